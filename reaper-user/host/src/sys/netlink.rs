//! A socket of the kernel's netlink connector.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::PollFlags;
use rustix::net::netlink::{CONNECTOR, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrAny, SocketFlags, SocketType, bind, recvfrom,
    sendto, socket_with, sockopt,
};

use super::{errno, wait_for};

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
    /// as permitted. It does not block.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT` where the kernel has no connector, `EPERM` where the group is not for all users.
    pub fn open(group: u32, room: usize) -> nix::Result<Connector> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let family = AddressFamily::NETLINK;
        let socket = socket_with(family, SocketType::DGRAM, flags, Some(CONNECTOR));
        let socket = socket.map_err(errno)?;
        // Only root may pass the limit; with less room, more is lost in a burst, which is counted.
        sockopt::set_socket_recv_buffer_size_force(&socket, room)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, room))
            .map_err(errno)?;
        bind(&socket, &SocketAddrNetlink::new(0, 1 << (group - 1))).map_err(errno)?;
        Ok(Connector(socket))
    }

    /// Sends a message to the kernel.
    ///
    /// # Errors
    /// `ECONNREFUSED` in a network namespace without a listener: any but the first.
    pub fn send(&self, bytes: &[u8]) -> nix::Result<()> {
        let sent = sendto(
            &self.0,
            bytes,
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        );
        sent.map(drop).map_err(errno)
    }

    /// Returns the next datagram that the kernel has sent, `None` if there is none. Any process can send to a netlink
    /// socket: what others have sent is skipped.
    ///
    /// # Errors
    /// `ENOBUFS`, once, where there was no room for some: what came before and after them can still be read.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> nix::Result<Option<&'a [u8]>> {
        loop {
            let received = recvfrom(&self.0, &mut *buffer, RecvFlags::empty());
            match received.map_err(errno) {
                Ok((len, _, sender)) => {
                    if is_kernel(sender) {
                        return Ok(buffer.get(..len));
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits at most so long until there is something to receive; whether there is.
    pub fn wait(&self, timeout: Duration) -> bool {
        wait_for(&self.0, PollFlags::POLLIN, timeout)
    }
}

impl AsFd for Connector {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn is_kernel(sender: Option<SocketAddrAny>) -> bool {
    let sender = sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok());
    sender.is_some_and(|sender| sender.pid() == 0)
}
