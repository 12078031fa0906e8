//! Sockets of the netlink connector.

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

/// A non-blocking socket of the netlink connector.
#[derive(Debug)]
pub struct Connector(OwnedFd);

impl Connector {
    /// Returns a value whose file is not a socket.
    #[cfg(test)]
    pub fn broken() -> Connector {
        Connector(std::fs::File::open("/dev/null").unwrap().into())
    }

    /// Opens a socket that receives the messages of a group. `room` is the size of its receive buffer in bytes, as
    /// far as permitted.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT` if the kernel has no connector, `EPERM` if the group is restricted to root.
    pub fn open(group: u32, room: usize) -> nix::Result<Connector> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let family = AddressFamily::NETLINK;
        let socket = socket_with(family, SocketType::DGRAM, flags, Some(CONNECTOR));
        let socket = socket.map_err(errno)?;
        // Only root can exceed the limit of the system. A smaller buffer loses more in a burst, and losses are
        // counted.
        sockopt::set_socket_recv_buffer_size_force(&socket, room)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, room))
            .map_err(errno)?;
        bind(&socket, &SocketAddrNetlink::new(0, 1 << (group - 1))).map_err(errno)?;
        Ok(Connector(socket))
    }

    /// Sends a message to the kernel.
    ///
    /// # Errors
    /// `ECONNREFUSED` in a network namespace other than the initial one, where nothing listens.
    pub fn send(&self, bytes: &[u8]) -> nix::Result<()> {
        let sent = sendto(
            &self.0,
            bytes,
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        );
        sent.map(drop).map_err(errno)
    }

    /// Returns the next datagram from the kernel, if there is one. Any process can send to a netlink socket, so
    /// datagrams from other senders are skipped.
    ///
    /// # Errors
    /// `ENOBUFS`, once, after the kernel has dropped messages for lack of space. The messages before and after remain
    /// readable.
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

    /// Waits until there is something to receive, at most for `timeout`. Returns whether there is.
    pub fn wait(&self, timeout: Duration) -> bool {
        wait_for(&self.0, PollFlags::POLLIN, timeout)
    }
}

impl AsFd for Connector {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns whether a datagram comes from the kernel.
fn is_kernel(sender: Option<SocketAddrAny>) -> bool {
    let sender = sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok());
    sender.is_some_and(|sender| sender.pid() == 0)
}
