//! Slowdown of process creation while the service runs.

use std::time::Duration;

use anyhow::Result;

use super::Bench;
use super::daemon::Setup;
use super::load::{Load, LoadPlacement};
use super::stats::{median, quantile};
use super::table::Row;

/// Name of the work, its request, the number of repetitions, and the goal in percent.
const WORK: [(&str, &str, u64, Option<f64>); 2] = [
    ("spawn + exec + wait of /bin/true", "spawn", 200, Some(2.0)),
    ("vfork + exit + wait", "vfork", 1500, None),
];

const PLACES: [LoadPlacement; 2] = [LoadPlacement::Outside, LoadPlacement::Inside];

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut ratios: [[Vec<f64>; WORK.len()]; PLACES.len()] = Default::default();
    let mut base: [Vec<f64>; WORK.len()] = Default::default();
    for _ in 0..bench.pick(25, 5) {
        for (place, ratios) in PLACES.into_iter().zip(&mut ratios) {
            round(bench, place, ratios, &mut base)?;
        }
    }
    let mut rows = Vec::new();
    for (n, (what, _, _, goal)) in WORK.into_iter().enumerate() {
        let what_alone = format!("{what}, without reaper");
        let alone = Row::new(what_alone, median(&base[n]) / 1e3, "µs");
        rows.push(alone.note("the load runs on one CPU"));
        for (place, ratios) in PLACES.iter().zip(&ratios) {
            let slower = |part| (quantile(&ratios[n], part) - 1.0) * 100.0;
            let note = format!(
                "{} rounds, each between two without reaper; half of them {:.1} to {:.1} %",
                ratios[n].len(),
                slower(0.25),
                slower(0.75)
            );
            let what = format!("{what}, slower with reaper, {}", place.name());
            rows.push(Row::new(what, slower(0.5), "%").note(note).at_most(goal));
        }
    }
    Ok(rows)
}

/// Measures without the service, with it, and without it again.
fn round(
    bench: &Bench,
    place: LoadPlacement,
    ratios: &mut [Vec<f64>; WORK.len()],
    base: &mut [Vec<f64>; WORK.len()],
) -> Result<()> {
    let mut load = Load::start(bench, place)?;
    load.request("pin")?;
    let before = work(&mut load)?;
    // The scope is the whole host.
    let daemon = Setup::new(bench, "enforce").named().start()?;
    let with = work(&mut load)?;
    drop(daemon);
    let after = work(&mut load)?;
    for n in 0..WORK.len() {
        let without = f64::midpoint(before[n], after[n]);
        ratios[n].push(with[n] / without);
        base[n].push(without);
    }
    Ok(())
}

/// Returns the nanoseconds per repetition for each kind of work.
fn work(load: &mut Load) -> Result<[f64; WORK.len()]> {
    // The kernel is busy for a while after the start or stop of the service.
    std::thread::sleep(Duration::from_millis(150));
    let mut each = [0.0; WORK.len()];
    for (each, (_, request, n, _)) in each.iter_mut().zip(WORK) {
        // Warms the caches and raises the CPU's clock.
        load.request(&format!("{request} {}", n / 10))?;
        *each = load.request(&format!("{request} {n}"))? as f64 / n as f64;
    }
    Ok(each)
}
