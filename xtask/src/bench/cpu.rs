//! CPU time of the service per event.

use anyhow::Result;

use super::Bench;
use super::daemon::Setup;
use super::host::{cpu_ns, threads};
use super::load::{Load, LoadPlacement};
use super::table::Row;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut rows = run(bench, LoadPlacement::Outside)?;
    rows.extend(run(bench, LoadPlacement::Inside)?);
    Ok(rows)
}

fn run(bench: &Bench, place: LoadPlacement) -> Result<Vec<Row>> {
    let n: u64 = bench.pick(10_000, 2_000);
    let mut load = Load::start(bench, place)?;
    let daemon = Setup::new(bench, "observe").scope([&load]).start()?;
    daemon.settle();
    let before = threads(daemon.pid())?;
    load.request(&format!("spawn {n}"))?;
    daemon.settle();
    let after = threads(daemon.pid())?;
    let events = daemon.stop()?.count("events").max(1);
    let each = |name| (cpu_ns(&after, name) - cpu_ns(&before, name)) as f64 / events as f64;
    let name = place.name();
    let note = format!("user and system time over {events} events of {n} runs of /bin/true");
    let engine = format!("CPU per event, engine, {name}");
    let mut rows = vec![
        Row::new(engine, each("engine") / 1e3, "µs")
            .at_most(1.0)
            .note(note),
    ];
    if place == LoadPlacement::Inside {
        let export = format!("CPU per event, export, {name}");
        let note = "writes each event as a JSON line to a file";
        rows.push(Row::new(export, each("export") / 1e3, "µs").note(note));
    }
    Ok(rows)
}
