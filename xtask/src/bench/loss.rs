//! Events lost at the highest rate of forks that the load can create.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::Bench;
use super::daemon::Setup;
use super::host::{cpu_ns, threads};
use super::load::{Load, LoadPlacement};
use super::table::Row;

/// Number of processes that fork at the same time.
const FORKERS: usize = 2;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut rows = storm(bench, LoadPlacement::Outside, bench.pick(60, 3))?;
    rows.extend(storm(bench, LoadPlacement::Inside, bench.pick(60, 3))?);
    Ok(rows)
}

fn storm(bench: &Bench, place: LoadPlacement, seconds: u64) -> Result<Vec<Row>> {
    let loads = (0..FORKERS).map(|_| Load::start(bench, place));
    let mut loads: Vec<Load> = loads.collect::<Result<_>>()?;
    let daemon = Setup::new(bench, "observe")
        .scope(&loads)
        .filtered()
        .start()?;
    daemon.settle();
    let before = cpu_ns(&threads(daemon.pid())?, "engine");
    let start = Instant::now();
    for load in &mut loads {
        load.send_request(&format!("storm {}", seconds * 1000))?;
    }
    let forks = loads
        .iter_mut()
        .map(Load::read_response)
        .sum::<Result<u64>>()?;
    let rate = forks as f64 / start.elapsed().as_secs_f64();
    // Time to read the rest of the ring and to write the last lines.
    std::thread::sleep(Duration::from_millis(500));
    daemon.settle();
    let cpu = cpu_ns(&threads(daemon.pid())?, "engine") - before;
    let output = daemon.stop()?;
    let (events, lost) = (output.count("events"), output.count("lost"));
    // Each has a fork and an exit. Other processes of the host only add events.
    let missing = (2 * forks).saturating_sub(events + lost);
    let name = place.name();
    let note = format!(
        "{}, {FORKERS} forkers, {seconds} s, {forks} forks; engine {:.2} µs per event",
        output.ring()?,
        cpu as f64 / events.max(1) as f64 / 1e3
    );
    let mut note_lost = format!("{events} read; neither read nor counted as lost: {missing}");
    let rate = Row::new(format!("forks per second, {name}"), rate, "/s").note(note);
    let rate = match place {
        LoadPlacement::Outside => rate.at_least(25_000.0),
        LoadPlacement::Inside => {
            note_lost += &format!("; lines dropped: {}", output.lines_missing()?);
            rate
        }
    };
    let lost = Row::new(format!("events lost at that rate, {name}"), lost as f64, "");
    Ok(vec![rate, lost.at_most(0.0).note(note_lost)])
}
