//! The world of one test: a directory, a launcher with canaries, a daemon that watches them, and the process trees.
//! Dropping it ends and removes all of it, also when the test panics.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::Signal;

use crate::daemon::{self, Daemon, Event};
use crate::proc::{self, ProcessKey, Stat};
use crate::report;

/// Limit for each wait: 2 minutes, multiplied by `REAPER_TEST_SLOWDOWN`.
static DEADLINE: LazyLock<Duration> = LazyLock::new(|| {
    let slowdown = std::env::var("REAPER_TEST_SLOWDOWN").map(|n| {
        n.parse::<u32>()
            .unwrap_or_else(|e| panic!("REAPER_TEST_SLOWDOWN={n}: {e}"))
    });
    Duration::from_secs(120) * slowdown.unwrap_or(1)
});

/// Files in the directory of a test that the report of a failure shows.
const OUTPUT_FILES: [&str; 5] = ["stdout", "stderr", "errors", "report.json", "events.jsonl"];
/// Limit on the lines of each file, and on the processes, in a report.
const REPORTED_LINES: usize = 60;

/// Polls `look` until it returns a value. Panics with `what` after the deadline.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + *DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            Instant::now() < end,
            "not within {} s: {what}",
            DEADLINE.as_secs()
        );
        std::thread::sleep(Duration::from_millis(8));
    }
}

/// Makes a program available at another path, executable for every user.
pub fn link(program: &Path, path: &Path) {
    fs::create_dir_all(path.parent().expect("a path with a parent")).expect("create a directory");
    let mode = fs::metadata(program)
        .expect("read the program's metadata")
        .permissions()
        .mode();
    // A hard link shares the mode. A binary built with a strict umask is not executable for other users.
    if mode & 0o005 != 0o005 || fs::hard_link(program, path).is_err() {
        copy(program, path);
        fs::set_permissions(path, Permissions::from_mode(0o755))
            .expect("make it executable for all users");
    }
}

/// Copies a program that is executed next.
///
/// Not with `fs::copy`: a process that another test forks meanwhile would inherit the file open for writing, and until that
/// is closed, exec of the program fails with ETXTBSY.
pub fn copy(program: impl AsRef<Path>, path: impl AsRef<Path>) {
    let (program, path) = (program.as_ref(), path.as_ref());
    let status = Command::new("cp").arg(program).arg(path).status();
    assert!(
        status.expect("start cp").success(),
        "cannot copy {} to {}",
        program.display(),
        path.display()
    );
}

/// Directory that is removed with its contents on drop.
pub struct TempDir(PathBuf);

impl TempDir {
    /// Creates a directory that every user can read. Its name starts with a dot, because some rules treat programs directly
    /// below /tmp as temporary ones.
    pub fn new() -> TempDir {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let dir = loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let dir =
                std::env::temp_dir().join(format!(".reaper-real-{}-{number}", std::process::id()));
            match fs::create_dir(&dir) {
                Ok(()) => break dir,
                // A test in another PID namespace can have the same pid.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => panic!("create {}: {e}", dir.display()),
            }
        };
        fs::set_permissions(&dir, Permissions::from_mode(0o755))
            .expect("make the directory readable for all users");
        TempDir(dir)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Adds the last lines of each output file to the report.
    fn report(&self) {
        for name in OUTPUT_FILES {
            let Ok(text) = fs::read(self.0.join(name)) else {
                continue;
            };
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            let tail = &lines[lines.len().saturating_sub(REPORTED_LINES)..];
            let (shown, all) = (tail.len(), lines.len());
            let tail = tail.join("\n");
            report::add(&format!("--- {name}, {shown} of {all} lines\n{tail}"));
        }
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report();
            if std::env::var_os("REAPER_TEST_KEEP").is_some() {
                return report::add(&format!("--- kept: {}", self.0.display()));
            }
        }
        // A directory that cannot be removed does not fail the test.
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub struct World {
    launcher: Child,
    launcher_stdin: Option<ChildStdin>,
    daemon: Option<Daemon>,
    /// Arguments of the daemon.
    arguments: Vec<String>,
    /// Number of reported processes when the second tree began; `None` before that.
    first_tree_len: Cell<Option<usize>>,
    /// Pre-existing processes with a role. The test does not end them.
    existing: Vec<ProcessKey>,
    /// Name of the scenario, and the expected decisions by role.
    expected: Option<(String, BTreeMap<&'static str, String>)>,
    /// The last field, so that it is dropped after everything that uses it.
    dir: TempDir,
}

impl World {
    /// Starts the launcher and waits for its canaries.
    pub fn new(subreaper: bool) -> World {
        let temp = TempDir::new();
        let dir = temp.path();
        fs::write(dir.join("report"), "").expect("create the report");
        fs::set_permissions(dir.join("report"), Permissions::from_mode(0o666))
            .expect("make the report writable for all users");
        let this = std::env::current_exe().expect("this program's path");
        for name in [
            "worker",
            "test-agent",
            "test-wall",
            "test-keeper",
            "test-state",
        ] {
            link(&this, &dir.join("bin").join(name));
        }
        let package = dir.join("node_modules/@anthropic-ai/claude-code/bin/claude.exe");
        link(&this, &package);
        fs::create_dir(dir.join("node_modules/.bin")).expect("create a directory");
        std::os::unix::fs::symlink(package, dir.join("node_modules/.bin/claude"))
            .expect("link claude");

        let mut command = Command::new(dir.join("bin/worker"));
        command
            .args(["test-process", "launcher", "launcher"])
            .arg(dir)
            .args((!subreaper).then_some("no-subreaper"));
        let errors = fs::File::create(dir.join("errors")).expect("create a file for errors");
        let output = errors.try_clone().expect("clone the file");
        command
            .stdin(Stdio::piped())
            .stdout(output)
            .stderr(errors)
            .current_dir(dir)
            // Rules can test variables that CI, a multiplexer or an agent around the tests has set.
            .env_clear()
            // `reaper run` in a tree must not write its records to the user's state directory.
            .env("XDG_STATE_HOME", dir.join("state"));
        for (name, value) in ["PATH", "TMPDIR", "RUST_BACKTRACE"]
            .into_iter()
            .filter_map(|name| Some((name, std::env::var_os(name)?)))
        {
            command.env(name, value);
        }
        let mut launcher = command.spawn().expect("start the launcher");
        let orders = launcher.stdin.take();
        let world = World {
            launcher,
            launcher_stdin: orders,
            daemon: None,
            arguments: Vec::new(),
            first_tree_len: Cell::new(None),
            existing: Vec::new(),
            expected: None,
            dir: temp,
        };
        for role in ["launcher", "canary", "canary-orphan"] {
            world.await_processes(role, 1);
        }
        world
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Makes the directory writable for processes that change their uid: they create gates and files in it.
    pub fn open_to_all(&self) {
        fs::set_permissions(self.dir(), Permissions::from_mode(0o1777))
            .expect("make the directory writable for all users");
    }

    /// Tells the launcher to start a process.
    pub fn launch(&mut self, image: &str, behaviour: &str, role: &str, args: &[String]) {
        let words: Vec<&str> = [image, behaviour, role]
            .into_iter()
            .chain(args.iter().map(String::as_str))
            .collect();
        let orders = self.launcher_stdin.as_mut().expect("the launcher's input");
        writeln!(orders, "{}", words.join("\t")).expect("write to the launcher");
    }

    /// Gives a pre-existing process a role. The test does not end it.
    pub fn register_existing(&mut self, role: &str, pid: i32) {
        let key = proc::stat(pid)
            .unwrap_or_else(|| panic!("there is no process {pid}"))
            .id;
        self.existing.push(key);
        let mut report = OpenOptions::new()
            .append(true)
            .open(self.dir().join("report"))
            .expect("open the report");
        let line = format!("{role} {} {}\n", key.pid, key.ticks);
        report.write_all(line.as_bytes()).expect("write the report");
    }

    /// Makes the launcher start `role`. [`ProcessContext::spawn`](crate::process) explains `how`.
    pub fn spawn(&mut self, role: &str, how: &str) {
        let orders = self.launcher_stdin.as_mut().expect("the launcher's input");
        writeln!(orders, "spawn\t{role}\t{how}").expect("write to the launcher");
    }

    /// Provides a program for the processes under `name`: a link to this binary at a path below the test's directory.
    ///
    /// The first of `words` is the path, or `LINK -> PATH` for a symbolic link to it. The other words are passed before the
    /// arguments of the process. `{dir}` is replaced by the directory, `{long}` by more text than an event contains.
    pub fn provide(&self, name: &str, words: &[String]) {
        let (path, arguments) = words.split_first().expect("the path of a program");
        let (path, target) = match path.split_once(" -> ") {
            Some((path, target)) => (path, Some(self.dir().join(target))),
            None => (path.as_str(), None),
        };
        let path = self.dir().join(path);
        let here = self.dir().display().to_string();
        let this = std::env::current_exe().expect("this program's path");
        let program = target.as_ref().unwrap_or(&path);
        if !program.exists() {
            link(&this, program);
        }
        if let Some(target) = &target {
            fs::create_dir_all(path.parent().expect("a path with a parent"))
                .expect("create a directory");
            std::os::unix::fs::symlink(target, &path).expect("link the program");
        }
        let arguments = arguments.iter().map(|word| {
            word.replace("{dir}", &here)
                .replace("{long}", &"x".repeat(39_000))
        });
        let lines: Vec<_> = [path.display().to_string()]
            .into_iter()
            .chain(arguments)
            .collect();
        let list = self.dir().join("programs");
        fs::create_dir_all(&list).expect("create a directory");
        fs::write(list.join(name), lines.join("\n")).expect("write the program's description");
    }

    /// Starts the daemon on the launcher's tree.
    pub fn start_daemon(&mut self, config: &str, more: &[&str]) {
        self.watch_scope(&self.process("launcher").pid.to_string(), config, more);
    }

    /// Starts the daemon on a pid or a cgroup.
    pub fn watch_scope(&mut self, scope: &str, config: &str, more: &[&str]) {
        let config = without_patience(config);
        self.arguments = daemon::arguments(self.dir(), Some(scope), &config, more);
        self.restart_daemon(&[]);
    }

    /// Starts the daemon on the whole host, in observe mode.
    pub fn observe_all(&mut self, config: &str) {
        self.arguments = daemon::arguments(self.dir(), None, config, &["--observe"]);
        self.restart_daemon(&[]);
    }

    /// Starts the daemon with the previous arguments and `more`.
    pub fn restart_daemon(&mut self, more: &[&str]) {
        let arguments = self.arguments.iter().cloned();
        let arguments: Vec<_> = arguments
            .chain(more.iter().map(|word| word.to_string()))
            .collect();
        self.daemon = Some(Daemon::start(self.dir(), &arguments));
    }

    /// Kills the daemon with SIGKILL.
    pub fn kill_daemon(&mut self) {
        drop(self.daemon.take().expect("a daemon"));
    }

    /// Returns the arguments of the daemon.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// Starts the daemon as a process of the tree: the process with the role `host` starts it.
    pub fn start_daemon_inside_tree(&mut self, config: &str, more: &[&str]) {
        let scope = self.process("launcher").pid.to_string();
        let mut command = vec![daemon::REAPER.to_owned()];
        command.extend(daemon::arguments(
            self.dir(),
            Some(&scope),
            &without_patience(config),
            more,
        ));
        fs::write(self.dir().join("command"), command.join("\n")).expect("write the command");
        self.open_gate("host");
        let key = self.await_processes("daemon", 1)[0];
        self.daemon = Some(Daemon::attach(self.dir(), key));
    }

    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("a daemon")
    }

    /// Returns all processes that have reported themselves, with their roles, in order.
    pub fn all_processes(&self) -> Vec<(String, ProcessKey)> {
        reported(self.dir())
    }

    /// Returns the processes with this role in the first tree.
    pub fn processes(&self, role: &str) -> Vec<ProcessKey> {
        self.all_processes()
            .into_iter()
            .take(self.first_tree_len.get().unwrap_or(usize::MAX))
            .filter(|(r, _)| r == role)
            .map(|(_, id)| id)
            .collect()
    }

    /// Returns the only process with this role, after it has reported itself.
    ///
    /// A process that was only asked for, with [`World::spawn`] for example, can still be starting.
    pub fn process(&self, role: &str) -> ProcessKey {
        match self.await_processes(role, 1).as_slice() {
            [id] => *id,
            other => panic!("{} processes have the role '{role}'", other.len()),
        }
    }

    /// Counts processes that report themselves from now on to the second tree, which can reuse roles.
    pub fn begin_second_tree(&self) {
        self.first_tree_len.set(Some(self.all_processes().len()));
    }

    /// Returns all processes of the second tree.
    pub fn processes_of_second_tree(&self) -> Vec<ProcessKey> {
        let first = self.first_tree_len.get().unwrap_or(usize::MAX);
        let second = self.all_processes().into_iter().skip(first);
        second.map(|(_, id)| id).collect()
    }

    /// Waits until `n` processes with this role have reported themselves.
    pub fn await_processes(&self, role: &str, n: usize) -> Vec<ProcessKey> {
        eventually(&format!("{n} × '{role}' up"), || {
            Some(self.processes(role)).filter(|processes| processes.len() >= n)
        })
    }

    /// Sends SIGKILL to the only process with this role.
    pub fn kill(&self, role: &str) {
        assert!(
            self.process(role).signal(Signal::SIGKILL),
            "'{role}' could not be killed"
        );
    }

    /// Opens a gate (a FIFO) for the processes that wait at it.
    pub fn open_gate(&self, gate: &str) {
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(libc::O_NONBLOCK);
        // Opening fails until a process waits there.
        eventually(&format!("a process waits at the gate {gate}"), || {
            options.open(self.dir().join(gate)).ok()
        });
    }

    /// Returns the living descendants of the launcher.
    pub fn living(&self) -> Vec<Stat> {
        proc::descendants(self.process("launcher"))
            .into_iter()
            .filter(Stat::is_alive)
            .collect()
    }

    /// Waits until only the canaries live below the launcher. One listing can miss a process that forks and exits
    /// continually, so 50 listings in a row must agree.
    pub fn await_only_canaries(&self) {
        let canaries = ["canary", "canary-orphan"].map(|role| self.process(role));
        let alone = || self.living().iter().all(|s| canaries.contains(&s.id));
        eventually("only the canaries live below the launcher", || {
            (0..50).all(|_| alone()).then_some(())
        });
    }

    /// Waits for an event for which `which` is true.
    pub fn await_event(&self, what: &str, which: impl Fn(&Event) -> bool) -> Event {
        eventually(&format!("an event: {what}"), || {
            self.daemon().events().iter().find(|e| which(e)).cloned()
        })
    }

    /// Waits until all processes with these roles have exited.
    pub fn await_gone(&self, roles: &[&str]) {
        eventually(&format!("{roles:?} gone"), || {
            let processes = self.all_processes();
            let left = processes
                .iter()
                .any(|(role, id)| roles.contains(&role.as_str()) && id.is_alive());
            (!left).then_some(())
        });
    }

    /// Asserts that each role has processes and that all of them are alive.
    pub fn assert_alive(&self, roles: &[&str]) {
        for role in roles {
            let processes = self.await_processes(role, 1);
            assert!(processes.iter().all(|id| id.is_alive()), "'{role}' is dead");
        }
    }

    /// Stops the daemon by SIGINT and returns all its events.
    pub fn stop(&mut self) -> Vec<Event> {
        self.stop_by(Signal::SIGINT)
    }

    pub fn stop_by(&mut self, signal: Signal) -> Vec<Event> {
        let (status, events) = self.daemon.take().expect("a daemon").stop(signal);
        assert_eq!(status.code(), Some(0), "the daemon ended with {status}");
        events
    }

    /// Sets the scenario's name and the expected decisions by role, which a report shows.
    pub fn expect(&mut self, scenario: String, decisions: Vec<(&'static str, String)>) {
        self.expected = Some((scenario, decisions.into_iter().collect()));
    }

    /// Adds the decisions on each process to the report, with the expected ones where known.
    fn report(&self) {
        let (scenario, expected) = match &self.expected {
            Some((scenario, expected)) => (scenario.as_str(), Some(expected)),
            None => ("see the test's source", None),
        };
        let events = daemon::read_events(self.dir());
        let mut report = format!("--- scenario: {scenario}\n--- role, pid, state: decisions");
        let mut processes = self.all_processes();
        processes.sort_by_key(|(_, id)| !id.is_alive());
        let shown = processes.len().min(REPORTED_LINES);
        for (role, id) in &processes[..shown] {
            let state = if id.is_alive() { "alive" } else { "gone" };
            let decided = daemon::decisions(&events, *id).join(", ");
            report += &format!("\n{role} {} {state}: {}", id.pid, or_none(&decided));
            if let Some(expected) = expected.and_then(|all| all.get(role.as_str())) {
                report += &format!("; expected: {}", or_none(expected));
            }
        }
        if shown < processes.len() {
            report += &format!("\nand {} more", processes.len() - shown);
        }
        let unnamed = |stat: &Stat| !processes.iter().any(|(_, id)| *id == stat.id);
        for stat in self
            .living()
            .into_iter()
            .filter(unnamed)
            .take(REPORTED_LINES)
        {
            let Stat {
                id, parent, state, ..
            } = stat;
            let decided = daemon::decisions(&events, id).join(", ");
            let state = char::from(state);
            report += &format!(
                "\nno role, {} below {parent}, {state}: {}",
                id.pid,
                or_none(&decided)
            );
        }
        let gaps = |event: &str| events.iter().filter(|e| e.event == event).count();
        let (opened, closed) = (gaps("gap.open"), gaps("gap.close"));
        report += &format!("\ngaps: {opened} opened, {closed} closed");
        report::add(&report);
    }
}

fn or_none(decisions: &str) -> &str {
    if decisions.is_empty() {
        "none"
    } else {
        decisions
    }
}

/// Returns all processes that have reported themselves in a directory, in order.
pub fn reported(dir: &Path) -> Vec<(String, ProcessKey)> {
    let text = fs::read_to_string(dir.join("report")).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|l| l.ends_with('\n'));
    whole.filter_map(parse).collect()
}

fn parse(line: &str) -> Option<(String, ProcessKey)> {
    let mut words = line.trim_end().split(' ');
    let role = words.next()?.to_owned();
    Some((
        role,
        ProcessKey {
            pid: words.next()?.parse().ok()?,
            ticks: words.next()?.parse().ok()?,
        },
    ))
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report();
        }
        self.daemon = None;
        let end = Instant::now() + *DEADLINE;
        let launcher = proc::stat(self.launcher.id()).map(|s| s.id);
        loop {
            let mut left: Vec<ProcessKey> = launcher
                .map(proc::descendants)
                .unwrap_or_default()
                .into_iter()
                .filter(Stat::is_alive)
                .map(|s| s.id)
                .collect();
            // A process that init adopted is no longer below the launcher, but it has reported itself.
            let reported = self.all_processes().into_iter().map(|(_, id)| id);
            let ours = |id: &ProcessKey| Some(*id) != launcher && !self.existing.contains(id);
            left.extend(reported.filter(|id| ours(id) && id.is_alive()));
            if left.is_empty() || Instant::now() > end {
                break;
            }
            for id in left {
                id.signal(Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

/// Returns a config with the rule for young processes off, unless it has such a rule: all processes of a test are young.
fn without_patience(config: &str) -> String {
    match config.contains("\"young\"") {
        true => config.into(),
        false => format!(
            "{config}\n[[rule]]\nname = \"young\"\naction = \"reap\"\nsession = \"ok\"\nenabled = false\n"
        ),
    }
}
