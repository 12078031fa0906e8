//! The few calls of bpf(2) that the figures need: a program that does nothing, and where a ring stands.

use std::ffi::{CStr, CString, c_int, c_long};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;

/// `BPF_PROG_LOAD`, `BPF_OBJ_GET`, `BPF_RAW_TRACEPOINT_OPEN`, `BPF_PROG_TYPE_RAW_TRACEPOINT` and the two
/// instructions `r0 = 0; exit` of include/uapi/linux/bpf.h.
const PROG_LOAD: c_int = 5;
const OBJ_GET: c_int = 7;
const RAW_TRACEPOINT_OPEN: c_int = 17;
const RAW_TRACEPOINT: u32 = 17;
const NOTHING: [u64; 2] = [0xb7, 0x95];

/// The beginning of `union bpf_attr` for `BPF_PROG_LOAD`.
#[repr(C)]
struct ProgLoad {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
}

/// For `BPF_OBJ_GET`.
#[repr(C)]
struct ObjGet {
    path: u64,
    fd: u32,
    flags: u32,
}

/// For `BPF_RAW_TRACEPOINT_OPEN`.
#[repr(C)]
struct RawTracepointOpen {
    name: u64,
    program: u32,
    _pad: u32,
}

/// # Safety
/// `attributes` is what bpf(2) asks for with this command, and what it points to is there.
unsafe fn bpf<T>(command: c_int, attributes: &T) -> nix::Result<OwnedFd> {
    // SAFETY: as the caller promises; the kernel reads so many bytes.
    let fd: c_long = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    let fd = nix::Error::result(fd)?;
    // SAFETY: a new descriptor that nobody else knows of.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// A program that does nothing at a tracepoint; taken away when this is dropped.
pub struct Empty {
    pub program: OwnedFd,
    _link: OwnedFd,
}

impl Empty {
    /// # Errors
    /// As `bpf(2)`.
    pub fn at(tracepoint: &CStr) -> nix::Result<Empty> {
        let load = ProgLoad {
            kind: RAW_TRACEPOINT,
            instructions: NOTHING.len() as u32,
            code: NOTHING.as_ptr().expose_provenance() as u64,
            license: c"MIT".as_ptr().expose_provenance() as u64,
        };
        // SAFETY: the attributes of the command, pointing to constants.
        let program = unsafe { bpf(PROG_LOAD, &load) }?;
        let open = RawTracepointOpen {
            name: tracepoint.as_ptr().expose_provenance() as u64,
            program: program.as_raw_fd().cast_unsigned(),
            _pad: 0,
        };
        // SAFETY: as above; the name outlives the call.
        let link = unsafe { bpf(RAW_TRACEPOINT_OPEN, &open) }?;
        Ok(Empty {
            program,
            _link: link,
        })
    }
}

/// The two positions of a pinned ring: the reader's and the writers' pages, as kernel/bpf/ringbuf.c has them.
pub struct Positions {
    pages: NonNull<u8>,
    page: usize,
}

impl Positions {
    /// # Errors
    /// As `bpf(2)` and `mmap(2)`.
    pub fn of_pinned(path: &Path) -> nix::Result<Positions> {
        let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| nix::Error::EINVAL)?;
        let get = ObjGet {
            path: path.as_ptr().expose_provenance() as u64,
            fd: 0,
            flags: 0,
        };
        // SAFETY: the attributes of the command; the path outlives the call.
        let map = unsafe { bpf(OBJ_GET, &get) }?;
        // SAFETY: a number of the system's, and a new mapping at an address of the kernel's choice.
        let (page, pages) = unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let (read, fd) = (libc::PROT_READ, map.as_raw_fd());
            let none = std::ptr::null_mut();
            (
                page,
                libc::mmap(none, 2 * page, read, libc::MAP_SHARED, fd, 0),
            )
        };
        if pages == libc::MAP_FAILED {
            return Err(nix::Error::last());
        }
        let pages = NonNull::new(pages.cast()).ok_or(nix::Error::EFAULT)?;
        Ok(Positions { pages, page })
    }

    /// Bytes that the reader has given back since the ring was made.
    pub fn consumed(&self) -> u64 {
        self.word(0)
    }

    /// Bytes that were written since the ring was made.
    pub fn produced(&self) -> u64 {
        self.word(self.page)
    }

    fn word(&self, at: usize) -> u64 {
        // SAFETY: each page begins with the position, a word that is written as a whole.
        let word = unsafe { self.pages.add(at).cast::<AtomicU64>().as_ref() };
        word.load(Ordering::Acquire)
    }
}

impl Drop for Positions {
    fn drop(&mut self) {
        // SAFETY: mapped above with this length, and nothing borrows from it.
        unsafe { libc::munmap(self.pages.as_ptr().cast(), 2 * self.page) };
    }
}
