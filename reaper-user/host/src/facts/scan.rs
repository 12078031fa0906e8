//! Reads all processes, with the evidence of the agents that they may descend from.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use super::reading::ProcDir;
use super::{ScriptPaths, SocketFacts, sockets_of};
use crate::source::ProcessTable as _;
use crate::source::procfs::readers::{Readers, readers};
use crate::source::procfs::{ProcessReading, Procfs, ProcfsError};
use reaper_model::event::{Image, ProcEntry, ProcessKey};
use reaper_model::facts::Fact;
use reaper_model::leftover::{EnvMarkers, LeftoverRow, ProcessTable};
use reaper_model::ruleset::script_path;

/// Time limit of a pass for its next result, see [`Procfs::pass`].
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of bytes read for truncated command lines in one scan.
const ARGUMENTS_ROOM: u64 = 16 << 20;
/// Threads of all scans. Separate from those of the engine, so that requested scans do not use these up.
static READERS: Readers = readers();
/// Threads for script paths. Separate, because a file system that hangs blocks them.
static SCRIPT_READERS: Readers = readers();

/// Result for one process.
enum ScannedProcess {
    /// Row for the table.
    Row(Box<LeftoverRow>),
    /// It has exited.
    Exited,
    /// It could not be read.
    Unread,
}

/// Reads all living processes. Those that cannot be read, or not in time, are listed as unread.
///
/// Then completes truncated command lines and resolves script paths, as far as possible within limits. Does not read
/// whether the processes listen (see [`listening`]).
///
/// # Errors
/// The processes cannot be listed, or no thread can be started.
pub fn scan_processes(procfs: &Procfs) -> Result<ProcessTable, ProcfsError> {
    scan_pids(procfs, procfs.pids()?, ScriptPaths::Resolved)
}

/// Reads the processes with these pids, as [`scan_processes`] does. Resolves script paths only if `scripts` says so.
///
/// # Errors
/// No thread can be started.
pub fn scan_pids(
    procfs: &Procfs,
    pids: Vec<u32>,
    scripts: ScriptPaths,
) -> Result<ProcessTable, ProcfsError> {
    let mut table = ProcessTable::default();
    let mut unread: HashSet<u32> = pids.iter().copied().collect();
    procfs.pass(&READERS, PATIENCE, pids, scan, |pid, found| match found {
        ScannedProcess::Row(row) => {
            unread.remove(&pid);
            table.rows.insert(pid, *row);
        }
        ScannedProcess::Exited => {
            unread.remove(&pid);
        }
        ScannedProcess::Unread => {}
    })?;
    // Reading the owner of the directory never blocks. It is the effective user.
    let uid = |pid: u32| match std::fs::metadata(procfs.root().join(pid.to_string())) {
        Ok(directory) => Some((pid, Some(directory.uid()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(_) => Some((pid, None)),
    };
    table.unread = unread.into_iter().filter_map(uid).collect();
    complete_arguments(procfs, &mut table)?;
    if scripts == ScriptPaths::Resolved {
        resolve_scripts(procfs, &mut table)?;
    }
    Ok(table)
}

/// Reads the truncated command lines of the table completely, shortest first, up to 16 MiB in total. The others, and
/// those that cannot be read in time, stay truncated.
fn complete_arguments(procfs: &Procfs, table: &mut ProcessTable) -> Result<(), ProcfsError> {
    let images = table.rows.iter().map(|(pid, row)| (*pid, &row.entry.image));
    let cut = images.filter(|(_, image)| image.truncated);
    let mut cut: Vec<(u32, u32)> = cut.map(|(pid, image)| (image.argv_full_len, pid)).collect();
    cut.sort_unstable();
    let mut room = ARGUMENTS_ROOM;
    cut.retain(|(len, _)| match room.checked_sub(u64::from(*len)) {
        Some(left) => {
            room = left;
            true
        }
        None => false,
    });
    let pids = cut.into_iter().map(|(_, pid)| pid).collect();
    let read = |procfs: &Procfs, _, reading| whole_arguments(procfs, reading);
    procfs.pass(&READERS, PATIENCE, pids, read, |pid, found| {
        let Some((seen, argv)) = found else { return };
        if let Some(image) = image_of(table, pid, &seen) {
            (image.argv, image.truncated) = (argv, false);
        }
    })?;
    Ok(())
}

/// Resolves the script paths in the table. One that cannot be resolved in time stays unknown.
fn resolve_scripts(procfs: &Procfs, table: &mut ProcessTable) -> Result<(), ProcfsError> {
    let runs_script = |row: &LeftoverRow| script_path(&row.entry.image).is_some();
    let rows = table.rows.iter().filter(|(_, row)| runs_script(row));
    let pids: Vec<u32> = rows.map(|(pid, _)| *pid).collect();
    let read = |procfs: &Procfs, _, reading| {
        let Ok(ProcessReading::Alive(seen)) = reading else {
            return None;
        };
        let mut subject = ProcDir::open(procfs.root(), seen.key)?;
        let script = subject.script(&seen.image)?;
        subject.is_alive().then_some((seen, script))
    };
    procfs.pass(&SCRIPT_READERS, PATIENCE, pids, read, |pid, found| {
        let Some((seen, script)) = found else { return };
        if let Some(image) = image_of(table, pid, &seen) {
            image.script = script;
        }
    })?;
    Ok(())
}

/// Returns the image of a row, to complete it from `now`, a later reading of its process. `None` if the pid or the
/// program is now another one.
fn image_of<'t>(table: &'t mut ProcessTable, pid: u32, now: &ProcEntry) -> Option<&'t mut Image> {
    let row = table.rows.get_mut(&pid)?;
    let begins = |whole: &Image, part: &Image| whole.argv.starts_with(&part.argv);
    let (known, image) = (&row.entry.image, &now.image);
    let is_same = row.entry.key == now.key
        && (&known.exe, known.argv_full_len) == (&image.exe, image.argv_full_len)
        && begins(known, image);
    is_same.then(|| Arc::make_mut(&mut row.entry.image))
}

/// Returns a process and its whole command line. `None` if it has exited, or if the command line cannot be read.
fn whole_arguments(
    procfs: &Procfs,
    reading: Result<ProcessReading, ProcfsError>,
) -> Option<(ProcEntry, Vec<u8>)> {
    let Ok(ProcessReading::Alive(seen)) = reading else {
        return None;
    };
    let mut subject = ProcDir::open(procfs.root(), seen.key)?;
    let argv = subject.arguments(&seen.image)?;
    subject.is_alive().then_some((seen, argv))
}

/// Returns facts about the sockets of the processes with these pids, by key. Start times are precise to the tick. Leaves
/// out processes that have exited or cannot be read in time.
///
/// # Errors
/// No thread can be started.
pub fn socket_facts(
    procfs: &Procfs,
    pids: Vec<u32>,
) -> Result<HashMap<ProcessKey, SocketFacts>, ProcfsError> {
    let mut all = HashMap::new();
    let read = |procfs: &Procfs, _, seen: Result<ProcessReading, ProcfsError>| {
        let Ok(ProcessReading::Alive(seen)) = seen else {
            return None;
        };
        Some((seen.key, sockets_of(procfs, seen.key)))
    };
    procfs.pass(&READERS, PATIENCE, pids, read, |_, found| all.extend(found))?;
    Ok(all)
}

/// Returns the TCP ports on which a process listens, in order; none if it has exited or cannot be read.
pub fn listening_ports(procfs: &Procfs, key: ProcessKey) -> Vec<u16> {
    let Some(mut subject) = ProcDir::open(procfs.root(), key) else {
        return Vec::new();
    };
    let ports = subject.listening_ports().unwrap_or_default();
    if subject.is_alive() {
        ports
    } else {
        Vec::new()
    }
}

/// Reads the facts for the row of a process. Those that cannot be read are unknown in the row.
fn scan(procfs: &Procfs, _: u32, found: Result<ProcessReading, ProcfsError>) -> ScannedProcess {
    let seen = match found {
        Ok(ProcessReading::Alive(seen)) => seen,
        Ok(ProcessReading::Zombie | ProcessReading::Vanished) => return ScannedProcess::Exited,
        Err(_) => return ScannedProcess::Unread,
    };
    let mut row = LeftoverRow {
        listening: Fact::Unread,
        window: Fact::Unread,
        login_uid: None,
        unit: Fact::Unreadable,
        env_markers: Fact::Unreadable,
        // Unknown counts as nested, so that its pids are not compared with those of the host.
        nested: true,
        inner_pid: None,
        entry: seen,
    };
    if !row.entry.kernel_thread
        && let Some(mut subject) = ProcDir::open(procfs.root(), row.entry.key)
    {
        let (nested, inner_pid) = subject.is_nested().unwrap_or((true, None));
        let unit = subject.unit();
        let login_uid = subject.login_uid();
        let environ = subject.environ();
        let env_markers = environ.map(|(environ, whole)| EnvMarkers::of(environ, whole));
        if subject.is_alive() {
            (row.nested, row.inner_pid) = (nested, inner_pid);
            row.unit = unit;
            row.login_uid = login_uid;
            row.env_markers = env_markers.map_or(Fact::Unreadable, Fact::Known);
        }
    }
    ScannedProcess::Row(Box::new(row))
}
