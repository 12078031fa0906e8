//! Starts the `reaper daemon` under measurement and reads its event stream.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::load::Load;
use super::pins::Pins;
use super::{Bench, process, raw, wait};
use crate::shell::OwnedChild;

/// Time without growth after which the stream is considered complete.
const QUIET: Duration = Duration::from_millis(300);

/// Pattern of the lines that describe single processes. Measurements with millions of events discard them.
const EACH_PROCESS: &str = "\"event\":\"(fork|exec|exit|reparent)\"";

/// Builder of a daemon. By default it knows only the agent rule of the benchmark, tracks the whole host and pins
/// nothing.
pub struct Setup<'a> {
    bench: &'a Bench,
    settings: String,
    /// Whether the built-in agents, boundaries and keeps are enabled.
    rules: [bool; 3],
    arguments: Vec<OsString>,
    filtered: bool,
}

impl<'a> Setup<'a> {
    /// Returns the default setup with the mode `enforce` or `observe`.
    pub fn new(bench: &'a Bench, mode: &str) -> Setup<'a> {
        Setup {
            bench,
            settings: format!("mode = \"{mode}\"\n"),
            rules: [false; 3],
            arguments: vec!["--no-pin".into()],
            filtered: false,
        }
    }

    /// Limits the scope to these loads.
    pub fn scope<'l>(mut self, loads: impl IntoIterator<Item = &'l Load>) -> Self {
        for load in loads {
            self.arguments.push("--scope".into());
            self.arguments.push(load.pid().to_string().into());
        }
        self
    }

    /// Adds a line to the config.
    pub fn set(mut self, line: &str) -> Self {
        self.settings += &format!("{line}\n");
        self
    }

    /// Enables the built-in boundaries and keeps. The probes compare their program names.
    pub fn named(self) -> Self {
        Setup {
            rules: [false, true, true],
            ..self
        }
    }

    /// Enables all built-in rules.
    pub fn whole_catalogue(self) -> Self {
        Setup {
            rules: [true; 3],
            ..self
        }
    }

    /// Pins in the BPF file system of the benchmark.
    pub fn pinned(mut self, pins: &Pins) -> Self {
        self.arguments
            .splice(..1, ["--pin-dir".into(), pins.dir().into()]);
        self
    }

    /// Removes the lines about single processes from the stream.
    pub fn filtered(self) -> Self {
        Setup {
            filtered: true,
            ..self
        }
    }

    fn config(&self) -> String {
        let [agents, boundaries, keeps] = self.rules;
        format!(
            "{}[defaults]\nagents = {agents}\nboundaries = {boundaries}\nkeeps = {keeps}\n\
             [[agent]]\nname = \"bench\"\ncomm = [\"{}\", \"{}\"]\n",
            self.settings,
            process::AGENT,
            process::OTHER_AGENT
        )
    }

    /// Starts the daemon and waits until it is ready.
    ///
    /// # Errors
    /// The daemon cannot be started, exits, or is not ready in time.
    pub fn start(&self) -> Result<Daemon> {
        let path = |name: &str| self.bench.dir.join(name);
        std::fs::write(path("config.toml"), self.config())?;
        let (stream, errors) = (path("stream.jsonl"), path("errors"));
        let mut command = Command::new(&self.bench.reaper);
        command.args(["daemon", "--json", "--config"]);
        command.arg(path("config.toml"));
        command.arg("--runtime-dir").arg(path("run"));
        command.args(&self.arguments);
        command.stdin(Stdio::null());
        let file = File::create(&stream)?;
        command.stderr(File::create(&errors)?);
        let (reader, writer) = std::io::pipe()?;
        if self.filtered {
            command.stdout(writer);
        } else {
            command.stdout(file.try_clone()?);
        }
        raw::end_with_us(&mut command);
        let started = Instant::now();
        let child = command.spawn().context("cannot start reaper")?;
        // Its copy of the pipe's write end would keep grep from exiting.
        drop(command);
        let mut filter = None;
        if self.filtered {
            let mut grep = Command::new("grep");
            grep.args(["--line-buffered", "-avE", EACH_PROCESS]);
            let grep = grep.env("LC_ALL", "C").stdin(reader).stdout(file).spawn();
            filter = Some(grep.context("cannot start grep")?);
        }
        let mut daemon = Daemon {
            child: OwnedChild(child),
            stream,
            errors,
            filter,
            started,
            ready_after: Duration::ZERO,
        };
        let mut ended = None;
        let ready = wait::until(|| {
            ended = daemon.child.try_wait().ok().flatten();
            ended.is_some() || std::fs::metadata(&daemon.stream).is_ok_and(|file| file.len() > 0)
        });
        daemon.ready_after = started.elapsed();
        if let Some(status) = ended {
            bail!("reaper exited with {status}: {}", daemon.complaint());
        }
        ensure!(ready, "reaper is not ready in time: {}", daemon.complaint());
        Ok(daemon)
    }
}

/// Running daemon; killed on drop.
pub struct Daemon {
    child: OwnedChild,
    stream: PathBuf,
    errors: PathBuf,
    filter: Option<Child>,
    started: Instant,
    /// Time from before the start until its `ready` event could be read.
    pub ready_after: Duration,
}

/// Output of a daemon that has exited.
pub struct DaemonOutput {
    stream: PathBuf,
    /// The `summary` event.
    pub summary: Value,
}

impl Daemon {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the daemon has read all events and is idle again.
    pub fn settle(&self) {
        // It polls for records without a wake-up after 50 ms, and once more before it sleeps.
        std::thread::sleep(Duration::from_millis(250));
    }

    /// Waits until the stream contains this event and has stopped growing. Returns the time from before the start until the
    /// last line was written.
    ///
    /// # Errors
    /// The event does not come in time.
    pub fn time_to_last_line_after(&self, event: &str) -> Result<Duration> {
        let (mut length, mut after) = (0, Duration::ZERO);
        let is_emitted = wait::until(|| {
            let now = std::fs::metadata(&self.stream).map_or(0, |file| file.len());
            if now != length {
                (length, after) = (now, self.started.elapsed());
            }
            // A quiet daemon may still be busy.
            self.started.elapsed() > after + QUIET
                && events(&self.stream, event).is_ok_and(|found| !found.is_empty())
        });
        ensure!(is_emitted, "reaper has not emitted {event}");
        Ok(after)
    }

    /// Stops the daemon for a while, as if the host were busy.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn hold_up(&self, time: Duration) -> Result<()> {
        self.signal(Signal::SIGSTOP)?;
        std::thread::sleep(time);
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        kill(pid, signal).with_context(|| format!("cannot send {signal} to reaper"))
    }

    /// Stops the daemon and returns its output.
    ///
    /// # Errors
    /// The daemon does not exit in time, or its stream has no summary.
    pub fn stop(mut self) -> Result<DaemonOutput> {
        self.signal(Signal::SIGTERM)?;
        ensure!(wait::ended(&mut self.child), "reaper does not stop");
        let filtered = self.filter.as_mut().is_none_or(wait::ended);
        ensure!(filtered, "the stream does not end");
        let output = DaemonOutput {
            stream: self.stream.clone(),
            summary: Value::Null,
        };
        let summary = output.events("summary")?.pop();
        let summary = summary.with_context(|| format!("no summary: {}", self.complaint()))?;
        Ok(DaemonOutput { summary, ..output })
    }

    fn complaint(&self) -> String {
        let errors = std::fs::read_to_string(&self.errors).unwrap_or_default();
        errors
            .lines()
            .last()
            .unwrap_or("no error message")
            .to_owned()
    }
}

impl DaemonOutput {
    /// Returns all events with this name.
    ///
    /// # Errors
    /// The stream cannot be read or parsed.
    pub fn events(&self, name: &str) -> Result<Vec<Value>> {
        events(&self.stream, name)
    }

    /// Returns the `ready` event.
    ///
    /// # Errors
    /// As [`DaemonOutput::events`].
    pub fn ready(&self) -> Result<Value> {
        let mut ready = self.events("ready")?;
        ready.pop().context("reaper has not emitted ready")
    }

    /// Returns the size of the ring buffer, from the `ready` event.
    ///
    /// # Errors
    /// As [`DaemonOutput::events`].
    pub fn ring(&self) -> Result<String> {
        let bytes = self.ready()?["ring_size"].as_u64().unwrap_or_default();
        Ok(match bytes >> 20 {
            0 => format!("ring of {} KiB", bytes >> 10),
            mib => format!("ring of {mib} MiB"),
        })
    }

    /// Returns a number of the summary.
    pub fn count(&self, key: &str) -> u64 {
        self.summary[key].as_u64().unwrap_or_default()
    }

    /// Returns the number of lines that were dropped because the reader was too slow.
    ///
    /// # Errors
    /// The stream cannot be read.
    pub fn lines_missing(&self) -> Result<u64> {
        let mut dropped = self.events("dropped")?;
        dropped.retain(|line| line["dropped_by"] == "stream");
        let counts = dropped.iter().filter_map(|line| line["count"].as_u64());
        Ok(counts.sum())
    }
}

fn events(stream: &Path, name: &str) -> Result<Vec<Value>> {
    let mark = format!("\"event\":\"{name}\"");
    let mut found = Vec::new();
    for line in BufReader::new(File::open(stream)?).lines() {
        let line = line?;
        if line.contains(&mark) {
            found.push(serde_json::from_str(&line).context("a line of the stream")?);
        }
    }
    Ok(found)
}
