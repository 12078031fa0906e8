//! Path of an executable, from the kernel's own directory entries: links are resolved by then, and
//! no process can be gone before it is looked at.

use aya_ebpf::helpers::generated::bpf_probe_read_kernel_str;
use reaper_common::EXE_MAX;

use crate::task::{offset, read};

/// Longest name of one component with its NUL (`NAME_MAX` + 1).
const NAME: usize = 256;
/// Room that [`components`] needs at its destination.
pub const ROOM: usize = EXE_MAX + NAME;
/// Directory entries and mount points walked at most.
const COMPONENTS: usize = 24;

/// Writes the components of the path of a `struct file` to `out`, last one first, each with a NUL.
/// Gives their length in bytes and whether the walk ended before the root.
///
/// # Safety
/// `out` points to [`ROOM`] bytes of map memory.
#[inline(always)]
pub unsafe fn components(file: *const u8, out: *mut u8) -> (usize, bool) {
    let path = file.wrapping_add(offset!(file_path));
    let mut mnt: *const u8 = read(path, offset!(path_mnt));
    let mut dentry: *const u8 = read(path, offset!(path_dentry));
    let mut root: *const u8 = read(mnt, offset!(mnt_root));
    let mut len = 0usize;
    for _ in 0..COMPONENTS {
        let parent: *const u8 = read(dentry, offset!(dentry_parent));
        if dentry == root || dentry == parent {
            let mount = mnt.wrapping_sub(offset!(mount_mnt));
            let above: *const u8 = read(mount, offset!(mount_parent));
            if above == mount || above.is_null() {
                return (len, false);
            }
            dentry = read(mount, offset!(mount_mountpoint));
            mnt = above.wrapping_add(offset!(mount_mnt));
            root = read(mnt, offset!(mnt_root));
            continue;
        }
        if len > EXE_MAX {
            break;
        }
        let name: *const u8 = read(dentry, offset!(dentry_name));
        // SAFETY: `len` is at most EXE_MAX, so a name fits into the room the caller promised.
        let n = unsafe { bpf_probe_read_kernel_str(out.add(len).cast(), NAME as u32, name.cast()) };
        if n <= 0 {
            break;
        }
        len += n as usize & (2 * NAME - 1);
        dentry = parent;
    }
    (len, true)
}
