//! From an agent's exit to the signals for its orphans.

use anyhow::{Result, ensure};

use super::Bench;
use super::daemon::Setup;
use super::load::{Load, LoadPlacement};
use super::process::{AGENT, ORPHAN};
use super::stats::{median, quantile};
use super::table::Row;
use super::trace::{Stamp, Trace};

/// What the trace's events mean, by their place in the list that it was started with.
const EXIT: usize = 0;
const SIGNAL: usize = 1;

/// Orphans of one parent in the second part.
const MANY: usize = 100;

/// Who sends the first signal, the setting for that, and the goals for median and p99 in µs.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    kernel_reap: &'static str,
    /// How long an agent has lived, in ms: until the service has looked at it and at what its environment says,
    /// the kernel leaves all to that.
    lived: u32,
    goals: Option<(f64, f64)>,
}

const BY_SERVICE: Way = Way {
    name: "by the service",
    kernel_reap: "off",
    lived: 120,
    goals: Some((60.0, 250.0)),
};
/// Its environment has to be read first.
const OF_A_YOUNG_ONE: Way = Way {
    name: "by the service, of an agent that has just begun",
    kernel_reap: "off",
    lived: 3,
    goals: None,
};
const BY_KERNEL: Way = Way {
    name: "by the kernel",
    kernel_reap: "auto",
    lived: 120,
    goals: Some((30.0, 250.0)),
};

/// What was measured of agents that were killed.
struct Killed {
    /// For each, when its orphans were signalled after its exit, in µs and in order.
    after: Vec<Vec<f64>>,
    /// What the daemon itself measured, in ns.
    own: Vec<f64>,
    /// How many of the signals the kernel sent.
    by_kernel: usize,
}

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut rows = way(bench, BY_SERVICE)?;
    rows.extend(way(bench, OF_A_YOUNG_ONE)?);
    rows.extend(way(bench, BY_KERNEL)?);
    Ok(rows)
}

fn way(bench: &Bench, way: Way) -> Result<Vec<Row>> {
    let Way { name, goals, .. } = way;
    let one = kill(bench, bench.pick(1000, 200), 1, way)?;
    let first: Vec<f64> = one.after.iter().map(|round| round[0]).collect();
    if way.kernel_reap != "off" && one.by_kernel == 0 {
        let what = format!("exit to signal {name}, one orphan: median");
        return Ok(vec![Row::missing(
            what,
            "this kernel cannot (6.16 and later can)",
        )]);
    }
    let note = format!(
        "{} kills of agents {} ms old, {} signals sent by the kernel; its stamps (whole µs)",
        first.len(),
        way.lived,
        one.by_kernel
    );
    let mut rows: Vec<_> = [
        ("median", 0.5, goals.map(|goals| goals.0)),
        ("p99", 0.99, goals.map(|goals| goals.1)),
        ("max", 1.0, None),
    ]
    .into_iter()
    .map(|(part, of, goal)| {
        let what = format!("exit to signal {name}, one orphan: {part}");
        let row = Row::new(what, quantile(&first, of), "µs");
        goal.map_or(row.clone(), |goal| row.at_most(goal))
    })
    .collect();
    rows[0].note = note;
    let own: Vec<f64> = one.own.iter().map(|ns| ns / 1e3).collect();
    // The kernel does not say when it has sent one.
    for (part, of) in [("median", 0.5), ("p99", 0.99), ("max", 1.0)] {
        if !own.is_empty() {
            let what = format!("the same by reaper's latency_ns: {part}");
            let row = Row::new(what, quantile(&own, of), "µs");
            rows.push(row.note("exit's record to after the signal was sent"));
        }
    }

    let many = kill(bench, bench.pick(50, 10), MANY, way)?.after;
    let at = |n: usize| median(&many.iter().map(|round| round[n]).collect::<Vec<_>>());
    let further = (at(MANY - 1) - median(&first)) / (MANY - 1) as f64;
    let note = format!(
        "exit to the last of {MANY}, less one alone, {} kills; first {:.0} µs, last {:.0} µs",
        many.len(),
        at(0),
        at(MANY - 1)
    );
    let what = format!("each further orphan of the same parent, {name}");
    let row = Row::new(what, further, "µs").note(note);
    rows.push(if goals.is_some() {
        row.at_most(20.0)
    } else {
        row
    });
    Ok(rows)
}

/// Kills that many agents beside what `start` starts, and gives that with when their orphans were signalled after each
/// exit, in µs and in order.
pub(super) fn traced<T>(
    bench: &Bench,
    rounds: usize,
    orphans: usize,
    lived: u32,
    start: impl FnOnce(&Load) -> Result<T>,
) -> Result<(Vec<Vec<f64>>, T)> {
    let mut load = Load::start(bench, LoadPlacement::Outside)?;
    // First, so that an exit's stamp comes before what a probe in the same place does.
    let trace = Trace::start(&[
        ("sched/sched_process_exit", format!("comm == \"{AGENT}\"")),
        (
            "signal/signal_generate",
            format!("sig == 15 && comm == \"{ORPHAN}\""),
        ),
    ])?;
    let started = start(&load)?;
    load.request(&format!("kill {rounds} {orphans} {lived}"))?;
    let after = pair(&trace.stamps()?);
    ensure!(
        after.len() == rounds && after.iter().all(|round| round.len() == orphans),
        "{} exits of {rounds} and {} signals of {} are in the trace",
        after.len(),
        after.iter().map(Vec::len).sum::<usize>(),
        rounds * orphans
    );
    Ok((after, started))
}

/// Kills that many agents.
fn kill(bench: &Bench, rounds: usize, orphans: usize, way: Way) -> Result<Killed> {
    let start = |load: &Load| {
        let setup = Setup::new(bench, "enforce").scope([load]);
        let setup = setup.set(&format!("kernel_reap = \"{}\"", way.kernel_reap));
        setup.start()
    };
    let (after, daemon) = traced(bench, rounds, orphans, way.lived, start)?;
    daemon.settle();
    let said = daemon.stop()?;
    ensure!(said.count("lost") == 0, "events were lost meanwhile");
    let mut signals = said.events("signal")?;
    signals.retain(|signal| signal["signal"] == "SIGTERM");
    let own = signals
        .iter()
        .filter_map(|signal| signal["latency_ns"].as_f64());
    let by_kernel = signals
        .iter()
        .filter(|signal| signal["sent_by"] == "kernel");
    Ok(Killed {
        after,
        own: own.collect(),
        by_kernel: by_kernel.count(),
    })
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
