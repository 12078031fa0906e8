//! A simulated kernel: a process table, a clock, and signals that reach no process of this machine.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::Signal;

use reaper_host::facts::{FactAnswer, FactReader, ReadyFuture, Urgency};
use reaper_host::kernel::{
    Clock, Kernel, ProcessHandle, ProcessTable, Signals, Sleep, WatchedHandle,
};
use reaper_host::source::kind::SourceKind;
use reaper_host::source::procfs::{Liveness, ProcessMemory, ProcfsError, Snapshot};
use reaper_host::source::scan::error::ScanError;
use reaper_host::source::{Drained, Source};
use reaper_model::event::{
    Event, EventKind, ExitStatus, Image, ProcEntry, ProcessKey, Provenance, Uids,
};
use reaper_model::facts::{Fact, FactSet, Facts};

const BOOTED: u64 = 1_000_000_000_000;
/// More than the tasks that tokio runs before it polls file descriptors (61).
const YIELDS: usize = 100;
const UIDS: Uids = Uids {
    real: 1000,
    effective: 1000,
};

/// State of the simulated kernel. Its clock advances with each event.
#[derive(Default)]
struct State {
    now: u64,
    processes: BTreeMap<u32, SimProcess>,
    events: VecDeque<Event>,
    sent: Vec<(u32, Signal)>,
    exited: Vec<u64>,
    /// Pid of a process that exits when a handle to it is opened. Another process then gets its pid.
    reused: Option<u32>,
    /// Whether requests for facts stay unanswered.
    holds_facts: bool,
}

struct SimProcess {
    key: ProcessKey,
    parent: u32,
    comm: &'static str,
    watched: Option<u64>,
}

/// A kernel with a simulated process table. Both file descriptors are readable when there is something to read.
pub struct SimKernel {
    state: Mutex<State>,
    event_fd: EventFd,
    exit_fd: EventFd,
}

impl SimKernel {
    pub fn boot() -> Arc<SimKernel> {
        let fd = || EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap();
        Arc::new(SimKernel {
            state: Mutex::new(State {
                now: BOOTED,
                ..State::default()
            }),
            event_fd: fd(),
            exit_fd: fd(),
        })
    }

    /// Returns the signals that were sent, with the pids they were sent to.
    pub fn sent(&self) -> Vec<(u32, Signal)> {
        self.state().sent.clone()
    }

    /// Ends the process of this pid when a handle on it is opened, and starts another one with the same pid.
    pub fn reuse_when_opened(&self, pid: u32) {
        self.state().reused = Some(pid);
    }

    /// Leaves all requests for facts unanswered.
    pub fn hold_facts(&self) {
        self.state().holds_facts = true;
    }

    /// Returns the interfaces through which the engine uses this kernel.
    pub fn interfaces(self: &Arc<Self>) -> (Kernel, Box<dyn Source>) {
        let facts = Arc::clone(self);
        let kernel = Kernel {
            clock: Arc::new(SimClock(Arc::clone(self))),
            processes: Arc::new(SimTable(Arc::clone(self))),
            signals: Arc::new(SimSignals(Arc::clone(self))),
            start_facts: Box::new(move |_| Box::new(SimFacts(Arc::clone(&facts), Vec::new()))),
            open_fallback: Box::new(|_| Err(ScanError::Wait(nix::Error::EMFILE).into())),
            notifier: reaper_host::sys::notify::Notifier::default(),
        };
        (kernel, Box::new(SimSource(Arc::clone(self))))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a process. The scan at the start finds it, if the engine does not run yet.
    pub fn start(&self, pid: u32, parent: u32, comm: &'static str) {
        let mut state = self.state();
        state.now += 20_000_000;
        let key = ProcessKey {
            pid,
            start: state.now,
        };
        let process = SimProcess {
            key,
            parent,
            comm,
            watched: None,
        };
        state.processes.insert(pid, process);
        state.now += 20_000_000;
    }

    /// Starts a process and reports its fork and an exec without a program. Returns the time of the exec.
    pub fn report_unread(&self, pid: u32, parent: u32, comm: &'static str) -> u64 {
        self.start(pid, parent, comm);
        let mut state = self.state();
        let key_of = |pid| state.processes[&pid].key;
        let (key, parent) = (key_of(pid), Some(key_of(parent)));
        let fork = EventKind::Fork {
            child: key,
            parent,
            creator: parent,
            uids: UIDS,
            pidfd_inode: 0,
            namespace_init: false,
            membership: None,
        };
        state.events.push_back(Event {
            time: key.start,
            provenance: Provenance::Kernel,
            kind: fork,
        });
        let time = state.now;
        drop(state);
        self.report_exec(pid, time, Image::unread());
        time
    }

    /// Reports the program of a process that was reported unread.
    pub fn report_late(&self, pid: u32, time: u64) {
        let image = image(self.state().processes[&pid].comm);
        self.report_exec(pid, time, image);
    }

    fn report_exec(&self, pid: u32, time: u64, image: Image) {
        let mut state = self.state();
        let key = state.processes[&pid].key;
        state.events.push_back(Event {
            time,
            provenance: Provenance::Kernel,
            kind: EventKind::Exec {
                key,
                parent: None,
                uids: UIDS,
                pidfd_inode: 0,
                image: image.into(),
                membership: None,
            },
        });
        self.event_fd.write(1).unwrap();
    }

    pub fn exit(&self, pid: u32, exit_status: ExitStatus) {
        let mut state = self.state();
        let Some(process) = state.processes.remove(&pid) else {
            return;
        };
        for child in state
            .processes
            .values_mut()
            .filter(|child| child.parent == pid)
        {
            child.parent = 1;
        }
        state.now += 1_000_000;
        let event = Event {
            time: state.now,
            provenance: Provenance::Kernel,
            kind: EventKind::Exit {
                key: process.key,
                parent: None,
                exit_status,
                peak_rss: 0,
                membership: None,
            },
        };
        state.events.push_back(event);
        self.event_fd.write(1).unwrap();
        if let Some(token) = process.watched {
            state.exited.push(token);
            self.exit_fd.write(1).unwrap();
        }
    }
}

fn image(comm: &str) -> Image {
    Image {
        comm: comm.into(),
        exe: format!("/usr/bin/{comm}").into(),
        ..Image::default()
    }
}

struct SimClock(Arc<SimKernel>);

impl Clock for SimClock {
    fn boot_time(&self) -> u64 {
        self.0.state().now
    }

    fn monotonic(&self) -> u64 {
        self.0.state().now
    }

    fn wall_time(&self) -> u64 {
        self.0.state().now
    }

    /// Advances the clock at once when the engine has nothing else to do.
    fn sleep_until(&self, at: u64) -> Sleep {
        let kernel = Arc::clone(&self.0);
        Box::pin(async move {
            // Lets tokio poll the file descriptors first.
            for _ in 0..YIELDS {
                tokio::task::yield_now().await;
            }
            let mut state = kernel.state();
            state.now = state.now.max(at);
        })
    }
}

struct SimSource(Arc<SimKernel>);

impl AsFd for SimSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.event_fd.as_fd()
    }
}

impl Source for SimSource {
    fn kind(&self) -> SourceKind {
        SourceKind::ProcConnector
    }

    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained {
        let _ = self.0.event_fd.read();
        let events = std::mem::take(&mut self.0.state().events);
        let records = events.len() as u64;
        events.into_iter().for_each(sink);
        Drained {
            records,
            ..Drained::default()
        }
    }

    fn confirms_identity(&mut self, key: ProcessKey) -> bool {
        let state = self.0.state();
        state
            .processes
            .get(&key.pid)
            .is_some_and(|process| process.key == key)
    }
}

struct SimTable(Arc<SimKernel>);

impl ProcessTable for SimTable {
    fn own_pid(&self) -> u32 {
        50
    }

    fn pids(&self) -> Result<Vec<u32>, ProcfsError> {
        Ok(self.0.state().processes.keys().copied().collect())
    }

    fn probe(&self, key: ProcessKey) -> Result<Liveness, ProcfsError> {
        let state = self.0.state();
        let process = state
            .processes
            .get(&key.pid)
            .filter(|process| process.key == key);
        Ok(process.map_or(Liveness::Gone, |process| Liveness::Alive {
            parent: process.parent,
        }))
    }

    fn snapshot_of(&self, pids: Vec<u32>) -> Result<Snapshot, ProcfsError> {
        let state = self.0.state();
        let processes = pids.iter().filter_map(|pid| state.processes.get(pid));
        let rows = processes.map(|process| ProcEntry {
            read_at: state.now,
            key: process.key,
            exact: true,
            pidfd_inode: 0,
            membership: None,
            parent: process.parent,
            uids: UIDS,
            image: image(process.comm).into(),
            kernel_thread: false,
            namespace_init: false,
        });
        Ok(Snapshot {
            rows: rows.collect(),
            ..Snapshot::default()
        })
    }

    fn snapshot_within(&self, _: Duration, pids: Vec<u32>) -> Result<Snapshot, ProcfsError> {
        self.snapshot_of(pids)
    }

    fn state(&self, pid: u32) -> Option<char> {
        self.0.state().processes.contains_key(&pid).then_some('S')
    }

    fn rss_bytes(&self, pid: u32) -> Option<u64> {
        self.memory(pid, false).map(|memory| memory.rss)
    }

    fn memory(&self, pid: u32, _: bool) -> Option<ProcessMemory> {
        let alive = self.0.state().processes.contains_key(&pid);
        alive.then_some(ProcessMemory {
            rss: 1 << 20,
            swap: 0,
        })
    }

    fn is_swap_used(&self) -> bool {
        false
    }

    fn cgroups_below(&self, _: &Path) -> io::Result<Vec<u64>> {
        Ok(Vec::new())
    }
}

struct SimSignals(Arc<SimKernel>);

impl AsFd for SimSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.exit_fd.as_fd()
    }
}

impl Signals for SimSignals {
    fn open(&self, pid: u32) -> nix::Result<Box<dyn WatchedHandle>> {
        let reused = self.0.state().reused.take_if(|reused| *reused == pid);
        if reused.is_some() {
            self.0.exit(pid, ExitStatus::Exited(0));
            self.0.start(pid, 1, "other");
        }
        let state = self.0.state();
        let process = state.processes.get(&pid).ok_or(nix::Error::ESRCH)?;
        Ok(Box::new(SimHandle {
            kernel: Arc::clone(&self.0),
            key: process.key,
        }))
    }

    fn exited(&self) -> Vec<u64> {
        let _ = self.0.exit_fd.read();
        std::mem::take(&mut self.0.state().exited)
    }
}

struct SimHandle {
    kernel: Arc<SimKernel>,
    key: ProcessKey,
}

impl ProcessHandle for SimHandle {
    fn file(&self) -> u64 {
        0
    }

    fn inode(&self) -> Option<u64> {
        None
    }

    fn uids(&self, _: u32) -> Option<Uids> {
        (!self.has_exited()).then_some(UIDS)
    }

    fn wait(&self, _: Duration) -> bool {
        let state = self.kernel.state();
        state
            .processes
            .get(&self.key.pid)
            .is_none_or(|process| process.key != self.key)
    }

    /// SIGKILL ends the process at once. So does SIGTERM, unless its name is `stubborn`.
    fn send_signal(&self, signal: Signal) -> nix::Result<()> {
        let comm = {
            let mut state = self.kernel.state();
            let process = state.processes.get(&self.key.pid);
            let process = process.filter(|process| process.key == self.key);
            let comm = process.ok_or(nix::Error::ESRCH)?.comm;
            state.sent.push((self.key.pid, signal));
            comm
        };
        let ends = signal == Signal::SIGKILL || signal == Signal::SIGTERM && comm != "stubborn";
        if ends {
            let signal = signal as u8;
            let core = false;
            self.kernel
                .exit(self.key.pid, ExitStatus::Signalled { signal, core });
        }
        Ok(())
    }
}

impl WatchedHandle for SimHandle {
    fn handle(&self) -> &dyn ProcessHandle {
        self
    }

    fn watch_exit(&self, token: u64) -> nix::Result<()> {
        let mut state = self.kernel.state();
        match state.processes.get_mut(&self.key.pid) {
            Some(process) if process.key == self.key => process.watched = Some(token),
            _ => {
                state.exited.push(token);
                self.kernel.exit_fd.write(1)?;
            }
        }
        Ok(())
    }
}

/// Reader that answers at once that no fact is a reason to keep a process.
struct SimFacts(Arc<SimKernel>, Vec<FactAnswer>);

impl FactReader for SimFacts {
    fn request(
        &mut self,
        key: ProcessKey,
        _: Option<&Arc<Image>>,
        _: u32,
        needs: FactSet,
        _: Urgency,
    ) {
        self.1.push(FactAnswer {
            key,
            requested: needs,
            found: Facts {
                markers: Fact::Known(0),
                unit: Fact::Known("".into()),
                listening: Fact::Known(false),
                ..Facts::unreadable()
            },
            at: u64::MAX,
        });
    }

    fn has_display(&self) -> bool {
        false
    }

    fn ready(&mut self) -> ReadyFuture<'_> {
        Box::pin(async {
            if self.1.is_empty() || self.0.state().holds_facts {
                std::future::pending().await
            }
        })
    }

    fn take(&mut self) -> Vec<FactAnswer> {
        match self.0.state().holds_facts {
            true => Vec::new(),
            false => std::mem::take(&mut self.1),
        }
    }
}
