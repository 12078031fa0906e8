//! World of one run: new mount, PID and network namespaces, an empty home, the mock model, a person's terminal, and a
//! `reaper daemon` limited to it. All of it ends on drop, or when the driver exits.

use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::mock;
use super::process::{self, CANARIES, LEFTOVERS};
use crate::shell::{OwnedChild, processes};

/// Time limit for the setup of a world.
const PATIENCE: Duration = Duration::from_secs(30);

/// Process of a world, with its pids outside of it.
#[derive(Clone, PartialEq, Eq)]
pub struct WorldProcess {
    pub pid: i32,
    pub parent: i32,
    /// Pid inside the world.
    pub inner: i32,
    pub argv: Vec<String>,
    start: u64,
}

pub struct World {
    pub dir: PathBuf,
    init: i32,
    namespace: PathBuf,
    /// Daemon, which stops before the namespaces end.
    daemon: Option<OwnedChild>,
    /// `unshare`. Its child, and thus the namespaces, end with it.
    outer: OwnedChild,
    reaper: Option<PathBuf>,
    /// PATH of the processes in the world.
    path: String,
}

/// Requirements of an agent.
pub struct WorldOptions<'a> {
    /// Directory of programs, first in PATH.
    pub path: &'a Path,
    pub environment: &'a [(String, String)],
    /// Files below the home directory, with their contents.
    pub files: &'a [(String, String)],
    /// Whether the model withholds its second response.
    pub holds: bool,
}

impl World {
    /// Creates a world in `dir`, which must not exist yet, with a daemon if `reaper` is given.
    ///
    /// # Errors
    /// A system call fails, or a process does not start in time.
    pub fn start(dir: &Path, needs: &WorldOptions<'_>, reaper: Option<&Path>) -> Result<World> {
        for name in ["", "bin", "tmp", "home", "project"] {
            let part = dir.join(name);
            fs::create_dir_all(&part)?;
            chown(&part, Some(process::USER), Some(process::USER))?;
        }
        let own = dir.with_file_name(process::COMMAND);
        for name in ["leftover", "mcp", "person", "mock-model", "editor"] {
            fs::hard_link(&own, dir.join("bin").join(name))?;
        }
        for (path, text) in needs.files {
            let file = dir.join("home").join(path);
            let parents: Vec<&Path> = file
                .ancestors()
                .skip(1)
                .take_while(|part| *part != dir)
                .collect();
            for parent in parents.into_iter().rev() {
                fs::create_dir_all(parent)?;
                chown(parent, Some(process::USER), Some(process::USER))?;
            }
            fs::write(&file, text)?;
            chown(&file, Some(process::USER), Some(process::USER))?;
        }
        fs::write(dir.join("tool-command"), tool_command(dir))?;
        if needs.holds {
            fs::write(dir.join("hold"), "")?;
        }
        let system = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";
        let path = format!("{}:{system}", needs.path.display());
        let mut command = Command::new("setpriv");
        command
            .args("--pdeathsig KILL unshare --mount --pid --net --mount-proc --fork".split(' '))
            .args(["--kill-child=KILL", "--"])
            .arg(dir.join("bin/person"))
            .args([process::COMMAND, "init"])
            .arg(dir)
            .env_clear()
            .env("HOME", dir.join("home"))
            .env("PATH", &path)
            .envs([
                ("TERM", "xterm-256color"),
                ("LANG", "C.UTF-8"),
                ("SHELL", "/bin/bash"),
                ("USER", "nobody"),
            ])
            .envs(needs.environment.iter().map(|(name, value)| (name, value)))
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(File::create(dir.join("init.log"))?)
            .stderr(File::create(dir.join("init.errors"))?);
        let outer = command
            .spawn()
            .context("cannot start setpriv and unshare")?;
        let mut world = World {
            dir: dir.to_owned(),
            outer: OwnedChild(outer),
            init: 0,
            namespace: PathBuf::new(),
            daemon: None,
            reaper: reaper.map(Path::to_owned),
            path,
        };
        world.wait("the world's init", |world| world.dir.join("ready").exists())?;
        let outer = world.outer.id();
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))?;
        world.init = children.trim().parse().context("unshare has no child")?;
        world.namespace = fs::read_link(format!("/proc/{}/ns/pid", world.init))?;
        let own = fs::read_link("/proc/self/ns/pid")?;
        ensure!(world.namespace != own, "the world has no PID namespace");
        world.start_person()?;
        world.start_daemon()?;
        Ok(world)
    }

    /// Starts the processes of the person: a job of the agent's shell, and two in another window.
    fn start_person(&self) -> Result<()> {
        let [sleep, listen, job] = CANARIES;
        let person = self.dir.join("bin/person");
        let person = format!("{} {}", person.display(), process::COMMAND);
        for window in ["canary", "client"] {
            let shell = "bash --norc --noprofile";
            self.tmux(&["new-window", "-d", "-t", "person:", "-n", window, shell])?;
        }
        self.type_line("agent", &format!("nohup {person} {job} >/dev/null 2>&1 &"))?;
        self.type_line("canary", &format!("{person} {listen} &"))?;
        self.type_line("canary", &format!("{person} {sleep}"))?;
        self.wait("the person's processes", |world| {
            let all = world.processes();
            CANARIES
                .iter()
                .all(|canary| all.iter().any(|process| process.role() == Some(canary)))
        })
    }

    /// Returns the daemon's runtime directory. It is outside the world's directory, so that only root may change it.
    fn run_dir(&self) -> PathBuf {
        self.dir.with_extension("run")
    }

    fn start_daemon(&mut self) -> Result<()> {
        let Some(reaper) = &self.reaper else {
            return Ok(());
        };
        fs::create_dir(self.run_dir())?;
        let config = self.dir.with_file_name("reaper.toml");
        fs::write(&config, "")?;
        let daemon = Command::new("setpriv")
            .args(["--pdeathsig", "TERM"])
            .arg(reaper)
            .args(["daemon", "--enforce", "--no-pin", "--no-journal", "--scope"])
            .args([&self.init.to_string(), "--config"])
            .arg(&config)
            .arg("--runtime-dir")
            .arg(self.run_dir())
            .arg("--events")
            .arg(self.dir.join("stream.jsonl"))
            .stdin(Stdio::null())
            .stdout(File::create(self.dir.join("daemon.log"))?)
            .stderr(File::create(self.dir.join("daemon.errors"))?)
            .spawn()
            .context("cannot start reaper")?;
        self.daemon = Some(OwnedChild(daemon));
        self.wait("reaper", |world| {
            let stream = fs::read_to_string(world.dir.join("stream.jsonl")).unwrap_or_default();
            stream.contains("\"event\":\"ready\"")
        })
    }

    /// Waits for a step of the setup.
    fn wait(&self, what: &str, mut is_there: impl FnMut(&World) -> bool) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !is_there(self) {
            let errors = ["init.errors", "daemon.errors"]
                .map(|name| fs::read_to_string(self.dir.join(name)));
            let errors: String = errors.into_iter().flatten().collect();
            ensure!(
                Instant::now() < end,
                "{what} does not start: {}",
                errors.trim()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Returns all processes of the world that have not exited.
    pub fn processes(&self) -> Vec<WorldProcess> {
        let is_inside = |path: &Path| {
            fs::read_link(path.join("ns/pid")).is_ok_and(|namespace| namespace == self.namespace)
        };
        let inside = processes().filter(|(_, path)| is_inside(path));
        inside
            .filter_map(|(pid, _)| WorldProcess::read(pid))
            .collect()
    }

    /// Runs a tmux command on the person's server.
    ///
    /// # Errors
    /// tmux cannot be started or fails.
    pub fn tmux(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new("tmux")
            .env("LANG", "C.UTF-8")
            // A new window inherits it from the client.
            .env("PATH", &self.path)
            .arg("-S")
            .arg(self.dir.join("tmux.sock"))
            .args(arguments)
            .output()
            .context("cannot start tmux")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "tmux {}: {}",
            arguments.join(" "),
            errors.trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Types a line into a window of the person's terminal.
    ///
    /// # Errors
    /// As [`World::tmux`].
    pub fn type_line(&self, window: &str, line: &str) -> Result<()> {
        self.keys(window, &[line])?;
        // Terminal programs treat fast input as pasted text, in which Enter is a new line.
        std::thread::sleep(Duration::from_millis(600));
        self.keys(window, &["Enter"])
    }

    /// Sends keys by their tmux names. Other words are typed as they are.
    ///
    /// # Errors
    /// As [`World::tmux`].
    pub fn keys(&self, window: &str, keys: &[&str]) -> Result<()> {
        let window = format!("person:{window}");
        self.tmux(&[&["send-keys", "-t", &window], keys].concat())
            .map(drop)
    }

    /// Returns the content of a window; empty if it is closed.
    pub fn screen(&self, window: &str) -> String {
        self.tmux(&["capture-pane", "-p", "-t", &format!("person:{window}")])
            .unwrap_or_default()
    }

    /// Returns the shell of a window.
    ///
    /// # Errors
    /// The window is closed.
    pub fn shell(&self, window: &str) -> Result<WorldProcess> {
        let window = format!("person:{window}");
        let inner: i32 = self
            .tmux(&["display-message", "-p", "-t", &window, "#{pane_pid}"])?
            .trim()
            .parse()?;
        let mut all = self.processes().into_iter();
        all.find(|process| process.inner == inner)
            .context("the shell is gone")
    }

    /// Returns how often the mock has logged an event.
    pub fn noted(&self, event: &str) -> usize {
        let log = fs::read_to_string(self.dir.join("mock.log")).unwrap_or_default();
        log.lines()
            .filter(|line| line.split(' ').nth(1) == Some(event))
            .count()
    }

    /// Returns the reason that `reaper explain` reports for a process, if any.
    pub fn explain(&self, process: &WorldProcess) -> Option<String> {
        let reaper = self.reaper.as_ref()?;
        let mut files = fs::read_dir(self.run_dir())
            .ok()?
            .flatten()
            .map(|entry| entry.path());
        let socket = files.find(|path| path.extension().is_some_and(|end| end == "sock"))?;
        let output = Command::new(reaper)
            .args(["explain", "--json", &process.pid.to_string(), "--socket"])
            .arg(socket)
            .output()
            .ok()?;
        let answer: Value = serde_json::from_slice(&output.stdout).ok()?;
        let mut log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.join("explain.jsonl"))
            .ok()?;
        std::io::Write::write_all(&mut log, format!("{answer}\n").as_bytes()).ok()?;
        Some(answer["why"].as_str()?.to_owned())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            // Fails only if the daemon has exited.
            let _ = kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGTERM);
            let end = Instant::now() + Duration::from_secs(5);
            while matches!(daemon.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

impl WorldProcess {
    /// Reads a process, unless it has exited.
    fn read(pid: i32) -> Option<WorldProcess> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        if ["Z", "X"].contains(fields.first()?) {
            return None;
        }
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let inner = status
            .lines()
            .find_map(|line| line.strip_prefix("NSpid:"))?;
        let argv = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let argv = String::from_utf8_lossy(&argv);
        Some(WorldProcess {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            inner: inner.split_whitespace().next_back()?.parse().ok()?,
            argv: argv
                .trim_end_matches('\0')
                .split('\0')
                .map(str::to_owned)
                .collect(),
            start: fields.get(19)?.parse().ok()?,
        })
    }

    pub fn is(&self, other: &WorldProcess) -> bool {
        (self.pid, self.start) == (other.pid, other.start)
    }

    /// Returns the role of a process of [`process`]; `None` for others.
    pub fn role(&self) -> Option<&str> {
        let at = self.argv.iter().position(|word| word == process::COMMAND)?;
        self.argv.get(at + 1).map(String::as_str)
    }

    /// Returns a short name for the table.
    pub fn label(&self) -> String {
        if let Some(role) = self.role() {
            return role.to_owned();
        }
        let words = self
            .argv
            .iter()
            .filter(|word| !word.starts_with('-'))
            .take(3);
        let short = words.map(|word| {
            let name = if word.starts_with('/') {
                word.rsplit('/').next()
            } else {
                None
            };
            let name = name.unwrap_or(word).replace('\n', " ");
            name.chars().take(24).collect::<String>()
        });
        short.collect::<Vec<_>>().join(" ")
    }

    /// Sends a signal to the process.
    ///
    /// # Errors
    /// The process is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let same = WorldProcess::read(self.pid).is_some_and(|now| now.is(self));
        ensure!(same, "{} is gone", self.label());
        kill(Pid::from_raw(self.pid), signal).with_context(|| format!("cannot send {signal}"))
    }
}

/// Returns the command of the tool call, which leaves a child of each kind behind.
fn tool_command(world: &Path) -> String {
    let leftover = world.join("bin/leftover");
    let own = format!("{} {}", leftover.display(), process::COMMAND);
    let [plain, setsid, nohup, listen] = LEFTOVERS;
    let quiet = "</dev/null >/dev/null 2>&1 &";
    format!(
        "{own} {plain} {quiet} setsid {own} {setsid} {quiet} nohup {own} {nohup} {quiet} {own} {listen} {quiet} \
         sleep 1; echo {}",
        mock::PORT
    )
}
