//! Leftovers of all kinds below a shell that adopts them, and a service whose scope is that shell.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::Value;

use super::{CommandOutput, reaper, run};
use crate::daemon::{self, Daemon, Event, JOURNAL, REAPER};
use crate::proc::{self, ProcessKey};
use crate::world::{TempDir, eventually, link};

/// Script with leftovers of all kinds, which differ in the duration of `sleep`. The leaders of their terminal sessions have
/// exited. `$0` is a pid of no process.
///
/// 3007 is no orphan, and its parent has chosen its environment. 3010 was started through sudo. 3008 starts after a line of
/// input.
const LEFT: &str = r#"
    CLAUDECODE=1 CLAUDE_PID=$0 setsid sh -c '(sh -c "sleep 3001; :") & exit'
    CLAUDECODE=1 CLAUDE_PID=$0 setsid sh -c '(trap "" TERM; while sleep 3002; do :; done) & exit'
    CLAUDECODE=1 CLAUDE_PID=$0 REAPER_KEEP=1 setsid sh -c 'sleep 3003 & exit'
    CLAUDE_PID=$$ setsid sh -c 'sleep 3004 & exit'
    CLAUDECODE=1 setsid sh -c 'sleep 3005 & exit'
    setsid sh -c 'sleep 3006 & exit'
    CLAUDECODE=1 CLAUDE_PID=$0 sleep 3007 &
    CLAUDECODE=1 CLAUDE_PID=$0 SUDO_UID=1000 setsid sh -c 'sleep 3010 & exit'
    echo up
    read x
    CLAUDECODE=1 CLAUDE_PID=$0 setsid sh -c 'sleep 3008 & exit'
    read x
"#;

/// Returns the user that runs the leftovers.
///
/// It is a user without running agents, because those could be owners. In a login session it must be the login user,
/// because a leftover with another uid counts as one that has changed its uid.
pub fn user() -> u32 {
    let login = std::fs::read_to_string("/proc/self/loginuid").ok();
    let login = login.and_then(|login| login.trim().parse().ok());
    login.filter(|uid| *uid != u32::MAX).unwrap_or(4345)
}

/// Shell that adopts the orphans below it. Its descendants are killed on drop.
pub struct Keeper(pub Child);

impl Keeper {
    /// Runs [`LEFT`] until all its processes sleep.
    pub fn start(dir: &TempDir) -> Keeper {
        Keeper::run_until_asleep(LEFT, 8, dir)
    }

    /// Runs a script until `asleep` processes below it run `sleep`.
    pub fn run_until_asleep(script: &str, asleep: usize, dir: &TempDir) -> Keeper {
        let keeper = Keeper::run(dir, script, &[]);
        keeper.await_asleep(asleep);
        keeper
    }

    /// Runs a script until it prints `up`. `$0` is a pid of no process.
    pub fn run(dir: &TempDir, script: &str, arguments: &[&OsStr]) -> Keeper {
        let here = dir.path().display();
        let config = format!(
            "grace = '300ms'\njournal_dir = '{here}/journal'\nruntime_dir = '{here}/run'\n"
        );
        std::fs::write(dir.path().join("c.toml"), config).expect("write a config");
        let mut gone = Command::new("true").spawn().expect("run true");
        let dead = gone.id();
        gone.wait().expect("wait for it");
        let mut command = Command::new("sh");
        command
            .args(["-c", script, &dead.to_string()])
            .args(arguments);
        command
            .current_dir(dir.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").expect("a PATH"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if nix::unistd::geteuid().is_root() {
            command.uid(user());
        }
        // SAFETY: prctl(2) is a single system call, which is async-signal-safe between fork and exec.
        unsafe {
            command.pre_exec(|| Ok(nix::sys::prctl::set_child_subreaper(true)?));
        }
        let mut keeper = Keeper(command.spawn().expect("start a shell"));
        let mut line = String::new();
        let out = keeper.0.stdout.take().expect("its output");
        BufReader::new(out)
            .read_line(&mut line)
            .expect("read from it");
        assert_eq!(line, "up\n");
        keeper
    }

    pub fn await_asleep(&self, n: usize) {
        eventually(&format!("{n} processes sleep"), || {
            let comm = |id: ProcessKey| std::fs::read(format!("/proc/{}/comm", id.pid)).ok();
            let asleep = self
                .living()
                .filter(|id| comm(*id).as_deref() == Some(b"sleep\n"));
            (asleep.count() == n).then_some(())
        });
    }

    /// Continues the script, and waits until one more process runs `sleep`.
    pub fn next_step(&mut self) {
        let before = self.asleep();
        let input = self.0.stdin.as_mut().expect("its input");
        input.write_all(b"\n").expect("write to the script");
        self.await_asleep(before + 1);
    }

    pub fn asleep(&self) -> usize {
        self.sleepers().len()
    }

    /// Returns the durations of the living `sleep` processes, sorted.
    pub fn sleepers(&self) -> Vec<String> {
        let argv =
            |id: ProcessKey| std::fs::read_to_string(format!("/proc/{}/cmdline", id.pid)).ok();
        let argv = self.living().filter_map(argv);
        let mut sleepers: Vec<_> = argv
            .filter_map(|argv| {
                Some(
                    argv.strip_prefix("sleep\0")?
                        .trim_end_matches('\0')
                        .to_owned(),
                )
            })
            .collect();
        sleepers.sort_unstable();
        sleepers
    }

    pub fn id(&self) -> ProcessKey {
        proc::stat(self.0.id()).expect("the keeper lives").id
    }

    pub fn living(&self) -> impl Iterator<Item = ProcessKey> {
        let below = proc::descendants(self.id()).into_iter();
        below.filter(proc::Stat::is_alive).map(|stat| stat.id)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // A process that loses its parent in one round is adopted and found in the next.
        for _ in 0..50 {
            let left: Vec<_> = self.living().collect();
            if left.is_empty() {
                break;
            }
            for id in left {
                id.signal(Signal::SIGKILL);
            }
            std::thread::sleep(std::time::Duration::from_millis(4));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Service whose scope is a keeper.
pub struct Service {
    pub keeper: Keeper,
    pub daemon: Daemon,
    // The last field, so that it is dropped after everything that uses it.
    pub dir: TempDir,
}

impl Service {
    pub fn start(config: &str, more: &[&str]) -> Service {
        Service::start_in(TempDir::new(), config, more)
    }

    pub fn start_in(dir: TempDir, config: &str, more: &[&str]) -> Service {
        let keeper = Keeper::start(&dir);
        let scope = keeper.0.id().to_string();
        let config = format!("grace = \"300ms\"\n{config}");
        let arguments = daemon::arguments(
            dir.path(),
            Some(&scope),
            &config,
            &[&JOURNAL, more].concat(),
        );
        let daemon = Daemon::start(dir.path(), &arguments);
        Service {
            keeper,
            daemon,
            dir,
        }
    }

    pub fn socket(&self) -> String {
        socket(self.dir.path())
    }

    pub fn ask(&self, args: &[&str]) -> CommandOutput {
        let socket = self.socket();
        reaper(
            self.dir.path(),
            &[args, &["--socket", &socket, "--json"]].concat(),
        )
    }

    pub fn ask_json(&self, args: &[&str]) -> Value {
        let said = self.ask(args);
        let json = serde_json::from_str(&said.out);
        json.unwrap_or_else(|e| panic!("{args:?}: {e}: {}{}", said.out, said.err))
    }

    pub fn ask_as(&self, uid: u32, args: &[&str]) -> CommandOutput {
        ask_as(self.dir.path(), uid, args)
    }

    /// Waits until `n` leftovers have been reported with this reason. Returns all leftovers.
    pub fn await_leftovers(&self, n: usize, reason: &str) -> Vec<Event> {
        eventually(&format!("{n} leftovers: {reason}"), || {
            let events = self.leftovers();
            let matching = events
                .iter()
                .filter(|e| e.reason.as_deref() == Some(reason));
            (matching.count() >= n).then_some(events)
        })
    }

    pub fn leftovers(&self) -> Vec<Event> {
        let events = self.daemon.events();
        events
            .iter()
            .filter(|e| e.event == "leftover")
            .cloned()
            .collect()
    }

    pub fn outcomes(&self, outcome: &str) -> usize {
        let events = self.daemon.events();
        let is = |e: &&Event| e.event == "outcome" && e.outcome.as_deref() == Some(outcome);
        events.iter().filter(is).count()
    }
}

/// Returns the socket of the only service of a directory.
pub fn socket(dir: &Path) -> String {
    let entries = std::fs::read_dir(dir.join("run")).expect("list the directory");
    let mut paths = entries.map(|entry| entry.expect("an entry").path());
    let socket = paths.find(|path| path.extension().is_some_and(|end| end == "sock"));
    socket.expect("a socket").display().to_string()
}

/// Runs a command that sends a request to this service, as another user.
pub fn ask_as(dir: &Path, uid: u32, args: &[&str]) -> CommandOutput {
    let program = dir.join("reaper");
    if !program.exists() {
        // Other users may not be able to read the build directory.
        link(Path::new(REAPER), &program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &uid.to_string(), "--clear-groups"]);
    command.arg(program).args(args);
    command.args(["--socket", &socket(dir), "--json"]);
    run(dir, &mut command)
}
