//! Recognises file systems that other machines can write to. A database or a lock file does not work reliably on
//! these.

use std::path::Path;

use nix::sys::statfs::statfs;

/// Network file systems, by their magic numbers. Other machines may not see their locks or shared memory.
const REMOTE: [(u32, &str); 18] = [
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB"),
    (0x0102_1997, "9p"),
    (0x5346_414F, "AFS"),
    (0x6B41_4653, "AFS"),
    (0x00C3_6400, "Ceph"),
    (0x7375_7245, "Coda"),
    (0x564C, "NCP"),
    // The actual storage is unknown.
    (0x6573_5546, "FUSE"),
    (0x0BD0_0BD0, "Lustre"),
    (0x0116_1970, "GFS2"),
    (0x7461_636F, "OCFS2"),
    (0x786F_4256, "vboxsf"),
    (0x2003_0528, "OrangeFS"),
    (0x1983_0326, "BeeGFS"),
    (0x4750_4653, "GPFS"),
];

/// Returns the name of the network file system with this magic number, or `None` if it is not known as one.
fn of_magic(magic: u32) -> Option<&'static str> {
    REMOTE
        .iter()
        .find(|(number, _)| *number == magic)
        .map(|(_, name)| *name)
}

/// Returns the name of the network file system that contains a directory, or `None` if it is a local one.
///
/// # Errors
/// As statfs(2).
pub fn kind(directory: &Path) -> nix::Result<Option<&'static str>> {
    // The type, and whether a number with the highest bit set is negative, depend on architecture and C library.
    Ok(of_magic(statfs(directory)?.filesystem_type().0 as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known_by_number() {
        for (magic, name) in [
            (0x6969, "NFS"),
            (0xFF53_4D42, "CIFS"),
            (0x0102_1997, "9p"),
            (0x5346_414F, "AFS"),
            (0x00C3_6400, "Ceph"),
            (0x6573_5546, "FUSE"),
        ] {
            assert_eq!(of_magic(magic), Some(name));
        }
        // A negative signed 32-bit number, extended to 64 bits.
        assert_eq!(of_magic(-0x01AC_B2BE_i64 as u32), Some("SMB"));
        // ext4, tmpfs, btrfs, overlayfs.
        for magic in [0xEF53, 0x0102_1994, 0x9123_683E, 0x794C_7630] {
            assert_eq!(of_magic(magic), None);
        }
    }
}
