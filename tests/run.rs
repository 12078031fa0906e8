//! Tests of `reaper run`: the cases of the test suites of `tini`, `dumb-init` and `timeout`, and its own guarantees.
//!
//! They need neither root nor BPF. As root, the suite runs them as an unprivileged user, and some as root too.

mod before;
mod beside;
mod cgroup;
mod files;
mod hostile;
mod lost;
mod owner;
mod passes;
mod places;
mod planted;
mod records;
mod signals;
mod status;
mod terminal;
mod trees;
mod watched;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use libtest_mimic::Trial;
use nix::libc;
use nix::sys::signal::{SigSet, Signal};

use crate::cli::{self, CommandOutput};
use crate::daemon::REAPER;
use crate::proc::{self, ProcessKey};
use crate::trees::trial;
use crate::world::{self, TempDir, eventually, link};

/// Unprivileged uid that no other process has.
const UNPRIVILEGED_UID: u32 = 61_010;
/// Environment variable of every process that a test starts. Its value is the test's directory.
const ENV_MARKER: &str = "REAPER_TEST_RUN";

/// File that `--report` writes.
const REPORT: &str = "report.json";

type ScenarioFn = fn(&RunWorld);

/// Returns the tests that need neither root nor a service.
///
/// `reaper run` treats its children alike for every user, so most tests run as an unprivileged user only. Tests of killed
/// owners, planted paths and cgroups run as root too.
pub fn trials() -> Vec<Trial> {
    let everybodys = [
        status::SCENARIOS,
        passes::SCENARIOS,
        signals::SCENARIOS,
        terminal::SCENARIOS,
        trees::SCENARIOS,
        before::SCENARIOS,
        hostile::SCENARIOS,
        owner::SCENARIOS,
        records::SCENARIOS,
        places::SCENARIOS,
        files::SCENARIOS,
    ];
    let by_user = [lost::SCENARIOS, planted::SCENARIOS];
    let roots = [
        trees::ROOT_SCENARIOS,
        lost::ROOT_SCENARIOS,
        planted::ROOT_SCENARIOS,
        hostile::ROOT_SCENARIOS,
        status::ROOT_SCENARIOS,
    ];
    let mut trials = as_nobody(&[everybodys.concat(), by_user.concat()].concat());
    trials.extend(as_root(&[by_user.concat(), roots.concat()].concat()));
    let left_out = !crate::cgroup::can_be_made();
    let in_a_cgroup = as_nobody(cgroup::SCENARIOS).into_iter();
    let in_a_cgroup = in_a_cgroup.chain(as_root(
        &[cgroup::SCENARIOS, cgroup::ROOT_SCENARIOS].concat(),
    ));
    trials.extend(in_a_cgroup.map(|trial| trial.with_ignored_flag(left_out)));
    trials
}

/// Returns the scenarios as tests that run as an unprivileged user.
fn as_nobody(scenarios: &[(&str, ScenarioFn)]) -> Vec<Trial> {
    let play = |(name, scenario): &(&str, ScenarioFn)| {
        scenario_trial("as-nobody", name, UNPRIVILEGED_UID, *scenario)
    };
    scenarios.iter().map(play).collect()
}

/// Returns the scenarios as tests that run as root; none if this process is not root.
fn as_root(scenarios: &[(&str, ScenarioFn)]) -> Vec<Trial> {
    let play =
        |(name, scenario): &(&str, ScenarioFn)| scenario_trial("as-root", name, 0, *scenario);
    let scenarios = scenarios.iter().map(play);
    scenarios
        .filter(|_| nix::unistd::geteuid().is_root())
        .collect()
}

/// Returns the tests that need a service. They run as an unprivileged user and as root.
pub fn beside_a_service() -> Vec<Trial> {
    let scenarios = [
        beside::SCENARIOS,
        watched::SCENARIOS,
        before::BESIDE_A_SERVICE,
    ]
    .concat();
    let mut trials = as_nobody(&scenarios);
    trials.extend(as_root(&scenarios));
    trials
}

fn scenario_trial(user: &str, name: &str, uid: u32, scenario: ScenarioFn) -> Trial {
    trial("run", &format!("{user}::{name}"), move || {
        let mut place = RunWorld::new(uid);
        scenario(&place);
        place.assert_canary_alive();
    })
}

/// World of one test: a directory with `./reaper`, its user, and a canary process of that user.
pub struct RunWorld {
    dir: TempDir,
    uid: u32,
    canary: Child,
}

impl RunWorld {
    fn new(uid: u32) -> RunWorld {
        let dir = TempDir::new();
        link(Path::new(REAPER), &dir.path().join("reaper"));
        let uid = match nix::unistd::geteuid() {
            root if root.is_root() => uid,
            own => own.as_raw(),
        };
        chown(dir.path(), Some(uid), Some(uid)).expect("give the directory to its user");
        let mut sleep = Command::new("sleep");
        sleep.arg("600").uid(uid).gid(uid);
        let canary = sleep.spawn().expect("start the canary");
        RunWorld { dir, uid, canary }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the content of a file; empty if there is no such file.
    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Waits until `is_expected` accepts the content of a file, and returns the content.
    fn await_content(&self, name: &str, is_expected: impl Fn(&str) -> bool) -> String {
        eventually(&format!("{name} has the expected content"), || {
            Some(self.read(name)).filter(|content| is_expected(content))
        })
    }

    /// Waits until a file contains a pid, and returns the process.
    fn await_pid(&self, name: &str) -> ProcessKey {
        let content = self.await_content(name, |content| content.ends_with('\n'));
        let pid: i32 = content.trim().parse().expect("a pid");
        proc::stat(pid).expect("the process that wrote its pid").id
    }

    /// Returns a command that runs as the test's user in the test's directory.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(self.dir.path())
            .env(ENV_MARKER, self.dir.path())
            .env("HOME", self.dir.path())
            .env("XDG_STATE_HOME", self.path("state"))
            // Other users cannot read some directories of root's PATH.
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            .uid(self.uid)
            .gid(self.uid)
            // A process group that the terminal can stop (not orphaned, setpgid(2)): its parent is in another group of
            // the same session.
            .process_group(0);
        // The caller of the suite may ignore signals, as `nohup` and a shell's `&` do.
        let reset_signals = || {
            for number in (1..=31).filter(|number| ![libc::SIGKILL, libc::SIGSTOP].contains(number))
            {
                // SAFETY: SIG_DFL installs no handler.
                unsafe { libc::signal(number, libc::SIG_DFL) };
            }
            SigSet::empty().thread_set_mask()?;
            Ok(())
        };
        // SAFETY: the closure makes only async-signal-safe system calls between fork and exec.
        unsafe { command.pre_exec(reset_signals) };
        command
    }

    /// Returns a `reaper run` command with these arguments.
    fn reaper(&self, words: &[&str]) -> Command {
        let mut command = self.command("./reaper");
        command.arg("run").args(words);
        command
    }

    /// Runs `reaper run` until it exits, and asserts that it leaves no process behind.
    fn run(&self, words: &[&str]) -> CommandOutput {
        let said = cli::run(self.dir.path(), &mut self.reaper(words));
        let left = self.survivors();
        assert!(
            left.is_empty(),
            "{words:?}: left behind: {left:?}: {}",
            said.err
        );
        said
    }

    /// Runs `reaper` with these arguments until it exits.
    fn ask(&self, words: &[&str]) -> CommandOutput {
        // A run in progress writes to the output files of the test's directory.
        let dir = self.path("asked");
        let _ = fs::create_dir(&dir);
        let mut command = self.command("./reaper");
        cli::run(&dir, command.args(words))
    }

    /// Returns the runs in the output of `reaper ps --json`.
    fn ps(&self, words: &[&str]) -> Vec<serde_json::Value> {
        let said = self.ask(&[&["ps", "--json"], words].concat());
        assert_eq!(said.code, Some(0), "{}", said.err);
        let mut said: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
        match said["runs"].take() {
            serde_json::Value::Array(runs) => runs,
            other => panic!("no list of runs: {other}"),
        }
    }

    /// Returns the report of a run that was started with [`reported`].
    fn report(&self) -> serde_json::Value {
        serde_json::from_str(&self.read(REPORT)).expect("a report")
    }

    /// Returns the directory of the run records.
    fn records(&self) -> std::path::PathBuf {
        self.path("state/reaper/runs")
    }

    /// Runs a bash script as the test's user until it exits.
    fn bash(&self, script: &str, arguments: &[&str]) -> CommandOutput {
        self.script("bash", script, arguments)
    }

    /// Runs a script in `shell` as the test's user until it exits.
    fn script(&self, shell: &str, script: &str, arguments: &[&str]) -> CommandOutput {
        let mut command = self.command(shell);
        command.args(["-c", script, shell]).args(arguments);
        cli::run(self.dir.path(), &mut command)
    }

    /// Starts `reaper run` with its output in the files `out` and `err`.
    fn start(&self, words: &[&str]) -> Started {
        self.start_as(&mut self.reaper(words))
    }

    fn start_as(&self, command: &mut Command) -> Started {
        let file = |name| fs::File::create(self.path(name)).expect("create a file for output");
        let child = command
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn();
        Started(child.expect("start the command"))
    }

    /// Installs this binary as `bin/worker` (`bin/worker test-process BEHAVIOUR ROLE DIR`) and creates its report file.
    fn install_worker(&self) {
        let this = std::env::current_exe().expect("this program's path");
        if !self.path("bin/worker").exists() {
            link(&this, &self.path("bin/worker"));
        }
        fs::write(self.path("report"), "").expect("create the report");
        fs::set_permissions(self.path("report"), Permissions::from_mode(0o666))
            .expect("make the report writable for all users");
    }

    /// Returns the command line of a worker with this behaviour and role.
    fn worker_command(&self, play: &str, role: &str) -> Vec<String> {
        let dir = self.dir.path().display().to_string();
        let mut words = vec!["bin/worker", "test-process"];
        let mut parts = play.split(' ');
        words.extend([parts.next().unwrap_or_default(), role, &dir]);
        words.extend(parts);
        words.into_iter().map(String::from).collect()
    }

    /// Waits until `n` processes with this role have reported themselves.
    fn await_processes(&self, role: &str, n: usize) -> Vec<ProcessKey> {
        eventually(&format!("{n} × '{role}' up"), || {
            let all = world::reported(self.dir.path()).into_iter();
            let processes: Vec<_> = all
                .filter(|(its, _)| its == role)
                .map(|(_, id)| id)
                .collect();
            (processes.len() >= n).then_some(processes)
        })
    }

    /// Returns the living processes with the test's environment marker.
    fn living(&self) -> Vec<ProcessKey> {
        let marker = format!("{ENV_MARKER}={}\0", self.dir.path().display());
        let marked = |pid: i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let marker = marker.as_bytes();
            environment.windows(marker.len()).any(|part| part == marker)
        };
        let all = proc::all()
            .into_iter()
            .filter(|one| one.is_alive() && marked(one.id.pid));
        all.map(|one| one.id).collect()
    }

    /// Asserts that no process of the test is alive.
    fn assert_alone(&self) {
        let left = self.survivors();
        assert!(left.is_empty(), "left behind: {left:?}");
    }

    /// Returns the living processes of the test with a description, which is read at once because they may exit soon.
    fn survivors(&self) -> Vec<(i32, String)> {
        let left = self.living().into_iter();
        left.map(|one| (one.pid, describe(one.pid))).collect()
    }

    /// Waits until no process of the test is alive.
    fn await_alone(&self) {
        eventually("no process is left", || {
            self.living().is_empty().then_some(())
        });
    }

    fn assert_canary_alive(&mut self) {
        let status = self.canary.try_wait().expect("poll the canary");
        assert!(status.is_none(), "the canary exited: {status:?}");
    }
}

impl Drop for RunWorld {
    fn drop(&mut self) {
        let _ = self.canary.kill();
        let _ = self.canary.wait();
        for _ in 0..100 {
            let left = self.living();
            if left.is_empty() {
                return;
            }
            for one in left {
                one.signal(Signal::SIGKILL);
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
}

/// Returns the arguments that run a shell script with `--report`, after `words`.
fn reported<'a>(words: &[&'a str], script: &'a str) -> Vec<&'a str> {
    [words, &["--report", REPORT, "--", "sh", "-c", script]].concat()
}

fn command_line(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ")
}

/// Returns the parent, name and command line of a process, as far as they can be read.
fn describe(pid: i32) -> String {
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let parent = proc::stat(pid).map_or(0, |stat| stat.parent);
    let line = command_line(pid);
    format!("child of {parent}: {}: {line}", comm.trim_end())
}

/// Running command that is killed on drop.
struct Started(Child);

impl Started {
    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    /// Sends the signal with this number.
    fn signal(&self, number: i32) {
        // SAFETY: kill(2) takes no pointers. The child has not been waited for, so its pid is not reused.
        let sent = unsafe { nix::libc::kill(self.pid(), number) };
        assert_eq!(sent, 0, "signal {number} cannot be sent");
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().expect("poll the command").is_none()
    }

    /// Waits until it exits and returns its status as a shell reports it: the exit code, or 128 plus the signal.
    fn end(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let status = eventually("the command exits", || {
            self.0.try_wait().expect("poll the command")
        });
        let by_signal = || 128 + status.signal().unwrap_or_default();
        status.code().unwrap_or_else(by_signal)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
