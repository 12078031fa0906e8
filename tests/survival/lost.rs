//! A source that is lost while it is at work: another one goes on, and nobody who is due stays.

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

pub const STORIES: &[SurvivalScenario] = &[("probes-out-of-reach", probes_out_of_reach)];

pub const CONNECTOR_SCENARIOS: &[SurvivalScenario] = &[
    ("socket-out-of-order", socket_out_of_order),
    ("births-unheard", births_unheard),
];

/// What is inferred is reaped, so that it can be seen that it is.
const INFERS: &str = r#"
grace = "500ms"
kill_timeout = "10s"

[[rule]]
name = "on-evidence"
action = "reap"
session = "gone"
inferred = true
"#;

/// Nobody can detach the probes of a service that lives, as the kernel does not let go of such links while somebody has
/// them open. But whoever may can shut a map of theirs for good, so that they cannot be told anything any more.
fn probes_out_of_reach() {
    let mut life = PinnedWorld::new(OWN_RULES, &["--source", "ebpf"]);
    goes_on(&mut life, &["ebpf", "proc-connector", "procfs"], |life| {
        freeze(&life.pins.one("maps-").join("CONTROL")).expect("freeze a map");
    });
    assert!(!life.pins.dir().exists(), "something is left there");
}

/// The socket of the proc connector says that it can tell nothing.
fn socket_out_of_order() {
    let mut life = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    life.world.spawn("host", "failing-socket");
    life.world.await_processes("host", 1);
    life.world
        .start_daemon_inside_tree(OWN_RULES, &["--source", "proc-connector"]);
    goes_on(&mut life, &["proc-connector", "procfs"], |life| {
        fs::write(life.world.dir().join("deaf"), "").expect("make it deaf");
    });
}

/// Of one whose birth is lost, and of whose program the kernel has told before it was looked for what was lost, it is
/// asked whose it is like of one that only that look has found.
fn births_unheard() {
    let mut life = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    life.world
        .start_daemon(INFERS, &["--source", "proc-connector"]);
    let dir = life.world.dir().display().to_string();
    // It leads a process group, which is all that is left of it in what it makes.
    let leader = format!(
        "exec setsid {dir}/bin/worker test-process later leader {dir} go orphan double sleep"
    );
    let leader = format!("leader={}", leader.replace(' ', "+"));
    life.agent("agent", &[&leader, "leaf=sleep"], &["leader", "leaf"]);
    life.await_sessions(&["agent"]);
    let leader = life.world.process("leader");
    life.world
        .await_event("the leader is seen", |e| e.is_about(leader));
    let daemon = proc::stat(life.world.daemon().pid())
        .expect("the daemon")
        .id;
    let socket = connector_of(daemon.pid).expect("its socket");
    assert!(
        daemon.signal(Signal::SIGSTOP),
        "the daemon could not be stopped"
    );
    let forks = Unheard::begin(&socket).expect("keep forks from it");
    life.world.open_gate("go");
    life.world.await_processes("orphan", 1);
    drop(forks);
    assert!(daemon.signal(Signal::SIGCONT), "the daemon could not go on");
    life.world
        .await_event("the gap is closed", |e| e.event == "gap.close");
    life.world.kill("agent");
    life.world.await_gone(&["leader", "leaf", "orphan"]);
    life.await_closed(1);
    let stream = life.end(&[]);
    let orphan = life.world.process("orphan");
    let due = stream.iter().find(|e| e.is("decision", orphan));
    assert_eq!(
        due.and_then(|e| e.rule.as_deref()),
        Some("on-evidence"),
        "{due:?}"
    );
}

/// The socket by which a process hears of others from the kernel's proc connector, for this process too.
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
    let is_it = |file: &fs::DirEntry| {
        let name = fs::read_link(file.path()).unwrap_or_default();
        sockets
            .iter()
            .any(|socket| name.as_os_str() == socket.as_str())
    };
    let number = files
        .filter(is_it)
        .find_map(|file| file.file_name().to_str()?.parse::<i32>().ok());
    let number = number.ok_or(Errno::ENOTSOCK)?;
    // SAFETY: two calls that take numbers; what each opens is nobody else's.
    unsafe {
        let of = Errno::result(libc::syscall(libc::SYS_pidfd_open, pid, 0))?;
        let of = OwnedFd::from_raw_fd(of as i32);
        let got = libc::syscall(libc::SYS_pidfd_getfd, of.as_raw_fd(), number, 0);
        Ok(OwnedFd::from_raw_fd(Errno::result(got)? as i32))
    }
}

/// For as long as this is there a socket is not told of any fork.
struct Unheard<'a>(&'a OwnedFd);

impl Unheard<'_> {
    fn begin(socket: &OwnedFd) -> nix::Result<Unheard<'_>> {
        // Behind the headers of netlink and of the connector; a filter has numbers as networks have them.
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
        set(socket, libc::SO_ATTACH_FILTER, &program).map(|()| Unheard(socket))
    }
}

impl Drop for Unheard<'_> {
    fn drop(&mut self) {
        // If that fails, the test does not come to its end.
        let _ = set(self.0, libc::SO_DETACH_FILTER, &0_i32);
    }
}

fn set<T>(socket: &OwnedFd, option: libc::c_int, value: &T) -> nix::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    let (file, level) = (socket.as_raw_fd(), libc::SOL_SOCKET);
    // SAFETY: the value is read, and is as long as is said.
    let set = unsafe { libc::setsockopt(file, level, option, (&raw const *value).cast(), length) };
    Errno::result(set).map(drop)
}

/// What is born while the first of these sources is lost, and afterwards, is reaped like all that was there before; by the
/// next of them that can be used.
fn goes_on(life: &mut PinnedWorld, sources: &[&str], lose: impl FnOnce(&PinnedWorld)) {
    let children = [
        "leaf=sleep",
        "orphan=double+setsid",
        "shell=later+go+meanwhile+parent+below+setsid",
        "keeper=as:test-keeper+sleep",
    ];
    life.agent("agent", &children, &["leaf", "orphan", "shell", "keeper"]);
    life.await_sessions(&["agent"]);
    let orphan = life.world.process("orphan");
    let detached = |e: &crate::daemon::Event| {
        e.is("decision", orphan) && e.reason.as_deref() == Some("detached")
    };
    life.world.await_event("an orphan is detached", detached);
    let daemon = proc::stat(life.world.daemon().pid())
        .expect("the daemon")
        .id;
    assert!(
        daemon.signal(Signal::SIGSTOP),
        "the daemon could not be stopped"
    );
    lose(life);
    life.world.open_gate("go");
    ["meanwhile", "below"]
        .iter()
        .for_each(|role| drop(life.world.await_processes(role, 1)));
    assert!(daemon.signal(Signal::SIGCONT), "the daemon could not go on");
    life.world
        .await_event("the gap is closed", |e| e.event == "gap.close");
    let status = ask_json(&life.world, &["status"]);
    let passed_over = status["rejected_sources"].as_array();
    let is_passed_over = |source: &&&str| {
        let mut reasons = passed_over.into_iter().flatten().filter_map(Value::as_str);
        reasons.any(|reason| reason.starts_with(&format!("{source} cannot be used")))
    };
    assert_eq!(
        status["source"],
        *sources
            .iter()
            .find(|one| !is_passed_over(one))
            .expect("a source"),
        "{status}"
    );
    life.agent("other", &["others-leaf=sleep"], &["others-leaf"]);
    life.await_sessions(&["other"]);
    let leaf = life.world.process("others-leaf");
    life.world
        .await_event("its leaf is seen", |e| e.is_about(leaf));
    life.world.kill("agent");
    life.world.kill("other");
    let hosts = life.world.processes("host").len() + life.world.processes("daemon").len();
    let spared: &[&str] = if hosts > 0 {
        &["keeper", "host", "daemon"]
    } else {
        &["keeper"]
    };
    life.await_left(spared);
    life.await_closed(2);
    let stream = life.end(spared);
    // Besides, the kernel may have lost some for want of room.
    let mut opened = stream.iter().filter(|e| e.event == "gap.open");
    let told = opened.any(|e| e.reason.as_deref() == Some("source_failed"));
    assert!(told, "it is not told that a source was lost");
}

/// Shuts a pinned map: from now on only the kernel's programs can write to it.
fn freeze(pinned: &Path) -> nix::Result<()> {
    const OBJ_GET: libc::c_long = 7;
    const MAP_FREEZE: libc::c_long = 22;
    let path = CString::new(pinned.as_os_str().as_bytes()).expect("a path");
    let map = bpf(OBJ_GET, path.as_ptr() as u64)?;
    // SAFETY: the call has just opened it, and nobody else has it.
    let map = unsafe { OwnedFd::from_raw_fd(map) };
    bpf(MAP_FREEZE, map.as_raw_fd() as u64).map(drop)
}

/// A command of bpf(2) that takes one thing, which stands first.
fn bpf(command: libc::c_long, first: u64) -> nix::Result<i32> {
    let mut attributes = [0_u64; 4];
    attributes[0] = first;
    let length = size_of_val(&attributes);
    // SAFETY: the attributes are as long as is said, and what they point to outlives the call.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_ptr(), length) };
    Errno::result(done).map(|done| done as i32)
}
