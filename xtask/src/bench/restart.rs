//! Time from the start of a service until it has caught up with the backlog since the last one was killed.

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::daemon::Setup;
use super::host::{cpu_ns, threads};
use super::load::{Load, LoadPlacement};
use super::pins::Pins;
use super::stats::{median, quantile};
use super::table::Row;

/// Number of records for which the goal applies.
const RECORDS: u64 = 100_000;
/// Size of the ring buffer in MiB, normally and with `--quick`: twice the size of the backlog.
const RING: [u32; 2] = [32, 4];

/// Results of one restart; times in ms.
struct Restart {
    caught_up: f64,
    last_line: f64,
    records: u64,
    lost: u64,
    missing: u64,
    engine: f64,
    export: f64,
}

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let pins = Pins::mounted(bench)?;
    let rounds = (0..bench.pick(5, 1)).map(|_| restart(bench, &pins));
    let rounds: Vec<Restart> = rounds.collect::<Result<_>>()?;
    let all = |of: fn(&Restart) -> f64| rounds.iter().map(of).collect::<Vec<_>>();
    let least = |of: fn(&Restart) -> u64| rounds.iter().map(of).min().unwrap_or_default();
    let most = |of: fn(&Restart) -> u64| rounds.iter().map(of).max().unwrap_or_default();
    let records = least(|r| r.records);
    let caught_up = all(|r| r.caught_up);
    let note = format!(
        "{records} records (ring of {} MiB) read and evaluated; {} restarts, max {:.0} ms; engine's CPU {:.0} ms",
        bench.pick(RING[0], RING[1]),
        rounds.len(),
        quantile(&caught_up, 1.0),
        median(&all(|r| r.engine)),
    );
    let what = "restart to caught up with the backlog";
    let caught_up = Row::new(what, median(&caught_up), "ms").note(note);
    let last_line = all(|r| r.last_line);
    let note = format!(
        "max {:.0} ms; export's CPU {:.0} ms",
        quantile(&last_line, 1.0),
        median(&all(|r| r.export))
    );
    Ok(vec![
        // The goal applies to this number of records only.
        if records < RECORDS {
            caught_up
        } else {
            caught_up.at_most(300.0)
        },
        Row::new(
            "restart to last line of the backlog in the stream",
            median(&last_line),
            "ms",
        )
        .note(note),
        Row::new(
            "records lost during the restart",
            most(|r| r.lost) as f64,
            "",
        )
        .at_most(0.0)
        .note(format!(
            "lines of the stream dropped: {}",
            most(|r| r.missing)
        )),
    ])
}

fn restart(bench: &Bench, pins: &Pins) -> Result<Restart> {
    let mut load = Load::start(bench, LoadPlacement::Inside)?;
    let setup = Setup::new(bench, "enforce").scope([&load]);
    let ring = bench.pick(RING[0], RING[1]);
    let setup = setup.set(&format!("ring_size = \"{ring} MiB\""));
    let setup = setup.pinned(pins);
    let daemon = setup.start()?;
    daemon.settle();
    // Kills it by SIGKILL.
    drop(daemon);
    // Each has a fork, an exec and an exit record.
    let n = bench.pick(RECORDS / 3 + 1, 5_000);
    load.request(&format!("spawn {n}"))?;

    let before = boot_ns()?;
    let daemon = setup.start()?;
    let last_line = daemon.time_to_last_line_after("caught_up")?;
    let threads = threads(daemon.pid())?;
    let output = daemon.stop()?;
    let resumed = output.ready()?;
    ensure!(
        resumed["resumed"] == true && output.events("session.resume")?.len() == 1,
        "reaper has not resumed the session"
    );
    let caught_up = output.events("caught_up")?;
    let caught_up = caught_up
        .first()
        .and_then(|line| line["time_boot_ns"].as_u64());
    let caught_up = caught_up.context("reaper has not emitted caught_up")? - before;
    let lost_before = resumed["lost_before"].as_u64().unwrap_or_default();
    let records = output.count("events");
    ensure!(
        lost_before > 0 || records >= 3 * n,
        "{records} records for {n} processes"
    );
    let cpu = |name| cpu_ns(&threads, name) as f64 / 1e6;
    Ok(Restart {
        caught_up: caught_up as f64 / 1e6,
        last_line: last_line.as_secs_f64() * 1e3,
        records,
        lost: lost_before + output.count("lost"),
        missing: output.lines_missing()?,
        engine: cpu("engine"),
        export: cpu("export"),
    })
}

/// Returns the nanoseconds since boot (CLOCK_BOOTTIME), as in the stream.
fn boot_ns() -> Result<u64> {
    let now = nix::time::ClockId::CLOCK_BOOTTIME.now()?;
    Ok(std::time::Duration::from(now).as_nanos() as u64)
}
