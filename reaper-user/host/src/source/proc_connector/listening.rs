//! Becoming one of those whom the kernel tells of processes, and being one no more.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::error::ConnectorError;
use super::parse::{ConnectorEvent, Message, messages, subscription};
use crate::sys;
use crate::sys::netlink::Connector;

/// More than any datagram of the kernel's.
pub(super) const DATAGRAM_MAX: usize = 1024;
/// How many wait here at most: the rest is left in the socket, where each takes twenty times the room.
pub(super) const WAITING_MAX: usize = 1 << 20;
/// How long the kernel may take to answer. It does before the call returns, if it does at all.
pub const PATIENCE: Duration = Duration::from_millis(50);

/// The socket of a listener, which says so when it is one no more: older kernels go on telling otherwise.
pub struct Listening(pub Connector);

impl Listening {
    /// To whom nothing is told.
    #[cfg(test)]
    pub fn deaf() -> Listening {
        Listening(Connector::broken())
    }

    /// What else comes before the answer is left in `early`, as far as there was room for it.
    pub fn begin(room: u32, early: &mut Vec<Message>) -> Result<Listening, ConnectorError> {
        let (listening, own) = Listening::ask(room)?;
        listening.await_answer(own, early)?;
        Ok(listening)
    }

    /// Gives the number by which the answer will be known.
    pub fn ask(room: u32) -> Result<(Listening, u32), ConnectorError> {
        let room = room.min(i32::MAX.cast_unsigned()) as usize;
        let socket = Connector::open(libc::CN_IDX_PROC, room).map_err(ConnectorError::open)?;
        // Answers go to all listeners: this tells which is its own.
        let own = (sys::boot_time() as u32).rotate_left(16) ^ std::process::id();
        let asked = socket.send(&subscription(true, own));
        asked.map_err(ConnectorError::ask)?;
        Ok((Listening(socket), own))
    }

    pub fn await_answer(&self, own: u32, early: &mut Vec<Message>) -> Result<(), ConnectorError> {
        let deadline = Instant::now() + PATIENCE;
        let mut buffer = [0; DATAGRAM_MAX];
        while early.len() < WAITING_MAX {
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
                // On a busy machine there is soon no room for more. The answer came first, and who is there is looked at
                // afterwards.
                Err(Errno::ENOBUFS) => {}
                Err(error) => return Err(ConnectorError::ask(error)),
            }
        }
        Err(ConnectorError::Silent)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // If the kernel does not hear it, it tells nobody.
        self.0.send(&subscription(false, 0)).unwrap_or_default();
    }
}
