//! Dumps of socket tables through `sock_diag(7)`.

use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

/// Message types and flags of include/uapi/linux/netlink.h and sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
/// Length of `nlmsghdr`.
const HEADER: usize = 16;
/// Size of the receive buffer. The kernel sends at most half of it at a time.
const BUFFER: usize = 64 << 10;
/// Bit of a connected socket in a request's states.
pub(super) const ESTABLISHED: u32 = 1 << 1;
/// Bit of a listening socket.
pub(super) const LISTEN: u32 = 1 << 10;

/// Calls `on_socket` with the message about each socket of the service's network namespace that the requests select, such
/// as an `inet_diag_req_v2` or a `unix_diag_req`.
///
/// # Errors
/// The kernel refuses a request, or its answer is damaged.
pub(super) fn dump(
    requests: &[Vec<u8>],
    mut on_socket: impl FnMut(&[u8]) -> nix::Result<()>,
) -> nix::Result<()> {
    let protocol = SockProtocol::NetlinkSockDiag;
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
    let mut buffer = vec![0; BUFFER];
    for request in requests {
        let len = (HEADER + request.len()) as u32;
        let mut message = Vec::with_capacity(HEADER + request.len());
        message.extend(len.to_ne_bytes());
        message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        message.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
        // Sequence number and port, which the kernel only copies to its answer.
        message.extend([0; 8]);
        message.extend(request);
        send(socket.as_raw_fd(), &message, MsgFlags::empty())?;
        loop {
            let len = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            if messages(&buffer[..len], &mut on_socket)? {
                break;
            }
        }
    }
    Ok(())
}

/// Calls `on_socket` with the messages of a datagram. Returns whether it is the last one.
///
/// # Errors
/// `EBADMSG` if it contains something else, such as an error of the kernel, or is cut.
pub(super) fn messages(
    mut datagram: &[u8],
    mut on_socket: impl FnMut(&[u8]) -> nix::Result<()>,
) -> nix::Result<bool> {
    let bad = Errno::EBADMSG;
    while let Some((header, _)) = datagram.split_first_chunk::<HEADER>() {
        let [a, b, c, d, e, f, ..] = *header;
        let len = u32::from_ne_bytes([a, b, c, d]) as usize;
        let message = datagram.get(..len.max(HEADER)).ok_or(bad)?;
        match u16::from_ne_bytes([e, f]) {
            NLMSG_DONE => return Ok(true),
            SOCK_DIAG_BY_FAMILY => on_socket(&message[HEADER..])?,
            _ => return Err(bad),
        }
        datagram = datagram.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// Returns the number in native byte order at an offset.
///
/// # Errors
/// `EBADMSG` if the message ends before.
pub(super) fn number(message: &[u8], at: usize) -> nix::Result<u32> {
    let bytes = message.get(at..).and_then(|rest| rest.first_chunk());
    Ok(u32::from_ne_bytes(*bytes.ok_or(Errno::EBADMSG)?))
}
