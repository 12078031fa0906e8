//! Tests of a source that fails at run time, and of lost fork events.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{Bpffs, PinnedWorld, SurvivalScenario};
use crate::cli::ask_json;
use crate::proc;
use crate::process::instruction;
use crate::trees::OWN_RULES;
use crate::world::World;

pub const SCENARIOS: &[SurvivalScenario] = &[("probe-map-frozen", probe_map_frozen)];

pub const CONNECTOR_SCENARIOS: &[SurvivalScenario] = &[
    ("socket-fails", socket_fails),
    ("births-lost-before-exec", births_lost_before_exec),
];

/// Config that reaps members attributed by evidence, which shows that they are.
const REAPS_INFERRED: &str = r#"
grace = "500ms"
kill_timeout = "10s"

[[rule]]
name = "on-evidence"
action = "reap"
session = "gone"
inferred = true
"#;

/// The service falls back to another source if it cannot write to its control map any more.
///
/// The probes themselves cannot be detached, because the running service holds their links open.
fn probe_map_frozen() {
    let mut test = PinnedWorld::new(OWN_RULES, &["--source", "ebpf"]);
    assert_failover(&mut test, &["ebpf", "proc-connector", "procfs"], |test| {
        freeze(&test.pins.one("maps-").join("CONTROL")).expect("freeze a map");
    });
    assert!(!test.pins.dir().exists(), "the pins were not removed");
}

/// The service falls back to another source if the proc connector's socket fails.
fn socket_fails() {
    let mut test = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    test.world.spawn("host", "failing-socket");
    test.world.await_processes("host", 1);
    test.world
        .start_daemon_inside_tree(OWN_RULES, &["--source", "proc-connector"]);
    assert_failover(&mut test, &["proc-connector", "procfs"], |test| {
        fs::write(test.world.dir().join("deaf"), "").expect("make the socket fail");
    });
}

/// A process whose fork event was lost is attributed by evidence, even if its exec was reported before the reconciliation
/// scan.
fn births_lost_before_exec() {
    let mut test = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    test.world
        .start_daemon(REAPS_INFERRED, &["--source", "proc-connector"]);
    let dir = test.world.dir().display().to_string();
    // The leader of a process group: the orphan's group is the only evidence of its descent.
    let leader = format!(
        "exec setsid {dir}/bin/worker test-process later leader {dir} go orphan double sleep"
    );
    let leader = format!("leader={}", leader.replace(' ', "+"));
    test.agent("agent", &[&leader, "leaf=sleep"], &["leader", "leaf"]);
    test.await_sessions(&["agent"]);
    let leader = test.world.process("leader");
    test.world
        .await_event("an event of the leader", |e| e.is_about(leader));
    let daemon = proc::stat(test.world.daemon().pid())
        .expect("the daemon")
        .id;
    let socket = connector_of(daemon.pid).expect("its socket");
    assert!(
        daemon.signal(Signal::SIGSTOP),
        "the daemon could not be stopped"
    );
    let forks = ForkFilter::install(&socket).expect("filter fork events");
    test.world.open_gate("go");
    test.world.await_processes("orphan", 1);
    drop(forks);
    assert!(
        daemon.signal(Signal::SIGCONT),
        "the daemon could not be continued"
    );
    test.world
        .await_event("the gap is closed", |e| e.event == "gap.close");
    test.world.kill("agent");
    test.world.await_gone(&["leader", "leaf", "orphan"]);
    test.await_closed(1);
    let stream = test.end(&[]);
    let orphan = test.world.process("orphan");
    let due = stream.iter().find(|e| e.is("decision", orphan));
    assert_eq!(
        due.and_then(|e| e.rule.as_deref()),
        Some("on-evidence"),
        "{due:?}"
    );
}

/// Returns a copy of the proc connector's socket of a process.
fn connector_of(pid: i32) -> std::io::Result<OwnedFd> {
    const NETLINK_CONNECTOR: &str = "11";
    let table = fs::read_to_string(format!("/proc/{pid}/net/netlink"))?;
    let rows = table.lines().map(|line| line.split_whitespace());
    let rows = rows.map(|mut row| {
        (
            row.nth(1),
            row.last().map(|inode| format!("socket:[{inode}]")),
        )
    });
    let sockets: Vec<String> = rows
        .filter(|(protocol, _)| *protocol == Some(NETLINK_CONNECTOR))
        .filter_map(|(_, name)| name)
        .collect();
    let files = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    let is_connector = |file: &fs::DirEntry| {
        let name = fs::read_link(file.path()).unwrap_or_default();
        sockets
            .iter()
            .any(|socket| name.as_os_str() == socket.as_str())
    };
    let number = files
        .filter(is_connector)
        .find_map(|file| file.file_name().to_str()?.parse::<i32>().ok());
    let number = number.ok_or(Errno::ENOTSOCK)?;
    // SAFETY: both calls take numbers only, and return new descriptors.
    unsafe {
        let pidfd = Errno::result(libc::syscall(libc::SYS_pidfd_open, pid, 0))?;
        let pidfd = OwnedFd::from_raw_fd(pidfd as i32);
        let copy = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0);
        Ok(OwnedFd::from_raw_fd(Errno::result(copy)? as i32))
    }
}

/// Filter that discards the fork events of a proc connector's socket. It is removed on drop.
struct ForkFilter<'a>(&'a OwnedFd);

impl ForkFilter<'_> {
    fn install(socket: &OwnedFd) -> nix::Result<ForkFilter<'_>> {
        // Offset of the event type, after the headers of netlink and of the connector. Filters load big-endian numbers.
        const WHAT: u32 = 16 + 20;
        const FORK: u32 = 1_u32.swap_bytes();
        let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
        let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        let answer = libc::BPF_RET | libc::BPF_K;
        let mut steps = [
            instruction(load, 0, 0, WHAT),
            instruction(equal, 0, 1, FORK),
            instruction(answer, 0, 0, 0),
            instruction(answer, 0, 0, u32::MAX),
        ];
        let program = libc::sock_fprog {
            len: steps.len() as u16,
            filter: steps.as_mut_ptr(),
        };
        set_option(socket, libc::SO_ATTACH_FILTER, &program).map(|()| ForkFilter(socket))
    }
}

impl Drop for ForkFilter<'_> {
    fn drop(&mut self) {
        // If this fails, the test fails too, because it waits for events.
        let _ = set_option(self.0, libc::SO_DETACH_FILTER, &0_i32);
    }
}

fn set_option<T>(socket: &OwnedFd, option: libc::c_int, value: &T) -> nix::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    let (file, level) = (socket.as_raw_fd(), libc::SOL_SOCKET);
    // SAFETY: the call only reads the value, and the length is its size.
    let set = unsafe { libc::setsockopt(file, level, option, (&raw const *value).cast(), length) };
    Errno::result(set).map(drop)
}

/// Asserts that the next usable source takes over when `lose` makes the first of `sources` fail.
///
/// Processes forked before, during and after the failure must be reaped.
fn assert_failover(test: &mut PinnedWorld, sources: &[&str], lose: impl FnOnce(&PinnedWorld)) {
    let children = [
        "leaf=sleep",
        "orphan=double+setsid",
        "shell=later+go+meanwhile+parent+below+setsid",
        "keeper=as:test-keeper+sleep",
    ];
    test.agent("agent", &children, &["leaf", "orphan", "shell", "keeper"]);
    test.await_sessions(&["agent"]);
    let orphan = test.world.process("orphan");
    let detached = |e: &crate::daemon::Event| {
        e.is("decision", orphan) && e.reason.as_deref() == Some("detached")
    };
    test.world.await_event("a detached orphan", detached);
    let daemon = proc::stat(test.world.daemon().pid())
        .expect("the daemon")
        .id;
    assert!(
        daemon.signal(Signal::SIGSTOP),
        "the daemon could not be stopped"
    );
    lose(test);
    test.world.open_gate("go");
    ["meanwhile", "below"]
        .iter()
        .for_each(|role| drop(test.world.await_processes(role, 1)));
    assert!(
        daemon.signal(Signal::SIGCONT),
        "the daemon could not be continued"
    );
    test.world
        .await_event("the gap is closed", |e| e.event == "gap.close");
    let status = ask_json(&test.world, &["status"]);
    let rejected = status["rejected_sources"].as_array();
    let is_rejected = |source: &&&str| {
        let mut reasons = rejected.into_iter().flatten().filter_map(Value::as_str);
        reasons.any(|reason| reason.starts_with(&format!("{source} cannot be used")))
    };
    assert_eq!(
        status["source"],
        *sources
            .iter()
            .find(|one| !is_rejected(one))
            .expect("a source"),
        "{status}"
    );
    test.agent("other", &["others-leaf=sleep"], &["others-leaf"]);
    test.await_sessions(&["other"]);
    let leaf = test.world.process("others-leaf");
    test.world
        .await_event("an event of the leaf", |e| e.is_about(leaf));
    test.world.kill("agent");
    test.world.kill("other");
    let hosts = test.world.processes("host").len() + test.world.processes("daemon").len();
    let kept: &[&str] = if hosts > 0 {
        &["keeper", "host", "daemon"]
    } else {
        &["keeper"]
    };
    test.await_only(kept);
    test.await_closed(2);
    let stream = test.end(kept);
    // There may be other gaps, because the kernel can lose records for lack of space.
    let mut opened = stream.iter().filter(|e| e.event == "gap.open");
    let reported = opened.any(|e| e.reason.as_deref() == Some("source_failed"));
    assert!(reported, "the failure of the source is not reported");
}

/// Freezes a pinned map: only BPF programs can write to it afterwards.
fn freeze(pinned: &Path) -> nix::Result<()> {
    const OBJ_GET: libc::c_long = 7;
    const MAP_FREEZE: libc::c_long = 22;
    let path = CString::new(pinned.as_os_str().as_bytes()).expect("a path");
    let map = bpf(OBJ_GET, path.as_ptr() as u64)?;
    // SAFETY: the call has just returned this new descriptor.
    let map = unsafe { OwnedFd::from_raw_fd(map) };
    bpf(MAP_FREEZE, map.as_raw_fd() as u64).map(drop)
}

/// Calls bpf(2) with a command that reads only the first attribute.
fn bpf(command: libc::c_long, first: u64) -> nix::Result<i32> {
    let mut attributes = [0_u64; 4];
    attributes[0] = first;
    let length = size_of_val(&attributes);
    // SAFETY: the length is the size of the attributes, and a pathname in them outlives the call.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_ptr(), length) };
    Errno::result(done).map(|done| done as i32)
}
