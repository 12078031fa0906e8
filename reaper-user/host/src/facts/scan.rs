//! Everybody, with what tells of the agents that they may come from.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use super::reading::{ProcDir, read_facts};
use crate::source::ProcessTable as _;
use crate::source::procfs::readers::{Readers, readers};
use crate::source::procfs::{ProcessReading, Procfs, ProcfsError};
use crate::sys;
use reaper_model::event::{Image, ProcEntry, ProcessKey};
use reaper_model::facts::{Fact, FactSet};
use reaper_model::leftover::{EnvMarkers, LeftoverRow, ProcessTable};
use reaper_model::ruleset::{Ruleset, script_path};

/// How long a pass over all processes waits for the next one.
const PATIENCE: Duration = Duration::from_secs(1);
/// Most bytes of long command lines that are read for a table.
const ARGUMENTS_ROOM: u64 = 16 << 20;
/// Those of all censuses: apart from the engine's, which who asks for scans must not use up.
static READERS: Readers = readers();
/// Those that resolve paths of scripts: apart, since a file system that hangs keeps them.
static SCRIPT_READERS: Readers = readers();

/// What came of a look.
enum ScannedProcess {
    Row(Box<LeftoverRow>),
    /// It is dead, or there is none.
    Nobody,
    Unread,
}

/// Reads the whole process table. Who cannot be read, or not in time, is among the unread.
///
/// # Errors
/// The table cannot be listed, or no thread can be started.
pub fn scan_processes(procfs: &Procfs) -> Result<ProcessTable, ProcfsError> {
    let pids = procfs.pids()?;
    let mut table = ProcessTable::default();
    let mut unread: HashSet<u32> = pids.iter().copied().collect();
    procfs.pass(&READERS, PATIENCE, pids, meet, |pid, met| match met {
        ScannedProcess::Row(row) => {
            unread.remove(&pid);
            table.rows.insert(pid, *row);
        }
        ScannedProcess::Nobody => {
            unread.remove(&pid);
        }
        ScannedProcess::Unread => {}
    })?;
    // The directory itself belongs to the effective user, and there is no waiting for that.
    let uid = |pid: u32| match std::fs::metadata(procfs.root().join(pid.to_string())) {
        Ok(directory) => Some((pid, Some(directory.uid()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(_) => Some((pid, None)),
    };
    table.unread = unread.into_iter().filter_map(uid).collect();
    complete_arguments(procfs, &mut table)?;
    resolve_scripts(procfs, &mut table)?;
    Ok(table)
}

/// Reads the whole command lines of those that are cut in a table, the shortest first, as long as there is room.
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
    let read = |procfs: &Procfs, _, look| whole_arguments(procfs, look);
    procfs.pass(&READERS, PATIENCE, pids, read, |pid, found| {
        let Some((seen, argv)) = found else { return };
        if let Some(image) = image_of(table, pid, &seen) {
            (image.argv, image.truncated) = (argv, false);
        }
    })?;
    Ok(())
}

/// Resolves the paths of the scripts of a table. One that cannot be resolved in time stays unknown.
fn resolve_scripts(procfs: &Procfs, table: &mut ProcessTable) -> Result<(), ProcfsError> {
    let runs_script = |row: &LeftoverRow| script_path(&row.entry.image).is_some();
    let rows = table.rows.iter().filter(|(_, row)| runs_script(row));
    let pids: Vec<u32> = rows.map(|(pid, _)| *pid).collect();
    let read = |procfs: &Procfs, _, look| {
        let Ok(ProcessReading::Alive(seen)) = look else {
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

/// Returns the image of a row to complete it. `None` if the process runs another program by now.
fn image_of<'t>(table: &'t mut ProcessTable, pid: u32, now: &ProcEntry) -> Option<&'t mut Image> {
    let row = table.rows.get_mut(&pid)?;
    let begins = |whole: &Image, part: &Image| whole.argv.starts_with(&part.argv);
    let (known, image) = (&row.entry.image, &now.image);
    let is_same = row.entry.key == now.key
        && (&known.exe, known.argv_full_len) == (&image.exe, image.argv_full_len)
        && begins(known, image);
    is_same.then(|| Arc::make_mut(&mut row.entry.image))
}

/// Returns a process with its whole command line.
fn whole_arguments(
    procfs: &Procfs,
    look: Result<ProcessReading, ProcfsError>,
) -> Option<(ProcEntry, Vec<u8>)> {
    let Ok(ProcessReading::Alive(seen)) = look else {
        return None;
    };
    let mut subject = ProcDir::open(procfs.root(), seen.key)?;
    let argv = subject.arguments(&seen.image)?;
    subject.is_alive().then_some((seen, argv))
}

/// Whether those with these pids have a socket that listens; who it was that was looked at, to the tick.
///
/// # Errors
/// No thread can be started.
pub fn listening(
    procfs: &Procfs,
    pids: Vec<u32>,
) -> Result<HashMap<ProcessKey, Fact<bool>>, ProcfsError> {
    let mut all = HashMap::new();
    let ask = |procfs: &Procfs, _, seen: Result<ProcessReading, ProcfsError>| {
        let Ok(ProcessReading::Alive(seen)) = seen else {
            return None;
        };
        let found = read_facts(
            procfs.root(),
            seen.key,
            FactSet::LISTENING,
            None,
            &Ruleset::default(),
            sys::boot_time(),
        );
        Some((seen.key, found.facts.listening))
    };
    procfs.pass(&READERS, PATIENCE, pids, ask, |_, found| all.extend(found))?;
    Ok(all)
}

fn meet(procfs: &Procfs, _: u32, look: Result<ProcessReading, ProcfsError>) -> ScannedProcess {
    let seen = match look {
        Ok(ProcessReading::Alive(seen)) => seen,
        Ok(ProcessReading::Zombie | ProcessReading::Vanished) => return ScannedProcess::Nobody,
        Err(_) => return ScannedProcess::Unread,
    };
    let mut row = LeftoverRow {
        listening: Fact::Unread,
        login_uid: None,
        unit: Fact::Unreadable,
        env_markers: Fact::Unreadable,
        // Where it cannot be told, no pid is taken at its word.
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
        let trace = environ.map(|(environ, whole)| EnvMarkers::of(environ, whole));
        if subject.is_alive() {
            (row.nested, row.inner_pid) = (nested, inner_pid);
            row.unit = unit;
            row.login_uid = login_uid;
            row.env_markers = trace.map_or(Fact::Unreadable, Fact::Known);
        }
    }
    ScannedProcess::Row(Box::new(row))
}
