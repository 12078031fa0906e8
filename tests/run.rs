//! `reaper run` from outside: what the suites of `tini`, `dumb-init` and `timeout` ask of those, and what this one
//! promises beyond them. Neither root nor probes are needed; where the suite is root's, each is run once more as a user
//! without any privilege.

mod before;
mod beside;
mod cgroup;
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

/// A user of whom nothing else runs.
const NOBODY: u32 = 61_010;
/// In the environment of all that a test starts, with the directory of the test.
const ENV_MARKER: &str = "REAPER_TEST_RUN";

/// Of what has come of a run.
const REPORT: &str = "report.json";

type ScenarioFn = fn(&RunWorld);

/// Without root and without a service. What `reaper run` does to its own children is the same for every user, so it is
/// tried as one without any privilege. What is left by a killed owner, planted paths and cgroups are tried as root too.
pub fn trials() -> Vec<Trial> {
    let everybodys = [
        status::STORIES,
        passes::STORIES,
        signals::STORIES,
        terminal::STORIES,
        trees::STORIES,
        before::STORIES,
        hostile::STORIES,
        owner::STORIES,
        records::STORIES,
        places::STORIES,
    ];
    let by_user = [lost::STORIES, planted::STORIES];
    let roots = [
        trees::ROOT_SCENARIOS,
        lost::ROOT_SCENARIOS,
        planted::ROOT_SCENARIOS,
        hostile::ROOT_SCENARIOS,
    ];
    let mut trials = as_nobody(&[everybodys.concat(), by_user.concat()].concat());
    trials.extend(as_root(&[by_user.concat(), roots.concat()].concat()));
    let left_out = !crate::cgroup::can_be_made();
    let in_a_cgroup = as_nobody(cgroup::STORIES).into_iter();
    let in_a_cgroup =
        in_a_cgroup.chain(as_root(&[cgroup::STORIES, cgroup::ROOT_SCENARIOS].concat()));
    trials.extend(in_a_cgroup.map(|trial| trial.with_ignored_flag(left_out)));
    trials
}

/// Tests of a user without privilege.
fn as_nobody(scenarios: &[(&str, ScenarioFn)]) -> Vec<Trial> {
    let play = |(name, scenario): &(&str, ScenarioFn)| {
        scenario_trial("as-nobody", name, NOBODY, *scenario)
    };
    scenarios.iter().map(play).collect()
}

/// Tests of root; none where this is not root.
fn as_root(scenarios: &[(&str, ScenarioFn)]) -> Vec<Trial> {
    let play =
        |(name, scenario): &(&str, ScenarioFn)| scenario_trial("as-root", name, 0, *scenario);
    let scenarios = scenarios.iter().map(play);
    scenarios
        .filter(|_| nix::unistd::geteuid().is_root())
        .collect()
}

/// Those for which a service is needed too, which signals for root and for others alike.
pub fn beside_a_service() -> Vec<Trial> {
    let scenarios = [beside::STORIES, watched::STORIES, before::BESIDE_A_SERVICE].concat();
    let mut trials = as_nobody(&scenarios);
    trials.extend(as_root(&scenarios));
    trials
}

fn scenario_trial(who: &str, name: &str, uid: u32, scenario: ScenarioFn) -> Trial {
    trial("run", &format!("{who}::{name}"), move || {
        let mut place = RunWorld::new(uid);
        scenario(&place);
        place.assert_spared();
    })
}

/// A directory in which `./reaper` is, somebody whose it is, and a process of theirs that is not to be touched.
pub struct RunWorld {
    dir: TempDir,
    uid: u32,
    outsider: Child,
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
        let outsider = sleep.spawn().expect("start who is not to be touched");
        RunWorld { dir, uid, outsider }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// What a file says, nothing where there is none yet.
    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Waits until a file says something like that.
    fn await_content(&self, name: &str, like: impl Fn(&str) -> bool) -> String {
        eventually(&format!("{name} says what it should"), || {
            Some(self.read(name)).filter(|said| like(said))
        })
    }

    /// Waits until a file of a pid is there, and gives who has it.
    fn await_pid(&self, name: &str) -> ProcessKey {
        let said = self.await_content(name, |said| said.ends_with('\n'));
        let pid: i32 = said.trim().parse().expect("a pid");
        proc::stat(pid).expect("who has just said its pid").id
    }

    /// A command of the place's user, in the place.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(self.dir.path())
            .env(ENV_MARKER, self.dir.path())
            .env("HOME", self.dir.path())
            .env("XDG_STATE_HOME", self.path("state"))
            // Not all that root has there may be looked into by others.
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            .uid(self.uid)
            .gid(self.uid)
            // A group that the terminal could stop: its leader's parent is in another one of the same session.
            .process_group(0);
        // Whoever starts the suite may ignore some, as `nohup` and a shell's `&` do.
        let by_default = || {
            for number in (1..=31).filter(|number| ![libc::SIGKILL, libc::SIGSTOP].contains(number))
            {
                // SAFETY: no handler is set.
                unsafe { libc::signal(number, libc::SIG_DFL) };
            }
            SigSet::empty().thread_set_mask()?;
            Ok(())
        };
        // SAFETY: between fork and exec nothing but system calls is made.
        unsafe { command.pre_exec(by_default) };
        command
    }

    /// `reaper run` with these words.
    fn reaper(&self, words: &[&str]) -> Command {
        let mut command = self.command("./reaper");
        command.arg("run").args(words);
        command
    }

    /// Runs it to its end, of which nothing is to be left.
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

    /// `reaper` with these words, to its end.
    fn ask(&self, words: &[&str]) -> CommandOutput {
        // Beside what a run that goes on writes to its own files.
        let dir = self.path("asked");
        let _ = fs::create_dir(&dir);
        let mut command = self.command("./reaper");
        cli::run(&dir, command.args(words))
    }

    /// The runs that there are, as `reaper ps` tells.
    fn ps(&self, words: &[&str]) -> Vec<serde_json::Value> {
        let said = self.ask(&[&["ps", "--json"], words].concat());
        assert_eq!(said.code, Some(0), "{}", said.err);
        let mut said: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
        match said["runs"].take() {
            serde_json::Value::Array(runs) => runs,
            other => panic!("no list of runs: {other}"),
        }
    }

    /// What is told of one with [`reported`].
    fn report(&self) -> serde_json::Value {
        serde_json::from_str(&self.read(REPORT)).expect("a report")
    }

    /// Where the records are.
    fn records(&self) -> std::path::PathBuf {
        self.path("state/reaper/runs")
    }

    /// Runs a script of the place's user to its end, with arguments.
    fn bash(&self, script: &str, arguments: &[&str]) -> CommandOutput {
        self.script("bash", script, arguments)
    }

    /// The same by another shell.
    fn script(&self, shell: &str, script: &str, arguments: &[&str]) -> CommandOutput {
        let mut command = self.command(shell);
        command.args(["-c", script, shell]).args(arguments);
        cli::run(self.dir.path(), &mut command)
    }

    /// Starts it, with its output in `out` and `err`.
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
        Started(child.expect("start it"))
    }

    /// This program as a process: `./worker test-process BEHAVIOUR ROLE DIR`, and the report for it.
    fn install_worker(&self) {
        let this = std::env::current_exe().expect("this program's path");
        if !self.path("bin/worker").exists() {
            link(&this, &self.path("bin/worker"));
        }
        fs::write(self.path("report"), "").expect("create the report");
        fs::set_permissions(self.path("report"), Permissions::from_mode(0o666))
            .expect("open the report to all");
    }

    /// The words by which a process plays `play` as `role`.
    fn worker_command(&self, play: &str, role: &str) -> Vec<String> {
        let dir = self.dir.path().display().to_string();
        let mut words = vec!["bin/worker", "test-process"];
        let mut parts = play.split(' ');
        words.extend([parts.next().unwrap_or_default(), role, &dir]);
        words.extend(parts);
        words.into_iter().map(String::from).collect()
    }

    /// Waits until so many of a role are up.
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

    /// All that lives of what was started here, as far as it has kept its environment.
    fn living(&self) -> Vec<ProcessKey> {
        let mark = format!("{ENV_MARKER}={}\0", self.dir.path().display());
        let marked = |pid: i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let mark = mark.as_bytes();
            environment.windows(mark.len()).any(|part| part == mark)
        };
        let all = proc::all()
            .into_iter()
            .filter(|one| one.is_alive() && marked(one.id.pid));
        all.map(|one| one.id).collect()
    }

    fn assert_alone(&self) {
        let left = self.survivors();
        assert!(left.is_empty(), "left behind: {left:?}");
    }

    /// What lives of it, described at once, since it may be about to go.
    fn survivors(&self) -> Vec<(i32, String)> {
        let left = self.living().into_iter();
        left.map(|one| (one.pid, describe(one.pid))).collect()
    }

    /// The same where who owned it may not have left yet.
    fn await_alone(&self) {
        eventually("nothing is left", || self.living().is_empty().then_some(()));
    }

    fn assert_spared(&mut self) {
        let ended = self.outsider.try_wait().expect("ask for the outsider");
        assert!(ended.is_none(), "who was not of it was ended: {ended:?}");
    }
}

impl Drop for RunWorld {
    fn drop(&mut self) {
        let _ = self.outsider.kill();
        let _ = self.outsider.wait();
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

/// The words for a script of a shell of which a report is wanted, behind these.
fn reported<'a>(words: &[&'a str], script: &'a str) -> Vec<&'a str> {
    [words, &["--report", REPORT, "--", "sh", "-c", script]].concat()
}

fn command_line(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ")
}

/// Its parent, its name and how it was called, as far as it still is.
fn describe(pid: i32) -> String {
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let parent = proc::stat(pid).map_or(0, |stat| stat.parent);
    let line = command_line(pid);
    format!("child of {parent}: {}: {line}", comm.trim_end())
}

/// One that runs, and does not when this is dropped.
struct Started(Child);

impl Started {
    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    /// Sends the signal of a number.
    fn signal(&self, number: i32) {
        // SAFETY: two numbers are passed. It has not been waited for, so the pid is its own.
        let sent = unsafe { nix::libc::kill(self.pid(), number) };
        assert_eq!(sent, 0, "signal {number} cannot be sent");
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().expect("ask for it").is_none()
    }

    /// Its status as a shell tells it, when it has ended.
    fn end(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let status = eventually("it ends", || self.0.try_wait().expect("wait for it"));
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
