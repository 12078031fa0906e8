//! Whether one user's agents delay the signals for the orphans of another's.

use std::os::unix::fs::symlink;

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::daemon::Setup;
use super::latency::{to_first_signal, traced};
use super::load::{Load, LoadPlacement};
use super::process::{IDLE, OTHER_AGENT};
use super::table::Row;

/// How long a victim's agent has lived, in ms, before it is killed.
const LIVED: u32 = 120;
/// The other user.
const UID: u32 = 70_001;
/// Most times the quiet latency that is promised.
const FACTOR: f64 = 2.0;

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let rounds = bench.pick(200, 40);
    let (sessions, holders, files) = bench.pick((8000, 40, 15_000), (500, 10, 15_000));
    let dir = bench.dir.join(IDLE);
    std::fs::create_dir_all(&dir)?;
    // The kernel names a process after the file, so that each of these is an agent's session.
    symlink("/bin/sleep", dir.join(OTHER_AGENT)).context("cannot name the idle agents")?;
    let setup = |loads: [&Load; 2]| {
        let setup = Setup::new(bench, "enforce").named().scope(loads).sieved();
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
    let said = daemon.stop()?;
    ensure!(said.count("lost") == 0, "events were lost meanwhile");
    let quiet = to_first_signal(" with no other user", &quiet);
    let mut rows = to_first_signal(" beside another user's sessions and open files", &beside);
    for (row, quiet) in rows.iter_mut().zip(&quiet) {
        row.goal_at_most = quiet.measured.map(|quiet| quiet * FACTOR);
        row.note = format!(
            "{sessions} sessions; {waves} times an agent ended above {holders} processes with {files} files each"
        );
    }
    Ok(quiet.into_iter().chain(rows).collect())
}
