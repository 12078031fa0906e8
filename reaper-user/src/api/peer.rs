//! Identity of a client, and what it may see and control.

#[cfg_attr(target_os = "macos", path = "peer/darwin.rs")]
mod target;

use std::io;

use tokio::net::UnixStream;

use reaper_model::event::{ProcessKey, Uids};

/// User at the other end of a connection, as reported by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Effective uid at the time of connecting.
    pub uid: u32,
}

/// Process that a client wants to keep or release, with the uids that decide whether it may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalTarget {
    /// Identity; the start time is truncated to a clock tick.
    pub key: ProcessKey,
    pub real: u32,
    pub saved: u32,
    /// Kernel's short name (`comm`).
    pub comm: String,
}

impl Peer {
    /// Reads the credentials of the peer (`SO_PEERCRED`).
    ///
    /// # Errors
    /// The kernel returns no credentials.
    pub fn of(stream: &UnixStream) -> io::Result<Peer> {
        let cred = stream.peer_cred()?;
        Ok(Peer { uid: cred.uid() })
    }

    /// Checks that pids mean the same processes for the client and for this service.
    ///
    /// # Errors
    /// The client has connected from another pid namespace, or its namespace is unknown. The message says what to do.
    pub fn check_pid_namespace(stream: &UnixStream) -> Result<(), &'static str> {
        match target::shares_pid_namespace(stream.peer_cred().ok().and_then(|cred| cred.pid())) {
            Some(true) => Ok(()),
            Some(false) => Err(
                "this client is in another pid namespace than the service, where pids mean other processes: run the \
                 command where the service runs, or start the container with `--pid=host`",
            ),
            None => Err(
                "the service cannot tell whether pids mean the same processes for this client: it may not read the client \
                 in /proc (mount option hidepid); run the command as the user of the service",
            ),
        }
    }

    /// Returns whether the client is root.
    pub fn is_root(self) -> bool {
        self.uid == 0
    }

    /// Returns whether it may control the service: root, or the user that the service runs as.
    pub fn is_privileged(self) -> bool {
        self.is_root() || self.uid == nix::unistd::geteuid().as_raw()
    }

    /// Returns whether it may see a process with these uids.
    pub fn may_see(self, uids: Uids) -> bool {
        self.is_root() || self.uid == uids.real || self.uid == uids.effective
    }

    /// Returns whether kill(2) would let it signal the process.
    pub fn may_signal(self, target: &SignalTarget) -> bool {
        self.is_root() || self.uid == target.real || self.uid == target.saved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reaper_host::facts::ScriptPaths;

    const KEY: ProcessKey = ProcessKey { pid: 5, start: 0 };

    fn uids(real: u32, effective: u32) -> Uids {
        Uids { real, effective }
    }

    #[test]
    fn only_privileged_clients_see_resolved_scripts() {
        let own = nix::unistd::geteuid().as_raw();
        for (uid, paths) in [
            (0, ScriptPaths::Resolved),
            (own, ScriptPaths::Resolved),
            (own + 1, ScriptPaths::Given),
        ] {
            assert_eq!(Peer { uid }.script_paths(), paths, "{uid}");
        }
    }

    #[test]
    fn root_sees_all_others_see_own_uid() {
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
    fn signal_target_has_start_time_and_uids() {
        let own = SignalTarget::read(std::process::id()).unwrap().unwrap();
        assert!(own.key.start > 0 && own.real == nix::unistd::getuid().as_raw());
        assert_eq!(SignalTarget::read(u32::MAX / 2).unwrap(), None);
    }
}
