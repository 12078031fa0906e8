//! Time of the probes in the kernel, from the kernel's BPF statistics.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::daemon::{Daemon, Setup};
use super::host::{field, read};
use super::load::{Load, LoadPlacement};
use super::stats::median;
use super::table::Row;
use super::undo::Undo;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// Number of probes that run per process: at its fork, exec and exit.
const PROBES: usize = 3;
/// Number of stretches. Results are medians over them, so single interruptions have no effect.
const STRETCHES: u64 = 20;

/// Run time in nanoseconds and number of runs, by program id.
type Runs = BTreeMap<u64, (u64, u64)>;

/// Name of the case, placement of the load, setting `events`, and goal in ns.
const CASES: [(&str, LoadPlacement, &str, Option<f64>); 3] = [
    ("untracked", LoadPlacement::Outside, "agents", Some(500.0)),
    (
        "untracked, events = \"all\"",
        LoadPlacement::Outside,
        "all",
        Some(1500.0),
    ),
    ("member", LoadPlacement::Inside, "agents", None),
];

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let _counting = counting()?;
    let n = bench.pick(500, 100);
    let mut rows = Vec::new();
    for (name, place, events, goal) in CASES {
        let mut load = Load::start(bench, place)?;
        // The scope is the whole host, because only then the probes compare program names. The mode is enforce,
        // because observe loads probes that cannot signal. The only agent is that of the benchmark.
        let setup = Setup::new(bench, "enforce").named();
        let setup = setup.set(&format!("events = \"{events}\""));
        let daemon = setup.filtered().start()?;
        daemon.settle();
        let (ns, others) = stretches(&mut load, n, &daemon)?;
        daemon.stop()?;
        let note = format!(
            "{} runs of /bin/true, BPF run stats, median of {STRETCHES} stretches; \
             {others} % more runs than those of the load",
            STRETCHES * n
        );
        let what = format!("kernel time for fork + exec + exit, {name}");
        rows.push(Row::new(what, ns, "ns").note(note).at_most(goal));
    }
    Ok(rows)
}

/// Returns the time per process of all probes together. Also returns the percentage of runs that other processes
/// caused.
fn stretches(load: &mut Load, n: u64, daemon: &Daemon) -> Result<(f64, u64)> {
    // Warms the caches.
    load.request(&format!("spawn {n}"))?;
    let (mut times, mut more) = (Vec::new(), 0);
    for _ in 0..STRETCHES {
        let before = held(daemon)?;
        load.request(&format!("spawn {n}"))?;
        let mut each = Vec::new();
        for (id, (ns, count)) in held(daemon)? {
            let (ns_before, count_before) = before.get(&id).copied().unwrap_or_default();
            let count = count - count_before;
            // The other programs list processes and handle cgroup moves.
            if count >= n {
                more += count - n;
                each.push((ns - ns_before) as f64 / count as f64);
            }
        }
        let ran = each.len();
        ensure!(ran == PROBES, "{ran} probes ran each time, not {PROBES}");
        times.push(each.iter().sum());
    }
    let runs = STRETCHES * n * PROBES as u64;
    Ok((median(&times), more * 100 / runs))
}

/// Enables BPF statistics until the result is dropped.
fn counting() -> Result<Undo> {
    let before = read(SWITCH)?;
    fs::write(SWITCH, "1").with_context(|| format!("cannot write {SWITCH}"))?;
    Ok(Undo::later(move || {
        let _ = fs::write(SWITCH, before.trim());
    }))
}

/// Returns the statistics of the programs that a daemon has open.
fn held(daemon: &Daemon) -> Result<Runs> {
    let mut programs = Runs::new();
    let infos = fs::read_dir(format!("/proc/{}/fdinfo", daemon.pid()));
    for entry in infos.context("reaper is gone")? {
        // The daemon may have closed the descriptor.
        let info = fs::read_to_string(entry?.path()).unwrap_or_default();
        let [id, ns, count] = ["prog_id", "run_time_ns", "run_cnt"].map(|key| field(&info, key));
        if let (Ok(id), Ok(ns), Ok(count)) = (id, ns, count) {
            programs.insert(id, (ns, count));
        }
    }
    Ok(programs)
}
