//! Memory of the service, idle and with many processes to track.

use anyhow::{Result, ensure};

use super::Bench;
use super::daemon::Setup;
use super::host::{births_and_tasks, field, memory, read};
use super::load::{Load, LoadPlacement};
use super::table::Row;

/// What a sleeping process takes of the kernel's memory and ours, at most.
const EACH_KIB: u64 = 64;
/// Pids left for everybody else.
const SPARE: u64 = 1000;
const MIB: f64 = 1024.0 * 1024.0;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let wanted = bench.pick(30_000, 3_000);
    let (n, why) = room_for(wanted)?;
    let mut load = Load::start(bench, LoadPlacement::Inside)?;
    let daemon = Setup::new(bench, "observe").scope([&load]).start()?;
    daemon.settle();
    let idle = memory(daemon.pid())?;
    let made = load.request(&format!("sleepers {n}"))?;
    daemon.settle();
    let full = memory(daemon.pid())?;
    let said = daemon.stop()?;
    ensure!(
        said.count("events") >= made,
        "reaper has not seen all {made} forks"
    );
    let ring = format!("without the {}, whose data is mapped twice", said.ring()?);
    let each = full.saturating_sub(idle) / made.max(1);
    let mut note = format!("{each} bytes each");
    if made < 30_000 {
        note += &format!(
            "; {}",
            if made < n {
                "the system allowed no more"
            } else {
                why
            }
        );
    }
    let tracked = Row::new(
        format!("memory with {made} tracked processes"),
        full as f64 / MIB,
        "MiB",
    );
    Ok(vec![
        Row::new("memory, idle", idle as f64 / MIB, "MiB")
            .at_most(10.0)
            .note(ring),
        // Fewer than the goal speaks of prove nothing.
        if made < 30_000 {
            tracked
        } else {
            tracked.at_most(40.0)
        }
        .note(note),
    ])
}

/// How many of the wanted processes can be made without harm to others, and what is in the way of more.
fn room_for(wanted: u64) -> Result<(u64, &'static str)> {
    let pid_max = field(&read("/proc/sys/kernel/pid_max")?, "")?;
    let pids = pid_max.saturating_sub(births_and_tasks()?.1 + SPARE);
    let available = field(&read("/proc/meminfo")?, "MemAvailable")?;
    let by_memory = available / 2 / EACH_KIB;
    let n = wanted.min(pids).min(by_memory);
    let why = match n {
        n if n == wanted => "--quick",
        n if n == pids => "pid_max allows no more",
        _ => "memory allows no more",
    };
    Ok((n, why))
}
