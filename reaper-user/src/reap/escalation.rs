//! Escalation of one session from SIGTERM to SIGKILL, until no process is left. Pure: the caller passes the time.

use std::collections::BTreeSet;
use std::time::Duration;

use nix::sys::signal::Signal;
use reaper_common::{MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT};
use reaper_model::event::ProcessKey;

/// Number of births during the grace beyond which SIGKILL is due at once.
const BIRTHS_MAX: u32 = 256;

/// Delays of an escalation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
    /// Time from the last progress after SIGKILL to giving up.
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

/// Stage of an escalation. Times are in ns of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// SIGTERM, or its replacement, has been sent. SIGKILL is due at `kill_at`.
    Term { kill_at: u64 },
    /// SIGKILL has been sent, and is sent to each new process. The next check for progress is due at `check_at`.
    Kill { check_at: u64 },
}

/// Signal that a process is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalStep {
    /// First signal. A stopped process handles it only after [`SignalStep::Continue`], which the whole tree gets after
    /// the signals, the youngest first.
    ///
    /// Otherwise a process could exit while others are still stopped. If it was the last link of their process group to
    /// the terminal session, the kernel would send them SIGHUP (`kill_orphaned_pgrp` in kernel/exit.c).
    Terminate(Signal),
    /// SIGCONT only. The process had SIGTERM from another sender, and a second one may have another meaning for it.
    Continue,
    Kill,
}

impl SignalStep {
    /// Returns the signal that the process has had after this step. After [`SignalStep::Continue`] that is SIGTERM,
    /// which another sender has sent.
    pub fn signal(self) -> Signal {
        match self {
            SignalStep::Terminate(signal) => signal,
            SignalStep::Continue => Signal::SIGTERM,
            SignalStep::Kill => Signal::SIGKILL,
        }
    }
}

/// Escalation of one session. Times are in ns of CLOCK_MONOTONIC.
#[derive(Clone, Debug)]
pub struct Escalation {
    times: Times,
    /// Signal before SIGKILL.
    pub(super) first_signal: Signal,
    stage: Stage,
    births: u32,
    /// Claimed processes that have not exited.
    claims: BTreeSet<ProcessKey>,
    /// Whether the last check found no progress.
    was_stalled: bool,
    /// Whether the current check has found no progress.
    is_stalled: bool,
}

impl Escalation {
    /// Creates an escalation without claims. SIGKILL is due after the grace.
    pub fn new(times: Times, now: u64) -> Escalation {
        Escalation::resumed(times, now.saturating_add(ns(times.grace)), now)
    }

    /// Returns the time between the first signal and SIGKILL.
    pub fn grace(&self) -> Duration {
        self.times.grace
    }

    /// Continues an escalation of an earlier service, with SIGKILL due at `kill_at`. It has no claims yet. If that time
    /// has passed, its grace has ended.
    pub fn resumed(times: Times, kill_at: u64, now: u64) -> Escalation {
        let mut escalation = Escalation {
            times,
            first_signal: Signal::SIGTERM,
            stage: Stage::Term { kill_at },
            births: 0,
            claims: BTreeSet::new(),
            was_stalled: false,
            is_stalled: false,
        };
        if kill_at <= now {
            escalation.kill(now);
        }
        escalation
    }

    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Returns the signal for a process. `had` are the signals it had from others (`MEMBER_SIGTERM_SENT`,
    /// `MEMBER_SIGKILL_SENT`). `init`: it is the init of a pid namespace, which ignores SIGTERM without a handler.
    /// `is_patient`: a rule gives it more time than the others. A tree that forks without end gets none.
    pub fn step(&self, had: u32, init: bool, is_patient: bool) -> SignalStep {
        let is_in_grace = self.is_before_kill() || is_patient && self.births <= BIRTHS_MAX;
        // It is unknown whether an announced SIGKILL was sent. Another one does no harm.
        if !is_in_grace || init || had & MEMBER_SIGKILL_SENT != 0 {
            SignalStep::Kill
        } else if had & MEMBER_SIGTERM_SENT != 0 {
            SignalStep::Continue
        } else {
            SignalStep::Terminate(self.first_signal)
        }
    }

    /// Returns whether SIGKILL is not due yet.
    pub fn is_before_kill(&self) -> bool {
        matches!(self.stage, Stage::Term { .. })
    }

    /// Returns when SIGKILL is due or, after that, the next check for progress.
    pub fn deadline(&self) -> u64 {
        match self.stage {
            Stage::Term { kill_at } => kill_at,
            Stage::Kill { check_at } => check_at,
        }
    }

    pub fn on_claim(&mut self, key: ProcessKey) {
        self.claims.insert(key);
    }

    /// Returns the claimed processes, lowest pid first.
    pub fn claims(&self) -> impl Iterator<Item = ProcessKey> {
        self.claims.iter().copied()
    }

    /// Counts a birth in the tree. Returns whether it has ended the grace, as the 257th birth does.
    pub fn on_birth(&mut self, now: u64) -> bool {
        self.births = self.births.saturating_add(1);
        let is_exceeded = self.is_before_kill() && self.births > BIRTHS_MAX;
        if is_exceeded {
            self.kill(now);
        }
        is_exceeded
    }

    /// Ends the grace if it has not ended, and sets the next check for progress to half the kill timeout from `now`.
    /// Sends no signal.
    pub fn kill(&mut self, now: u64) {
        // Giving up takes two checks without progress, the second one at the end of the time.
        self.stage = Stage::Kill {
            check_at: now + ns(self.times.kill_timeout) / 2,
        };
    }

    /// Returns the escalation with the same claims and a new grace, for processes that have not been signalled yet.
    pub fn renewed(&self, times: Times, now: u64) -> Escalation {
        Escalation {
            first_signal: self.first_signal,
            claims: self.claims.clone(),
            ..Escalation::new(times, now)
        }
    }

    /// Notes a check without progress. Returns whether the previous check had none either. If not, the caller sets
    /// the time of the next check by [`Escalation::on_progress`].
    pub fn on_stall(&mut self) -> bool {
        self.is_stalled = true;
        self.was_stalled
    }

    /// Notes progress, or that it is still possible. After SIGKILL, also sets the time of the next check.
    pub fn on_progress(&mut self, now: u64) {
        self.was_stalled = std::mem::take(&mut self.is_stalled);
        if !self.is_before_kill() {
            self.kill(now);
        }
    }

    /// Removes the claim of a process, which counts as progress. Does nothing if it has none.
    pub fn on_finished(&mut self, key: ProcessKey, now: u64) {
        if self.claims.remove(&key) {
            self.is_stalled = false;
            self.on_progress(now);
        }
    }

    /// Returns whether there are no claims.
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }
}

pub(super) fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests;
