//! Cost of `reaper run`, compared with `timeout`.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::host::{field, read, switches};
use super::stats::{median, quantile};
use super::table::Row;
use super::{Bench, wait};

const MIB: f64 = 1024.0;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let own = bench.reaper.display().to_string();
    let own = [own.as_str(), "run", "--"];
    let all: [&[&str]; 3] = [&[], &own, &["timeout", "9"]];
    let mut took: [Vec<f64>; 3] = Default::default();
    for _ in 0..bench.pick(300, 30) {
        for (words, took) in all.iter().zip(&mut took) {
            took.push(once(words)?);
        }
    }
    let alone = median(&took[0]);
    let more = |name: &str, took: &[f64]| {
        let (starts, most) = (took.len(), quantile(took, 0.99));
        let what = format!("start to exit of true, added by {name}");
        let note = format!("{starts} starts, 99 % within {most:.1} ms");
        Row::new(what, median(took) - alone, "ms").note(note)
    };
    let mut rows = vec![
        Row::new("start to exit of true, alone", alone, "ms"),
        more("reaper run", &took[1]).at_most(3.0),
        more("timeout", &took[2]),
    ];
    rows.extend(at_rest(bench, &own)?);
    Ok(rows)
}

/// Returns the milliseconds from the start of `words` followed by `true` until it exits.
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
    // Keeps the run records out of the user's list, but on a disk.
    let state = std::env::temp_dir().join(format!("reaper-bench-{}/state", std::process::id()));
    command
        .env("XDG_STATE_HOME", state)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Returns memory and wake-ups of `reaper run` while its command sleeps.
fn at_rest(bench: &Bench, own: &[&str]) -> Result<[Row; 2]> {
    let sleep = Sleeper::start(&[])?;
    let owned = Sleeper::start(own)?;
    let (alone, peak) = (sleep.peak()?, owned.peak()?);
    let seconds = bench.pick(10, 3);
    let before = switches(owned.0.id())?;
    std::thread::sleep(Duration::from_secs(seconds));
    let wakes = switches(owned.0.id())? - before;
    let note = format!(
        "peak {:.1} MiB, `sleep` {:.1} MiB",
        peak as f64 / MIB,
        alone as f64 / MIB
    );
    Ok([
        Row::new(
            "memory of reaper run, above that of sleep",
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

/// Command that sleeps; ended on drop.
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
        ensure!(up, "{words:?} sleep does not start in time");
        // Time for the work that follows a start.
        std::thread::sleep(Duration::from_millis(300));
        Ok(sleeper)
    }

    /// Returns the peak resident memory, in KiB.
    fn peak(&self) -> Result<u64> {
        field(&read(format!("/proc/{}/status", self.0.id()))?, "VmHWM")
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // The pid is valid, because the process has not been waited for. `reaper run` passes the signal on.
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}
