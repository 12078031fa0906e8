//! The service, to which the end of a tree is left where it watches that: then one hand ends all, and what it does is told in its
//! stream.

use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::Signal;

use crate::api::client::{Client, ClientError};
use crate::api::{Claims, EndRequest};
use crate::reap::Handed;
use reaper_host::source::procfs::ProcessMemory;
use reaper_host::sys;
use reaper_host::sys::child;
use reaper_host::sys::pidfd::Pidfd;
use reaper_model::event::ProcessKey;

/// How long it may say nothing when it is asked.
const SILENCE: Duration = Duration::from_secs(1);

/// A service that ends what descends from this process.
pub(super) struct Service {
    client: Client,
    signal: Signal,
    grace: Duration,
    /// `None` where it is in another pid namespace.
    process: Option<Pidfd>,
}

impl Service {
    /// Has the one that listens there end all that it knows to descend from this process. Gives whom it has begun with; `None`
    /// where there is none, or it does not. Without a grace it kills.
    pub(super) fn ask(
        socket: &Path,
        signal: Signal,
        grace: Duration,
    ) -> Option<(Service, Vec<Handed>)> {
        let mut service = Service {
            client: Client::new(socket).within(SILENCE),
            signal: match grace.is_zero() {
                true => Signal::SIGKILL,
                false => signal,
            },
            grace,
            process: None,
        };
        let ordered = service.order(service.signal, grace);
        let ordered = ordered
            .inspect_err(|error| tracing::debug!("the end is not left to a service: {error}"));
        let (handed, pid) = ordered.ok().filter(|(handed, _)| !handed.is_empty())?;
        service.process = match pid.map(Pidfd::open) {
            None => None,
            Some(Err(Errno::ESRCH)) => return None,
            Some(opened) => opened.ok(),
        };
        Some((service, handed))
    }

    /// Has it see to those too who have come since. Gives whom it is ending; `None` where it says nothing.
    pub(super) fn ask_again(&self) -> Option<Vec<Handed>> {
        match self.order(self.signal, self.grace) {
            Ok((handed, _)) => Some(handed),
            Err(ClientError::Refused(_)) => Some(Vec::new()),
            Err(error) => {
                tracing::debug!("the service is silent: {error}");
                None
            }
        }
    }

    /// Has it kill them now; whether it does.
    pub(super) fn hasten(&self) -> bool {
        self.order(Signal::SIGKILL, Duration::ZERO).is_ok()
    }

    pub(super) fn is_gone(&self) -> bool {
        self.process.as_ref().is_some_and(Pidfd::has_exited)
    }

    /// Whom it is ending then, and its pid.
    fn order(
        &self,
        signal: Signal,
        grace: Duration,
    ) -> Result<(Vec<Handed>, Option<u32>), ClientError> {
        let request = EndRequest {
            pid: std::process::id(),
            start_ns: child::own_start(&mut [0; 1024]).unwrap_or_default(),
            until_ns: sys::boot_time().saturating_add(sys::nanoseconds(SILENCE)),
            signal: signal.as_str().to_owned(),
            grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
        };
        let ask = || -> Result<(Claims, Option<u32>), ClientError> {
            let said = self.client.post("/v1/end", &request)?;
            Ok((said.read::<Claims>()?, said.pid))
        };
        // Who embeds this may be within a runtime of their own, and there are not two in one thread.
        let (claims, pid) = thread::scope(|scope| -> Result<_, ClientError> {
            let asked = thread::Builder::new().spawn_scoped(scope, ask)?;
            let failed = |_| ClientError::Io(io::Error::other("a thread has failed"));
            asked.join().map_err(failed)?
        })?;
        let handed = claims.processes.into_iter().map(|one| Handed {
            key: ProcessKey {
                pid: one.pid,
                start: one.start_ns,
            },
            signal,
            memory: one.rss.map(|rss| ProcessMemory {
                rss,
                ..ProcessMemory::default()
            }),
        });
        Ok((handed.collect(), pid))
    }
}
