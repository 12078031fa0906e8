//! Reads /proc: data about the host and about a process.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Returns the content of a file.
///
/// # Errors
/// The file cannot be read; the error contains its path.
pub fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the number in the line that begins with `key`.
///
/// # Errors
/// There is no such line, or no number in it.
pub fn field(text: &str, key: &str) -> Result<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key));
    let word = rest.and_then(|rest| rest.trim_start_matches(':').split_whitespace().next());
    word.and_then(|word| word.parse().ok())
        .with_context(|| format!("no number {key}"))
}

/// Thread of a process, with its counters.
pub struct Thread {
    pub id: u32,
    pub name: String,
    /// CPU time in user space and in the kernel.
    pub cpu_ns: u64,
    switches: u64,
}

/// Returns the threads of a process.
///
/// # Errors
/// The process is gone.
pub fn threads(pid: u32) -> Result<Vec<Thread>> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).context("reaper is gone")?;
    tasks
        .map(|task| {
            let task = task?;
            let id = task.file_name().to_str().and_then(|id| id.parse().ok());
            let task = task.path();
            let status = read(task.join("status"))?;
            let schedstat = read(task.join("schedstat"))?;
            let cpu_ns = schedstat.split(' ').next().and_then(|n| n.parse().ok());
            Ok(Thread {
                id: id.context("no thread's id")?,
                name: read(task.join("comm"))?.trim_end().to_owned(),
                cpu_ns: cpu_ns.context("no CPU time in schedstat")?,
                switches: field(&status, "voluntary_ctxt_switches")?
                    + field(&status, "nonvoluntary_ctxt_switches")?,
            })
        })
        .collect()
}

/// Returns the CPU time of the threads with this name.
pub fn cpu_ns(threads: &[Thread], name: &str) -> u64 {
    let wanted = threads.iter().filter(|thread| thread.name == name);
    wanted.map(|thread| thread.cpu_ns).sum()
}

/// Returns the number of context switches of all threads of a process.
///
/// # Errors
/// The process is gone.
pub fn switches(pid: u32) -> Result<u64> {
    Ok(threads(pid)?.iter().map(|thread| thread.switches).sum())
}

/// Returns the resident memory of a process in bytes, without BPF maps. The data of the ring buffer is mapped twice.
///
/// # Errors
/// The process is gone.
pub fn memory(pid: u32) -> Result<u64> {
    Ok(sum_up(&read(format!("/proc/{pid}/smaps"))?))
}

fn sum_up(smaps: &str) -> u64 {
    let (mut bytes, mut is_map) = (0, false);
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if !first.ends_with(':') {
            // The header of a mapping.
            is_map = line.contains("bpf-map");
        } else if first == "Rss:" && !is_map {
            bytes += field(line, "Rss").unwrap_or_default() * 1024;
        }
    }
    bytes
}

/// Returns the number of living descendants of a process. All of them must be single-threaded.
pub fn descendants(of: u32) -> u64 {
    // A process that has exited has no file.
    let children = read(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    let children = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    let lives = |pid: u32| {
        let status = read(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains("\nState:")
            && !status.contains("\nState:\tZ")
            && !status.contains("\nState:\tX")
    };
    children
        .map(|pid| u64::from(lives(pid)) + descendants(pid))
        .sum()
}

/// Returns the number of forks since boot and that of living threads. A start or exit of a process changes one of them.
///
/// # Errors
/// /proc cannot be read.
pub fn births_and_tasks() -> Result<(u64, u64)> {
    let load = read("/proc/loadavg")?;
    let tasks = load.split(['/', ' ']).nth(4).and_then(|n| n.parse().ok());
    let births = field(&read("/proc/stat")?, "processes")?;
    Ok((
        births,
        tasks.context("no number of tasks in /proc/loadavg")?,
    ))
}

/// Returns a description of the host, on which all results depend.
pub fn describe() -> Value {
    let line = |path: &str| read(path).unwrap_or_default().trim().to_owned();
    let cpu = line("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name"));
    json!({
        "kernel": line("/proc/sys/kernel/osrelease"),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu": model.map(|model| model.trim_start_matches([' ', '\t', ':'])),
        "loadavg": line("/proc/loadavg"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_not_counted_as_memory() {
        let smaps = "55d0-55d1 r-xp 00000000 08:01 7  /usr/bin/reaper\nSize: 8 kB\nRss: 4 kB\n\
                     7f00-7f01 rw-s 00000000 00:0e 9  anon_inode:bpf-map\nSize: 16 kB\nRss: 12 kB\n\
                     7f10-7f11 rw-p 00000000 00:00 0 \nSize: 4 kB\nRss: 4 kB\nVmFlags: rd wr\n";
        assert_eq!(sum_up(smaps), 8 << 10);
    }

    #[test]
    fn field_is_found_only_at_start_of_line() {
        let status = "nonvoluntary_ctxt_switches:\t3\nvoluntary_ctxt_switches:\t40\n";
        assert_eq!(field(status, "voluntary_ctxt_switches").unwrap(), 40);
        assert!(field(status, "involuntary").is_err());
    }
}
