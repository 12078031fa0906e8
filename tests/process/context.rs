//! Operations of every test process: report itself, start other processes, wait at a gate.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, Pid, getpid, getppid};

use crate::proc::{self, ProcessKey};

/// Role, directory and arguments of a test process.
pub struct ProcessContext {
    pub role: String,
    pub dir: PathBuf,
    pub args: Vec<String>,
}

/// Returns the command of a program in the test's directory.
///
/// If the test has provided the program ([`World::provide`](crate::world::World::provide)), the command has its first
/// arguments too. `claude` is called through the link that npm creates.
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

/// Splits the leading modifiers from the rest of a start method ([`ProcessContext::spawn`]).
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
    /// Reports to the test that this process is set up.
    pub fn report(&self) {
        let me = proc::stat("self").expect("/proc/self/stat");
        self.report_other(&self.role, me.id);
    }

    /// Reports another process, which cannot report itself.
    pub fn report_other(&self, role: &str, key: ProcessKey) {
        let line = format!("{role} {} {}\n", key.pid, key.ticks);
        let mut file = OpenOptions::new()
            .append(true)
            .open(self.dir.join("report"))
            .expect("open the report");
        // A single write with O_APPEND, so that lines of several processes do not mix.
        file.write_all(line.as_bytes()).expect("write the report");
    }

    /// Returns the context of another process of the same test.
    pub fn with(&self, role: &str, args: &[&str]) -> ProcessContext {
        ProcessContext {
            role: role.into(),
            dir: self.dir.clone(),
            args: args.iter().map(|a| a.to_string()).collect(),
        }
    }

    /// Returns the command of a process with this program, behaviour and role.
    pub fn command(
        &self,
        image_name: &str,
        behaviour: &str,
        role: &str,
        args: &[String],
    ) -> Command {
        let mut command = image(&self.dir, image_name);
        command
            .args(["test-process", behaviour, role])
            .arg(&self.dir)
            .args(args);
        command
    }

    /// Returns the command of an agent with the arguments of this process. If the first is `as:IMAGE`, it sets the
    /// agent's program.
    pub fn agent(&self) -> Command {
        let (image, args) = match self.args.split_first() {
            Some((first, rest)) if first.starts_with("as:") => (&first[3..], rest),
            _ => ("claude", &self.args[..]),
        };
        self.command(image, "agent", "agent", args)
    }

    /// Starts a process with this role. `how` is `[MODIFIER…] [METHOD] BEHAVIOUR [ARG…]`.
    ///
    /// Methods: `fork` without exec, `double` as an orphan by a double fork, `triple-fork` as an orphan after three forks
    /// without exec. The default is fork and exec.
    ///
    /// Modifiers, which `fork` and `triple-fork` ignore: `as:IMAGE` sets the program, `env-i` clears the environment,
    /// `env:NAME=VALUE` adds a variable, `no-input` sets standard input to /dev/null.
    pub fn spawn(&self, role: &str, how: &str) {
        let (modifiers, rest) = modifiers(how);
        match rest.split_once(' ') {
            Some(("fork", rest)) => {
                fork(|| self.run_behaviour(role, rest));
            }
            Some(("triple-fork", rest)) => fork_times(3, &|| self.run_behaviour(role, rest)),
            Some(("double", rest)) => {
                let words = [&modifiers[..], &[rest]].concat().join(" ");
                let mut middle = self.start(&[], role, &format!("middle {words}"));
                // A process with SA_NOCLDWAIT, as the launcher, gets no status of its children.
                let ended = middle.wait().map_err(|error| error.raw_os_error());
                assert!(
                    matches!(ended, Ok(_) | Err(Some(nix::libc::ECHILD))),
                    "wait for the middle process: {ended:?}"
                );
            }
            _ => drop(self.start(&modifiers, role, rest)),
        }
    }

    /// Starts a process by fork and exec, with this standard input and output.
    pub fn spawn_between(&self, role: &str, how: &str, [input, output]: [Stdio; 2]) {
        let (modifiers, rest) = modifiers(how);
        begin(
            self.prepare(&modifiers, role, rest)
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
        let behaviour = words.next().expect("a behaviour");
        let image = modifiers.iter().find_map(|word| word.strip_prefix("as:"));
        let image = image.unwrap_or("worker");
        let mut command = self.command(image, &behaviour, role, &words.collect::<Vec<_>>());
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

    /// Returns the command of these words, with `{dir}` replaced by the test's directory.
    pub fn real(&self, words: &[String]) -> Command {
        let here = self.dir.display().to_string();
        let words: Vec<String> = words.iter().map(|w| w.replace("{dir}", &here)).collect();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// Runs the behaviour and arguments in `how` in this process.
    pub fn run_behaviour(&self, role: &str, how: &str) -> ! {
        let words: Vec<&str> = how.split(' ').collect();
        super::find_behaviour(words[0])(&self.with(role, &words[1..]))
    }

    /// Executes the worker program with the behaviour and arguments in `how`.
    pub fn exec(&self, how: &str) -> ! {
        let mut words = how.split(' ').map(String::from);
        let behaviour = words.next().expect("a behaviour");
        let args: Vec<_> = words.collect();
        let error = self.command("worker", &behaviour, &self.role, &args).exec();
        panic!("exec {how}: {error}")
    }

    /// Blocks until the test opens the gate of this name.
    pub fn gate(&self, name: &str) {
        let path = self.dir.join(name);
        match nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o666)) {
            Ok(()) | Err(nix::Error::EEXIST) => {}
            Err(e) => panic!("make the gate {name}: {e}"),
        }
        // Opening a FIFO for reading blocks until another process opens it for writing.
        File::open(path).expect("wait at the gate");
    }
}

/// Starts a process without waiting for it.
pub fn begin(command: &mut Command) {
    drop(
        command
            .spawn()
            .unwrap_or_else(|e| panic!("start {command:?}: {e}")),
    );
}

/// Sleeps until a signal ends the process.
pub fn rest() -> ! {
    loop {
        nix::unistd::pause();
    }
}

/// Waits until this process has another parent than `parent`.
pub fn orphaned_by(parent: Pid) {
    while getppid() == parent {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Forks a process that runs `child` and exits when that returns.
pub fn fork(child: impl FnOnce()) -> Pid {
    // SAFETY: the caller has one thread, so the child may do what the parent may. Children of a process with two threads
    // (`threads.rs`) only make system calls.
    match unsafe { nix::unistd::fork() }.expect("fork") {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            nix::unistd::alarm::set(super::LIFETIME_S);
            child();
            leave(0)
        }
    }
}

/// Forks a chain of `n` processes. All but the last exit right after their fork; the last one runs `last`.
fn fork_times(n: u32, last: &dyn Fn()) {
    let first = fork(|| continue_chain(n - 1, last));
    nix::sys::wait::waitpid(first, None).expect("wait for the first hop");
}

fn continue_chain(n: u32, last: &dyn Fn()) -> ! {
    let me = getpid();
    fork(|| {
        if n > 1 {
            continue_chain(n - 1, last);
        }
        orphaned_by(me);
        last()
    });
    leave(0)
}

/// Exits at once, without exit handlers.
pub fn leave(code: i32) -> ! {
    // SAFETY: _exit(2) takes no pointers; no buffer needs to be flushed.
    unsafe { nix::libc::_exit(code) }
}
