//! Measures whether one user's agents delay the signals for another user's orphans.

use std::os::unix::fs::symlink;

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::daemon::Setup;
use super::latency::{to_first_signal, traced};
use super::load::{Load, LoadPlacement};
use super::process::{IDLE, OTHER_AGENT};
use super::table::Row;

/// Age of a victim's agent when it is killed, in ms.
const LIVED: u32 = 120;
/// Uid of the other user.
const UID: u32 = 70_001;
/// Goal: upper limit of the latency, as a multiple of that without another user.
const FACTOR: f64 = 2.0;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let rounds = bench.pick(200, 40);
    let (sessions, holders, files) = bench.pick((8000, 40, 15_000), (500, 10, 15_000));
    let dir = bench.dir.join(IDLE);
    std::fs::create_dir_all(&dir)?;
    // The kernel names a process after its file, so each of these is recognised as an agent.
    symlink("/bin/sleep", dir.join(OTHER_AGENT)).context("cannot link the idle agents")?;
    let setup = |loads: [&Load; 2]| {
        let setup = Setup::new(bench, "enforce").named().scope(loads).filtered();
        setup.set("kernel_reap = \"off\"").start()
    };
    let start = |victim: &Load| {
        let other = Load::start_as(bench, LoadPlacement::Outside, Some(UID))?;
        Ok((setup([victim, &other])?, other))
    };
    let (quiet, (daemon, other)) = traced(bench, rounds, 1, LIVED, start)?;
    daemon.stop()?;
    drop(other);
    let start = |victim: &Load| {
        let mut other = Load::start_as(bench, LoadPlacement::Outside, Some(UID))?;
        let daemon = setup([victim, &other])?;
        other.request(&format!("idle {sessions}"))?;
        daemon.settle();
        other.send_request(&format!("crowd {holders} {files}"))?;
        Ok((daemon, other))
    };
    let (beside, (daemon, mut other)) = traced(bench, rounds, 1, LIVED, start)?;
    other.send_request("end")?;
    let waves = other.read_response()?;
    daemon.settle();
    let output = daemon.stop()?;
    ensure!(output.count("lost") == 0, "reaper lost events");
    let quiet = to_first_signal(" with no other user", &quiet);
    let mut rows = to_first_signal(" beside another user's sessions and open files", &beside);
    for (row, quiet) in rows.iter_mut().zip(&quiet) {
        row.goal_at_most = quiet.measured.map(|quiet| quiet * FACTOR);
        row.note = format!(
            "{sessions} sessions; {waves} times an agent exited and left {holders} processes with {files} open files each"
        );
    }
    Ok(quiet.into_iter().chain(rows).collect())
}
