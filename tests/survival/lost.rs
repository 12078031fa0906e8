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

use super::{Bpffs, Lasting, Story};
use crate::cli::told;
use crate::proc;
use crate::trees::OWN_RULES;
use crate::world::World;

pub const STORIES: &[Story] = &[("probes-out-of-reach", probes_out_of_reach)];

pub const CONNECTORS: &[Story] = &[("socket-out-of-order", socket_out_of_order)];

/// Nobody can detach the probes of a service that lives, as the kernel does not let go of such links while somebody has
/// them open. But whoever may can shut a map of theirs for good, so that they cannot be told anything any more.
fn probes_out_of_reach() {
    let mut life = Lasting::new(OWN_RULES, &["--source", "ebpf"]);
    goes_on(&mut life, &["ebpf", "proc-connector", "procfs"], |life| {
        freeze(&life.pins.one("maps-").join("CONTROL")).expect("freeze a map");
    });
    assert!(!life.pins.dir().exists(), "something is left there");
}

/// The socket of the proc connector says that it can tell nothing.
fn socket_out_of_order() {
    let mut life = Lasting {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    life.world.start("host", "deafening");
    life.world.await_cast("host", 1);
    life.world
        .watch_from_within(OWN_RULES, &["--source", "proc-connector"]);
    goes_on(&mut life, &["proc-connector", "procfs"], |life| {
        fs::write(life.world.dir().join("deaf"), "").expect("make it deaf");
    });
}

/// What is born while the first of these sources is lost, and afterwards, is reaped like all that was there before; by the
/// next of them that can be used.
fn goes_on(life: &mut Lasting, sources: &[&str], lose: impl FnOnce(&Lasting)) {
    let children = [
        "leaf=sleep",
        "orphan=double+setsid",
        "shell=later+go+meanwhile+parent+below+setsid",
        "keeper=as:test-keeper+sleep",
    ];
    life.agent("agent", &children, &["leaf", "orphan", "shell", "keeper"]);
    life.await_sessions(&["agent"]);
    let orphan = life.world.one("orphan");
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
    life.world.open("go");
    ["meanwhile", "below"]
        .iter()
        .for_each(|role| drop(life.world.await_cast(role, 1)));
    assert!(daemon.signal(Signal::SIGCONT), "the daemon could not go on");
    life.world
        .await_event("the gap is closed", |e| e.event == "gap.closed");
    let status = told(&life.world, &["status"]);
    let passed_over = status["passed_over"].as_array();
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
    let leaf = life.world.one("others-leaf");
    life.world
        .await_event("its leaf is seen", |e| e.about(leaf));
    life.world.kill("agent");
    life.world.kill("other");
    let hosts = life.world.cast("host").len() + life.world.cast("daemon").len();
    let spared: &[&str] = if hosts > 0 {
        &["keeper", "host", "daemon"]
    } else {
        &["keeper"]
    };
    life.await_left(spared);
    life.await_closed(2);
    let stream = life.world.stop();
    life.judge(spared);
    // Besides, the kernel may have lost some for want of room.
    let mut opened = stream.iter().filter(|e| e.event == "gap.open");
    let told = opened.any(|e| e.reason.as_deref() == Some("source_lost"));
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
