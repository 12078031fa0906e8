//! From an agent's exit to the signals for its orphans.

use anyhow::{Result, ensure};

use super::actor::{AGENT, ORPHAN};
use super::daemon::Daemon;
use super::load::{Load, Place};
use super::stats::{median, quantile};
use super::table::Row;
use super::trace::{Stamp, Trace};
use super::{Bench, host};

/// What the trace's events mean, by their place in the list that it was started with.
const EXIT: usize = 0;
const SIGNAL: usize = 1;

/// Orphans of one parent in the second part.
const MANY: usize = 100;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let (one, own) = kill(bench, bench.pick(1000, 200), 1)?;
    let first: Vec<f64> = one.iter().map(|round| round[0]).collect();
    let own: Vec<f64> = own.iter().map(|ns| ns / 1e3).collect();
    let rounds = format!("{} kills, the kernel's stamps (whole µs)", first.len());
    let mut rows = vec![
        Row::new("exit to signal, one orphan: median", median(&first), "µs")
            .at_most(60.0)
            .note(rounds),
        Row::new(
            "exit to signal, one orphan: p99",
            quantile(&first, 0.99),
            "µs",
        )
        .at_most(250.0),
        Row::new(
            "exit to signal, one orphan: max",
            quantile(&first, 1.0),
            "µs",
        ),
        Row::new(
            "the same by reaper's latency_ns: median",
            median(&own),
            "µs",
        )
        .note("exit's record to after the signal was sent"),
        Row::new(
            "the same by reaper's latency_ns: p99",
            quantile(&own, 0.99),
            "µs",
        ),
        Row::new(
            "the same by reaper's latency_ns: max",
            quantile(&own, 1.0),
            "µs",
        ),
    ];

    let (many, _) = kill(bench, bench.pick(50, 10), MANY)?;
    let at = |n: usize| median(&many.iter().map(|round| round[n]).collect::<Vec<_>>());
    let further = (at(MANY - 1) - median(&first)) / (MANY - 1) as f64;
    let note = format!(
        "exit to the last of {MANY}, less one alone, {} kills; first {:.0} µs, last {:.0} µs",
        many.len(),
        at(0),
        at(MANY - 1)
    );
    rows.push(
        Row::new("each further orphan of the same parent", further, "µs")
            .at_most(20.0)
            .note(note),
    );
    Ok(rows)
}

/// Kills that many agents. Gives, for each, when its orphans were signalled after its exit, in µs and in
/// order; and what the daemon itself measured, in ns.
fn kill(bench: &Bench, rounds: usize, orphans: usize) -> Result<(Vec<Vec<f64>>, Vec<f64>)> {
    let mut load = Load::start(bench, Place::Outside)?;
    let daemon = Daemon::start(bench, "enforce", &[&load])?;
    let trace = Trace::start(&[
        ("sched/sched_process_exit", format!("comm == \"{AGENT}\"")),
        (
            "signal/signal_generate",
            format!("sig == 15 && comm == \"{ORPHAN}\""),
        ),
    ])?;
    load.obey(&format!("kill {rounds} {orphans}"))?;
    let measured = pair(&trace.stamps()?);
    drop(trace);
    daemon.rest();
    let busy = host::threads(daemon.pid())?;
    let said = daemon.stop()?;
    ensure!(
        !busy.is_empty() && said.count("lost") == 0,
        "events were lost meanwhile"
    );
    ensure!(
        measured.len() == rounds && measured.iter().all(|round| round.len() == orphans),
        "{} exits of {rounds} and {} signals of {} are in the trace",
        measured.len(),
        measured.iter().map(Vec::len).sum::<usize>(),
        rounds * orphans
    );
    let own = said.events("signal")?;
    let own = own.iter().filter(|signal| signal["signal"] == "SIGTERM");
    Ok((
        measured,
        own.filter_map(|signal| signal["latency_ns"].as_f64())
            .collect(),
    ))
}

/// The signals after each exit, up to the next.
fn pair(stamps: &[Stamp]) -> Vec<Vec<f64>> {
    let mut rounds: Vec<Vec<f64>> = Vec::new();
    let mut exit = 0.0;
    for stamp in stamps {
        match (stamp.event, rounds.last_mut()) {
            (EXIT, _) => {
                exit = stamp.at;
                rounds.push(Vec::new());
            }
            (SIGNAL, Some(round)) => round.push(stamp.at - exit),
            _ => {}
        }
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_belong_to_the_exit_before_them() {
        let stamp = |(event, at)| Stamp { event, at };
        let stamps = [
            (SIGNAL, 1.0),
            (EXIT, 10.0),
            (SIGNAL, 12.0),
            (SIGNAL, 13.0),
            (EXIT, 20.0),
        ];
        assert_eq!(pair(&stamps.map(stamp)), [vec![2.0, 3.0], vec![]]);
    }
}
