//! Time from an agent's exit to the signals for its orphans.

use anyhow::{Result, ensure};

use super::Bench;
use super::daemon::Setup;
use super::load::{Load, LoadPlacement};
use super::process::{AGENT, ORPHAN};
use super::stats::{median, quantile};
use super::table::Row;
use super::trace::{Stamp, Trace};

/// Indices of the traced events.
const EXIT: usize = 0;
const SIGNAL: usize = 1;

/// Number of orphans of one parent in the second part.
const MANY: usize = 100;

/// One case: which side sends the first signal, and the goals for median and p99 in µs.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    kernel_reap: &'static str,
    /// Age of an agent when it is killed, in ms. The probes signal only after the service has read the agent's
    /// environment.
    lived: u32,
    goals: Option<(f64, f64)>,
}

const BY_SERVICE: Way = Way {
    name: "by the service",
    kernel_reap: "off",
    lived: 120,
    goals: Some((60.0, 250.0)),
};
/// The service must read the environment first.
const OF_A_YOUNG_ONE: Way = Way {
    name: "by the service, agent just started",
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

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut rows = way(bench, BY_SERVICE)?;
    rows.extend(way(bench, OF_A_YOUNG_ONE)?);
    rows.extend(way(bench, BY_KERNEL)?);
    Ok(rows)
}

fn way(bench: &Bench, way: Way) -> Result<Vec<Row>> {
    let Way { name, goals, .. } = way;
    let (one, by_kernel) = kill(bench, bench.pick(1000, 200), 1, way)?;
    let how = format!(" {name}, one orphan");
    if way.kernel_reap != "off" && by_kernel == 0 {
        let what = format!("exit to signal{how}: median");
        return Ok(vec![Row::missing(what, "needs Linux 6.16 or later")]);
    }
    let mut rows = Vec::from(to_first_signal(&how, &one));
    rows[0].note = format!(
        "{} kills of agents {} ms old, {by_kernel} signals sent by the kernel; kernel time stamps (whole µs)",
        one.len(),
        way.lived,
    );
    let first = rows[0].measured.unwrap_or(f64::NAN);
    if let Some((median, p99)) = goals {
        rows[0].goal_at_most = Some(median);
        rows[1].goal_at_most = Some(p99);
    }

    let (many, _) = kill(bench, bench.pick(50, 10), MANY, way)?;
    let at = |n: usize| median(&many.iter().map(|round| round[n]).collect::<Vec<_>>());
    let further = (at(MANY - 1) - first) / (MANY - 1) as f64;
    let note = format!(
        "exit to the last of {MANY}, minus one alone, {} kills; first {:.0} µs, last {:.0} µs",
        many.len(),
        at(0),
        at(MANY - 1)
    );
    let what = format!("each further orphan of the same parent, {name}");
    rows.push(
        Row::new(what, further, "µs")
            .note(note)
            .at_most(goals.map(|_| 20.0)),
    );
    Ok(rows)
}

/// Returns median and p99 of the time from an exit to the first signal.
pub fn to_first_signal(how: &str, after: &[Vec<f64>]) -> [Row; 2] {
    let first: Vec<f64> = after.iter().map(|round| round[0]).collect();
    [("median", 0.5), ("p99", 0.99)].map(|(part, of)| {
        let what = format!("exit to signal{how}: {part}");
        Row::new(what, quantile(&first, of), "µs")
    })
}

/// Calls `start`, then kills `rounds` agents of age `lived` (ms). Returns for each exit the times until its orphans were
/// signalled (µs, sorted), and the result of `start`.
pub fn traced<T>(
    bench: &Bench,
    rounds: usize,
    orphans: usize,
    lived: u32,
    start: impl FnOnce(&Load) -> Result<T>,
) -> Result<(Vec<Vec<f64>>, T)> {
    let mut load = Load::start(bench, LoadPlacement::Outside)?;
    // Started before the probes, so that the time stamp of an exit comes before the probe's work.
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
        "the trace has {} of {rounds} exits and {} of {} signals",
        after.len(),
        after.iter().map(Vec::len).sum::<usize>(),
        rounds * orphans
    );
    Ok((after, started))
}

/// Kills `rounds` agents. Returns the times until their orphans were signalled, and the number of signals that the kernel
/// sent.
fn kill(bench: &Bench, rounds: usize, orphans: usize, way: Way) -> Result<(Vec<Vec<f64>>, usize)> {
    let start = |load: &Load| {
        let setup = Setup::new(bench, "enforce").scope([load]);
        let setup = setup.set(&format!("kernel_reap = \"{}\"", way.kernel_reap));
        setup.start()
    };
    let (after, daemon) = traced(bench, rounds, orphans, way.lived, start)?;
    daemon.settle();
    let output = daemon.stop()?;
    ensure!(output.count("lost") == 0, "reaper lost events");
    let mut signals = output.events("signal")?;
    signals.retain(|signal| signal["signal"] == "SIGTERM" && signal["sent_by"] == "kernel");
    Ok((after, signals.len()))
}

/// Returns for each exit the times until the signals that follow it.
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
