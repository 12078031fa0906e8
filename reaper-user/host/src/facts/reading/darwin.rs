//! Reads a process through sysctl(3) and libproc.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use super::{CpuTime, home, match_markers};
use crate::source::darwin::args::Arguments;
use crate::source::darwin::{sockets, table};
use crate::sys::{self, darwin};
use reaper_model::activity::Activity;
use reaper_model::conversation::{ConversationSource, Conversations};
use reaper_model::event::{Image, ProcessKey, TICK_NS};
use reaper_model::facts::{
    Fact, InheritedFacts, KernelSession, LocalSockets, Stdio, is_distinctive,
};
use reaper_model::leftover::EnvMarkers;
use reaper_model::ruleset::{Pattern, script_path};

/// A process that is being read. All reads are by pid: [`ProcDir::is_alive`] then checks that it was this process.
pub(in crate::facts) struct ProcDir {
    key: ProcessKey,
    /// Number of the process, which is never reused.
    unique: u64,
    /// Arguments and environment that were read last.
    given: Vec<u8>,
}

impl ProcDir {
    /// Opens the living process with this key. `None` if it is gone or cannot be read. Ignores the directory: macOS
    /// has no /proc.
    pub(in crate::facts) fn open(_: &Path, key: ProcessKey) -> Option<ProcDir> {
        let unique = darwin::identity(key.pid).ok()?.unique;
        let process = table::one(key.pid).ok()??;
        let subject = ProcDir {
            key,
            unique,
            given: Vec::new(),
        };
        key.has_same_tick(table::key(&process)).then_some(subject)
    }

    /// Returns whether the process still runs. What was read before counts only in this case.
    pub(in crate::facts) fn is_alive(&mut self) -> bool {
        darwin::identity(self.key.pid).is_ok_and(|now| now.unique == self.unique)
    }

    /// Returns the environment with which the program was started, and that it is complete. The kernel shows no
    /// environment of system programs (`/bin/sh`). It is then unknown, and the process is kept.
    pub(in crate::facts) fn environ(&mut self) -> Option<(&[u8], bool)> {
        self.given = darwin::arguments(self.key.pid).ok()?;
        let given = Arguments::parse(&self.given);
        Some((given.environment?, true))
    }

    /// Returns `None`: how a registry identifies a process on macOS is not known.
    pub(super) fn conversations(
        &mut self,
        _: ProcessKey,
        _: &[Arc<ConversationSource>],
    ) -> Option<Conversations> {
        None
    }

    /// Returns the whole command line, of which `image` has the beginning. `None` if it cannot be read completely or
    /// belongs to another program.
    pub(in crate::facts) fn arguments(&mut self, image: &Image) -> Option<Vec<u8>> {
        self.given = darwin::arguments(self.key.pid).ok()?;
        let given = Arguments::parse(&self.given);
        let is_complete =
            !given.is_cut && given.argv.len() as u64 == u64::from(image.argv_full_len);
        (is_complete && given.argv.starts_with(&image.argv)).then(|| given.argv.to_vec())
    }

    /// Returns the absolute path of the script that `image` runs, with links resolved. `None` if it runs none, or
    /// the script no longer exists.
    pub(in crate::facts) fn script(&self, image: &Image) -> Option<Vec<u8>> {
        let given = Path::new(OsStr::from_bytes(script_path(image)?));
        let path = match given.is_absolute() {
            true => given.to_path_buf(),
            false => darwin::directory(self.key.pid)?.join(given),
        };
        let found = std::fs::canonicalize(path).ok()?;
        Some(found.into_os_string().into_vec())
    }

    /// Returns which patterns match a variable of the environment, as a bit set (see [`match_markers`]). Unreadable if
    /// the environment cannot be read.
    pub(super) fn markers(&mut self, patterns: &[Pattern]) -> Fact<u64> {
        match self.environ() {
            Some((environ, whole)) => match_markers(environ, whole, patterns),
            None => Fact::Unreadable,
        }
    }

    /// Returns the markers of agents in the environment, and the working directory if it is distinctive
    /// ([`is_distinctive`], and not writable for all users). `None` if one of the two cannot be read.
    pub(super) fn inherited(&mut self) -> Option<InheritedFacts> {
        let directory = darwin::directory(self.key.pid)?;
        let (environ, whole) = self.environ()?;
        let (env_markers, home) = (EnvMarkers::of(environ, whole), home(environ));
        // In a directory like /tmp, where all users may write, any process can be working.
        let shared = std::fs::metadata(&directory).ok()?.mode() & 0o002 != 0;
        let is_distinctive_here = !shared && is_distinctive(&directory, home.as_deref());
        let directory = is_distinctive_here.then(|| directory.into());
        Some(InheritedFacts {
            env_markers,
            directory,
            // Other ends of pipes are not read.
            input: 0,
            login_uid: None,
        })
    }

    /// Returns no unit: macOS has none.
    pub(in crate::facts) fn unit(&mut self) -> Fact<Arc<str>> {
        Fact::Known("".into())
    }

    /// Returns the current session id and controlling terminal.
    pub(super) fn session(&mut self) -> Fact<KernelSession> {
        let process = table::one(self.key.pid).ok().flatten();
        process.map_or(Fact::Unreadable, |process| {
            Fact::Known(KernelSession {
                sid: darwin::session(process.pid),
                tty: process.terminal,
            })
        })
    }

    /// Returns `Unreadable`: paths of open files are not read on macOS.
    pub(super) fn input(&self) -> Fact<bool> {
        Fact::Unreadable
    }

    /// Returns `None`: connections of a process are not read on macOS.
    pub(super) fn activity(&mut self) -> io::Result<Option<Activity>> {
        Ok(None)
    }

    /// Always fails: the other end of a pipe is not read on macOS.
    pub(super) fn stdio(&self, _: ProcessKey) -> io::Result<Stdio> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the CPU time of all threads up to now; `None` if it cannot be read.
    pub(super) fn cpu_time(&mut self) -> Option<CpuTime> {
        let ticks = darwin::usage(self.key.pid)?.cpu / TICK_NS;
        let at = sys::monotonic();
        Some(CpuTime { ticks, at })
    }

    /// Returns no sockets: which displays a process uses, and which Unix sockets listen, is not read on macOS.
    pub(super) fn local_sockets(&self, _: u64) -> io::Result<Option<LocalSockets>> {
        Ok(Some(LocalSockets::default()))
    }

    /// Returns whether the process has a listening network socket; `None` if that is unknown for one of its sockets.
    pub(super) fn listening(&self, _: u64) -> io::Result<Option<bool>> {
        let Some(files) = darwin::sockets(self.key.pid) else {
            return Ok(None);
        };
        for file in files {
            // It has been closed since.
            let Some(info) = darwin::socket(self.key.pid, file) else {
                continue;
            };
            match sockets::listens(&info) {
                Some(false) => {}
                answer => return Ok(answer),
            }
        }
        Ok(Some(false))
    }
}
