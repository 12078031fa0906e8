//! A `reaper daemon` that is measured, and what it says.

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

/// A stream that has not grown for so long is at its end.
const QUIET: Duration = Duration::from_millis(300);

/// Lines on what happens to every process: a run with millions of events keeps none of them.
const EACH_PROCESS: &str = "\"event\":\"(fork|exec|exit|reparent)\"";

/// How a daemon is to be started. It knows one agent, [`process::AGENT`], considers the whole host and pins
/// nothing, unless something else is said.
pub struct Setup<'a> {
    bench: &'a Bench,
    settings: String,
    /// Whether the built-in rules of a kind are known: agents, boundaries, keeps.
    rules: [bool; 3],
    arguments: Vec<OsString>,
    sieved: bool,
}

impl<'a> Setup<'a> {
    /// `mode` is `enforce` or `observe`.
    pub fn new(bench: &'a Bench, mode: &str) -> Setup<'a> {
        Setup {
            bench,
            settings: format!("mode = \"{mode}\"\n"),
            rules: [false; 3],
            arguments: vec!["--no-pin".into()],
            sieved: false,
        }
    }

    /// Considers these loads only.
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

    /// Knows what is no agent by the built-in rules: their names are what the probes look up.
    pub fn named(self) -> Self {
        Setup {
            rules: [false, true, true],
            ..self
        }
    }

    /// Knows all built-in rules.
    pub fn whole_catalogue(self) -> Self {
        Setup {
            rules: [true; 3],
            ..self
        }
    }

    /// Pins in the bench's own place.
    pub fn pinned(mut self, pins: &Pins) -> Self {
        self.arguments
            .splice(..1, ["--pin-dir".into(), pins.dir().into()]);
        self
    }

    /// Of its stream only what is decided and done is kept.
    pub fn sieved(self) -> Self {
        Setup {
            sieved: true,
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

    /// Starts it and waits until it is ready.
    ///
    /// # Errors
    /// It cannot be started, or says why it does not work.
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
        if self.sieved {
            command.stdout(writer);
        } else {
            command.stdout(file.try_clone()?);
        }
        raw::end_with_us(&mut command);
        let started = Instant::now();
        let child = command.spawn().context("cannot start reaper")?;
        // Its copy of the pipe's end would keep the sieve from ending.
        drop(command);
        let mut sieve = None;
        if self.sieved {
            let mut grep = Command::new("grep");
            grep.args(["--line-buffered", "-avE", EACH_PROCESS]);
            let grep = grep.env("LC_ALL", "C").stdin(reader).stdout(file).spawn();
            sieve = Some(grep.context("cannot start grep")?);
        }
        let mut daemon = Daemon {
            child: OwnedChild(child),
            stream,
            errors,
            sieve,
            started,
            ready_after: Duration::ZERO,
        };
        let mut ended = None;
        let told = wait::until(|| {
            ended = daemon.child.try_wait().ok().flatten();
            ended.is_some() || std::fs::metadata(&daemon.stream).is_ok_and(|file| file.len() > 0)
        });
        daemon.ready_after = started.elapsed();
        if let Some(status) = ended {
            bail!("reaper ended with {status}: {}", daemon.complaint());
        }
        ensure!(told, "reaper does not get ready: {}", daemon.complaint());
        Ok(daemon)
    }
}

/// A running daemon; killed when this is dropped.
pub struct Daemon {
    child: OwnedChild,
    stream: PathBuf,
    errors: PathBuf,
    sieve: Option<Child>,
    started: Instant,
    /// From before it was started until its `ready` could be read.
    pub ready_after: Duration,
}

/// What a daemon said, read once it has ended.
pub struct DaemonOutput {
    stream: PathBuf,
    /// Its last line.
    pub summary: Value,
}

impl Daemon {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it has had time to take in all that happened, and sleeps again.
    pub fn settle(&self) {
        // It looks at what nobody woke it for after 50 ms, and once more before it sleeps.
        std::thread::sleep(Duration::from_millis(250));
    }

    /// From before it was started until the last line was written that follows an event of this name; waits until none
    /// has come for a while.
    ///
    /// # Errors
    /// There is no such event.
    pub fn time_to_last_line_after(&self, event: &str) -> Result<Duration> {
        let (mut length, mut after) = (0, Duration::ZERO);
        let is_told = wait::until(|| {
            let now = std::fs::metadata(&self.stream).map_or(0, |file| file.len());
            if now != length {
                (length, after) = (now, self.started.elapsed());
            }
            // What is quiet may be busy with something else.
            self.started.elapsed() > after + QUIET
                && events(&self.stream, event).is_ok_and(|found| !found.is_empty())
        });
        ensure!(is_told, "reaper does not say {event}");
        Ok(after)
    }

    /// Keeps it from running for a while, as a busy host does.
    ///
    /// # Errors
    /// It is gone.
    pub fn hold_up(&self, time: Duration) -> Result<()> {
        self.signal(Signal::SIGSTOP)?;
        std::thread::sleep(time);
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        kill(pid, signal).with_context(|| format!("cannot send {signal} to reaper"))
    }

    /// Ends it.
    ///
    /// # Errors
    /// It does not end well.
    pub fn stop(mut self) -> Result<DaemonOutput> {
        self.signal(Signal::SIGTERM)?;
        ensure!(wait::ended(&mut self.child), "reaper does not stop");
        let sieved = self.sieve.as_mut().is_none_or(wait::ended);
        ensure!(sieved, "the stream does not end");
        let said = DaemonOutput {
            stream: self.stream.clone(),
            summary: Value::Null,
        };
        let summary = said.events("summary")?.pop();
        let summary = summary.with_context(|| format!("no summary: {}", self.complaint()))?;
        Ok(DaemonOutput { summary, ..said })
    }

    fn complaint(&self) -> String {
        let errors = std::fs::read_to_string(&self.errors).unwrap_or_default();
        errors
            .lines()
            .last()
            .unwrap_or("it says nothing")
            .to_owned()
    }
}

impl DaemonOutput {
    /// All events of a name.
    ///
    /// # Errors
    /// The stream is no JSON lines.
    pub fn events(&self, name: &str) -> Result<Vec<Value>> {
        events(&self.stream, name)
    }

    /// What it said when it was ready.
    ///
    /// # Errors
    /// As [`DaemonOutput::events`].
    pub fn ready(&self) -> Result<Value> {
        let mut ready = self.events("ready")?;
        ready.pop().context("reaper has not said that it was ready")
    }

    /// Size of the ring, as it said.
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

    /// A number of the summary.
    pub fn count(&self, key: &str) -> u64 {
        self.summary[key].as_u64().unwrap_or_default()
    }

    /// Lines that were not written, because the reader was too slow.
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
