//! Time from the start of the service to its first event.

use anyhow::{Result, ensure};

use super::Bench;
use super::daemon::Setup;
use super::load::{Load, LoadPlacement};
use super::stats::{median, quantile};
use super::table::Row;

/// Number of processes in /proc, besides those of the host.
const PROCESSES: u64 = 1000;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut load = Load::start(bench, LoadPlacement::Inside)?;
    load.sleepers(PROCESSES)?;
    let (mut took, mut seeded) = (Vec::new(), 0);
    for _ in 0..bench.pick(15, 5) {
        let daemon = Setup::new(bench, "observe").scope([&load]).start()?;
        took.push(daemon.ready_after.as_secs_f64() * 1e3);
        let ready = daemon.stop()?.ready()?;
        seeded = ready["processes"].as_u64().unwrap_or_default();
        ensure!(
            seeded >= PROCESSES,
            "reaper discovered {seeded} of {PROCESSES} processes"
        );
    }
    let note = format!(
        "{seeded} processes, {} starts, max {:.0} ms",
        took.len(),
        quantile(&took, 1.0)
    );
    Ok(vec![
        Row::new("start to first event", median(&took), "ms")
            .at_most(150.0)
            .note(note),
    ])
}
