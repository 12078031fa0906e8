//! Event source for hosts without BPF: the kernel's proc connector.
//!
//! The connector reports forks, execs, exits and new user ids of all processes to root, in the order of each processor.
//! It names processes by pid alone. This source distinguishes processes with the same pid by the times of their forks
//! and by /proc. From Linux 6.9 on, it also compares the inode numbers of pidfds.
//!
//! It reads /proc and the inode numbers when it receives an event, so a moment late. If the process has exited or its
//! pid was reused in that moment, its program stays unknown. If the read takes too long on a busy machine, the program
//! is [reported later](translate).
//!
//! A fork event names the child's parent, not the creator. They differ under `CLONE_PARENT`: then the parent that the
//! child shares with its creator counts as its creator.

pub(super) mod error;
mod identity;
mod inbox;
mod listener;
mod parse;
#[cfg(test)]
mod tests;
mod translate;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::drained::{Drained, Lost};
use super::error::SourceError;
use super::event_source::Source;
use super::kind::SourceKind;
use super::procfs::Procfs;
use crate::sys;
use crate::sys::pidfd::Pidfd;
pub use error::ConnectorError;
use inbox::Inbox;
use listener::Listener;
use reaper_model::event::{Event, ProcessKey};
use translate::{Output, Translator};

/// Size in bytes of the receive buffer while [`probe`] tries the connector.
const PROBE_BUFFER_SIZE: u32 = 1 << 20;
/// Time limit for reading the program of one process.
const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// Number of messages translated between two reads of the socket. Reading /proc is slower than the kernel reports.
const BATCH: usize = 64;
/// Time limit for one drain, in ns: signals, timers and requests wait for it.
const DRAIN_TIME_MAX_NS: u64 = 20_000_000;
/// Age of the oldest queued message, in ns, from which a growing backlog counts.
const BACKLOG_AGE_MAX_NS: u64 = 1_000_000_000;
/// Number of successive drains with a growing backlog after which the source fails.
const GROWING_DRAINS_MAX: u32 = 50;
/// Bound on the difference between two clock readings, in ns. A larger difference means that the machine was suspended.
const CLOCK_JITTER_NS: u64 = 1_000_000;

/// Source that receives the messages of the proc connector.
pub struct ProcConnector {
    inbox: Inbox,
    translator: Translator,
    /// Whether the kernel has long reported more than this source can translate.
    falls_behind: bool,
    /// Time of the latest loss, in ns of CLOCK_MONOTONIC. The known processes are reconciled with /proc once all
    /// messages from before it are translated.
    reconcile_after_ns: Option<u64>,
    /// Age of the oldest queued message after the last drain, in ns.
    backlog_age_ns: u64,
    /// Number of successive drains after which that age had grown.
    growing_drains: u32,
    /// Total suspend time, in ns: the kernel's times are CLOCK_MONOTONIC, those of events are since boot.
    suspended_ns: u64,
}

/// Checks that the proc connector can be used on this host. Subscribes to it and unsubscribes again.
///
/// # Errors
/// The kernel, a permission or a namespace does not allow it.
pub fn probe() -> Result<(), ConnectorError> {
    sys::non_initial_pid_namespace().map_err(ConnectorError::Proc)?;
    Listener::subscribe(PROBE_BUFFER_SIZE, &mut Vec::new()).map(drop)
}

impl ProcConnector {
    /// Subscribes to the connector and lists pre-existing processes.
    ///
    /// `buffer_size` is the size in bytes of the socket's receive buffer, the kernel's overhead included.
    ///
    /// # Errors
    /// The connector cannot be used, or /proc cannot be listed.
    pub fn open(buffer_size: u32) -> Result<ProcConnector, ConnectorError> {
        // The pids of the connector are looked up in /proc, so it must show the same pid namespace.
        sys::non_initial_pid_namespace().map_err(ConnectorError::Proc)?;
        let mut early = Vec::new();
        let listener = Listener::subscribe(buffer_size, &mut early)?;
        let mut translator =
            Translator::new(Procfs::default(), Box::new(pidfd_inode), READ_TIMEOUT);
        // Only after subscribing: from then on the kernel reports each fork.
        translator.reconcile()?;
        Ok(ProcConnector {
            inbox: Inbox::new(listener, early),
            translator,
            falls_behind: false,
            reconcile_after_ns: None,
            backlog_age_ns: 0,
            growing_drains: 0,
            suspended_ns: sys::suspended(),
        })
    }

    /// Marks the source as failed if the kernel has long reported more than it can translate.
    ///
    /// That is so after [`GROWING_DRAINS_MAX`] successive drains that left a backlog older than [`BACKLOG_AGE_MAX_NS`]
    /// that got no younger. `next` is the time of the oldest queued message (CLOCK_MONOTONIC, ns), if there is one.
    fn check_backlog(&mut self, next: Option<u64>) {
        let age_ns = next.map_or(0, |next| sys::monotonic().saturating_sub(next));
        let grows = age_ns > BACKLOG_AGE_MAX_NS && age_ns >= self.backlog_age_ns;
        self.backlog_age_ns = age_ns;
        self.growing_drains = if grows { self.growing_drains + 1 } else { 0 };
        if self.growing_drains > GROWING_DRAINS_MAX {
            self.falls_behind = true;
        }
    }
}

impl Source for ProcConnector {
    fn kind(&self) -> SourceKind {
        SourceKind::ProcConnector
    }

    /// Passes on the events reported before this call, in order, until 20 ms have passed.
    ///
    /// It stops when it detects a loss, so that the engine learns of the loss before the events that follow. Events
    /// reported during the call may stay for the next call. An exit that /proc cannot confirm counts as lost.
    ///
    /// Also retries to read programs that an earlier call could not read in time.
    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained {
        let began = sys::monotonic();
        let suspended_ns = sys::suspended();
        if suspended_ns.abs_diff(self.suspended_ns) > CLOCK_JITTER_NS {
            self.suspended_ns = suspended_ns;
        }
        let lost = self.inbox.lost().total;
        let mut records = 0;
        let mut last_time = 0;
        loop {
            self.inbox.receive();
            let now = sys::monotonic();
            if self.inbox.lost().total != lost {
                // Messages from before the loss may report exits of processes that a scan of /proc does not find.
                self.reconcile_after_ns = Some(now);
                break;
            }
            if self.inbox.first().is_none() || last_time > began || now > began + DRAIN_TIME_MAX_NS
            {
                break;
            }
            for _ in 0..BATCH {
                if self.inbox.lost().total != lost {
                    break;
                }
                let Some(message) = self.inbox.pop() else {
                    break;
                };
                records += 1;
                last_time = message.time;
                let time = message.time.saturating_add(self.suspended_ns);
                let mut out = Output {
                    may_have_execed: &mut |pid| self.inbox.may_have_execed(pid),
                    sink: &mut *sink,
                };
                self.translator.translate(time, message.what, &mut out);
            }
        }
        let next = self.inbox.first().map(|message| message.time);
        if self
            .reconcile_after_ns
            .is_some_and(|after| next.is_none_or(|next| next > after))
        {
            self.reconcile_after_ns = None;
            // The engine's reconciliation scan finds the exits.
            if let Err(error) = self.translator.reconcile() {
                tracing::error!("{error}");
            }
        }
        self.check_backlog(next);
        let lost = self.inbox.lost().total;
        let mut out = Output {
            may_have_execed: &mut |pid| self.inbox.may_have_execed(pid),
            sink,
        };
        // Programs still to be read count as records, so that the engine drains again soon.
        records += self.translator.retry(sys::monotonic(), &mut out) as u64;
        self.inbox
            .count_as_lost(self.translator.take_unverified_exits());
        if self.inbox.lost().total != lost {
            self.reconcile_after_ns = Some(sys::monotonic());
        }
        let defects = self.inbox.take_defects();
        Drained {
            records: records + defects.records,
            lost: self.inbox.lost().total,
            ..defects
        }
    }

    /// Compares the inode number of the pidfd if it is known, otherwise the start tick in /proc.
    fn confirms_identity(&mut self, key: ProcessKey) -> bool {
        self.translator.is_alive(key)
    }

    /// Returns a total only, because the kinds of lost events are unknown.
    fn lost(&self) -> Lost {
        self.inbox.lost()
    }

    fn has_undrained(&self) -> bool {
        self.inbox.first().is_some()
    }

    fn failure(&self) -> Option<SourceError> {
        let broken = self.inbox.broken().map(ConnectorError::Broken);
        let error = broken.or_else(|| self.falls_behind.then_some(ConnectorError::Behind));
        error.map(SourceError::from)
    }

    fn import_keys(&mut self, keys: &mut dyn Iterator<Item = ProcessKey>) {
        self.translator.import_keys(keys);
    }
}

impl AsFd for ProcConnector {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inbox.listener.0.as_fd()
    }
}

/// Implements [`identity::InodeReader`]. Takes 2 µs, a third of the other reads at a fork.
fn pidfd_inode(pid: u32) -> u64 {
    let inode = Pidfd::open(pid).ok().and_then(|pidfd| pidfd.unique_inode());
    inode.unwrap_or(0)
}
