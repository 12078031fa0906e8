//! Converts records to rows.

use hashbrown::HashSet;
use rusqlite::{Transaction, params};

use super::history::HistoryAncestor;
use super::keeps::int;
use crate::export::names::{outcome_name, outcome_reason};
use crate::export::{
    Ancestor, EventBody, EventRecord, ExitInfo, FreedMemory, Lifecycle, ProcessRef, ResumedRoot,
    SessionRef, command_args, to_json, wall_time,
};
use crate::reap::ReapOutcome;
use reaper_model::event::ProcessKey;

/// Limit of processes in [`Journaled`]. All are forgotten at the limit, and their exits are not stored.
const DECIDED_MAX: usize = 65_536;
/// Limit of stored requests for each process, the latest ones: a user may send any number.
const REQUESTS_MAX: u32 = 32;

/// Selects the records that the journal stores: changes of sessions, decisions, outcomes, requests of users, and exits
/// of the processes that have a decision or a request. Exits of all members would be most of the records.
#[derive(Default)]
pub(super) struct Journaled {
    /// Processes that have a decision or a request and have not exited.
    decided: HashSet<ProcessKey>,
}

impl Journaled {
    /// Returns whether the journal stores the next record.
    pub(super) fn includes(&mut self, record: &EventRecord) -> bool {
        match &record.body {
            EventBody::Decision { process, .. } | EventBody::Keep { process, .. } => {
                if self.decided.len() == DECIDED_MAX {
                    self.decided.clear();
                }
                self.decided.insert(process.key);
                true
            }
            EventBody::Lifecycle {
                process,
                event: Lifecycle::Exit { .. },
                ..
            } => self.decided.remove(&process.key),
            EventBody::SessionOpen { .. }
            | EventBody::SessionResume { .. }
            | EventBody::SessionRelaunch { .. }
            | EventBody::SessionRootExit { .. }
            | EventBody::SessionClose { .. }
            | EventBody::Outcome { .. } => true,
            _ => false,
        }
    }
}

/// Writer of the records of a batch.
pub(super) struct RowWriter<'a> {
    pub(super) transaction: &'a Transaction<'a>,
    pub(super) boot: i64,
}

type Result<T> = rusqlite::Result<T>;

impl RowWriter<'_> {
    /// Writes a record, if [`Journaled`] includes it. A record that was written before adds no row. Nor does a decision or
    /// outcome that equals the latest one of its process.
    pub(super) fn write(&self, record: &EventRecord) -> Result<()> {
        let time = wall(record.boot_ns);
        match &record.body {
            EventBody::SessionOpen { process, outer, .. } => {
                let Some(session) = &process.session else {
                    return Ok(());
                };
                let outer = outer.as_ref().map(|outer| self.session(outer, time));
                let id = self.session(session, time)?;
                let root = self.process(process, Some(id))?;
                self.execute(
                    "UPDATE session SET root = ?2, outer = ?3, uid = ?4 WHERE id = ?1",
                    params![id, root, outer.transpose()?, process.uids.real],
                )
            }
            EventBody::SessionResume { session, root, .. } => {
                let id = self.session(session, time)?;
                match root {
                    ResumedRoot::Alive(process) => self.root(id, process),
                    ResumedRoot::Exited { .. } => Ok(()),
                }
            }
            EventBody::SessionRelaunch {
                session, process, ..
            } => self.root(self.session(session, time)?, process),
            EventBody::SessionRootExit {
                session,
                exit_status,
                ..
            } => {
                let exit = ExitInfo::from(*exit_status);
                self.execute(
                    "UPDATE session SET gone = coalesce(gone, ?2), exit_code = ?3, exit_signal = ?4
                     WHERE id = ?1",
                    params![self.session(session, time)?, time, exit.code, exit.signal],
                )
            }
            EventBody::SessionClose {
                session,
                reaped,
                kept,
                failed,
                memory:
                    FreedMemory {
                        rss,
                        swap,
                        unmeasured,
                    },
                lost_before,
                ..
            } => {
                // The time is that of the first report. A service that resumes a closed session restarts the counts.
                self.execute(
                    "UPDATE session SET closed = coalesce(closed, ?2), reaped = max(reaped, ?3),
                         kept = ?4, failed = max(failed, ?5), lost_before = max(lost_before, ?6),
                         rss = max(rss, ?7), swap = max(swap, ?8), unread = max(unread, ?9)
                     WHERE id = ?1",
                    params![
                        self.session(session, time)?,
                        time,
                        reaped,
                        kept,
                        failed,
                        int(*lost_before),
                        int(*rss),
                        int(*swap),
                        int(*unmeasured)
                    ],
                )
            }
            // Stored without the decision, which the next service would take as proof of an inferred membership.
            EventBody::Decision {
                process,
                decision: names,
            } if process.evidence.is_some()
                && matches!(names.reason, "detached" | "root_alive") =>
            {
                let process = self.member(process, time)?;
                self.lineage(process, &names.ancestors)
            }
            EventBody::Decision {
                process,
                decision: names,
            } => {
                let process = self.member(process, time)?;
                self.lineage(process, &names.ancestors)?;
                let rule = names.rule.as_deref();
                // A decision that equals the latest one is not stored again.
                self.execute(
                    "INSERT INTO decision (process, time, verdict, reason, rule, mode)
                     SELECT ?1, ?2, ?3, ?4, ?5, ?6 WHERE NOT EXISTS (
                         SELECT 1 FROM decision
                         WHERE id = (SELECT max(id) FROM decision WHERE process = ?1)
                             AND (verdict, reason) = (?3, ?4) AND rule IS ?5 AND mode IS ?6)",
                    params![process, time, names.verdict, names.reason, rule, names.mode],
                )
            }
            EventBody::Keep {
                process, by, kept, ..
            } => {
                let until = kept.and_then(|kept| kept.until).map(wall);
                let process = self.member(process, time)?;
                self.execute(
                    "INSERT INTO request (process, time, request, by_uid, tree, until)
                     SELECT ?1, ?2, ?3, ?4, ?5, ?6 WHERE NOT EXISTS (
                         SELECT 1 FROM request WHERE (process, time, request) = (?1, ?2, ?3))",
                    params![
                        process,
                        time,
                        record.body.name(),
                        by,
                        kept.map(|kept| kept.tree),
                        until
                    ],
                )?;
                self.execute(
                    "DELETE FROM request WHERE process = ?1 AND id NOT IN (
                         SELECT id FROM request WHERE process = ?1 ORDER BY id DESC LIMIT ?2)",
                    params![process, REQUESTS_MAX],
                )
            }
            EventBody::Outcome {
                process,
                outcome,
                signal,
                duration,
                memory,
            } => {
                let exit = match outcome {
                    ReapOutcome::Exited(exit_status) => ExitInfo::from(*exit_status),
                    ReapOutcome::Failed(_) | ReapOutcome::NotSent(_) => ExitInfo::default(),
                };
                self.execute(
                    "INSERT INTO outcome (process, time, outcome, reason, signal, exit_code, exit_signal,
                         duration, rss, swap)
                     SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10 WHERE NOT EXISTS (
                         SELECT 1 FROM outcome
                         WHERE id = (SELECT max(id) FROM outcome WHERE process = ?1)
                             AND outcome = ?3 AND reason IS ?4)",
                    params![
                        self.member(process, time)?,
                        time,
                        outcome_name(outcome),
                        outcome_reason(outcome),
                        signal,
                        exit.code,
                        exit.signal,
                        duration.map(int),
                        memory.map(|memory| int(memory.rss)),
                        memory.map(|memory| int(memory.swap))
                    ],
                )
            }
            EventBody::Lifecycle {
                process,
                event: Lifecycle::Exit { exit_status, .. },
                ..
            } => {
                let exit = ExitInfo::from(*exit_status);
                self.execute(
                    "UPDATE process SET exited = ?4, exit_code = ?5, exit_signal = ?6
                     WHERE (boot, pid, start) = (?1, ?2, ?3)",
                    params![
                        self.boot,
                        process.key.pid,
                        int(process.key.start),
                        time,
                        exit.code,
                        exit.signal
                    ],
                )
            }
            _ => Ok(()),
        }
    }

    /// Stores the number of dropped records. `time` is in ns since boot.
    pub(super) fn dropped(&self, count: u64, time: u64) -> Result<()> {
        let (time, count) = (wall(time), int(count));
        self.execute(
            "INSERT INTO dropped (time, count) VALUES (?1, ?2)",
            params![time, count],
        )
    }

    /// Returns the row id of a session. Inserts it if it is new, and otherwise updates its agent and when it was last
    /// seen. `time` is in ns since the epoch.
    fn session(&self, session: &SessionRef, time: i64) -> Result<i64> {
        let ProcessKey { pid, start } = session.first_root;
        self.id(
            "INSERT INTO session (boot, pid, start, agent, opened, seen) VALUES (?1, ?2, ?3, ?4, ?5, ?5)
             ON CONFLICT DO UPDATE SET agent = excluded.agent, seen = max(seen, excluded.seen)
             RETURNING id",
            params![self.boot, pid, int(start), &*session.agent, time],
        )
    }

    /// Returns the row id of a process. Inserts or updates its row and that of its session.
    fn member(&self, process: &ProcessRef, time: i64) -> Result<i64> {
        let session = process.session.as_ref();
        let session = session.map(|session| self.session(session, time));
        self.process(process, session.transpose()?)
    }

    /// Returns the row id of a process. Inserts it if it is new, and otherwise updates its description. `session` is a
    /// row id; with `None` the stored one stays.
    fn process(&self, process: &ProcessRef, session: Option<i64>) -> Result<i64> {
        let args = command_args(&process.image);
        self.id(
            "INSERT INTO process (boot, pid, start, session, uid, comm, exe, args)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
             ON CONFLICT DO UPDATE SET session = coalesce(excluded.session, session),
                 uid = excluded.uid, comm = excluded.comm, exe = excluded.exe, args = excluded.args
             RETURNING id",
            params![
                self.boot,
                process.key.pid,
                int(process.key.start),
                session,
                process.uids.real,
                String::from_utf8_lossy(&process.image.comm),
                String::from_utf8_lossy(&process.image.exe),
                serde_json::Value::from(args).to_string()
            ],
        )
    }

    /// Stores the ancestors of a process, unless more are stored: a restarted service does not know those that exited before.
    fn lineage(&self, process: i64, ancestors: &[Ancestor]) -> Result<()> {
        if ancestors.is_empty() {
            return Ok(());
        }
        let ancestors: Vec<HistoryAncestor> = ancestors.iter().map(HistoryAncestor::from).collect();
        self.execute(
            "UPDATE process SET lineage = ?2 WHERE id = ?1
                 AND iif(json_valid(lineage), json_array_length(lineage), 0) <= json_array_length(?2)",
            params![process, String::from_utf8_lossy(&to_json(&ancestors))],
        )
    }

    /// Sets the root of a session, and its uid if that is unknown.
    fn root(&self, session: i64, process: &ProcessRef) -> Result<()> {
        let root = self.process(process, Some(session))?;
        self.execute(
            "UPDATE session SET root = ?2, uid = coalesce(uid, ?3) WHERE id = ?1",
            params![session, root, process.uids.real],
        )
    }

    fn execute(&self, sql: &str, values: impl rusqlite::Params) -> Result<()> {
        self.transaction
            .prepare_cached(sql)?
            .execute(values)
            .map(drop)
    }

    /// Runs a statement that returns a row id.
    fn id(&self, sql: &str, values: impl rusqlite::Params) -> Result<i64> {
        self.transaction
            .prepare_cached(sql)?
            .query_row(values, |row| row.get(0))
    }
}

/// Converts a time since boot to nanoseconds since the epoch.
fn wall(boot_ns: u64) -> i64 {
    i64::try_from(wall_time(boot_ns).as_nanosecond()).unwrap_or(i64::MAX)
}
