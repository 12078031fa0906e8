//! Containers of podman, which root starts.
//!
//! The behaviour that starts a container is in its own mount namespace. Whatever podman mounts there and writes below /run
//! and /dev/shm disappears with the last process of the container. Only cgroup v2 is mounted, because crun refuses the mixed
//! layout that some machines have, and no cgroup is created.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use super::context::{ProcessContext, rest};
use super::guest::await_sleep;
use crate::proc;

/// Options before the command of podman. The storage is a plain directory, and neither systemd nor its journal is used.
const GLOBAL: &[&str] = &[
    "--root",
    "/run/storage",
    "--storage-driver",
    "vfs",
    "--cgroup-manager",
    "cgroupfs",
    "--runtime=crun",
    "--events-backend=file",
];

/// Options of `podman run`. The limits are low enough for a host on which root cannot raise its own.
const RUN: &[&str] = &[
    "--name",
    "box",
    "--network",
    "none",
    "--ulimit",
    "nofile=512:512",
    "--ulimit",
    "nproc=500:500",
    "--volume",
    "/usr:/usr:ro",
    "--cgroups=disabled",
    "--log-driver=k8s-file",
    "--pidfile=/run/init.pid",
    "--conmon-pidfile=/run/conmon.pid",
    "--rootfs",
    "/run/image",
];

/// Makes the mount namespace, and the root directory of the container: it has the programs of the host.
fn prepare() {
    unshare(CloneFlags::CLONE_NEWNS).expect("create a mount namespace");
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .expect("make mounts private");
    for (kind, place) in [
        ("tmpfs", "/run"),
        ("tmpfs", "/dev/shm"),
        ("cgroup2", "/sys/fs/cgroup"),
    ] {
        mount(Some("none"), place, Some(kind), MsFlags::empty(), none)
            .unwrap_or_else(|e| panic!("mount {kind} at {place}: {e}"));
    }
    fs::create_dir_all("/run/image/usr").expect("create a directory");
    for name in ["bin", "lib", "lib64", "sbin"] {
        symlink(format!("usr/{name}"), format!("/run/image/{name}")).expect("link a directory");
    }
}

fn podman(words: &[&str]) -> Command {
    let mut command = Command::new("podman");
    command.args(GLOBAL).args(words);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Returns the command that runs a program in the container.
fn run(kind: &[&str], program: &[String]) -> Command {
    let mut command = podman(&[&["run"], kind, RUN].concat());
    command.args(program);
    command
}

/// Reports conmon and the first process of the container, once that executes `program`.
fn report_container(s: &ProcessContext, [conmon, init]: [&str; 2], program: &str) {
    for (role, file) in [(conmon, "/run/conmon.pid"), (init, "/run/init.pid")] {
        let pid = poll(|| fs::read_to_string(file).ok()?.trim().parse::<i32>().ok());
        if role == init {
            let name = format!("/proc/{pid}/comm");
            poll(|| (fs::read_to_string(&name).ok()?.trim_end() == program).then_some(()));
        }
        s.report_other(role, proc::stat(pid).expect("its stat").id);
    }
}

/// Polls until there is a value. SIGALRM ends a process that waits for too long.
fn poll<T>(mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// `podman-detached STARTER CONMON INIT CLIENT PROGRAM…`: runs a program in a detached container, and a client that
/// follows its output.
pub fn detached(s: &ProcessContext) -> ! {
    prepare();
    let [starter, conmon, init, client, program @ ..] = &s.args[..] else {
        panic!("podman-detached STARTER CONMON INIT CLIENT PROGRAM…");
    };
    let mut run = run(&["--detach"], program).spawn().expect("start podman");
    // It is a zombie at the latest.
    s.report_other(starter, proc::stat(run.id()).expect("its stat").id);
    assert!(
        run.wait().expect("wait for podman").success(),
        "podman fails"
    );
    report_container(s, [conmon, init], &program[0]);
    let logs = podman(&["logs", "--follow", "box"]).spawn();
    await_sleep(s, client, logs.expect("start podman").id());
    s.report();
    rest()
}

/// `podman-attached CONMON INIT CLIENT PROGRAM…`: runs a program in a container, and holds the other end of its standard
/// input.
pub fn attached(s: &ProcessContext) -> ! {
    prepare();
    let [conmon, init, client, program @ ..] = &s.args[..] else {
        panic!("podman-attached CONMON INIT CLIENT PROGRAM…");
    };
    let run = run(&["--rm", "-i"], program).stdin(Stdio::piped()).spawn();
    let mut run = run.expect("start podman");
    let _input = run.stdin.take();
    report_container(s, [conmon, init], &program[0]);
    await_sleep(s, client, run.id());
    s.report();
    let _ = run.wait();
    rest()
}
