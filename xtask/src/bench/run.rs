//! What it costs to run a command with an owner: `reaper run`, beside others that stand between a command and its caller.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::host::{field, read, threads};
use super::stats::{median, quantile};
use super::table::Row;
use super::{Bench, wait};
use crate::shell::find_program;

/// The words before a command, by what they are called here.
const OTHERS: [(&str, &[&str]); 4] = [
    ("tini", &["tini", "-s", "--"]),
    ("dumb-init", &["dumb-init"]),
    ("timeout", &["timeout", "9"]),
    ("systemd-run", &["systemd-run", "--quiet", "--scope"]),
];
const MIB: f64 = 1024.0;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let own = bench.reaper.display().to_string();
    let own = [own.as_str(), "run", "--"];
    let present = OTHERS
        .iter()
        .filter(|(program, words)| find_program(program).is_some() && once(words).is_ok());
    let mut all: Vec<(&str, &[&str])> = vec![("nobody", &[]), ("reaper run", &own)];
    all.extend(present);
    let mut took = vec![Vec::new(); all.len()];
    for _ in 0..bench.pick(300, 30) {
        for ((_, words), took) in all.iter().zip(&mut took) {
            took.push(once(words)?);
        }
    }
    let alone = median(&took[0]);
    let mut rows = vec![Row::new("start to end of true, alone", alone, "ms")];
    for ((name, _), took) in all.iter().zip(&took).skip(1) {
        let more = Row::new(
            format!("start to end of true, more with {name}"),
            median(took) - alone,
            "ms",
        );
        let note = format!(
            "{} starts, 99 % within {:.1} ms",
            took.len(),
            quantile(took, 0.99)
        );
        let more = more.note(note);
        rows.push(if *name == "reaper run" {
            more.at_most(3.0)
        } else {
            more
        });
    }
    let missing = OTHERS
        .iter()
        .filter(|(name, _)| all.iter().all(|(it, _)| it != name));
    rows.extend(missing.map(|(name, _)| {
        Row::missing(
            format!("start to end of true, more with {name}"),
            "not to be had here",
        )
    }));
    rows.extend(at_rest(bench, &own)?);
    Ok(rows)
}

/// Milliseconds from the start of `true` by these words to its end.
fn once(words: &[&str]) -> Result<f64> {
    let mut command = with(words, &["/bin/true"]);
    let begin = Instant::now();
    let status = command.status().context("cannot start a command")?;
    ensure!(status.success(), "{words:?} /bin/true: {status}");
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}

fn with(words: &[&str], command: &[&str]) -> Command {
    let words = [words, command].concat();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    // What is written down of it is not for the user's own list, and on the same disk.
    let state = std::env::temp_dir().join(format!("reaper-bench-{}/state", std::process::id()));
    command
        .env("XDG_STATE_HOME", state)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// While its command sleeps: memory, and wake-ups.
fn at_rest(bench: &Bench, own: &[&str]) -> Result<[Row; 2]> {
    let sleep = Sleeper::start(&[])?;
    let owned = Sleeper::start(own)?;
    let (alone, peak) = (sleep.peak()?, owned.peak()?);
    let seconds = bench.pick(10, 3);
    let before = owned.wakes()?;
    std::thread::sleep(Duration::from_secs(seconds));
    let wakes = owned.wakes()? - before;
    let note = format!(
        "{:.1} MiB at its peak, `sleep` {:.1} MiB",
        peak as f64 / MIB,
        alone as f64 / MIB
    );
    Ok([
        Row::new(
            "memory of reaper run, more than sleep",
            (peak as f64 - alone as f64) / MIB,
            "MiB",
        )
        .at_most(4.0)
        .note(note),
        Row::new(
            "wake-ups of reaper run while its command sleeps",
            wakes as f64,
            "",
        )
        .at_most(0.0)
        .note(format!("in {seconds} s")),
    ])
}

/// A command that does nothing, and is ended when this is dropped.
struct Sleeper(Child);

impl Sleeper {
    fn start(words: &[&str]) -> Result<Sleeper> {
        let child = with(words, &["sleep", "100"])
            .spawn()
            .context("cannot start sleep")?;
        let sleeper = Sleeper(child);
        let pid = sleeper.0.id();
        let children = || read(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let comm = |pid: &str| read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let up = wait::until(|| match words {
            [] => comm(&pid.to_string()) == "sleep\n",
            _ => comm(children().trim()) == "sleep\n",
        });
        ensure!(up, "{words:?} sleep does not come up");
        // Caches of the page tables, and whatever else follows on a start.
        std::thread::sleep(Duration::from_millis(300));
        Ok(sleeper)
    }

    /// Most that it has had resident, in KiB.
    fn peak(&self) -> Result<u64> {
        field(&read(format!("/proc/{}/status", self.0.id()))?, "VmHWM")
    }

    fn wakes(&self) -> Result<u64> {
        Ok(threads(self.0.id())?
            .iter()
            .map(|thread| thread.switches)
            .sum())
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // It has not been waited for, and hands that on to its command.
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}
