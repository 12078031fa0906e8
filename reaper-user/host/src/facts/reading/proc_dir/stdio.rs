//! Reads the standard input and output.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::ProcDir;
use crate::source::procfs::parse::number;
use crate::sys::pidfd::Pidfd;
use reaper_model::event::ProcessKey;
use reaper_model::facts::{Fact, Stdio};

impl ProcDir {
    /// Returns whether standard input is a terminal; false if it is closed. The caller must check [`ProcDir::is_alive`]
    /// afterwards, as in [`ProcDir::listening`].
    pub(in crate::facts::reading) fn input(&self) -> Fact<bool> {
        match std::fs::read_link(self.path.join("fd/0")) {
            Ok(file) => Fact::Known(is_terminal(file.as_os_str().as_bytes())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Fact::Known(false),
            Err(_) => Fact::Unreadable,
        }
    }

    /// Returns whether the other ends of standard input and output are open, if these are pipes or sockets. The caller must
    /// check [`ProcDir::is_alive`] afterwards, as in [`ProcDir::listening`].
    pub(in crate::facts::reading) fn stdio(&self, key: ProcessKey) -> io::Result<Stdio> {
        let [input, output] = [self.other_end(key, 0)?, self.other_end(key, 1)?];
        Ok(match (input, output) {
            (Some(true), _) => Stdio::Connected(self.input_inode().unwrap_or(0)),
            (Some(false), Some(false)) => Stdio::HungUp,
            _ => Stdio::Other,
        })
    }

    /// Returns the inode number of the pipe or socket that is standard input; `None` if it is something else.
    pub(super) fn input_inode(&self) -> Option<u64> {
        let link = std::fs::read_link(self.path.join("fd/0")).ok()?;
        let link = link.as_os_str().as_bytes();
        let inode = link
            .strip_prefix(b"pipe:[")
            .or_else(|| link.strip_prefix(b"socket:["))?;
        number(inode.strip_suffix(b"]")?)
    }

    /// Returns whether the other end of the file with descriptor `number` is open. `None` if the descriptor is closed,
    /// or is neither a pipe nor a socket.
    fn other_end(&self, key: ProcessKey, number: i32) -> io::Result<Option<bool>> {
        let path = self.path.join("fd").join(number.to_string());
        let link = match std::fs::read_link(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            link => link?,
        };
        let link = link.as_os_str().as_bytes();
        let file: OwnedFd = if link.starts_with(b"pipe:[") {
            // The pipe has one more reader or writer for a moment, of a kind that it already has.
            let mut options = File::options();
            let options = match number {
                0 => options.read(true),
                _ => options.write(true),
            };
            options.custom_flags(libc::O_NONBLOCK).open(&path)?.into()
        } else if link.starts_with(b"socket:[") {
            // Sockets cannot be opened by path.
            Pidfd::open(key.pid)?.file_of(number)?
        } else {
            return Ok(None);
        };
        let mut polled = [PollFd::new(file.as_fd(), PollFlags::empty())];
        poll(&mut polled, PollTimeout::ZERO)?;
        let found = polled[0].revents().unwrap_or(PollFlags::empty());
        // POLLHUP: a pipe without a writer, or a closed socket. POLLERR: a pipe without a reader.
        Ok(Some(
            !found.intersects(PollFlags::POLLHUP | PollFlags::POLLERR),
        ))
    }
}

/// Returns whether a file is a terminal, by its path. A terminal with another name is not recognised.
fn is_terminal(file: &[u8]) -> bool {
    let device = file.strip_prefix(b"/dev/").unwrap_or_default();
    device.starts_with(b"pts/") || device.starts_with(b"tty") || device == b"console"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::arbitrary_bytes;

    proptest! {
        #[test]
        fn only_paths_below_dev_are_terminals(name in arbitrary_bytes("/dev/pts/3")) {
            prop_assert!(!is_terminal(&name) || name.starts_with(b"/dev/"));
        }
    }
}
