//! Copies the path of an executable from the kernel's directory entries. Links are already resolved there, and the
//! process cannot exit before the path is read.

use aya_ebpf::helpers::generated::bpf_probe_read_kernel_str;
use reaper_common::EXE_MAX;

use crate::task::{load, masked, offset, read};

/// Maximum length of a component with its NUL (`NAME_MAX` + 1).
const NAME: usize = 256;
/// Size of the buffer that [`components`] needs for the verifier. Bounds are expressed by masks, and the smallest mask is
/// twice the real bound.
pub const ROOM: usize = 2 * EXE_MAX + NAME;
const MASK: i32 = 2 * EXE_MAX as i32 - 1;
/// Maximum number of directory entries walked within the file's own mount, and above it.
const WITHIN: usize = 16;
const BEYOND: usize = 12;

/// Writes the components of the path of a `struct file` to `out`, the last one first, each with a NUL. Returns the number
/// of bytes, and whether the walk ended before the root.
///
/// # Safety
/// `file` comes from typed loads; `out` points to [`ROOM`] bytes of map memory.
#[inline(always)]
pub unsafe fn components(file: *const u8, out: *mut u8) -> (usize, bool) {
    // SAFETY: guaranteed by the caller.
    let (len, cut) = unsafe { walk(file, out) };
    (masked::<MASK>(len as u64), cut)
}

/// Walks from a file to the root of its namespace, over all mounts, and appends the name of each directory to `out`. Returns
/// as [`components`].
///
/// # Safety
/// As for [`components`].
#[inline(always)]
unsafe fn walk(file: *const u8, out: *mut u8) -> (usize, bool) {
    let path = file.wrapping_add(offset!(file_path));
    let mut len = 0usize;
    // SAFETY: typed loads, which are cheap. Most files are on the first mount.
    let mnt: *const u8 = unsafe {
        let mnt: *const u8 = load(path, offset!(path_mnt));
        let root: *const u8 = load(mnt, offset!(mnt_root));
        let mut dentry: *const u8 = load(path, offset!(path_dentry));
        let mut at_root = false;
        for _ in 0..WITHIN {
            if dentry == root {
                at_root = true;
                break;
            }
            if !append(load(dentry, offset!(dentry_name)), out, &mut len) {
                return (len, true);
            }
            dentry = load(dentry, offset!(dentry_parent));
        }
        if !at_root {
            return (len, true);
        }
        // Copied from here on: the verifier does not allow subtraction from a typed pointer.
        read(path, offset!(path_mnt))
    };
    let Some((mut mnt, mut dentry)) = mounted_on(mnt) else {
        return (len, false);
    };
    for _ in 0..BEYOND {
        if dentry == read(mnt, offset!(mnt_root)) {
            match mounted_on(mnt) {
                Some(above) => (mnt, dentry) = above,
                None => return (len, false),
            }
        } else {
            // SAFETY: guaranteed by the caller.
            if !unsafe { append(read(dentry, offset!(dentry_name)), out, &mut len) } {
                return (len, true);
            }
            dentry = read(dentry, offset!(dentry_parent));
        }
    }
    (len, true)
}

/// Returns the mount above a mount, and the directory there that it covers; `None` for the topmost mount.
#[inline(always)]
fn mounted_on(mnt: *const u8) -> Option<(*const u8, *const u8)> {
    let mount = mnt.wrapping_sub(offset!(mount_mnt));
    let above: *const u8 = read(mount, offset!(mount_parent));
    if above == mount || above.is_null() {
        return None;
    }
    Some((
        above.wrapping_add(offset!(mount_mnt)),
        read(mount, offset!(mount_mountpoint)),
    ))
}

/// Appends a name. Returns false if there is no room or no name.
///
/// # Safety
/// `out` points to [`ROOM`] bytes of map memory.
#[inline(always)]
unsafe fn append(name: *const u8, out: *mut u8, len: &mut usize) -> bool {
    if *len > EXE_MAX {
        return false;
    }
    let at = masked::<MASK>(*len as u64);
    // SAFETY: within the buffer that the caller provides.
    let n = unsafe { bpf_probe_read_kernel_str(out.add(at).cast(), NAME as u32, name.cast()) };
    if n <= 0 {
        return false;
    }
    *len = at + masked::<{ 2 * NAME as i32 - 1 }>(n.cast_unsigned());
    true
}
