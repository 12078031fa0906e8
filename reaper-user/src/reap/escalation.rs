//! One session's way from SIGTERM to nothing left. Pure: time comes in.

use std::collections::BTreeSet;
use std::time::Duration;

use nix::sys::signal::Signal;
use reaper_common::{MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT};
use reaper_model::event::ProcessKey;

/// Births during the grace after which it ends at once.
const BIRTHS_MAX: u32 = 256;

/// How long to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// From SIGTERM to SIGKILL.
    pub grace: Duration,
    /// From the last sign of progress after SIGKILL to giving up.
    pub kill_timeout: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Times {
            grace: Duration::from_secs(5),
            kill_timeout: Duration::from_secs(1),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// SIGTERM, or what is in its place, has been sent; SIGKILL follows at the deadline.
    Term { kill_at: u64 },
    /// SIGKILL has been sent, and is to whatever appears.
    Kill { look_at: u64 },
}

/// What a process is sent on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalStep {
    /// The signal that is to be first. A stopped process sees it when it is woken, by [`SignalStep::Continue`], after all others of its
    /// tree have had it and the youngest first: none is to end while others stand. Where it was their process group's last tie to
    /// the session, the kernel sends those SIGHUP (`kill_orphaned_pgrp` in kernel/exit.c), which nobody has asked for.
    Terminate(Signal),
    /// SIGCONT alone: SIGTERM has been sent to it by another, and a second one may mean more to it.
    Continue,
    Kill,
}

impl SignalStep {
    /// What the process has been sent after it, be it by another.
    pub fn signal(self) -> Signal {
        match self {
            SignalStep::Terminate(signal) => signal,
            SignalStep::Continue => Signal::SIGTERM,
            SignalStep::Kill => Signal::SIGKILL,
        }
    }
}

/// See the module. Times are ns on the monotonic clock.
#[derive(Clone, Debug)]
pub struct Escalation {
    times: Times,
    /// Sent first.
    pub(super) first_signal: Signal,
    stage: Stage,
    births: u32,
    /// Processes on it that have not ended.
    claims: BTreeSet<ProcessKey>,
    /// Looked at once for progress since the last sign of it.
    was_stalled: bool,
    /// Being looked at, and nothing moves.
    is_stalled: bool,
}

impl Escalation {
    pub fn new(times: Times, now: u64) -> Escalation {
        Escalation::resumed(times, now.saturating_add(ns(times.grace)), now)
    }

    /// How long before SIGKILL it sends its first signal.
    pub fn grace(&self) -> Duration {
        self.times.grace
    }

    /// One that another service has opened, whose SIGKILL is due at `kill_at`.
    pub fn resumed(times: Times, kill_at: u64, now: u64) -> Escalation {
        let mut ladder = Escalation {
            times,
            first_signal: Signal::SIGTERM,
            stage: Stage::Term { kill_at },
            births: 0,
            claims: BTreeSet::new(),
            was_stalled: false,
            is_stalled: false,
        };
        if kill_at <= now {
            ladder.kill(now);
        }
        ladder
    }

    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// What a process on it is to be sent. `had` is what it has been sent by others (`MEMBER_SIGTERM_SENT`,
    /// `MEMBER_SIGKILL_SENT`); an `init` of a pid namespace ignores SIGTERM unless it has a handler for it.
    pub fn step(&self, had: u32, init: bool) -> SignalStep {
        // Whether a SIGKILL that is told of was sent cannot be seen, and one more does no harm.
        if !self.is_before_kill() || init || had & MEMBER_SIGKILL_SENT != 0 {
            SignalStep::Kill
        } else if had & MEMBER_SIGTERM_SENT != 0 {
            SignalStep::Continue
        } else {
            SignalStep::Terminate(self.first_signal)
        }
    }

    /// Whether SIGKILL is not called for yet.
    pub fn is_before_kill(&self) -> bool {
        matches!(self.stage, Stage::Term { .. })
    }

    pub fn deadline(&self) -> u64 {
        match self.stage {
            Stage::Term { kill_at } => kill_at,
            Stage::Kill { look_at } => look_at,
        }
    }

    /// One more process is on it.
    pub fn on_claim(&mut self, key: ProcessKey) {
        self.claims.insert(key);
    }

    /// Returns the processes on it, lowest pid first.
    pub fn claims(&self) -> impl Iterator<Item = ProcessKey> {
        self.claims.iter().copied()
    }

    /// One was born into a tree that is being ended; true if there have been so many that SIGKILL is due now.
    pub fn on_birth(&mut self, now: u64) -> bool {
        self.births = self.births.saturating_add(1);
        let overrun = self.is_before_kill() && self.births > BIRTHS_MAX;
        if overrun {
            self.kill(now);
        }
        overrun
    }

    /// The grace is over.
    pub fn kill(&mut self, now: u64) {
        // Two looks without progress between them, the second one at the end of the time.
        self.stage = Stage::Kill {
            look_at: now + ns(self.times.kill_timeout) / 2,
        };
    }

    /// The same ladder with the whole grace again, for processes that have not been signalled yet.
    pub fn renewed(&self, times: Times, now: u64) -> Escalation {
        Escalation {
            first_signal: self.first_signal,
            claims: self.claims.clone(),
            ..Escalation::new(times, now)
        }
    }

    /// A look that finds nothing moving: whether there has been one before since the last sign of
    /// progress. If not, [`Escalation::on_progress`] sets the time of the next one.
    pub fn on_stall(&mut self) -> bool {
        self.is_stalled = true;
        self.was_stalled
    }

    /// Something moves, or may still.
    pub fn on_progress(&mut self, now: u64) {
        self.was_stalled = std::mem::take(&mut self.is_stalled);
        if !self.is_before_kill() {
            self.kill(now);
        }
    }

    /// One is off it.
    pub fn on_finished(&mut self, key: ProcessKey, now: u64) {
        if self.claims.remove(&key) {
            self.is_stalled = false;
            self.on_progress(now);
        }
    }

    /// Whether nobody is on it.
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests;
