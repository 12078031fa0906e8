//! Starts daemons with the privileges of the service's unit. systemd gives them to a service; each daemon copies them from
//! a process of that service.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Error};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::LazyLock;

use nix::libc::{self, c_int, c_ulong, sock_filter, sock_fprog};

/// Environment variable with the pid of the process from which daemons copy their privileges.
const MODEL: &str = "REAPER_TEST_PRIVILEGES_OF";

/// Lines of /proc/PID/status in which the daemon must be equal to the model.
const COMPARED: [&str; 4] = ["CapBnd:", "NoNewPrivs:", "Seccomp:", "Seccomp_filters:"];

static UNIT: LazyLock<Option<Privileges>> = LazyLock::new(|| {
    let pid = std::env::var(MODEL).ok()?;
    Some(Privileges::of(pid.parse().expect("a pid")))
});

struct Privileges {
    status: Vec<String>,
    bounding: u64,
    mounts: File,
    filters: Vec<Vec<sock_filter>>,
}

impl Privileges {
    fn of(pid: i32) -> Privileges {
        let status = status(pid);
        let bounding = status.iter().find_map(|line| line.strip_prefix("CapBnd:"));
        let bounding = bounding.expect("a bounding set").trim();
        Privileges {
            bounding: u64::from_str_radix(bounding, 16).expect("a bounding set"),
            mounts: File::open(format!("/proc/{pid}/ns/mnt")).expect("its mount namespace"),
            filters: filters(pid).expect("read its seccomp filters"),
            status,
        }
    }

    /// Gives this process the privileges. Root has the capabilities of the bounding set after the next exec.
    fn adopt(&self, dir: &CString) -> io::Result<()> {
        nix::sched::setns(&self.mounts, nix::sched::CloneFlags::CLONE_NEWNS)?;
        nix::unistd::chdir(dir.as_c_str())?;
        // SAFETY: these calls take no pointers, except to a filter that lives until they return.
        unsafe {
            let mut capability: c_ulong = 0;
            while libc::prctl(libc::PR_CAPBSET_READ, capability) >= 0 {
                if self.bounding >> capability & 1 == 0 {
                    check(libc::prctl(libc::PR_CAPBSET_DROP, capability).into())?;
                }
                capability += 1;
            }
            check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
            for filter in &self.filters {
                let program = sock_fprog {
                    len: filter.len() as u16,
                    filter: filter.as_ptr().cast_mut(),
                };
                let mode = libc::SECCOMP_SET_MODE_FILTER;
                check(libc::syscall(
                    libc::SYS_seccomp,
                    mode,
                    0,
                    &raw const program,
                ))?;
            }
        }
        Ok(())
    }
}

/// Makes a command start with the privileges of the unit, in `dir`. Does nothing without [`MODEL`].
pub fn restrict(command: &mut Command, dir: &Path) {
    let Some(unit) = &*UNIT else { return };
    let dir = CString::new(dir.as_os_str().as_bytes()).expect("a path");
    // SAFETY: `adopt` makes system calls only.
    unsafe { command.pre_exec(move || unit.adopt(&dir)) };
}

/// Checks that a process has the privileges of the unit. Does nothing without [`MODEL`].
pub fn assert_restricted(pid: i32) {
    let Some(unit) = &*UNIT else { return };
    assert_eq!(status(pid), unit.status, "the daemon's privileges");
}

fn status(pid: i32) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("read the status");
    let compared = |line: &&str| COMPARED.iter().any(|key| line.starts_with(key));
    text.lines().filter(compared).map(str::to_owned).collect()
}

/// Request of ptrace(2) that the libc crate lacks.
const PTRACE_SECCOMP_GET_FILTER: libc::c_uint = 0x420c;

/// Returns the seccomp filters of a process. The kernel applies all of them, so their order means nothing.
fn filters(pid: i32) -> io::Result<Vec<Vec<sock_filter>>> {
    let mut filters = Vec::new();
    // SAFETY: each buffer has room for all instructions of its filter.
    unsafe {
        let ptrace = |request, address: usize, data: *mut sock_filter| {
            check(libc::ptrace(request, pid, address, data))
        };
        ptrace(libc::PTRACE_SEIZE, 0, null_mut())?;
        ptrace(libc::PTRACE_INTERRUPT, 0, null_mut())?;
        let mut status: c_int = 0;
        check(libc::waitpid(pid, &raw mut status, libc::__WALL).into())?;
        while let Ok(len) = ptrace(PTRACE_SECCOMP_GET_FILTER, filters.len(), null_mut()) {
            let mut filter = Vec::with_capacity(len);
            ptrace(
                PTRACE_SECCOMP_GET_FILTER,
                filters.len(),
                filter.as_mut_ptr(),
            )?;
            filter.set_len(len);
            filters.push(filter);
        }
        ptrace(libc::PTRACE_DETACH, 0, null_mut())?;
    }
    Ok(filters)
}

/// Returns the result of a system call.
fn check(result: i64) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| Error::last_os_error())
}
