//! Sandbox in which an agent is installed and run: a temporary folder, namespaces, and a daemon that observes.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use serde_json::Value;

use super::install::{self, Installed};
use crate::bench::undo::Undo;
use crate::shell::OwnedChild;

/// Unprivileged uid that installs and runs agents.
pub const USER: Uid = Uid::from_raw(65534);

const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// Temporary folder, deleted on drop and on an interrupt.
pub struct Sandbox {
    /// Part that belongs to the user.
    pub folder: PathBuf,
    own: PathBuf,
    _removal: Undo,
}

impl Sandbox {
    /// Creates the folder.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn new(name: &str) -> Result<Sandbox> {
        let own = std::env::temp_dir().join(format!("agents-{}-{name}", std::process::id()));
        let folder = own.join("agent");
        // Fails if another user has created something there.
        fs::create_dir(&own).with_context(|| own.display().to_string())?;
        let removal = Undo::removes(&own);
        fs::create_dir_all(folder.join("work"))?;
        // The user needs access, whatever the umask.
        fs::set_permissions(&own, fs::Permissions::from_mode(0o755))?;
        for directory in [&folder, &folder.join("work")] {
            fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
            chown(directory, Some(USER.as_raw()), Some(USER.as_raw()))?;
        }
        Ok(Sandbox {
            folder,
            own,
            _removal: removal,
        })
    }

    /// Starts a command of an agent in new namespaces. The agent waits for [`Run::go`].
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn start(&self, installed: &Installed, directory: &Path, line: &str) -> Result<Run> {
        let bin = installed.command.parent().unwrap_or(Path::new("/"));
        let user = install::as_user(&installed.folder, USER, bin);
        let mut command = ends_with_us("unshare");
        command.args("--mount --pid --net --mount-proc --fork --kill-child".split(' '));
        // The shell stays the init: changing the uid would clear the signal that ends it with `unshare`.
        let script = "read go; ip link set lo up; \"$@\"; exit 0";
        command
            .args(["sh", "-c", script, "sh"])
            .arg(user.get_program())
            .args(user.get_args());
        let environment = installed.environment.iter();
        command.args(environment.map(|(name, value)| format!("{name}={value}")));
        command.args(["script", "--quiet", "--flush", "--command"]);
        command.args([line, "/dev/null"]);
        command.current_dir(directory);
        let output = File::create(self.own.join("output"))?;
        command
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output);
        let child = command.spawn().context("cannot start unshare")?;
        Ok(Run {
            child: OwnedChild(child),
        })
    }

    /// Starts a daemon that observes a run, with these additional rules. `name` is the prefix of its files.
    ///
    /// # Errors
    /// The daemon cannot be started, or is not ready in time.
    pub fn watch(&self, reaper: &Path, run: &Run, name: &str, rules: &str) -> Result<Watch> {
        let path = |kind: &str| self.own.join(format!("{name}.{kind}"));
        fs::write(path("toml"), rules)?;
        let mut command = ends_with_us(reaper);
        command.args(["daemon", "--observe", "--json", "--no-pin", "--no-journal"]);
        command.arg("--scope").arg(run.pid().to_string());
        command.arg("--config").arg(path("toml"));
        command.arg("--runtime-dir").arg(path("run"));
        command
            .stdin(Stdio::null())
            .stdout(File::create(path("stream"))?);
        command.stderr(File::create(path("errors"))?);
        let mut watch = Watch {
            child: OwnedChild(command.spawn().context("cannot start reaper")?),
            stream: path("stream"),
        };
        let started = Instant::now();
        while fs::metadata(&watch.stream)?.len() == 0 {
            let ended = watch.child.try_wait()?.is_some();
            if ended || started.elapsed() > READY_TIMEOUT {
                let errors = fs::read_to_string(path("errors"))?;
                bail!("reaper is not ready: {}", errors.trim());
            }
            sleep(Duration::from_millis(20));
        }
        Ok(watch)
    }

    /// Returns the last line of the agent's output.
    pub fn last_line(&self) -> String {
        let output = fs::read(self.own.join("output")).unwrap_or_default();
        let output = String::from_utf8_lossy(&output);
        let plain = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>();
        let last = output
            .lines()
            .map(plain)
            .rfind(|line| !line.trim().is_empty());
        last.unwrap_or_default().chars().take(200).collect()
    }
}

/// Agent in its namespaces. On drop, `unshare` is killed. The kernel then kills the init of the PID namespace, and with it
/// all processes there.
pub struct Run {
    child: OwnedChild,
}

impl Run {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets the agent start.
    ///
    /// # Errors
    /// The namespaces could not be created.
    pub fn go(&mut self) -> Result<()> {
        let input = self.child.stdin.as_mut().context("no input")?;
        input
            .write_all(b"go\n")
            .context("the namespaces could not be created")
    }
}

/// Running daemon; killed on drop.
pub struct Watch {
    child: OwnedChild,
    stream: PathBuf,
}

impl Watch {
    /// Stops the daemon and returns its events.
    ///
    /// # Errors
    /// The daemon cannot be stopped, or its stream cannot be read.
    pub fn stop(mut self) -> Result<Vec<Value>> {
        // Time to read the last events.
        sleep(Duration::from_millis(500));
        let pid = Pid::from_raw(self.child.id().cast_signed());
        kill(pid, Signal::SIGTERM).context("cannot stop reaper")?;
        self.child.wait()?;
        let stream = fs::read_to_string(&self.stream)?;
        let event = |line: &str| serde_json::from_str(line).context("a line of the stream");
        stream.lines().map(event).collect()
    }
}

/// Returns a command that is killed when this process exits.
fn ends_with_us(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program.as_ref());
    command
}
