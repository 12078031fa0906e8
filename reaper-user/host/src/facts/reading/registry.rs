//! Reads an agent's registry of running processes.
//!
//! The files belong to the user of the agent and can contain anything. Reads are bounded and follow no symbolic link
//! below the registry's directory. Only regular files of that user count, and only for the process whose pid and start
//! time they name.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::unistd::User;
use serde_json::{Map, Value};

use crate::source::procfs::parse::{field, innermost_pid, is_nested, number, words};
use reaper_model::conversation::{Conversations, Registry, is_job};
use reaper_model::event::{ProcessKey, TICK_NS};

/// Maximum size of a file in bytes.
const FILE_MAX: u64 = 1 << 20;
/// Maximum number of jobs of a process whose files are read.
const JOBS_MAX: usize = 4;

/// Directory of a registry, in the root directory of the process.
pub(super) struct RegistryDir {
    /// Directory up to which symbolic links are followed, because an administrator may have created them.
    base: PathBuf,
    /// Path below `base`, in which no symbolic link is followed. Empty if `base` is the directory itself.
    below: PathBuf,
}

/// A process, as a registry can name it.
pub(super) struct RegistryProcess {
    /// Pid in its own pid namespace.
    pid: u32,
    /// Start time in clock ticks since boot.
    start: u64,
    /// Effective uid.
    pub(super) uid: u32,
    /// Whether the pids in the registry belong to another pid namespace than the service's.
    nested: bool,
}

/// Returns the value of a variable in an environment (format of `/proc/PID/environ`).
pub(super) fn variable<'a>(environ: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let mut variables = environ.split(|byte| *byte == 0);
    variables.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

impl RegistryProcess {
    /// Takes the pid and the uid from a `/proc/PID/status` file, and the start time from `key`. `None` if the file has
    /// no valid `NSpid` and `Uid` lines.
    pub(super) fn new(status: &[u8], key: ProcessKey) -> Option<RegistryProcess> {
        Some(RegistryProcess {
            pid: innermost_pid(status)?,
            start: key.start / TICK_NS,
            uid: number(words(field(status, b"Uid:")?).nth(1)?)?,
            nested: is_nested(status),
        })
    }
}

impl RegistryDir {
    /// Returns the registry directory for an agent of this user with this environment.
    ///
    /// The registry's variable names it, if set. Otherwise it is below `$HOME`, or below the home in the user database
    /// if that is not set. `None` if there is no home either.
    pub(super) fn of(registry: &Registry, environ: &[u8], uid: u32) -> Option<RegistryDir> {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;
        let path = |value: &[u8]| PathBuf::from(OsStr::from_bytes(value));
        let named = registry.directory_variable.as_deref();
        let named = named.and_then(|name| variable(environ, name));
        if let Some(directory) = named.filter(|value| !value.is_empty()) {
            let (base, below) = (path(directory), PathBuf::new());
            return Some(RegistryDir { base, below });
        }
        let home = variable(environ, "HOME").filter(|value| !value.is_empty());
        let by_name_service = || Some(User::from_uid(uid.into()).ok()??.dir);
        let base = home.map(path).or_else(by_name_service)?;
        let below = PathBuf::from(&*registry.directory);
        Some(RegistryDir { base, below })
    }

    /// Adds to `found` the conversation ids that the registry has for a process, and the processes that its jobs take
    /// over. `proc` is the directory of the process in /proc.
    ///
    /// Reads the files of at most [`JOBS_MAX`] jobs. Adds no processes to take over if the process is in an inner pid
    /// namespace. Returns `None` if a file cannot be read or is not valid; a missing one is no error.
    pub(super) fn read(
        &self,
        registry: &Registry,
        proc: &Path,
        process: &RegistryProcess,
        found: &mut Conversations,
    ) -> Option<()> {
        let mut jobs = Vec::new();
        let Some(directory) = self.open(proc).ok()? else {
            return Some(());
        };
        for file in &registry.files {
            let file = file.replace("{pid}", &process.pid.to_string());
            if let Some(json) = read(&directory, &file, process.uid).ok()? {
                of_process(&json, registry, process, &mut |entry| {
                    strings(entry, &mut |text| {
                        found.registered.insert_from(text.as_bytes())
                    });
                    jobs_of(entry, registry, &mut jobs);
                });
            }
        }
        jobs.sort_unstable();
        jobs.dedup();
        for (job, file) in jobs
            .iter()
            .take(JOBS_MAX)
            .flat_map(|job| registry.adopted.iter().map(move |file| (job, file)))
        {
            let file = file.replace("{job}", job);
            if let Some(json) = read(&directory, &file, process.uid).ok()?
                && !process.nested
            {
                processes(&json, registry, &mut |key| found.adopt(key));
            }
        }
        Some(())
    }

    /// Opens the directory below the root directory of a process. Returns `None` if it does not exist.
    fn open(&self, proc: &Path) -> io::Result<Option<File>> {
        let root = File::open(proc.join("root"))?;
        let directory = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let how = OpenHow::new()
            .flags(directory)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let Some(base) = existing(openat2(&root, &self.base, how).map(File::from))? else {
            return Ok(None);
        };
        if self.below.as_os_str().is_empty() {
            return Ok(Some(base));
        }
        existing(openat2(&base, &self.below, beneath(directory)).map(File::from))
    }
}

/// Returns how to open a path that stays below a directory and contains no symbolic link.
fn beneath(flags: OFlag) -> OpenHow {
    OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS)
}

/// Returns `None` instead of the error for a missing file.
fn existing(opened: nix::Result<File>) -> io::Result<Option<File>> {
    match opened.map_err(io::Error::from) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a JSON file below a directory. Returns `None` if it does not exist.
///
/// # Errors
/// The file cannot be read, is too large, or is not JSON. Or it is not a regular file, or belongs to another user than
/// `uid` and root.
fn read(directory: &File, path: &str, uid: u32) -> io::Result<Option<Value>> {
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let Some(file) = existing(openat2(directory, path, beneath(flags)).map(File::from))? else {
        return Ok(None);
    };
    let metadata = file.metadata()?;
    let is_own = metadata.uid() == uid || metadata.uid() == 0;
    if !metadata.is_file() || !is_own || metadata.len() > FILE_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut text = Vec::new();
    file.take(FILE_MAX).read_to_end(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}

/// Calls `each` with the JSON objects that name the process by pid and start time. Does not search inside of these.
fn of_process<'a>(
    json: &'a Value,
    registry: &Registry,
    process: &RegistryProcess,
    each: &mut dyn FnMut(&'a Map<String, Value>),
) {
    match json {
        Value::Object(entry) => {
            let mut named = names(entry, registry);
            if named.any(|(pid, start)| (pid, start) == (process.pid, process.start)) {
                return each(entry);
            }
            let inner = entry.values();
            inner.for_each(|value| of_process(value, registry, process, each));
        }
        Value::Array(all) => all
            .iter()
            .for_each(|value| of_process(value, registry, process, each)),
        _ => {}
    }
}

/// Calls `each` with the processes that a JSON value names, in objects at any depth.
fn processes(json: &Value, registry: &Registry, each: &mut dyn FnMut(ProcessKey)) {
    match json {
        Value::Object(entry) => {
            for (pid, start) in names(entry, registry) {
                let start = start.saturating_mul(TICK_NS);
                each(ProcessKey { pid, start });
            }
            entry
                .values()
                .for_each(|value| processes(value, registry, each));
        }
        Value::Array(all) => all
            .iter()
            .for_each(|value| processes(value, registry, each)),
        _ => {}
    }
}

/// Returns the processes that the object itself names, by pid and start time in clock ticks. Nested objects do not
/// count.
fn names<'a>(
    entry: &'a Map<String, Value>,
    registry: &'a Registry,
) -> impl Iterator<Item = (u32, u64)> + 'a {
    let value = |key: &str| match entry.get(key)? {
        Value::String(text) => text.parse().ok(),
        value => value.as_u64(),
    };
    registry.process.iter().filter_map(move |(pid, start)| {
        let pid = u32::try_from(value(pid)?).ok()?;
        Some((pid, value(start)?))
    })
}

/// Calls `each` with all strings of an object, also in nested objects and lists.
fn strings(entry: &Map<String, Value>, each: &mut dyn FnMut(&str)) {
    fn of(value: &Value, each: &mut dyn FnMut(&str)) {
        match value {
            Value::String(text) => each(text),
            Value::Array(all) => all.iter().for_each(|value| of(value, each)),
            Value::Object(inner) => strings(inner, each),
            _ => {}
        }
    }
    entry.values().for_each(|value| of(value, each));
}

/// Adds the job names in an object and in nested objects, but not in lists. Ignores those that [`is_job`] rejects.
fn jobs_of(entry: &Map<String, Value>, registry: &Registry, jobs: &mut Vec<String>) {
    for (key, value) in entry {
        match value {
            Value::String(name)
                if registry.job.iter().any(|job| **job == **key) && is_job(name) =>
            {
                jobs.push(name.clone());
            }
            Value::Object(inner) => jobs_of(inner, registry, jobs),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
