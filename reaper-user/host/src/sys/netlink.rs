//! A socket of the kernel's netlink connector, on which it tells whoever asks of what happens in it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// See the module.
#[derive(Debug)]
pub struct Connector(OwnedFd);

impl Connector {
    /// What only looks like a socket.
    #[cfg(test)]
    pub fn broken() -> Connector {
        Connector(std::fs::File::open("/dev/null").unwrap().into())
    }

    /// Opens a socket that belongs to a group of listeners and holds so many bytes until they are read, as far
    /// as permitted. Nothing waits on it.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT` where the kernel has no connector, `EPERM` where this group is not for everybody.
    pub fn open(group: u32, room: i32) -> nix::Result<Connector> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_CONNECTOR) };
        let fd = Errno::result(fd)?;
        // SAFETY: a new descriptor that belongs to nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // The limit is root's to pass; with less room, more is lost in a burst, which is counted.
        if make_room(&socket, libc::SO_RCVBUFFORCE, room).is_err() {
            make_room(&socket, libc::SO_RCVBUF, room)?;
        }
        let own = address(1 << (group - 1));
        // SAFETY: the address is read, and is as long as is said.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const own).cast(), ADDRESS_LEN) };
        Errno::result(bound)?;
        Ok(Connector(socket))
    }

    /// Says something to the kernel.
    ///
    /// # Errors
    /// `ECONNREFUSED` in a network namespace where nobody listens: any but the first.
    pub fn send(&self, bytes: &[u8]) -> nix::Result<()> {
        let kernel = address(0);
        // SAFETY: the bytes and the address are read, and are as long as is said.
        let sent = unsafe {
            libc::sendto(
                self.0.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                0,
                (&raw const kernel).cast(),
                ADDRESS_LEN,
            )
        };
        Errno::result(sent).map(drop)
    }

    /// The next datagram that the kernel has sent, `None` if there is none. Anybody can send to a netlink
    /// socket: what others have sent is skipped.
    ///
    /// # Errors
    /// `ENOBUFS`, once, where there was no room for some: what came before and after them can still be read.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> nix::Result<Option<&'a [u8]>> {
        loop {
            let mut sender = address(0);
            let mut len = ADDRESS_LEN;
            // SAFETY: both are written to, and are as long as is said.
            let received = unsafe {
                libc::recvfrom(
                    self.0.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    0,
                    (&raw mut sender).cast(),
                    &raw mut len,
                )
            };
            match Errno::result(received) {
                Ok(received) if len == ADDRESS_LEN && sender.nl_pid == 0 => {
                    return Ok(buffer.get(..received.cast_unsigned()));
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits at most so long until there is something to receive; whether there is.
    pub fn wait(&self, timeout: Duration) -> bool {
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, timeout), Ok(1))
    }
}

impl AsFd for Connector {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn make_room(socket: &OwnedFd, option: libc::c_int, bytes: i32) -> nix::Result<()> {
    // SAFETY: the number is read, and is as long as is said.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const bytes).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    Errno::result(set).map(drop)
}

const ADDRESS_LEN: libc::socklen_t = size_of::<libc::sockaddr_nl>() as libc::socklen_t;

/// Of the kernel, or one that it finds for a socket in these groups.
fn address(groups: u32) -> libc::sockaddr_nl {
    // SAFETY: integers alone, for which zero is a value.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address.nl_groups = groups;
    address
}
