//! Latency with each event source, and with a periodic scan as users run it today.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::libc::SYS_getdents64;

use super::daemon::Setup;
use super::host::{births_and_tasks, threads};
use super::latency::{to_first_signal, traced};
use super::load::{Load, LoadPlacement};
use super::process::{AGENT, ORPHAN};
use super::stats::{median, quantile};
use super::table::Row;
use super::trace::{Stamp, Trace};
use super::{Bench, raw};
use crate::shell::OwnedChild;

/// Age of an agent when it is killed, in ms. By that age a scan has discovered it and its child.
const LIVED: u32 = 300;
/// Interval of the periodic scan, in seconds.
const EVERY: u32 = 5;
/// Number of sleeping processes during a scan.
const SLEEPERS: u64 = 1000;
/// Indices of the traced events: the thread continues to list /proc, or has reached the end of the list.
const LISTS: usize = 0;
const HAS_LISTED: usize = 1;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for source in ["ebpf", "proc-connector", "procfs"] {
        rows.extend(through(bench, source)?);
    }
    rows.extend(scanner(bench)?);
    rows.push(pass(bench)?);
    Ok(rows)
}

fn through(bench: &Bench, source: &str) -> Result<[Row; 2]> {
    let start = |load: &_| {
        let setup = Setup::new(bench, "enforce").scope([load]);
        let setup = setup.set("kernel_reap = \"off\"");
        setup.set(&format!("source = \"{source}\"")).start()
    };
    let (after, daemon) = traced(bench, bench.pick(200, 40), 1, LIVED, start)?;
    daemon.settle();
    let output = daemon.stop()?;
    ensure!(output.count("lost") == 0, "reaper lost events");
    Ok(rows(&format!(", through {source}"), &after))
}

/// Measures a shell loop of `ps` that kills the benchmark's orphans only.
fn scanner(bench: &Bench) -> Result<[Row; 2]> {
    let look = format!(
        "while :; do ps -eo pid=,ppid=,comm= | awk '{{ comm[$1] = $3; parent[$1] = $2 }} \
         END {{ for (pid in comm) if (comm[pid] == \"{ORPHAN}\" && comm[parent[pid]] != \"{AGENT}\") print pid }}' | \
         xargs -r kill; sleep {EVERY}; done"
    );
    let start = |_: &_| {
        let mut command = Command::new("sh");
        command.args(["-c", &look]).stdin(Stdio::null());
        raw::end_with_us(&mut command);
        let child = command.spawn().context("cannot start sh")?;
        Ok(OwnedChild(child))
    };
    let (after, scanner) = traced(bench, bench.pick(20, 4), 1, LIVED, start)?;
    drop(scanner);
    Ok(rows(&format!(", by a loop of ps every {EVERY} s"), &after))
}

fn rows(how: &str, after: &[Vec<f64>]) -> [Row; 2] {
    let mut rows = to_first_signal(how, after);
    let kills = after.len();
    rows[0].note = format!("{kills} kills of agents {LIVED} ms old; kernel time stamps");
    rows
}

/// Measures a scan of all processes without any change.
fn pass(bench: &Bench) -> Result<Row> {
    let mut load = Load::start(bench, LoadPlacement::Outside)?;
    load.sleepers(SLEEPERS)?;
    let setup = Setup::new(bench, "observe").scope([&load]);
    let setup = setup.set("source = \"procfs\"");
    let setup = setup.set("scan_min_interval = \"50ms\"\nscan_max_interval = \"50ms\"");
    let daemon = setup.start()?;
    daemon.settle();
    let engine = threads(daemon.pid())?;
    let engine = engine.iter().find(|thread| thread.name == "engine");
    let engine = engine.context("reaper has no thread named engine")?.id;
    let lists = format!("common_pid == {engine} && id == {SYS_getdents64}");
    let trace = Trace::start(&[
        ("raw_syscalls/sys_enter", lists.clone()),
        ("raw_syscalls/sys_exit", format!("{lists} && ret == 0")),
    ])?;
    std::thread::sleep(Duration::from_secs(bench.pick(10, 3)));
    let took = passes(&trace.stamps()?);
    let (_, tasks) = births_and_tasks()?;
    daemon.stop()?;
    ensure!(!took.is_empty(), "the trace contains no scan");
    let note = format!(
        "median of {}, p99 {:.1} ms; {SLEEPERS} sleepers among {tasks} tasks, each system call traced",
        took.len(),
        quantile(&took, 0.99) / 1e3
    );
    let what = "procfs scan of 1,000 unchanged processes";
    Ok(Row::new(what, median(&took) / 1e3, "ms")
        .at_most(10.0)
        .note(note))
}

/// Returns the duration of each complete scan in the trace, in µs.
fn passes(stamps: &[Stamp]) -> Vec<f64> {
    let mut all = Vec::new();
    // The first scan may have begun before the trace.
    let mut begun = None;
    let mut between = false;
    for stamp in stamps {
        match stamp.event {
            LISTS if between => (begun, between) = (Some(stamp.at), false),
            HAS_LISTED => {
                all.extend(begun.take().map(|begun| stamp.at - begun));
                between = true;
            }
            _ => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scan_lasts_from_first_listing_to_end_of_list() {
        let stamp = |(event, at)| Stamp { event, at };
        let stamps = [
            (LISTS, 1.0),
            (HAS_LISTED, 3.0),
            (LISTS, 50.0),
            (LISTS, 54.0),
            (LISTS, 57.0),
            (HAS_LISTED, 58.0),
            (LISTS, 100.0),
        ];
        assert_eq!(passes(&stamps.map(stamp)), [8.0]);
        assert!(passes(&[]).is_empty());
    }
}
