//! Process information of macOS, through sysctl(3) and libproc.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::LazyLock;

use libc::{c_int, c_void};
use nix::errno::Errno;

use crate::sys::kinfo::Identity;

/// `PROC_PIDUNIQIDENTIFIERINFO` of bsd/sys/proc_info_private.h.
const UNIQUE: c_int = 17;
/// `PROC_PIDFDSOCKETINFO` of bsd/sys/proc_info.h.
const SOCKET: c_int = 3;
/// Upper bound of the size of a `socket_fdinfo`.
const SOCKET_MAX: usize = 1024;
/// Size of a `proc_fdinfo`: two numbers.
const DESCRIPTOR: usize = 8;

/// Resources that a process uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Resident memory in bytes.
    pub resident: u64,
    /// CPU time in ns.
    pub cpu: u64,
}

/// Returns all processes, including zombies, as consecutive `kinfo_proc` structures.
///
/// # Errors
/// As sysctl(3).
pub fn processes() -> io::Result<Vec<u8>> {
    let mib = [libc::CTL_KERN, libc::KERN_PROC, libc::KERN_PROC_ALL, 0];
    loop {
        // More processes can start before they are listed.
        let room = sysctl(&mib, None)? + (16 << 10);
        let mut bytes = vec![0; room];
        match sysctl(&mib, Some(&mut bytes)) {
            Err(Errno::ENOMEM) => {}
            length => {
                bytes.truncate(length?);
                return Ok(bytes);
            }
        }
    }
}

/// Returns a process as a `kinfo_proc` structure; empty if it does not exist.
///
/// # Errors
/// As sysctl(3).
pub fn process(pid: u32) -> io::Result<Vec<u8>> {
    let mib = [
        libc::CTL_KERN,
        libc::KERN_PROC,
        libc::KERN_PROC_PID,
        signed(pid),
    ];
    let mut bytes = vec![0; 1024];
    match sysctl(&mib, Some(&mut bytes)) {
        Err(Errno::ESRCH) => Ok(Vec::new()),
        length => {
            bytes.truncate(length?);
            Ok(bytes)
        }
    }
}

/// Returns the arguments of a process and, if permitted, its environment, in the kernel's format (`KERN_PROCARGS2`).
///
/// # Errors
/// `EINVAL` if the process is gone or belongs to another user.
pub fn arguments(pid: u32) -> io::Result<Vec<u8>> {
    // With a smaller buffer the kernel returns the end instead of the beginning.
    static MOST: LazyLock<usize> = LazyLock::new(|| {
        let mut bytes = [0; 4];
        let read = sysctl(&[libc::CTL_KERN, libc::KERN_ARGMAX], Some(&mut bytes));
        read.map_or(1 << 20, |_| u32::from_ne_bytes(bytes) as usize)
    });
    let mut bytes = vec![0; *MOST];
    let mib = [libc::CTL_KERN, libc::KERN_PROCARGS2, signed(pid)];
    let length = sysctl(&mib, Some(&mut bytes))?;
    bytes.truncate(length);
    bytes.shrink_to_fit();
    Ok(bytes)
}

/// Returns the boot time of this host by its current wall clock, in µs since the epoch.
pub fn booted() -> Option<u64> {
    let mut bytes = [0; 16];
    sysctl(&[libc::CTL_KERN, libc::KERN_BOOTTIME], Some(&mut bytes)).ok()?;
    let seconds = u64::from_ne_bytes(*bytes.first_chunk()?);
    let micros = u32::from_ne_bytes(*bytes[8..].first_chunk()?);
    Some(seconds * 1_000_000 + u64::from(micros))
}

/// Returns a sysctl that is a string; empty if it does not exist or is longer than 256 bytes.
pub fn text(name: &std::ffi::CStr) -> String {
    let mut bytes = [0_u8; 256];
    let mut length = bytes.len();
    // SAFETY: the name ends with NUL, no more than `length` bytes are written, and nothing is set.
    let read = unsafe {
        libc::sysctlbyname(
            name.as_ptr(),
            bytes.as_mut_ptr().cast(),
            &raw mut length,
            std::ptr::null_mut(),
            0,
        )
    };
    let bytes = if read == 0 { &bytes[..length] } else { &[] };
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Returns the identity of a process that has not exited.
///
/// # Errors
/// `ESRCH` if there is no such process.
pub fn identity(pid: u32) -> nix::Result<Identity> {
    identity_with(pid, 0)
}

/// Returns the identity of a process that may be a zombie.
///
/// # Errors
/// `ESRCH` if there is no such process.
pub fn identity_of_any(pid: u32) -> nix::Result<Identity> {
    identity_with(pid, 1)
}

/// Returns the identity of a process. `zombies` is 1 to find zombies too, else 0.
fn identity_with(pid: u32, zombies: u64) -> nix::Result<Identity> {
    let mut bytes = [0; 56];
    if pid_info(pid, UNIQUE, zombies, &mut bytes)? < 32 {
        return Err(Errno::EIO);
    }
    let number = |at: usize| {
        bytes[at..]
            .first_chunk()
            .map_or(0, |b| u64::from_ne_bytes(*b))
    };
    Ok(Identity {
        unique: number(16),
        parent: number(24),
    })
}

/// Returns the path of the executable; empty if unknown.
pub fn executable(pid: u32) -> Vec<u8> {
    let mut bytes = [0_u8; libc::PROC_PIDPATHINFO_MAXSIZE as usize];
    // SAFETY: no more than the given size is written.
    let length =
        unsafe { libc::proc_pidpath(signed(pid), bytes.as_mut_ptr().cast(), bytes.len() as u32) };
    let length = usize::try_from(length).unwrap_or(0).min(bytes.len());
    bytes[..length].to_vec()
}

/// Returns the working directory. `None` if the process is gone or another user's, or if the directory has no path.
pub fn directory(pid: u32) -> Option<PathBuf> {
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut info: libc::proc_vnodepathinfo = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::proc_vnodepathinfo>();
    // SAFETY: the structure is that of this flavor, and no more than its size is written.
    let read = unsafe {
        libc::proc_pidinfo(
            signed(pid),
            libc::PROC_PIDVNODEPATHINFO,
            0,
            (&raw mut info).cast(),
            i32::try_from(size).ok()?,
        )
    };
    if usize::try_from(read) != Ok(size) {
        return None;
    }
    let path = info.pvi_cdir.vip_path.as_flattened().iter();
    let path: Vec<u8> = path
        .map(|byte| byte.cast_unsigned())
        .take_while(|byte| *byte != 0)
        .collect();
    (!path.is_empty()).then(|| OsString::from_vec(path).into())
}

/// Returns the resources that a process uses; `None` if it is gone or another user's.
pub fn usage(pid: u32) -> Option<Usage> {
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut info: libc::rusage_info_v0 = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is that of this flavor.
    let read =
        unsafe { libc::proc_pid_rusage(signed(pid), libc::RUSAGE_INFO_V0, (&raw mut info).cast()) };
    (read == 0).then(|| Usage {
        resident: info.ri_resident_size,
        cpu: nanoseconds(info.ri_user_time.saturating_add(info.ri_system_time)),
    })
}

/// Returns the descriptors of a process that are sockets; `None` if they cannot be listed.
pub fn sockets(pid: u32) -> Option<Vec<i32>> {
    let mut bytes = vec![0; 64 * DESCRIPTOR];
    loop {
        let length = pid_info(pid, libc::PROC_PIDLISTFDS, 0, &mut bytes).ok()?;
        if length < bytes.len() {
            bytes.truncate(length);
            break;
        }
        bytes.resize(2 * bytes.len(), 0);
    }
    let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |b| i32::from_ne_bytes(*b));
    let all = bytes.chunks_exact(DESCRIPTOR);
    let sockets = all.filter(|file| number(&file[4..]) == libc::PROX_FDTYPE_SOCKET);
    Some(sockets.map(number).collect())
}

/// Returns a socket of a process as a `socket_fdinfo` structure; `None` if it has been closed.
pub fn socket(pid: u32, file: i32) -> Option<Vec<u8>> {
    let mut bytes = vec![0; SOCKET_MAX];
    // SAFETY: no more than the given size is written.
    let length = unsafe {
        libc::proc_pidfdinfo(
            signed(pid),
            file,
            SOCKET,
            bytes.as_mut_ptr().cast(),
            SOCKET_MAX as c_int,
        )
    };
    bytes.truncate(usize::try_from(length).ok().filter(|length| *length > 0)?);
    Some(bytes)
}

/// Returns the id of the session of a process; 0 if unknown.
pub fn session(pid: u32) -> u32 {
    let pid = nix::unistd::Pid::from_raw(signed(pid));
    nix::unistd::getsid(Some(pid)).map_or(0, |sid| sid.as_raw().cast_unsigned())
}

/// Converts CPU time from ticks of the Mach clock to ns.
fn nanoseconds(ticks: u64) -> u64 {
    static SCALE: LazyLock<(u64, u64)> = LazyLock::new(|| {
        let mut info = mach_timebase_info { numer: 0, denom: 0 };
        // SAFETY: only the structure is written.
        unsafe { mach_timebase_info(&raw mut info) };
        (info.numer.max(1).into(), info.denom.max(1).into())
    });
    let (numer, denom) = *SCALE;
    let ns = u128::from(ticks) * u128::from(numer) / u128::from(denom);
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// `mach_timebase_info_data_t` of mach/mach_time.h.
#[repr(C)]
struct mach_timebase_info {
    numer: u32,
    denom: u32,
}

// SAFETY: as mach/mach_time.h declares it.
unsafe extern "C" {
    fn mach_timebase_info(info: *mut mach_timebase_info) -> c_int;
}

/// Reads a sysctl into `into`, or returns its length if there is no buffer.
fn sysctl(mib: &[c_int], into: Option<&mut [u8]>) -> nix::Result<usize> {
    let (at, mut length) = match into {
        Some(into) => (into.as_mut_ptr().cast::<c_void>(), into.len()),
        None => (std::ptr::null_mut(), 0),
    };
    // SAFETY: the path is only read, no more than `length` bytes are written, and nothing is set.
    let read = unsafe {
        libc::sysctl(
            mib.as_ptr().cast_mut(),
            mib.len() as u32,
            at,
            &raw mut length,
            std::ptr::null_mut(),
            0,
        )
    };
    Errno::result(read).map(|_| length)
}

/// Reads information about a process with libproc. Returns the number of bytes.
fn pid_info(pid: u32, flavor: c_int, argument: u64, into: &mut [u8]) -> nix::Result<usize> {
    let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
    // SAFETY: no more than the given size is written.
    let length = unsafe {
        libc::proc_pidinfo(
            signed(pid),
            flavor,
            argument,
            into.as_mut_ptr().cast(),
            room,
        )
    };
    match usize::try_from(length) {
        Ok(length) if length > 0 => Ok(length),
        _ => Err(Errno::last()),
    }
}

/// Converts a pid for the kernel. An invalid pid becomes one that no process has.
fn signed(pid: u32) -> c_int {
    c_int::try_from(pid).unwrap_or(c_int::MAX)
}
