//! Subscribes to the proc connector and unsubscribes from it.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::error::ConnectorError;
use super::parse::{ConnectorEvent, Message, messages, subscription};
use crate::sys;
use crate::sys::netlink::Connector;

/// Size in bytes of the buffer for one datagram: more than the kernel sends.
pub(super) const DATAGRAM_MAX: usize = 1024;
/// Maximum number of messages held in memory. The rest stays in the socket, where each takes twenty times the space.
pub(super) const QUEUE_MAX: usize = 1 << 20;
/// Time limit for the kernel's answer to a subscription. The kernel answers before the call returns, or never.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(50);

/// Socket of a subscriber. Unsubscribes when dropped, because older kernels keep reporting otherwise.
pub struct Listener(pub Connector);

impl Listener {
    /// Returns a listener that receives nothing.
    #[cfg(test)]
    pub fn broken() -> Listener {
        Listener(Connector::broken())
    }

    /// Subscribes, with a receive buffer of `size` bytes as far as permitted, and waits for the kernel's answer.
    /// Messages received before the answer are put into `early`.
    ///
    /// # Errors
    /// The connector cannot be used. [`ConnectorError::Silent`] if no answer comes within [`ANSWER_TIMEOUT`].
    pub fn subscribe(size: u32, early: &mut Vec<Message>) -> Result<Listener, ConnectorError> {
        let (listener, own) = Listener::request(size)?;
        listener.await_answer(own, early)?;
        Ok(listener)
    }

    /// Requests a subscription. Returns the socket, and the number that identifies the kernel's answer to this request.
    pub fn request(size: u32) -> Result<(Listener, u32), ConnectorError> {
        let size = size.min(i32::MAX.cast_unsigned()) as usize;
        let socket = Connector::open(libc::CN_IDX_PROC, size).map_err(ConnectorError::open)?;
        // The kernel sends each answer to all listeners.
        let own = (sys::boot_time() as u32).rotate_left(16) ^ std::process::id();
        let sent = socket.send(&subscription(true, own));
        sent.map_err(ConnectorError::request)?;
        Ok((Listener(socket), own))
    }

    /// Waits for the answer to the request numbered `own`, for [`ANSWER_TIMEOUT`]. Puts other messages into `early`,
    /// and skips malformed ones.
    ///
    /// # Errors
    /// The answer is an error, none comes in time or before [`QUEUE_MAX`] other messages, or receiving fails.
    pub fn await_answer(&self, own: u32, early: &mut Vec<Message>) -> Result<(), ConnectorError> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut buffer = [0; DATAGRAM_MAX];
        while early.len() < QUEUE_MAX {
            match self.0.receive(&mut buffer) {
                Ok(Some(datagram)) => {
                    for message in messages(datagram).flatten() {
                        match message.what {
                            ConnectorEvent::Answer { to, errno } if to == own => {
                                return match errno {
                                    0 => Ok(()),
                                    errno => Err(ConnectorError::answer(errno)),
                                };
                            }
                            _ => early.push(message),
                        }
                    }
                }
                Ok(None) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if !self.0.wait(left) {
                        return Err(ConnectorError::Silent);
                    }
                }
                // The buffer soon overflows on a busy machine. The answer is already in it, and a later scan of /proc
                // finds the processes whose messages were lost.
                Err(Errno::ENOBUFS) => {}
                Err(error) => return Err(ConnectorError::request(error)),
            }
        }
        Err(ConnectorError::Silent)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Sending fails only if the connector cannot be reached, and then it reports nothing.
        self.0.send(&subscription(false, 0)).unwrap_or_default();
    }
}
