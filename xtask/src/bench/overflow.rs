//! A fork bomb that a ring is too small for: what is lost is found, and whoever is due is ended all the same.

use std::time::Duration;

use anyhow::Result;

use super::Bench;
use super::daemon::{DaemonOutput, Setup};
use super::host::descendants;
use super::load::{Load, LoadPlacement};
use super::table::Row;

const RING: &str = "ring_size = \"64 KiB\"";
const FORKERS: u64 = 4;
/// The service is quick enough for any storm, unless it does not get to run for a while.
const HELD_UP: Duration = Duration::from_millis(100);
/// Processes that are nobody's, beside one that forks as well.
const CANARIES: u64 = 200;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let storm: u64 = bench.pick(10_000, 2_000);
    let mut canary = Load::start(bench, LoadPlacement::Outside)?;
    let canaries = canary.request(&format!("sleepers {CANARIES}"))?;
    let mut load = Load::start(bench, LoadPlacement::Outside)?;
    let setup = Setup::new(bench, "enforce").scope([&load, &canary]);
    let daemon = setup.set(RING).sieved().start()?;
    daemon.settle();
    canary.send_request(&format!("storm {storm}"))?;
    load.send_request(&format!("bomb {FORKERS} {storm}"))?;
    std::thread::sleep(Duration::from_millis(storm / 2));
    daemon.hold_up(HELD_UP)?;
    let bombed = load.read_response();
    // The gap that was open by then, and the session's last line.
    std::thread::sleep(Duration::from_millis(500));
    daemon.settle();
    let survivors = descendants(load.pid());
    let sings = canary.read_response().is_ok();
    let killed = canaries.saturating_sub(descendants(canary.pid()));
    let said = daemon.stop()?;

    let name = said.ring()?;
    let lost = said.count("lost");
    let mut rows = gaps(&said, &name, lost)?;
    let what = format!("{name}: root's end to the last of its members'");
    rows.push(match bombed {
        Ok(ns) => Row::new(what, ns as f64 / 1e6, "ms"),
        Err(error) => Row::missing(what, format!("{error:#}")),
    });
    let closed = said.events("session.close")?;
    let closed = closed.first().map_or("session not closed".into(), |close| {
        format!("reaped {}, failed {}", close["reaped"], close["failed"])
    });
    rows.push(
        Row::new(format!("{name}: survivors"), survivors as f64, "")
            .at_most(0.0)
            .note(closed),
    );
    let wrong = killed + u64::from(!sings);
    let note = format!("{canaries} canaries asleep and one that forks, outside the session");
    rows.push(
        Row::new(format!("{name}: wrong kills"), wrong as f64, "")
            .at_most(0.0)
            .note(note),
    );
    Ok(rows)
}

/// What was lost, and how long it took to find what had become of it.
fn gaps(said: &DaemonOutput, name: &str, lost: u64) -> Result<Vec<Row>> {
    let what = format!("{name}: longest gap, announced to reconciled");
    if lost == 0 {
        return Ok(vec![Row::missing(what, "nothing was lost")]);
    }
    let (open, closed) = (said.events("gap.open")?, said.events("gap.close")?);
    let of = |key: &str| {
        closed
            .iter()
            .map(|gap| gap[key].as_u64().unwrap_or(0))
            .collect::<Vec<_>>()
    };
    let found: u64 = of("lost").iter().sum();
    let longest = of("duration_ns").into_iter().max().unwrap_or_default();
    let sum = of("duration_ns").iter().sum::<u64>() as f64 / 1e6;
    let note = format!(
        "{} gaps, {sum:.0} ms in all; {} processes found, {} ends",
        closed.len(),
        of("found").iter().sum::<u64>(),
        of("gone").iter().sum::<u64>(),
    );
    let unclosed = open.len().saturating_sub(closed.len());
    let note_lost = format!(
        "{lost} lost of {}; gaps not closed: {unclosed}",
        lost + said.count("events")
    );
    Ok(vec![
        Row::new(
            format!("{name}: lost and in no gap"),
            lost.saturating_sub(found) as f64,
            "",
        )
        .at_most(0.0)
        .note(note_lost),
        Row::new(what, longest as f64 / 1e6, "ms")
            .at_most(1000.0)
            .note(note),
    ])
}
