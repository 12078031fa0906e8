//! Builds the report of a scan for leftovers, for a scan with or without the service.

use hashbrown::HashMap;

use crate::api::{Finding, ScanReport};
use crate::export::{command_line, leftover_judgement};
use crate::reap::{ReapOutcome, ReapResult};
use reaper_host::source::procfs::Procfs;
use reaper_host::sys;
use reaper_model::event::ProcessKey;
use reaper_model::leftover::{Leftover, LeftoverRow, LeftoverVerdict, ProcessTable};

use super::LeftoverReapResult;

/// Limit of bytes of a command line.
const COMMAND_BYTES: usize = 256;

impl ScanReport {
    /// Creates an empty report. `scanned_by` names the scanning program.
    pub fn new(scanned_by: &str) -> ScanReport {
        ScanReport {
            scanned_by: scanned_by.into(),
            ..ScanReport::default()
        }
    }

    /// Adds the leftovers that a scan found: those to reap to `reapable`, all others to `kept`. Sets the number of
    /// unreadable processes.
    pub fn add_leftovers(&mut self, table: &ProcessTable, leftovers: &[Leftover]) {
        self.unreadable = table.unread.len() as u64;
        for leftover in leftovers {
            if let Some(row) = table.rows.get(&leftover.key.pid) {
                self.add_one(row, leftover);
            }
        }
    }

    fn add_one(&mut self, row: &LeftoverRow, leftover: &Leftover) {
        let finding = finding(row, leftover, self.observes);
        if leftover.verdict == LeftoverVerdict::Reap {
            self.reapable.push(finding);
        } else {
            self.kept.push(finding);
        }
    }

    /// Adds the outcomes, and the leftovers that were discovered late.
    pub fn add_outcomes(&mut self, done: &LeftoverReapResult) {
        for (row, leftover) in &done.late {
            self.add_one(row, leftover);
        }
        let ends: HashMap<_, _> = done.ended.iter().map(|end| (end.key, end)).collect();
        for finding in &mut self.reapable {
            let key = ProcessKey {
                pid: finding.pid,
                start: finding.start_ns,
            };
            if let Some(end) = ends.get(&key) {
                add_outcome(finding, end);
            }
        }
        // A leftover without an outcome exited before its signal. Outcomes of members come from the engine.
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

/// Adds the outcome of a claim to the leftover in a report. If it was not ended, also replaces the explanation `why`.
fn add_outcome(finding: &mut Finding, result: &ReapResult) {
    let (outcome, why) = match result.outcome {
        ReapOutcome::Exited(_) => ("ended", None),
        ReapOutcome::Failed(failure) => ("failed", Some(failure.to_string())),
        ReapOutcome::NotSent(_) => (
            "not_sent",
            Some("already exited, or no longer to be reaped".to_owned()),
        ),
    };
    finding.outcome = Some(outcome.into());
    finding.signal = result.signal.map(|signal| signal.as_str().into());
    finding.duration_ns = result.duration;
    if let Some(why) = why {
        finding.why = why;
    }
}

fn finding(row: &LeftoverRow, leftover: &Leftover, observes: bool) -> Finding {
    let entry = &row.entry;
    Finding {
        pid: leftover.key.pid,
        start_ns: leftover.key.start,
        parent_pid: Some(entry.parent),
        subtree_root_pid: leftover.subtree_root.pid,
        uid: entry.uids.effective,
        command: command_line(&entry.image, COMMAND_BYTES),
        agent: leftover.agent.to_string(),
        decision: leftover.verdict.name().into(),
        reason: leftover.reason().into(),
        rule: leftover.verdict.rule().map(str::to_owned),
        evidence: Some(leftover.evidence.name().into()),
        evidence_variable: leftover.evidence.variable().map(str::to_owned),
        agent_pid: leftover.evidence.owner(),
        why: leftover_judgement(leftover, observes),
        age_s: sys::boot_time().saturating_sub(leftover.key.start) / 1_000_000_000,
        rss: Procfs::default().rss_of(leftover.key),
        ..Finding::default()
    }
}
