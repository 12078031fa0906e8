//! Kernel time stamps of events, from a private ftrace instance.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MsFlags, mount};

use super::undo::Undo;

const TRACEFS: &str = "/sys/kernel/tracing";
/// Buffer size per CPU, in KiB.
const BUFFER: &str = "4096";

/// Mounts tracefs if it is not mounted.
///
/// # Errors
/// tracefs cannot be mounted.
pub fn mount_tracefs() -> Result<()> {
    if Path::new(TRACEFS).join("instances").exists() {
        return Ok(());
    }
    let (tracefs, none) = (Some("tracefs"), None::<&str>);
    mount(tracefs, TRACEFS, tracefs, MsFlags::empty(), none)
        .with_context(|| format!("cannot mount {TRACEFS}"))
}

/// Event (its index) and its time in µs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stamp {
    pub event: usize,
    pub at: f64,
}

/// Running trace; removed on drop.
pub struct Trace {
    dir: PathBuf,
    events: Vec<&'static str>,
    _removed: Undo,
}

impl Trace {
    /// Starts a trace. `events` are names (`group/event`) and filters.
    ///
    /// # Errors
    /// Permission is denied, or the kernel has no such event.
    pub fn start(events: &[(&'static str, String)]) -> Result<Trace> {
        let name = format!("instances/reaper-bench-{}", std::process::id());
        let dir = Path::new(TRACEFS).join(name);
        fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let gone = dir.clone();
        let removed = Undo::later(move || {
            // Busy while another thread reads it.
            super::wait::until(|| fs::remove_dir(&gone).is_ok() || !gone.exists());
        });
        let write = |file: &str, text: &str| {
            let path = dir.join(file);
            fs::write(&path, text)
                .with_context(|| format!("cannot write {text:?} to {}", path.display()))
        };
        write("buffer_size_kb", BUFFER)?;
        write("trace_clock", "mono")?;
        for (event, filter) in events {
            write(&format!("events/{event}/filter"), filter)?;
            write(&format!("events/{event}/enable"), "1")?;
        }
        let name = |(event, _): &(&'static str, String)| event.rsplit('/').next().unwrap_or(event);
        Ok(Trace {
            events: events.iter().map(name).collect(),
            dir,
            _removed: removed,
        })
    }

    /// Returns all events so far, in order.
    ///
    /// # Errors
    /// The buffer was too small, or a line cannot be parsed.
    pub fn stamps(&self) -> Result<Vec<Stamp>> {
        let mut stamps = Vec::new();
        for line in super::host::read(self.dir.join("trace"))?.lines() {
            ensure!(!line.contains("LOST"), "the trace has lost events");
            let found = self.events.iter().enumerate();
            let mut found = found.filter_map(|(n, name)| Some((n, parse(line, name)?)));
            match found.next() {
                Some((event, at)) => stamps.push(Stamp { event, at }),
                None if line.starts_with('#') || line.is_empty() => {}
                None => bail!("cannot parse this line of the trace: {line}"),
            }
        }
        stamps.sort_by(|a, b| a.at.total_cmp(&b.at));
        Ok(stamps)
    }
}

/// Returns the time of a line of the trace, in µs; `None` if the line is about another event.
fn parse(line: &str, event: &str) -> Option<f64> {
    let (before, _) = line.split_once(&format!(": {event}: "))?;
    let (seconds, micros) = before.rsplit(' ').next()?.split_once('.')?;
    Some(seconds.parse::<f64>().ok()? * 1e6 + micros.parse::<f64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_trace_give_event_and_time() {
        let line = "        rb-agent-4711    [001] d..1.  3021.000123: sched_process_exit: comm=rb-agent pid=4711 prio=120";
        assert_eq!(parse(line, "sched_process_exit"), Some(3_021_000_123.0));
        assert_eq!(parse(line, "signal_generate"), None);
    }
}
