//! Memory of the service, idle and with many tracked processes.

use anyhow::{Result, ensure};

use super::Bench;
use super::daemon::Setup;
use super::host::{births_and_tasks, field, memory, read};
use super::load::{Load, LoadPlacement};
use super::table::Row;

/// Upper bound for the memory of a sleeping process, in the kernel and in the service.
const EACH_KIB: u64 = 64;
/// Pids that are left for other processes.
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
    let output = daemon.stop()?;
    ensure!(
        output.count("events") >= made,
        "reaper has not read all {made} forks"
    );
    let ring = format!("without the {}, whose data is mapped twice", output.ring()?);
    let each = full.saturating_sub(idle) / made.max(1);
    let mut note = format!("{each} bytes each");
    if made < 30_000 {
        note += &format!(
            "; {}",
            if made < n {
                "the system allows no more"
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
        // The goal applies to 30,000 processes only.
        if made < 30_000 {
            tracked
        } else {
            tracked.at_most(40.0)
        }
        .note(note),
    ])
}

/// Returns how many of the wanted processes can be created without harm to others, and what limits the number.
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
