//! A look in the shape in which it is answered, with the service or without.

use hashbrown::HashMap;

use crate::api::{Finding, ScanReport};
use crate::export::{command_line, leftover_text};
use crate::reap::{ReapFailure, ReapOutcome, ReapResult};
use reaper_host::source::procfs::Procfs;
use reaper_host::sys;
use reaper_model::event::ProcessKey;
use reaper_model::leftover::{Leftover, LeftoverRow, LeftoverVerdict, ProcessTable};

use super::LeftoverReapResult;

/// Bytes of a command line.
const COMMAND_BYTES: usize = 256;

impl ScanReport {
    /// Of nothing yet. `scanned_by` is who has looked.
    pub fn by(looked_by: &str) -> ScanReport {
        ScanReport {
            scanned_by: looked_by.into(),
            ..ScanReport::default()
        }
    }

    /// Takes in what a look has found.
    pub fn add(&mut self, table: &ProcessTable, strays: &[Leftover]) {
        self.unreadable = table.unread.len() as u64;
        for stray in strays {
            if let Some(row) = table.rows.get(&stray.key.pid) {
                self.add_one(row, stray);
            }
        }
    }

    fn add_one(&mut self, row: &LeftoverRow, stray: &Leftover) {
        let finding = finding(row, stray);
        if stray.verdict == LeftoverVerdict::Reap {
            self.reapable.push(finding);
        } else {
            self.kept.push(finding);
        }
    }

    /// Takes in what became of those found.
    pub fn done(&mut self, done: &LeftoverReapResult) {
        for (row, stray) in &done.late {
            self.add_one(row, stray);
        }
        let ends: HashMap<_, _> = done.ended.iter().map(|end| (end.key, end)).collect();
        for finding in &mut self.reapable {
            let key = ProcessKey {
                pid: finding.pid,
                start: finding.start_ns,
            };
            if let Some(end) = ends.get(&key) {
                ended(finding, end);
            }
        }
        // Who was found and gone before its turn came. What is a member's is the engine's, which tells it.
        for finding in self.reapable.iter_mut().filter(|f| f.session_id.is_none()) {
            finding.outcome.get_or_insert_with(|| "not_sent".into());
        }
        let is_ended = |end: &&ReapResult| matches!(end.outcome, ReapOutcome::Exited(_));
        let confirmed = done.ended.iter().filter(is_ended);
        self.ended = Some(confirmed.clone().count() as u64);
        let memory = confirmed.filter_map(|end| end.memory);
        self.freed_bytes = Some(memory.map(|memory| memory.rss + memory.swap).sum());
    }
}

fn ended(finding: &mut Finding, end: &ReapResult) {
    let (outcome, why) = match end.outcome {
        ReapOutcome::Exited(_) => ("ended", None),
        ReapOutcome::Failed(failure) => ("failed", Some(failed(failure))),
        ReapOutcome::NotSent(_) => (
            "not_sent",
            Some("gone, or not to be ended any more".to_owned()),
        ),
    };
    finding.outcome = Some(outcome.into());
    finding.signal = end.signal.map(|signal| signal.as_str().into());
    finding.duration_ns = end.duration;
    if let Some(why) = why {
        finding.why = why;
    }
}

fn finding(row: &LeftoverRow, stray: &Leftover) -> Finding {
    let seen = &row.entry;
    Finding {
        pid: stray.key.pid,
        start_ns: stray.key.start,
        parent_pid: Some(seen.parent),
        subtree_root_pid: stray.subtree_root.pid,
        uid: seen.uids.effective,
        command: command_line(&seen.image, COMMAND_BYTES),
        agent: stray.agent.to_string(),
        decision: stray.verdict.name().into(),
        reason: stray.reason().into(),
        rule: stray.verdict.rule().map(str::to_owned),
        evidence: Some(stray.evidence.name().into()),
        evidence_variable: stray.evidence.variable().map(str::to_owned),
        agent_pid: stray.evidence.owner(),
        why: leftover_text(stray),
        age_s: sys::boot_time().saturating_sub(stray.key.start) / 1_000_000_000,
        rss: Procfs::default().rss_of(stray.key),
        ..Finding::default()
    }
}

fn failed(failure: ReapFailure) -> String {
    match failure {
        ReapFailure::Eperm => "not permitted to signal it".into(),
        ReapFailure::KillTimeout('D') => "in uninterruptible sleep".into(),
        ReapFailure::KillTimeout(state) => format!("SIGKILL has no effect, state {state}"),
        ReapFailure::Errno(errno) => format!("cannot be signalled: errno {errno}"),
        ReapFailure::Stopped => "stopped before it had ended".into(),
    }
}
