//! A directory that is listed again and again, through one buffer: `getdents64(2)`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::{Whence, lseek};

/// What the C library uses: some thousand processes.
const ROOM: usize = 32 << 10;
/// Where in a `struct linux_dirent64` its length and its name begin.
const LENGTH: usize = 16;
const NAME: usize = 19;

/// See the module.
pub struct Listing {
    directory: OwnedFd,
    buffer: Box<[u8; ROOM]>,
}

impl Listing {
    /// # Errors
    /// As `open(2)`.
    pub fn open(directory: &Path) -> nix::Result<Listing> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Listing {
            directory: open(directory, flags, Mode::empty())?,
            buffer: Box::new([0; ROOM]),
        })
    }

    /// Hands over the names of all entries, `.` and `..` too.
    ///
    /// # Errors
    /// It cannot be listed to the end: there may be others than those that were handed over.
    pub fn names(&mut self, mut take: impl FnMut(&[u8])) -> nix::Result<()> {
        lseek(&self.directory, 0, Whence::SeekSet)?;
        loop {
            let length = self.more()?;
            if length == 0 {
                return Ok(());
            }
            names(&self.buffer[..length]).for_each(&mut take);
        }
    }

    /// Reads the next entries; how many bytes they are, 0 at the end.
    fn more(&mut self) -> nix::Result<usize> {
        let (directory, room) = (self.directory.as_raw_fd(), self.buffer.len());
        let into = self.buffer.as_mut_ptr();
        // SAFETY: the kernel writes into the buffer, and no more than there is room for.
        let length = unsafe { libc::syscall(libc::SYS_getdents64, directory, into, room) };
        nix::Error::result(length).map(|length| length as usize)
    }
}

/// The names of the entries that stand one behind the other, up to the first that is none.
fn names(mut entries: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = entries.get(LENGTH..)?.first_chunk()?;
        let (entry, rest) = entries.split_at_checked(u16::from_ne_bytes(*length).into())?;
        entries = rest;
        entry.get(NAME..)?.split(|byte| *byte == 0).next()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn all_are_listed_each_time_however_many() {
        let dir = tempfile::tempdir().unwrap();
        let mut listing = Listing::open(dir.path()).unwrap();
        for count in [0, 5, 3000] {
            let mut expected: Vec<String> = (0..count).map(|n| format!("entry {n}")).collect();
            for name in &expected {
                std::fs::write(dir.path().join(name), "").unwrap();
            }
            expected.extend([".", ".."].map(String::from));
            expected.sort();
            for _ in 0..2 {
                let mut listed = Vec::new();
                let mut take = |name: &[u8]| listed.push(String::from_utf8(name.into()).unwrap());
                listing.names(&mut take).unwrap();
                listed.sort();
                assert_eq!(listed, expected);
            }
        }
        std::fs::remove_dir_all(dir.path()).unwrap();
        let gone = listing.names(|name| panic!("{name:?}"));
        assert_eq!(gone, Err(nix::Error::ENOENT));
    }

    proptest! {
        #[test]
        fn any_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(names(&bytes).count() <= bytes.len());
        }
    }
}
