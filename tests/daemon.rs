//! A running `reaper daemon`, and its event stream.

use std::cell::{Ref, RefCell};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::privileges;
use crate::proc::ProcessKey;
use crate::world::eventually;

/// The program under test.
pub const REAPER: &str = env!("CARGO_BIN_EXE_reaper");

/// Length of a clock tick of /proc, in nanoseconds.
const TICK_NS: u64 = 10_000_000;

/// Line of the event stream: the fields that tests read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Event {
    pub schema: u32,
    pub seq: u64,
    pub event: String,
    pub time_boot_ns: u64,
    #[serde(rename = "process.pid")]
    pub pid: Option<i32>,
    #[serde(rename = "process.executable.path")]
    pub executable: Option<String>,
    #[serde(rename = "process.exit.code")]
    pub exit_code: Option<i32>,
    #[serde(rename = "process.exit.signal")]
    pub exit_signal: Option<String>,
    pub entity_id: Option<String>,
    pub birth_parent_id: Option<String>,
    pub session_id: Option<String>,
    pub outer_session_id: Option<String>,
    /// Kind of an opened session: `agent` or `server`.
    pub session_kind: Option<String>,
    pub agent: Option<String>,
    pub old_parent_id: Option<String>,
    pub adopter_pid: Option<i32>,
    pub decision: Option<String>,
    pub reason: Option<String>,
    pub rule: Option<String>,
    #[serde(rename = "memory.rss")]
    pub memory_rss: Option<u64>,
    pub signal: Option<String>,
    pub sent_by: Option<String>,
    pub outcome: Option<String>,
    pub failed: Option<u64>,
    pub lost: Option<u64>,
    pub resumed: Option<bool>,
    pub pin_dir: Option<String>,
    /// Number of records read, in the summary.
    pub events: Option<u64>,
}

impl Event {
    /// Returns the start time of the event's process, in nanoseconds since boot.
    pub fn start_ns(&self) -> Option<u64> {
        let (before, _pid) = self.entity_id.as_ref()?.rsplit_once('-')?;
        before.rsplit_once('-')?.1.parse().ok()
    }

    /// Returns the event's process.
    pub fn process(&self) -> Option<ProcessKey> {
        let (pid, ticks) = (self.pid?, self.start_ns()? / TICK_NS);
        Some(ProcessKey { pid, ticks })
    }

    /// Returns whether the event is about this process.
    pub fn is_about(&self, key: ProcessKey) -> bool {
        self.pid == Some(key.pid) && self.process() == Some(key)
    }

    /// Returns whether the event has this name and is about this process.
    pub fn is(&self, name: &str, key: ProcessKey) -> bool {
        self.event == name && self.is_about(key)
    }
}

#[derive(Default)]
struct Log {
    read: u64,
    events: Vec<Event>,
}

/// Process of the daemon.
enum DaemonProcess {
    Own(Child),
    /// Child of another process, which writes its wait status to `DIR/status`.
    Others(ProcessKey),
}

/// Daemon that is killed on drop.
pub struct Daemon {
    process: DaemonProcess,
    dir: PathBuf,
    log: RefCell<Log>,
}

/// Arguments for a daemon with a journal in its directory.
pub const JOURNAL: [&str; 2] = ["--journal-dir", "journal"];

/// Returns the arguments of a daemon on `scope`, or on the whole host. Its files are in `dir`: `config.toml`,
/// `events.jsonl` and the runtime directory `run`.
///
/// It pins nothing unless `more` has `--pin-dir`, because pins outlive a test, and has no journal unless `more` has
/// [`JOURNAL`].
pub fn arguments(dir: &Path, scope: Option<&str>, config: &str, more: &[&str]) -> Vec<String> {
    std::fs::write(dir.join("config.toml"), config).expect("write the configuration");
    let _ = std::fs::remove_file(dir.join("events.jsonl"));
    let path = |name| dir.join(name).display().to_string();
    let mut arguments: Vec<String> = vec!["daemon".into()];
    arguments.extend(
        scope
            .iter()
            .flat_map(|scope| ["--scope".into(), scope.to_string()]),
    );
    arguments.extend((!more.contains(&"--pin-dir")).then(|| "--no-pin".into()));
    arguments.extend(more.iter().map(|word| word.to_string()));
    arguments.extend(["--config".into(), path("config.toml")]);
    arguments.extend(["--events".into(), path("events.jsonl")]);
    arguments.extend(["--runtime-dir".into(), path("run")]);
    arguments.extend((!more.contains(&JOURNAL[0])).then(|| "--no-journal".into()));
    arguments
}

/// Starts a daemon with [`arguments`]. The kernel kills it when the test's thread exits.
pub fn spawn(dir: &Path, arguments: &[String]) -> Child {
    let mut command = Command::new(REAPER);
    command
        .args(arguments)
        .current_dir(dir)
        .stdin(Stdio::null());
    let file = |name| {
        let file = File::options()
            .create(true)
            .append(true)
            .open(dir.join(name));
        file.expect("open a file for its output")
    };
    command.stdout(file("stdout")).stderr(file("stderr"));
    privileges::restrict(&mut command, dir);
    // SAFETY: prctl(2) is a single system call, which is async-signal-safe between fork and exec.
    unsafe { command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?)) };
    command
        .spawn()
        .unwrap_or_else(|e| panic!("start {REAPER}: {e}"))
}

impl Daemon {
    /// Starts a daemon with [`arguments`] and waits until it is ready. Its output goes to the files `stdout` and `stderr`.
    pub fn start(dir: &Path, arguments: &[String]) -> Daemon {
        // Events of earlier daemons stay in the file.
        let said = std::fs::metadata(dir.join("events.jsonl")).map_or(0, |meta| meta.len());
        let log = Log {
            read: said,
            ..Log::default()
        };
        let daemon = Daemon::ready(DaemonProcess::Own(spawn(dir, arguments)), log, dir);
        privileges::assert_restricted(daemon.pid());
        daemon
    }

    /// Waits until a daemon that another process has started with [`arguments`] is ready.
    pub fn attach(dir: &Path, key: ProcessKey) -> Daemon {
        Daemon::ready(DaemonProcess::Others(key), Log::default(), dir)
    }

    fn ready(process: DaemonProcess, log: Log, dir: &Path) -> Daemon {
        let mut daemon = Daemon {
            process,
            dir: dir.to_owned(),
            log: RefCell::new(log),
        };
        eventually("the daemon is ready", || {
            let status = daemon.status();
            assert!(
                status.is_none(),
                "the daemon ended with {}",
                status.unwrap_or_default()
            );
            daemon
                .events()
                .iter()
                .any(|e| e.event == "ready")
                .then_some(())
        });
        daemon
    }

    pub fn pid(&self) -> i32 {
        match &self.process {
            DaemonProcess::Own(child) => child.id().cast_signed(),
            DaemonProcess::Others(key) => key.pid,
        }
    }

    /// Returns its wait status once it has exited.
    fn status(&mut self) -> Option<ExitStatus> {
        match &mut self.process {
            DaemonProcess::Own(child) => child.try_wait().expect("poll the daemon's status"),
            DaemonProcess::Others(_) => {
                let text = std::fs::read_to_string(self.dir.join("status")).ok()?;
                Some(ExitStatus::from_raw(
                    text.strip_suffix('\n')?.parse().expect("a status"),
                ))
            }
        }
    }

    /// Returns all events so far, without an incomplete last line.
    pub fn events(&self) -> Ref<'_, Vec<Event>> {
        self.log
            .borrow_mut()
            .refresh(&self.dir.join("events.jsonl"));
        Ref::map(self.log.borrow(), |log| &log.events)
    }

    /// Stops it by a signal and returns its exit status and all its events.
    pub fn stop(mut self, signal: Signal) -> (ExitStatus, Vec<Event>) {
        kill(Pid::from_raw(self.pid()), signal).expect("interrupt the daemon");
        let status = eventually("the daemon stops", || self.status());
        let events = self.events().clone();
        (status, events)
    }
}

/// Returns the events of all daemons of a directory, in order. The last line of a killed daemon may be incomplete.
pub fn whole_stream(dir: &Path) -> Vec<Event> {
    let text = std::fs::read(dir.join("events.jsonl")).expect("read the events");
    let parsed = text.split(|b| *b == b'\n').filter(|line| !line.is_empty());
    let parsed = parsed.map(|line| (line, serde_json::from_slice::<Event>(line)));
    let parsed: Vec<_> = parsed.collect();
    let first = |n: usize| matches!(parsed.get(n), None | Some((_, Ok(Event { seq: 1, .. }))));
    let whole = parsed.iter().enumerate().filter_map(|(n, (line, event))| {
        let text = String::from_utf8_lossy(line);
        match event {
            Ok(event) => Some(event.clone()),
            Err(e) => {
                assert!(
                    first(n + 1),
                    "malformed event that is not the last of a daemon: {e}: {text}"
                );
                None
            }
        }
    });
    whole.collect()
}

/// Returns the signal events of the daemons of a directory.
pub fn signals(dir: &Path) -> Vec<Event> {
    let mut events = read_events(dir);
    events.retain(|e| e.event == "signal");
    events
}

/// Returns whether a daemon of the directory has reported lost records.
pub fn has_lost_records(dir: &Path) -> bool {
    let lost = |e: &Event| e.event == "gap.open" && e.reason.as_deref() == Some("records_lost");
    read_events(dir).iter().any(lost)
}

/// Returns the decisions and boundaries of a process in order, each with its reason and rule.
pub fn decisions(events: &[Event], key: ProcessKey) -> Vec<String> {
    let of_it = events.iter().filter(|e| e.is_about(key));
    let decided = of_it.filter_map(|e| {
        match e.event.as_str() {
            "decision" => e.decision.as_deref(),
            "boundary" => Some("boundary"),
            _ => None,
        }
        .map(|what| {
            let words = [Some(what), e.reason.as_deref(), e.rule.as_deref()];
            words.into_iter().flatten().collect::<Vec<_>>().join(" ")
        })
    });
    decided.collect()
}

/// Returns all well-formed events in a directory so far; none if there is no event file.
pub fn read_events(dir: &Path) -> Vec<Event> {
    let text = std::fs::read(dir.join("events.jsonl")).unwrap_or_default();
    let lines = text.split(|b| *b == b'\n');
    lines
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect()
}

impl Log {
    fn refresh(&mut self, path: &Path) {
        let Ok(mut file) = File::open(path) else {
            return;
        };
        let mut new = Vec::new();
        file.seek(SeekFrom::Start(self.read))
            .expect("seek in the events");
        file.read_to_end(&mut new).expect("read the events");
        let whole = new
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |end| end + 1);
        for line in new[..whole].split(|b| *b == b'\n') {
            // A line break that ends the incomplete line of a killed daemon.
            if line.is_empty() {
                continue;
            }
            let event = serde_json::from_slice(line);
            let text = || String::from_utf8_lossy(line).into_owned();
            self.events
                .push(event.unwrap_or_else(|e| panic!("malformed event: {e}: {}", text())));
        }
        self.read += whole as u64;
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // These calls fail only if the daemon has exited already.
        match &mut self.process {
            DaemonProcess::Own(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            DaemonProcess::Others(key) => drop(key.signal(Signal::SIGKILL)),
        }
    }
}
