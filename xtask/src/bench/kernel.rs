//! Time that the probes take in the kernel, by its own count.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::daemon::Daemon;
use super::host::{field, read};
use super::load::{Load, Place};
use super::table::Row;
use super::undo::Undo;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// In the order in which reaper loads them.
const PROBES: [&str; 3] = ["fork", "exec", "exit"];

#[derive(Clone, Copy, Default)]
struct Runs {
    ns: u64,
    count: u64,
}

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let _counting = counting()?;
    let mut load = Load::start(bench, Place::Outside)?;
    let daemon = Daemon::start(bench, "observe", &[&load])?;
    let n: u64 = bench.pick(10_000, 2_000);
    let before = runs(daemon.pid())?;
    load.obey(&format!("spawn {n}"))?;
    let after = runs(daemon.pid())?;
    daemon.stop()?;

    let mut sum = 0.0;
    let mut rows = Vec::new();
    for ((probe, before), after) in PROBES.iter().zip(before).zip(after) {
        let count = after.count - before.count;
        let each = (after.ns - before.ns) as f64 / count.max(1) as f64;
        sum += each;
        let others = count.saturating_sub(n) * 100 / n;
        let note = match others {
            0..5 => String::new(),
            _ => format!("{others} % more runs than the load makes: others were at work"),
        };
        rows.push(Row::new(format!("kernel time for a {probe}"), each, "ns").note(note));
    }
    let note = format!("{n} times /bin/true, BPF run stats");
    rows.push(
        Row::new("kernel time for fork + exec + exit", sum, "ns")
            .at_most(1500.0)
            .note(note),
    );
    Ok(rows)
}

/// Has the kernel count, until this is dropped.
fn counting() -> Result<Undo> {
    let before = read(SWITCH)?;
    fs::write(SWITCH, "1").with_context(|| format!("cannot write {SWITCH}"))?;
    Ok(Undo::later(move || {
        let _ = fs::write(SWITCH, before.trim());
    }))
}

/// How often and how long the programs ran that a process holds, in the order in which they were loaded.
fn runs(pid: u32) -> Result<[Runs; PROBES.len()]> {
    let mut programs = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo")).context("reaper is gone")? {
        // A descriptor may be closed meanwhile.
        let Ok(info) = fs::read_to_string(entry?.path()) else {
            continue;
        };
        if let (Ok(id), Ok(ns), Ok(count)) = (
            field(&info, "prog_id"),
            field(&info, "run_time_ns"),
            field(&info, "run_cnt"),
        ) {
            programs.insert(id, Runs { ns, count });
        }
    }
    ensure!(
        programs.len() == PROBES.len(),
        "reaper holds {} programs, not {}",
        programs.len(),
        PROBES.len()
    );
    let mut programs = programs.into_values();
    Ok(std::array::from_fn(|_| programs.next().unwrap_or_default()))
}
