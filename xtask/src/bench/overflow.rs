//! A fork bomb with a ring buffer that is too small: the service recovers lost processes and reaps all due members.

use std::time::Duration;

use anyhow::Result;

use super::Bench;
use super::daemon::{DaemonOutput, Setup};
use super::host::descendants;
use super::load::{Load, LoadPlacement};
use super::table::Row;

const RING: &str = "ring_size = \"64 KiB\"";
const FORKERS: u64 = 4;
/// Time for which the service is stopped, because otherwise it is fast enough for any storm.
const HELD_UP: Duration = Duration::from_millis(100);
/// Number of processes outside the session that must survive.
const CANARIES: u64 = 200;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let storm: u64 = bench.pick(10_000, 2_000);
    let mut canary = Load::start(bench, LoadPlacement::Outside)?;
    let canaries = canary.request(&format!("sleepers {CANARIES}"))?;
    let mut load = Load::start(bench, LoadPlacement::Outside)?;
    let setup = Setup::new(bench, "enforce").scope([&load, &canary]);
    let daemon = setup.set(RING).filtered().start()?;
    daemon.settle();
    canary.send_request(&format!("storm {storm}"))?;
    load.send_request(&format!("bomb {FORKERS} {storm}"))?;
    std::thread::sleep(Duration::from_millis(storm / 2));
    daemon.hold_up(HELD_UP)?;
    let bombed = load.read_response();
    // Time to close the last gap and the session.
    std::thread::sleep(Duration::from_millis(500));
    daemon.settle();
    let survivors = descendants(load.pid());
    let canary_alive = canary.read_response().is_ok();
    let killed = canaries.saturating_sub(descendants(canary.pid()));
    let output = daemon.stop()?;

    let name = output.ring()?;
    let lost = output.count("lost");
    let mut rows = gaps(&output, &name, lost)?;
    let what = format!("{name}: root's exit to last member's exit");
    rows.push(match bombed {
        Ok(ns) => Row::new(what, ns as f64 / 1e6, "ms"),
        Err(error) => Row::missing(what, format!("{error:#}")),
    });
    let closed = output.events("session.close")?;
    let closed = closed.first().map_or("session not closed".into(), |close| {
        format!("reaped {}, failed {}", close["reaped"], close["failed"])
    });
    rows.push(
        Row::new(format!("{name}: survivors"), survivors as f64, "")
            .at_most(0.0)
            .note(closed),
    );
    let wrong = killed + u64::from(!canary_alive);
    let note = format!("{canaries} canaries asleep and one that forks, outside the session");
    rows.push(
        Row::new(format!("{name}: wrong kills"), wrong as f64, "")
            .at_most(0.0)
            .note(note),
    );
    Ok(rows)
}

/// Returns the rows about lost events and about the time to recover them.
fn gaps(output: &DaemonOutput, name: &str, lost: u64) -> Result<Vec<Row>> {
    let what = format!("{name}: longest gap, announced to reconciled");
    if lost == 0 {
        return Ok(vec![Row::missing(what, "nothing was lost")]);
    }
    let (open, closed) = (output.events("gap.open")?, output.events("gap.close")?);
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
        "{} gaps, {sum:.0} ms in total; {} processes and {} exits recovered",
        closed.len(),
        of("found").iter().sum::<u64>(),
        of("gone").iter().sum::<u64>(),
    );
    let unclosed = open.len().saturating_sub(closed.len());
    let note_lost = format!(
        "{lost} lost of {}; gaps not closed: {unclosed}",
        lost + output.count("events")
    );
    Ok(vec![
        Row::new(
            format!("{name}: lost outside of gaps"),
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
