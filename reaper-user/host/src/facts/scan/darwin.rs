//! Reads all processes, with the evidence of the agents that they may descend from. No read blocks on macOS.

use std::path::Path;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::reading::ProcDir;
use super::{ScriptPaths, SocketFacts, sockets_of};
use crate::source::darwin::table::{ProcessReading, Procfs, ProcfsError, all, one, proc_entry};
use reaper_model::event::ProcessKey;
use reaper_model::facts::Fact;
use reaper_model::leftover::{EnvMarkers, LeftoverRow, ProcessTable};

/// Reads all living processes. Those that cannot be read are listed as unread. Does not read whether they listen.
///
/// # Errors
/// The processes cannot be listed.
pub fn scan_processes(procfs: &Procfs) -> Result<ProcessTable, ProcfsError> {
    let pids = all()?.iter().map(|process| process.pid).collect();
    scan_pids(procfs, pids, ScriptPaths::Resolved)
}

/// Reads the processes with these pids, as [`scan_processes`] does. Resolves script paths only if `scripts` says so.
///
/// # Errors
/// The processes cannot be listed.
pub fn scan_pids(
    _: &Procfs,
    pids: Vec<u32>,
    scripts: ScriptPaths,
) -> Result<ProcessTable, ProcfsError> {
    let mut table = ProcessTable::default();
    let wanted: HashSet<u32> = pids.into_iter().collect();
    let is_wanted = |pid: u32| wanted.contains(&pid);
    let all = all()?;
    let living = all.iter().filter(|process| !process.is_zombie());
    for process in living.filter(|process| is_wanted(process.pid)) {
        let Some(seen) = proc_entry(process) else {
            // It has exited, or its pid was reused during the read.
            if let Some(now) = one(process.pid)?.filter(|now| !now.is_zombie()) {
                table.unread.insert(now.pid, Some(now.uids.effective));
            }
            continue;
        };
        let mut row = LeftoverRow {
            listening: Fact::Unread,
            window: Fact::Unread,
            login_uid: None,
            unit: Fact::Unreadable,
            env_markers: Fact::Unreadable,
            nested: false,
            inner_pid: None,
            entry: seen,
        };
        if let Some(mut subject) = ProcDir::open(Path::new(""), row.entry.key) {
            let environ = subject.environ();
            let env_markers = environ.map(|(environ, whole)| EnvMarkers::of(environ, whole));
            let is_cut = row.entry.image.truncated;
            let argv = is_cut.then(|| subject.arguments(&row.entry.image));
            let resolves = scripts == ScriptPaths::Resolved;
            let script = resolves.then(|| subject.script(&row.entry.image)).flatten();
            if subject.is_alive() {
                if let Some(argv) = argv.flatten() {
                    let image = Arc::make_mut(&mut row.entry.image);
                    (image.argv, image.truncated) = (argv, false);
                }
                if let Some(script) = script {
                    Arc::make_mut(&mut row.entry.image).script = script;
                }
                row.unit = subject.unit();
                row.env_markers = env_markers.map_or(Fact::Unreadable, Fact::Known);
            }
        }
        table.rows.insert(process.pid, row);
    }
    Ok(table)
}

/// Returns facts about the sockets of the processes with these pids, by key. Leaves out those that have exited.
///
/// # Errors
/// The process table cannot be read.
pub fn socket_facts(
    procfs: &Procfs,
    pids: Vec<u32>,
) -> Result<HashMap<ProcessKey, SocketFacts>, ProcfsError> {
    let mut all = HashMap::new();
    for pid in pids {
        if let ProcessReading::Alive(seen) = procfs.read(pid)? {
            all.insert(seen.key, sockets_of(procfs, seen.key));
        }
    }
    Ok(all)
}

/// Returns no ports: macOS shows only whether a socket listens.
pub fn listening_ports(_: &Procfs, _: ProcessKey) -> Vec<u16> {
    Vec::new()
}
