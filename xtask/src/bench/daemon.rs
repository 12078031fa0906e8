//! A `reaper daemon` that is measured, and what it says.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::load::Load;
use super::{Bench, actor, raw, wait};

/// A running daemon that considers some loads only; ended when this is dropped.
pub struct Daemon {
    child: Child,
    stream: PathBuf,
    errors: PathBuf,
    /// From before it was started until its `ready` could be read.
    pub ready_after: Duration,
}

/// What a daemon said, read once it has ended.
pub struct Said {
    stream: PathBuf,
    /// Its last line.
    pub summary: Value,
}

impl Daemon {
    /// Starts one and waits until it is ready. `mode` is `enforce` or `observe`.
    ///
    /// # Errors
    /// It cannot be started, or says why it does not work.
    pub fn start(bench: &Bench, mode: &str, loads: &[&Load]) -> Result<Daemon> {
        let path = |name: &str| bench.dir.join(name);
        let config = format!(
            "mode = \"{mode}\"\n[defaults]\nagents = false\nboundaries = false\nkeeps = false\n\
             [[agent]]\nname = \"bench\"\ncomm = \"{}\"\n",
            actor::AGENT
        );
        std::fs::write(path("config.toml"), config)?;
        let (stream, errors) = (path("stream.jsonl"), path("errors"));
        let mut command = Command::new(&bench.reaper);
        command.args(["daemon", "--json", "--config"]);
        command.arg(path("config.toml"));
        command.arg("--runtime-dir").arg(path("run"));
        for load in loads {
            command.args(["--scope", &load.pid().to_string()]);
        }
        command.stdin(Stdio::null());
        command.stdout(File::create(&stream)?);
        command.stderr(File::create(&errors)?);
        raw::end_with_us(&mut command);
        let start = Instant::now();
        let child = command.spawn().context("cannot start reaper")?;
        let mut daemon = Daemon {
            child,
            stream,
            errors,
            ready_after: Duration::ZERO,
        };
        let mut ended = None;
        let told = wait::until(|| {
            ended = daemon.child.try_wait().ok().flatten();
            ended.is_some() || std::fs::metadata(&daemon.stream).is_ok_and(|file| file.len() > 0)
        });
        daemon.ready_after = start.elapsed();
        if let Some(status) = ended {
            bail!("reaper ended with {status}: {}", daemon.complaint());
        }
        ensure!(told, "reaper does not get ready: {}", daemon.complaint());
        Ok(daemon)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it has had time to take in all that happened, and sleeps again.
    pub fn rest(&self) {
        // It looks at what nobody woke it for after 50 ms, and once more before it sleeps.
        std::thread::sleep(Duration::from_millis(250));
    }

    /// Ends it.
    ///
    /// # Errors
    /// It does not end well.
    pub fn stop(mut self) -> Result<Said> {
        kill(
            Pid::from_raw(self.child.id().cast_signed()),
            Signal::SIGTERM,
        )
        .context("cannot stop reaper")?;
        ensure!(wait::ended(&mut self.child), "reaper does not stop");
        let said = Said {
            stream: self.stream.clone(),
            summary: Value::Null,
        };
        let summary = said.events("summary")?.pop();
        let summary = summary.with_context(|| format!("no summary: {}", self.complaint()))?;
        Ok(Said { summary, ..said })
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

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail only where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Said {
    /// All events of a name.
    ///
    /// # Errors
    /// The stream is no JSON lines.
    pub fn events(&self, name: &str) -> Result<Vec<Value>> {
        let mark = format!("\"event\":\"{name}\"");
        let mut found = Vec::new();
        for line in BufReader::new(File::open(&self.stream)?).lines() {
            let line = line?;
            if line.contains(&mark) {
                found.push(serde_json::from_str(&line).context("a line of the stream")?);
            }
        }
        Ok(found)
    }

    /// A number of the summary.
    pub fn count(&self, key: &str) -> u64 {
        self.summary[key].as_u64().unwrap_or_default()
    }

    /// Lines that should have been written and were not: the reader was too slow.
    ///
    /// # Errors
    /// The stream cannot be read.
    pub fn lines_missing(&self) -> Result<u64> {
        let lines = BufReader::new(File::open(&self.stream)?).lines().count() as u64;
        Ok(self.count("seq").saturating_sub(lines))
    }
}
