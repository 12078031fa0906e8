//! The test binary as the first process of a virtual machine: `cargo xtask vm` boots a kernel with nothing else
//! in it, and this makes of that what the tests find on any host.
//!
//! `real init ARG…`, as pid 1 alone: mounts, runs the tests with `ARG…` as a child, and powers off. What the tests
//! report goes to the second serial port, all else to the console.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::process::{Command, Stdio};

use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::Pid;

/// Where the host reads line by line. Kernel messages go to the first port, so that none is in the midst of a line.
const REPORT: &str = "/dev/ttyS1";

/// Kind and place. The directory for the tests' files is none of them: programs are linked into it from the root.
const MOUNTS: &[(&str, &str)] = &[
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("devpts", "/dev/pts"),
    ("tmpfs", "/run"),
    ("bpf", "/sys/fs/bpf"),
    ("cgroup2", "/sys/fs/cgroup"),
];

/// Runs the tests and powers the machine off. Does nothing where there is another init.
pub fn main(args: impl Iterator<Item = OsString>) {
    if std::process::id() != 1 {
        eprintln!("`init` is for the first process of a virtual machine: call `cargo xtask vm`");
        return;
    }
    if let Err(e) = tests(args) {
        eprintln!("init: {e}");
    }
    // SAFETY: two system calls; the machine holds nothing that would have to be kept.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_POWER_OFF);
    }
}

fn tests(args: impl Iterator<Item = OsString>) -> io::Result<()> {
    for (kind, place) in MOUNTS {
        let named = |e| io::Error::other(format!("mount {kind} on {place}: {e}"));
        fs::create_dir_all(place).map_err(named)?;
        mount(
            Some(*kind),
            *place,
            Some(*kind),
            MsFlags::empty(),
            None::<&str>,
        )
        .map_err(|e| named(e.into()))?;
    }
    let mut report = File::options().write(true).open(REPORT)?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    writeln!(
        report,
        r#"{{"type":"guest","kernel":"{}"}}"#,
        release.trim()
    )?;
    let tests = Command::new(std::env::current_exe()?)
        .args(args)
        .env("PATH", "/bin")
        .stdin(Stdio::null())
        .stdout(report.try_clone()?)
        .spawn()?;
    let status = reap_until(Pid::from_raw(tests.id().cast_signed()))?;
    writeln!(report, r#"{{"type":"guest","ended":"{status:?}"}}"#)
}

/// Waits for whoever has ended, as an init does for all that it adopts, until this one has.
fn reap_until(who: Pid) -> io::Result<WaitStatus> {
    loop {
        let status = wait()?;
        if status.pid() == Some(who) {
            return Ok(status);
        }
    }
}
