//! Orphans of all kinds below a shell that adopts them, and a service on them and on nothing else.

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

/// Orphans of all kinds, each told by how long it sleeps, in terminal sessions that are over. `$0` is a pid that is
/// nobody's. One is no orphan: a program has chosen the environment of its child; and one has come by way of sudo.
/// Once it is told to, one more comes.
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

/// Who runs what is to be left behind: nobody whose agents run meanwhile, which might be its owners. Where somebody
/// has logged in it has to be them.
pub fn user() -> u32 {
    let login = std::fs::read_to_string("/proc/self/loginuid").ok();
    let login = login.and_then(|login| login.trim().parse().ok());
    login.filter(|uid| *uid != u32::MAX).unwrap_or(4345)
}

/// A shell that adopts what is orphaned below it. What is below it ends with this.
pub struct Keeper(pub Child);

impl Keeper {
    pub fn start(grace: &TempDir) -> Keeper {
        Keeper::of(LEFT, 8, grace)
    }

    /// Runs a script, below which so many processes sleep once it is up.
    pub fn of(script: &str, asleep: usize, grace: &TempDir) -> Keeper {
        let keeper = Keeper::play(grace, script, &[]);
        // All have become what they are to be.
        keeper.await_asleep(asleep);
        keeper
    }

    /// Runs a script until it says `up`. `$0` is a pid that belongs to no process.
    pub fn play(grace: &TempDir, script: &str, arguments: &[&OsStr]) -> Keeper {
        let here = grace.path().display();
        let config = format!(
            "grace = '300ms'\njournal_dir = '{here}/journal'\nruntime_dir = '{here}/run'\n"
        );
        std::fs::write(grace.path().join("c.toml"), config).expect("write a config");
        let mut gone = Command::new("true").spawn().expect("run true");
        let dead = gone.id();
        gone.wait().expect("wait for it");
        let mut command = Command::new("sh");
        command
            .args(["-c", script, &dead.to_string()])
            .args(arguments);
        command
            .current_dir(grace.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").expect("a PATH"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if nix::unistd::geteuid().is_root() {
            command.uid(user());
        }
        // SAFETY: one system call, which is safe after fork.
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

    /// Starts one more.
    pub fn go_on(&mut self) {
        let before = self.asleep();
        let input = self.0.stdin.as_mut().expect("its input");
        input.write_all(b"\n").expect("tell it to go on");
        self.await_asleep(before + 1);
    }

    pub fn asleep(&self) -> usize {
        self.sleepers().len()
    }

    /// For how long each sleeps that lives.
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
        // Who loses its parent by this is adopted, and found in the next round.
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

/// A service on a keeper and what is below it.
pub struct Service {
    pub keeper: Keeper,
    pub daemon: Daemon,
    // The last field: it goes when all that used it has gone.
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
        let told = serde_json::from_str(&said.out);
        told.unwrap_or_else(|e| panic!("{args:?}: {e}: {}{}", said.out, said.err))
    }

    pub fn ask_as(&self, uid: u32, args: &[&str]) -> CommandOutput {
        ask_as(self.dir.path(), uid, args)
    }

    /// Waits until this many strays are told of for this reason.
    pub fn await_leftovers(&self, n: usize, reason: &str) -> Vec<Event> {
        eventually(&format!("{n} strays are told of: {reason}"), || {
            let events = self.leftovers();
            let of_it = events
                .iter()
                .filter(|e| e.reason.as_deref() == Some(reason));
            (of_it.count() >= n).then_some(events)
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

/// The socket of the one service whose files are in a directory.
pub fn socket(dir: &Path) -> String {
    let entries = std::fs::read_dir(dir.join("run")).expect("list the directory");
    let mut paths = entries.map(|entry| entry.expect("an entry").path());
    let socket = paths.find(|path| path.extension().is_some_and(|end| end == "sock"));
    socket.expect("a socket").display().to_string()
}

/// Asks it as somebody else.
pub fn ask_as(dir: &Path, uid: u32, args: &[&str]) -> CommandOutput {
    let program = dir.join("reaper");
    if !program.exists() {
        // They may not look into the build directory.
        link(Path::new(REAPER), &program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &uid.to_string(), "--clear-groups"]);
    command.arg(program).args(args);
    command.args(["--socket", &socket(dir), "--json"]);
    run(dir, &mut command)
}
