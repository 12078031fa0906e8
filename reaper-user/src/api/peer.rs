//! Who asks, and what is theirs to see and to order.

#[cfg_attr(target_os = "macos", path = "peer/darwin.rs")]
mod target;

use std::io;

use tokio::net::UnixStream;

use reaper_model::event::{ProcessKey, Uids};

/// Who is at the other end of a connection, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Effective, when it connected.
    pub uid: u32,
}

/// A process somebody wants something done with: who it is, and who may signal it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalTarget {
    /// The start is a whole tick.
    pub key: ProcessKey,
    pub real: u32,
    pub saved: u32,
    /// The kernel's short name for it.
    pub comm: String,
}

impl Peer {
    /// By `SO_PEERCRED`.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn of(stream: &UnixStream) -> io::Result<Peer> {
        let cred = stream.peer_cred()?;
        Ok(Peer { uid: cred.uid() })
    }

    pub fn is_root(self) -> bool {
        self.uid == 0
    }

    /// Whether it may do as the service itself does: root, or the user that this runs as.
    pub fn is_privileged(self) -> bool {
        self.is_root() || self.uid == nix::unistd::geteuid().as_raw()
    }

    /// Whether a process under these ids is shown to it.
    pub fn may_see(self, uids: Uids) -> bool {
        self.is_root() || self.uid == uids.real || self.uid == uids.effective
    }

    /// Whether kill(2) would let it signal the process.
    pub fn may_signal(self, target: &SignalTarget) -> bool {
        self.is_root() || self.uid == target.real || self.uid == target.saved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ProcessKey = ProcessKey { pid: 5, start: 0 };

    fn uids(real: u32, effective: u32) -> Uids {
        Uids { real, effective }
    }

    #[test]
    fn root_sees_and_reaches_all_and_others_what_is_theirs() {
        let (root, alice) = (Peer { uid: 0 }, Peer { uid: 1000 });
        assert!(
            root.may_see(uids(7, 8))
                && alice.may_see(uids(1000, 0))
                && alice.may_see(uids(0, 1000))
        );
        assert!(!alice.may_see(uids(0, 0)) && !alice.may_see(uids(1001, 1001)));
        let target = |real, saved| SignalTarget {
            key: KEY,
            real,
            saved,
            comm: String::new(),
        };
        assert!(root.may_signal(&target(7, 8)));
        assert!(alice.may_signal(&target(1000, 0)) && alice.may_signal(&target(0, 1000)));
        assert!(!alice.may_signal(&target(0, 0)) && !alice.may_signal(&target(1001, 1001)));
    }

    #[test]
    fn a_target_is_read_with_its_identity() {
        let own = SignalTarget::read(std::process::id()).unwrap().unwrap();
        assert!(own.key.start > 0 && own.real == nix::unistd::getuid().as_raw());
        assert_eq!(SignalTarget::read(u32::MAX / 2).unwrap(), None);
    }
}
