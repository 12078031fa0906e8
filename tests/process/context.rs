//! What every process can do: report itself, start others in all the ways there are, wait for its cue.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, Pid, getpid, getppid};

use crate::proc::{self, ProcessKey};

/// Who a process is and where it stands.
pub struct ProcessContext {
    pub role: String,
    pub dir: PathBuf,
    pub args: Vec<String>,
}

/// A program in the test's directory, and the words that come before a process's own: what the test provides by this
/// name, or `claude` where npm puts it, called through its link.
fn image(dir: &Path, name: &str) -> Command {
    if let Ok(words) = std::fs::read_to_string(dir.join("programs").join(name)) {
        let mut words = words.split('\n');
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        return command;
    }
    Command::new(match name {
        "claude" => dir.join("node_modules/.bin/claude"),
        other => dir.join("bin").join(other),
    })
}

/// Splits what is to be done into the words that say how it is started, and the rest.
pub fn modifiers(how: &str) -> (Vec<&str>, &str) {
    let (mut found, mut rest) = (Vec::new(), how);
    while let Some((word, after)) = rest.split_once(' ')
        && (word == "env-i"
            || word == "no-input"
            || word.starts_with("env:")
            || word.starts_with("as:"))
    {
        found.push(word);
        rest = after;
    }
    (found, rest)
}

impl ProcessContext {
    /// Tells the test that this process is up.
    pub fn report(&self) {
        let me = proc::stat("self").expect("/proc/self/stat");
        self.report_other(&self.role, me.id);
    }

    /// Tells the test that another process is up, which cannot do so itself.
    pub fn report_other(&self, role: &str, who: ProcessKey) {
        let line = format!("{role} {} {}\n", who.pid, who.ticks);
        let mut file = OpenOptions::new()
            .append(true)
            .open(self.dir.join("report"))
            .expect("open the report");
        // One write to a file opened for appending: lines of many processes do not mix.
        file.write_all(line.as_bytes()).expect("write the report");
    }

    /// The same stage for another process.
    pub fn with(&self, role: &str, args: &[&str]) -> ProcessContext {
        ProcessContext {
            role: role.into(),
            dir: self.dir.clone(),
            args: args.iter().map(|a| a.to_string()).collect(),
        }
    }

    /// A program that plays `play` as `role`.
    pub fn command(&self, image_name: &str, play: &str, role: &str, args: &[String]) -> Command {
        let mut command = image(&self.dir, image_name);
        command
            .args(["test-process", play, role])
            .arg(&self.dir)
            .args(args);
        command
    }

    /// The agent, with this process's own arguments as its. The first may be `as:IMAGE` for another program.
    pub fn agent(&self) -> Command {
        let (image, args) = match self.args.split_first() {
            Some((first, rest)) if first.starts_with("as:") => (&first[3..], rest),
            _ => ("claude", &self.args[..]),
        };
        self.command(image, "agent", "agent", args)
    }

    /// Starts `role`. `how` is the play and its arguments, after an optional word for the way: `fork` without exec,
    /// `double` as an orphan, `hops` as an orphan of three processes that never ran a program. Before that may stand
    /// `as:IMAGE` for another program, `env-i` for no environment, `env:NAME=VALUE` for more of it,
    /// `no-input` for nothing to read from.
    pub fn spawn(&self, role: &str, how: &str) {
        let (modifiers, play) = modifiers(how);
        match play.split_once(' ') {
            Some(("fork", rest)) => {
                fork(|| self.run_behaviour(role, rest));
            }
            Some(("triple-fork", rest)) => fork_times(3, &|| self.run_behaviour(role, rest)),
            Some(("double", rest)) => {
                let words = [&modifiers[..], &[rest]].concat().join(" ");
                let mut middle = self.start(&[], role, &format!("middle {words}"));
                // One that never has to wait for its children learns nothing of them.
                let ended = middle.wait().map_err(|error| error.raw_os_error());
                assert!(
                    matches!(ended, Ok(_) | Err(Some(nix::libc::ECHILD))),
                    "wait for the middle process: {ended:?}"
                );
            }
            _ => drop(self.start(&modifiers, role, play)),
        }
    }

    /// Starts `role` as [`Stage::spawn`] does, with this standard input and output.
    pub fn spawn_between(&self, role: &str, how: &str, [input, output]: [Stdio; 2]) {
        let (modifiers, play) = modifiers(how);
        begin(
            self.prepare(&modifiers, role, play)
                .stdin(input)
                .stdout(output),
        );
    }

    fn start(&self, modifiers: &[&str], role: &str, how: &str) -> Child {
        let mut command = self.prepare(modifiers, role, how);
        command
            .spawn()
            .unwrap_or_else(|e| panic!("start {role}: {e}"))
    }

    fn prepare(&self, modifiers: &[&str], role: &str, how: &str) -> Command {
        let mut words = how.split(' ').map(String::from);
        let play = words.next().expect("a play");
        let image = modifiers.iter().find_map(|word| word.strip_prefix("as:"));
        let image = image.unwrap_or("worker");
        let mut command = self.command(image, &play, role, &words.collect::<Vec<_>>());
        if modifiers.contains(&"env-i") {
            command.env_clear();
        }
        if modifiers.contains(&"no-input") {
            command.stdin(Stdio::null());
        }
        for word in modifiers
            .iter()
            .filter_map(|word| word.strip_prefix("env:"))
        {
            let (name, value) = word.split_once('=').expect("NAME=VALUE");
            command.env(name, value);
        }
        command
    }

    /// The command of these words, in which `{dir}` stands for the directory of the test.
    pub fn real(&self, words: &[String]) -> Command {
        let here = self.dir.display().to_string();
        let words: Vec<String> = words.iter().map(|w| w.replace("{dir}", &here)).collect();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// Plays `how` in this process.
    pub fn run_behaviour(&self, role: &str, how: &str) -> ! {
        let words: Vec<&str> = how.split(' ').collect();
        super::find_behaviour(words[0])(&self.with(role, &words[1..]))
    }

    /// Runs the worker program in place of this one.
    pub fn exec(&self, how: &str) -> ! {
        let mut words = how.split(' ').map(String::from);
        let play = words.next().expect("a play");
        let error = self
            .command("worker", &play, &self.role, &words.collect::<Vec<_>>())
            .exec();
        panic!("exec {how}: {error}")
    }

    /// Blocks until the test opens the gate of this name.
    pub fn gate(&self, name: &str) {
        let path = self.dir.join(name);
        match nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o666)) {
            Ok(()) | Err(nix::Error::EEXIST) => {}
            Err(e) => panic!("make the gate {name}: {e}"),
        }
        // Opening a FIFO to read blocks until somebody opens it to write.
        File::open(path).expect("wait at the gate");
    }
}

/// Starts a process that nobody waits for.
pub fn begin(command: &mut Command) {
    drop(
        command
            .spawn()
            .unwrap_or_else(|e| panic!("start {command:?}: {e}")),
    );
}

/// Does nothing until it is ended.
pub fn rest() -> ! {
    loop {
        nix::unistd::pause();
    }
}

/// Waits until this process has been given to another parent than `parent`.
pub fn orphaned_by(parent: Pid) {
    while getppid() == parent {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A new process that runs no other program, and ends when `child` returns.
pub fn fork(child: impl FnOnce()) -> Pid {
    // SAFETY: processes that fork have one thread, so the child may do whatever the parent may; children of one
    // that has two make nothing but system calls.
    match unsafe { nix::unistd::fork() }.expect("fork") {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            nix::unistd::alarm::set(super::LIFETIME_S);
            child();
            leave(0)
        }
    }
}

/// A process at the end of `n` others which are gone as soon as they have forked.
fn fork_times(n: u32, last: &dyn Fn()) {
    let first = fork(|| onward(n - 1, last));
    nix::sys::wait::waitpid(first, None).expect("wait for the first hop");
}

fn onward(n: u32, last: &dyn Fn()) -> ! {
    let me = getpid();
    fork(|| {
        if n > 1 {
            onward(n - 1, last);
        }
        orphaned_by(me);
        last()
    });
    leave(0)
}

/// Ends this process at once, without the runtime's own clean-up.
pub fn leave(code: i32) -> ! {
    // SAFETY: ends the process; there is nothing to flush.
    unsafe { nix::libc::_exit(code) }
}
