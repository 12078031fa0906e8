//! The test binary as the init process of a virtual machine. `cargo xtask vm` boots a kernel with an otherwise empty
//! root file system, and this module mounts what the tests expect on a host.
//!
//! `real init ARG…` works as pid 1 only: it mounts, runs the tests with `ARG…` as a child, and powers off. The test
//! report goes to the second serial port, all other output to the console.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::process::{Command, Stdio};

use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::Pid;

/// Serial port for the report. Kernel messages go to the first port, so they cannot break a line of the report.
const REPORT: &str = "/dev/ttyS1";

/// Type and mount point of each file system. /tmp is not mounted: tests hard-link their program into it from the root.
const MOUNTS: &[(&str, &str)] = &[
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("devpts", "/dev/pts"),
    ("tmpfs", "/run"),
    ("bpf", "/sys/fs/bpf"),
    ("cgroup2", "/sys/fs/cgroup"),
];

/// Runs the tests and powers the machine off. Does nothing if this process is not pid 1.
pub fn main(args: impl Iterator<Item = OsString>) {
    if std::process::id() != 1 {
        eprintln!("`init` must be pid 1 of a virtual machine; call `cargo xtask vm`");
        return;
    }
    if let Err(e) = tests(args) {
        eprintln!("init: {e}");
    }
    // SAFETY: sync(2) and reboot(2) take no pointers, and the machine is disposable.
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

/// Waits for exited children, adopted ones included, until `child` has exited.
fn reap_until(child: Pid) -> io::Result<WaitStatus> {
    loop {
        let status = wait()?;
        if status.pid() == Some(child) {
            return Ok(status);
        }
    }
}
