//! Calls of bpf(2) on pinned programs that need no capability. `aya` opens a program by its id, which needs
//! CAP_SYS_ADMIN.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `BPF_OBJ_GET` and `BPF_OBJ_GET_INFO_BY_FD` of include/uapi/linux/bpf.h.
const OBJ_GET: libc::c_long = 7;
const OBJ_GET_INFO_BY_FD: libc::c_long = 15;
/// Maximum number of maps of a program (`MAX_USED_MAPS` of include/linux/bpf_verifier.h).
const MAPS_MAX: usize = 64;

/// Arguments of `BPF_OBJ_GET` in `union bpf_attr`.
#[repr(C)]
struct ObjectPath {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Arguments of `BPF_OBJ_GET_INFO_BY_FD` in `union bpf_attr`.
#[repr(C)]
struct InfoRequest {
    fd: u32,
    length: u32,
    info: u64,
}

/// Start of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct RawInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_length: u32,
    xlated_length: u32,
    jited: u64,
    xlated: u64,
    load_time: u64,
    created_by_uid: u32,
    maps: u32,
    map_ids: u64,
}

/// A loaded program.
pub struct ProgramInfo {
    pub id: u32,
    /// Ids of the maps that it uses.
    pub map_ids: Vec<u32>,
}

/// Opens a pinned program.
///
/// # Errors
/// The path is not that of a pinned object, or cannot be opened.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let arguments = ObjectPath {
        path: path.as_ptr() as u64,
        fd: 0,
        flags: 0,
    };
    // SAFETY: the arguments have the size that is passed, and the path outlives the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            OBJ_GET,
            &raw const arguments,
            size_of_val(&arguments),
        )
    };
    match i32::try_from(fd) {
        // SAFETY: the call has returned a new descriptor.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns facts about a loaded program.
///
/// # Errors
/// The descriptor is not that of a program.
pub fn program_info(program: impl AsFd) -> io::Result<ProgramInfo> {
    let mut map_ids = [0_u32; MAPS_MAX];
    let mut info = RawInfo {
        maps: MAPS_MAX as u32,
        map_ids: map_ids.as_mut_ptr() as u64,
        ..RawInfo::default()
    };
    let request = InfoRequest {
        fd: program.as_fd().as_raw_fd().cast_unsigned(),
        length: size_of::<RawInfo>() as u32,
        info: &raw mut info as u64,
    };
    // SAFETY: the kernel writes at most `length` bytes to `info`, and `maps` ids to `map_ids`. Both outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            OBJ_GET_INFO_BY_FD,
            &raw const request,
            size_of_val(&request),
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let count = MAPS_MAX.min(info.maps as usize);
    Ok(ProgramInfo {
        id: info.id,
        map_ids: map_ids[..count].to_vec(),
    })
}
