//! Reads a process from /proc.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::listeners::{in_own_namespace, is_in_own_namespace};
use super::local;
use super::registry::{RegistryDir, RegistryProcess, variable};
use super::script;
use super::sockets::{connections, listening_ports, listens};
use super::{CpuTime, home, match_markers};
use crate::source::procfs::parse::{Stat, field, innermost_pid, is_nested, number, words};
use crate::source::procfs::{Dir, living_thread};
use crate::sys::{self, pidfd::Pidfd};
use reaper_model::activity::Activity;
use reaper_model::conversation::{ConversationSource, Conversations};
use reaper_model::event::{Image, ProcessKey, TICK_NS};
use reaper_model::facts::{
    Fact, InheritedFacts, KernelSession, LocalSockets, Stdio, is_distinctive,
};
use reaper_model::leftover::EnvMarkers;
use reaper_model::ruleset::{Pattern, script_path};

/// Maximum number of bytes read from an environment.
pub(in crate::facts) const ENVIRON_MAX: usize = 128 << 10;
/// Maximum number of bytes read from a command line: the limit of exec(2) with the default stack limit of 8 MiB.
pub(in crate::facts) const ARGUMENTS_MAX: usize = 2 << 20;
/// CPU time in ns for reading the open files of a process. Enough for about 15,000 files.
const FILES_BUDGET: u64 = 25_000_000;
/// Number of files read between two readings of the clock, which is a system call.
const FILES_CHUNK: usize = 64;

/// A process that is being read.
///
/// Files that are read through `dir` are those of one process, even if its pid is reused meanwhile. After reading files
/// by path, [`ProcDir::is_alive`] must be checked. If it does not hold, the contents may be those of another process.
pub(in crate::facts) struct ProcDir {
    /// Path of `dir`.
    path: PathBuf,
    /// Directory of the process, or of a thread that still runs after its leader has exited.
    dir: Dir,
    buffer: Vec<u8>,
}

impl ProcDir {
    /// Opens the living process with this key. `None` if it is gone or cannot be read. Start times are compared by the
    /// tick.
    pub(in crate::facts) fn open(root: &Path, key: ProcessKey) -> Option<ProcDir> {
        let mut path = root.join(key.pid.to_string());
        let mut dir = Dir::open(&path).ok()?;
        let mut buffer = Vec::with_capacity(4 << 10);
        dir.read("stat", &mut buffer).ok()?;
        let stat = Stat::parse(&buffer)?;
        let start = stat.start.saturating_mul(TICK_NS);
        if !key.has_same_tick(ProcessKey { start, ..key }) {
            return None;
        }
        if stat.is_leader_dead() {
            let (name, thread) = living_thread(&path, &dir, &stat)?;
            (path, dir) = (path.join(name), thread);
        }
        Some(ProcDir { path, dir, buffer })
    }

    /// Returns whether the process still runs. What was read before counts only in this case. An exiting process has no
    /// environment and no files any more, and would look like one that never had any.
    pub(in crate::facts) fn is_alive(&mut self) -> bool {
        self.stat(|stat| !stat.is_leader_dead()) == Some(true)
    }

    /// Passes the fields of the `stat` file to `take`. `None` if the file cannot be read or parsed.
    fn stat<T>(&mut self, take: impl FnOnce(Stat) -> T) -> Option<T> {
        self.dir.read("stat", &mut self.buffer).ok()?;
        Stat::parse(&self.buffer).map(take)
    }

    /// Returns the environment with which the program was started, and whether it is complete. It is cut after
    /// [`ENVIRON_MAX`] bytes. `None` if it cannot be read. The program can have overwritten parts of it.
    pub(in crate::facts) fn environ(&mut self) -> Option<(&[u8], bool)> {
        let read = self
            .dir
            .read_some("environ", ENVIRON_MAX + 1, &mut self.buffer);
        read.ok()?;
        let whole = self.buffer.len() <= ENVIRON_MAX;
        Some((&self.buffer[..self.buffer.len().min(ENVIRON_MAX)], whole))
    }

    /// Returns whether an environment that was read as empty is really empty. Within an exec it reads as empty until it
    /// is set up.
    fn is_set_up(&mut self) -> bool {
        if self.dir.read("stat", &mut self.buffer).is_err() {
            return false;
        }
        // env_end is field 51 of proc_pid_stat(5). The name in parentheses is field 2.
        let fields = self.buffer.rsplit(|b| *b == b')').next();
        let mut fields = fields.unwrap_or_default().split(|b| *b == b' ');
        let placed = fields.nth(49).is_some_and(|end| end != b"0");
        placed
            && self
                .environ()
                .is_some_and(|(environ, _)| environ.is_empty())
    }

    /// Like `environ`, but also returns `None` within an exec that has not set up the environment yet.
    fn settled_environ(&mut self) -> Option<(&[u8], bool)> {
        if matches!(self.environ(), Some(([], _))) && !self.is_set_up() {
            return None;
        }
        self.environ()
    }

    /// Returns the absolute path of the script that `image` runs, with links resolved below the process's root
    /// directory. A file or directory that no longer exists keeps its name.
    ///
    /// `None` if `image` runs no script, or if the file cannot be reached or is not a regular file. Blocks as long as a
    /// file system on the way does.
    pub(in crate::facts) fn script(&self, image: &Image) -> Option<Vec<u8>> {
        script::resolve(&self.path, script_path(image)?)
    }

    /// Returns which patterns match a variable of the environment, as a bit set (see [`match_markers`]). Unreadable if
    /// the environment cannot be read or an exec is setting it up.
    pub(super) fn markers(&mut self, patterns: &[Pattern]) -> Fact<u64> {
        match self.settled_environ() {
            Some((environ, whole)) => match_markers(environ, whole, patterns),
            None => Fact::Unreadable,
        }
    }

    /// Returns the whole command line, of which `image` has the beginning. `None` if it is too long, cannot be read
    /// completely or belongs to another program.
    pub(in crate::facts) fn arguments(&mut self, image: &Image) -> Option<Vec<u8>> {
        let read = self
            .dir
            .read_some("cmdline", ARGUMENTS_MAX + 1, &mut self.buffer);
        read.ok()?;
        let argv = &self.buffer;
        // The kernel returns less if the process has overwritten or unmapped its arguments.
        let is_complete = argv.len() as u64 == u64::from(image.argv_full_len);
        let is_it = argv.len() <= ARGUMENTS_MAX && is_complete && argv.starts_with(&image.argv);
        is_it.then(|| std::mem::take(&mut self.buffer))
    }

    /// Returns the markers of agents in the environment, and the working directory if it is distinctive
    /// ([`is_distinctive`], and not writable for all users). `None` if one of the two cannot be read.
    pub(super) fn inherited(&mut self) -> Option<InheritedFacts> {
        let (environ, whole) = self.settled_environ()?;
        let (env_markers, home) = (EnvMarkers::of(environ, whole), home(environ));
        let place = self.path.join("cwd");
        let directory = std::fs::read_link(&place).ok()?;
        // In a directory like /tmp, where all users may write, any process can be working.
        let shared = std::fs::metadata(&place).ok()?.mode() & 0o002 != 0;
        let is_distinctive_here = !shared && is_distinctive(&directory, home.as_deref());
        let directory = is_distinctive_here.then(|| directory.into());
        Some(InheritedFacts {
            env_markers,
            directory,
            input: self.input_inode().unwrap_or(0),
            login_uid: self.login_uid(),
        })
    }

    /// Returns the conversation ids in the environment, and what the registries of the agents contain about the
    /// process.
    ///
    /// `None` if its status or environment cannot be read, or if the environment is cut and lacks a variable. An
    /// unreadable registry only sets [`Conversations::registry_unreadable`].
    pub(super) fn conversations(
        &mut self,
        key: ProcessKey,
        sources: &[Arc<ConversationSource>],
    ) -> Option<Conversations> {
        self.dir.read("status", &mut self.buffer).ok()?;
        let process = RegistryProcess::new(&self.buffer, key)?;
        let (environ, whole) = self.settled_environ()?;
        let mut found = Conversations::default();
        let mut directories = Vec::new();
        for source in sources {
            let value = variable(environ, &source.variable);
            found.inherited.insert_from(value.unwrap_or_default());
            if value.is_none() && !whole {
                return None;
            }
            if let Some(registry) = &source.registry {
                let directory = RegistryDir::of(registry, environ, process.uid);
                directories.push((registry, directory));
            }
        }
        for (registry, directory) in directories {
            let read = directory.and_then(|d| d.read(registry, &self.path, &process, &mut found));
            found.registry_unreadable |= read.is_none();
        }
        Some(found)
    }

    /// Returns whether the process is in an inner pid namespace and, if so, its pid in the innermost one. `None` if its
    /// status cannot be read.
    pub(in crate::facts) fn is_nested(&mut self) -> Option<(bool, Option<u32>)> {
        self.dir.read("status", &mut self.buffer).ok()?;
        let nested = is_nested(&self.buffer);
        let inner = innermost_pid(&self.buffer).filter(|_| nested);
        Some((nested, inner))
    }

    /// Returns the login uid of the kernel's audit system; `None` if it is unset or not shown.
    pub(in crate::facts) fn login_uid(&mut self) -> Option<u32> {
        self.dir.read("loginuid", &mut self.buffer).ok()?;
        number(&self.buffer).filter(|uid| *uid != u32::MAX)
    }

    /// Returns the innermost systemd unit of the process; empty if none exists.
    pub(in crate::facts) fn unit(&mut self) -> Fact<std::sync::Arc<str>> {
        match self.dir.read("cgroup", &mut self.buffer) {
            Ok(()) => Fact::Known(unit(&self.buffer).into()),
            Err(_) => Fact::Unreadable,
        }
    }

    /// Returns the current session id and controlling terminal.
    pub(super) fn session(&mut self) -> Fact<KernelSession> {
        let now = self.stat(|stat| KernelSession {
            sid: stat.sid,
            tty: stat.tty,
        });
        now.map_or(Fact::Unreadable, Fact::Known)
    }

    /// Returns whether standard input is a terminal; false if it is closed. The caller must check [`ProcDir::is_alive`]
    /// afterwards, as in [`ProcDir::listening`].
    pub(super) fn input(&self) -> Fact<bool> {
        match std::fs::read_link(self.path.join("fd/0")) {
            Ok(file) => Fact::Known(is_terminal(file.as_os_str().as_bytes())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Fact::Known(false),
            Err(_) => Fact::Unreadable,
        }
    }

    /// Returns the CPU time of all threads up to now; `None` if it cannot be read.
    pub(super) fn cpu_time(&mut self) -> Option<CpuTime> {
        let ticks = self.stat(|stat| stat.cpu)?;
        let at = sys::monotonic();
        Some(CpuTime { ticks, at })
    }

    /// Returns the inode numbers of the process's sockets, and whether these are all. Stops once it has used `budget`
    /// (ns of this thread's CPU time).
    fn sockets(&self, budget: u64) -> io::Result<(HashSet<u64>, bool)> {
        let mut sockets = HashSet::new();
        let end = sys::thread_time().saturating_add(budget);
        for (n, file) in std::fs::read_dir(self.path.join("fd"))?.enumerate() {
            if n % FILES_CHUNK == FILES_CHUNK - 1 && sys::thread_time() >= end {
                return Ok((sockets, false));
            }
            // A file that has been closed since is skipped.
            if let Ok(link) = std::fs::read_link(file?.path())
                && let Some(inode) = link.as_os_str().as_bytes().strip_prefix(b"socket:[")
            {
                sockets.extend(number::<u64>(inode.strip_suffix(b"]").unwrap_or_default()));
            }
        }
        Ok((sockets, true))
    }

    /// Returns the process's use of resources and its connections. `None` if it has too many open files to read within
    /// [`FILES_BUDGET`].
    ///
    /// # Errors
    /// A file of the process or a socket table cannot be read.
    pub(super) fn activity(&mut self) -> io::Result<Option<Activity>> {
        let unknown = || io::Error::from(io::ErrorKind::InvalidData);
        self.dir.read("io", &mut self.buffer)?;
        let bytes = |name: &[u8]| -> Option<u64> {
            let rest = field(&self.buffer, name)?;
            words(rest).next().and_then(number)
        };
        let (read, written) = (bytes(b"rchar:"), bytes(b"wchar:"));
        let io_bytes = read.zip(written).ok_or_else(unknown)?;
        self.dir.read("status", &mut self.buffer)?;
        // A process without its own memory (an exiting one) has no such lines.
        let kib = |name: &[u8]| -> u64 {
            let rest = field(&self.buffer, name).unwrap_or_default();
            words(rest).next().and_then(number).unwrap_or(0)
        };
        let (rss_kib, swap_kib) = (kib(b"VmRSS:"), kib(b"VmSwap:"));
        let (own, all) = self.sockets(FILES_BUDGET)?;
        if !all {
            return Ok(None);
        }
        let ticks = self.stat(|stat| stat.cpu).ok_or_else(unknown)?;
        let mut activity = Activity {
            cpu_ns: ticks.saturating_mul(TICK_NS),
            io_bytes: io_bytes.0.saturating_add(io_bytes.1),
            rss: rss_kib.saturating_mul(1024),
            swap: swap_kib.saturating_mul(1024),
            ..Activity::default()
        };
        if !own.is_empty() {
            let (clients, others) = connections(&self.path.join("net"), &own)?;
            (activity.clients, activity.sockets) = (clients.into(), others.into());
        }
        Ok(Some(activity))
    }

    /// Returns whether the other ends of standard input and output are open, if these are pipes or sockets. The caller must
    /// check [`ProcDir::is_alive`] afterwards, as in [`ProcDir::listening`].
    pub(super) fn stdio(&self, key: ProcessKey) -> io::Result<Stdio> {
        let [input, output] = [self.other_end(key, 0)?, self.other_end(key, 1)?];
        Ok(match (input, output) {
            (Some(true), _) => Stdio::Connected(self.input_inode().unwrap_or(0)),
            (Some(false), Some(false)) => Stdio::HungUp,
            _ => Stdio::Other,
        })
    }

    /// Returns the inode number of the pipe or socket that is standard input; `None` if it is something else.
    fn input_inode(&self) -> Option<u64> {
        let link = std::fs::read_link(self.path.join("fd/0")).ok()?;
        let link = link.as_os_str().as_bytes();
        let inode = link
            .strip_prefix(b"pipe:[")
            .or_else(|| link.strip_prefix(b"socket:["))?;
        number(inode.strip_suffix(b"]")?)
    }

    /// Returns whether the other end of the file with descriptor `number` is open. `None` if the descriptor is closed,
    /// or is neither a pipe nor a socket.
    fn other_end(&self, key: ProcessKey, number: i32) -> io::Result<Option<bool>> {
        let path = self.path.join("fd").join(number.to_string());
        let link = match std::fs::read_link(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            link => link?,
        };
        let link = link.as_os_str().as_bytes();
        let file: OwnedFd = if link.starts_with(b"pipe:[") {
            // The pipe has one more reader or writer for a moment, of a kind that it already has.
            let mut options = File::options();
            let options = match number {
                0 => options.read(true),
                _ => options.write(true),
            };
            options.custom_flags(libc::O_NONBLOCK).open(&path)?.into()
        } else if link.starts_with(b"socket:[") {
            // Sockets cannot be opened by path.
            Pidfd::open(key.pid)?.file_of(number)?
        } else {
            return Ok(None);
        };
        let mut polled = [PollFd::new(file.as_fd(), PollFlags::empty())];
        poll(&mut polled, PollTimeout::ZERO)?;
        let found = polled[0].revents().unwrap_or(PollFlags::empty());
        // POLLHUP: a pipe without a writer, or a closed socket. POLLERR: a pipe without a reader.
        Ok(Some(
            !found.intersects(PollFlags::POLLHUP | PollFlags::POLLERR),
        ))
    }

    /// Returns whether the process had a listening TCP or Unix socket after `requested` (ns since boot). In another network
    /// namespace than the service's, only TCP counts. `None` if it has too many open files to read all within
    /// [`FILES_BUDGET`], and those that were read include no such socket.
    ///
    /// Read by path: the caller must check [`ProcDir::is_alive`] afterwards, because the pid can be reused.
    pub(super) fn listening(&self, requested: u64) -> io::Result<Option<bool>> {
        let listeners = in_own_namespace(&self.path, requested);
        let local = match &listeners {
            Some(_) => Some(local::table(requested)?),
            None => None,
        };
        let has_local = |sockets: &HashSet<u64>| {
            let local = local.as_ref();
            local.is_some_and(|local| !local.listening.is_disjoint(sockets))
        };
        let (sockets, all) = self.sockets(FILES_BUDGET)?;
        let listens = match listeners {
            Some(listeners) => !listeners.is_disjoint(&sockets) || has_local(&sockets),
            None if sockets.is_empty() => false,
            None => {
                let net = self.path.join("net");
                listens(&net.join("tcp"), &sockets)?
                    || match listens(&net.join("tcp6"), &sockets) {
                        // The kernel has no IPv6.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                        listens => listens?,
                    }
            }
        };
        Ok((listens || all).then_some(listens))
    }

    /// Returns the displays to which the process is connected, and whether it has a listening Unix socket. `None` if it has
    /// too many open files to read all within [`FILES_BUDGET`], or if the kernel does not tell which processes have windows:
    /// in another network namespace that has one, it may be any process.
    /// Read by path, as in [`ProcDir::listening`].
    pub(super) fn local_sockets(&self, requested: u64) -> io::Result<Option<LocalSockets>> {
        let table = local::table(requested)?;
        let windows = match &table.windows {
            Some(windows) => windows,
            None if table.has_display => return Ok(None),
            None => &HashMap::new(),
        };
        if is_in_own_namespace(&self.path) != Some(true)
            && local::has_window(&self.path.join("net/unix"))?
        {
            return Ok(None);
        }
        if windows.is_empty() && table.listening.is_empty() {
            return Ok(Some(LocalSockets::default()));
        }
        let (sockets, all) = self.sockets(FILES_BUDGET)?;
        let windows = sockets.iter().filter_map(|inode| windows.get(inode));
        let mut displays: Vec<Box<[u8]>> = windows.cloned().collect();
        displays.sort_unstable();
        displays.dedup();
        let listens = !table.listening.is_disjoint(&sockets);
        Ok(all.then(|| LocalSockets {
            displays: displays.into(),
            listens,
        }))
    }

    /// Returns the TCP ports on which the process listens, in order. Leaves out those of files that cannot be read
    /// within [`FILES_BUDGET`]. Read by path, as in [`ProcDir::listening`].
    pub(in crate::facts) fn listening_ports(&self) -> io::Result<Vec<u16>> {
        let (sockets, _) = self.sockets(FILES_BUDGET)?;
        let tables = ["net/tcp", "net/tcp6"].map(|table| self.path.join(table));
        let ports = tables
            .iter()
            .filter_map(|table| listening_ports(table, &sockets).ok());
        let ports: io::Result<BTreeSet<u16>> = ports.flatten().collect();
        Ok(ports?.into_iter().collect())
    }
}

/// Returns the innermost systemd unit in a `cgroup` file; empty if there is no unit. Uses cgroup v2, and systemd's own
/// v1 hierarchy if v2 shows no unit.
fn unit(file: &[u8]) -> String {
    let path = |line: &[u8]| unit_of_path(line.strip_suffix(b" (deleted)").unwrap_or(line));
    let v2 = field(file, b"0::").and_then(path);
    let v1 = || {
        let mut lines = file.split(|b| *b == b'\n');
        lines.find_map(|line| {
            let mut parts = line.splitn(3, |b| *b == b':');
            let named = parts.nth(1)? == b"name=systemd";
            path(parts.next().filter(|_| named)?)
        })
    };
    v2.or_else(v1).unwrap_or_default()
}

/// Returns the innermost unit in a cgroup path, except for units that hold everything of a user or a login.
///
/// A user's service manager (`user@1000.service`) contains all processes of the user, and a login session
/// (`session-3.scope`) all that was started in one terminal. Agents and their leftovers are in there with everything
/// else, so these two do not show that a process is managed. A unit nested in them does.
fn unit_of_path(path: &[u8]) -> Option<String> {
    let name = path.rsplit(|b| *b == b'/').find_map(|name| {
        // systemd prefixes names that could be confused with files of a cgroup.
        let name = name.strip_prefix(b"_").unwrap_or(name);
        let service = name.ends_with(b".service") && !name.starts_with(b"user@");
        let scope = name.ends_with(b".scope") && !is_login(name);
        (service || scope).then_some(name)
    })?;
    Some(String::from_utf8_lossy(name).into_owned())
}

/// Returns whether a scope is that of a login session, such as `session-3.scope`.
fn is_login(scope: &[u8]) -> bool {
    let id = scope.strip_prefix(b"session-");
    let id = id.and_then(|id| id.strip_suffix(b".scope"));
    // `3`, or `c3` for a session that is not a login of a user.
    id.is_some_and(|id| number::<u64>(id.strip_prefix(b"c").unwrap_or(id)).is_some())
}

/// Returns whether a file is a terminal, by its path. A terminal with another name is not recognised.
fn is_terminal(file: &[u8]) -> bool {
    let device = file.strip_prefix(b"/dev/").unwrap_or_default();
    device.starts_with(b"pts/") || device.starts_with(b"tty") || device == b"console"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::{arbitrary_bytes, proc_self_file};

    const TCP: &[u8] = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
        0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0 100 0 0 10 0\n   \
        1: 0100007F:1F90 0100007F:A1B2 01 00000000:00000000 00:00000000 00000000     0        0 4243 1 0 20 4 30 10 -1\n";

    proptest! {
        #[test]
        fn any_cgroup_file_can_be_parsed(bytes in arbitrary_bytes(proc_self_file("cgroup"))) {
            let unit = unit(&bytes);
            let ends = [".service", ".scope"].iter().any(|end| unit.ends_with(end));
            prop_assert!(unit.is_empty() || ends, "{}", unit);
        }

        #[test]
        fn only_paths_below_dev_are_terminals(name in arbitrary_bytes("/dev/pts/3")) {
            prop_assert!(!is_terminal(&name) || name.starts_with(b"/dev/"));
        }
    }

    proptest! {
        // Each case creates files.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_table_of_sockets_can_be_read(bytes in arbitrary_bytes(TCP)) {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &bytes).unwrap();
            let listens = listens(file.path(), &HashSet::from([4242])).unwrap();
            prop_assert!(!listens || bytes.windows(4).any(|word| word == b"4242"));
        }

        #[test]
        fn any_proc_files_can_be_read(
            stat in prop_oneof![Just(proc_self_file("stat")), arbitrary_bytes(proc_self_file("stat"))],
            environ in arbitrary_bytes("A=1\0REAPER_KEEP=1\0"),
            cgroup in arbitrary_bytes(proc_self_file("cgroup")),
            status in arbitrary_bytes(proc_self_file("status")),
            login in arbitrary_bytes("1000"),
        ) {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("7");
            std::fs::create_dir(&dir).unwrap();
            let start = Stat::parse(&stat).map_or(0, |stat| stat.start.saturating_mul(TICK_NS));
            for (name, content) in [
                ("stat", &stat),
                ("environ", &environ),
                ("cgroup", &cgroup),
                ("status", &status),
                ("loginuid", &login),
            ] {
                std::fs::write(dir.join(name), content).unwrap();
            }
            let subject = ProcDir::open(root.path(), ProcessKey { pid: 7, start });
            prop_assert!(subject.is_none() || Stat::parse(&stat).is_some());
            if let Some(mut subject) = subject {
                let keep = [Pattern::argv("REAPER_KEEP=1").unwrap()];
                let markers = subject.markers(&keep);
                let is_there = environ.split(|b| *b == 0).any(|v| v == b"REAPER_KEEP=1");
                prop_assert!(markers == Fact::Unreadable || markers == Fact::Known(u64::from(is_there)));
                subject.unit();
                subject.session();
                subject.cpu_time();
                prop_assert!(subject.is_nested().is_some());
                prop_assert!(subject.login_uid() != Some(u32::MAX));
            }
        }
    }

    #[test]
    fn files_beyond_the_budget_are_unknown() {
        let root = tempfile::tempdir().unwrap();
        let files = root.path().join("7/fd");
        std::fs::create_dir_all(&files).unwrap();
        let stat = "7 (x) S 1 9 8 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 0 0\n";
        std::fs::write(root.path().join("7/stat"), stat).unwrap();
        let subject = ProcDir::open(root.path(), ProcessKey { pid: 7, start: 0 }).unwrap();
        for n in 0..2 * FILES_CHUNK {
            std::os::unix::fs::symlink(format!("socket:[{n}]"), files.join(n.to_string())).unwrap();
        }
        let (sockets, all) = subject.sockets(u64::MAX).unwrap();
        assert_eq!((sockets.len(), all), (2 * FILES_CHUNK, true));
        let (sockets, all) = subject.sockets(0).unwrap();
        assert_eq!((sockets.len(), all), (FILES_CHUNK - 1, false));
    }

    #[test]
    fn listening_sockets_are_found_in_the_table() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), TCP).unwrap();
        for (inode, expected) in [(4242, true), (4243, false), (0, false)] {
            let sockets = HashSet::from([inode]);
            let found = listens(file.path(), &sockets).unwrap();
            assert_eq!(found, expected, "{inode}");
            let ports: io::Result<Vec<u16>> =
                listening_ports(file.path(), &sockets).unwrap().collect();
            assert_eq!(ports.unwrap().first() == Some(&8080), expected, "{inode}");
        }
    }

    #[test]
    fn innermost_managed_unit_is_found() {
        for (file, expected) in [
            ("0::/system.slice/nginx.service\n", "nginx.service"),
            ("0::/system.slice/a.service/inner/leaf\n", "a.service"),
            ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
            ("0::/user.slice/user-1000.slice/session-c2.scope\n", ""),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice\n",
                "",
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/dev.service\n",
                "dev.service",
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-u12.scope\n",
                "run-u12.scope",
            ),
            ("0::/system.slice/docker-0a1b.scope\n", "docker-0a1b.scope"),
            ("0::/x.slice/session-build.scope\n", "session-build.scope"),
            ("0::/system.slice/_cpu.service\n", "cpu.service"),
            ("0::/system.slice/b.service (deleted)\n", "b.service"),
            ("0::/../../../system.slice/c.service\n", "c.service"),
            (
                "12:cpu:/x.service\n1:name=systemd:/system.slice/d.service\n0::/\n",
                "d.service",
            ),
            ("12:cpu,cpuacct:/x.service\n", ""),
            ("0::/\n", ""),
            ("", ""),
        ] {
            assert_eq!(unit(file.as_bytes()), expected, "{file:?}");
        }
    }
}
