//! Scans for leftovers in a service. The engine's members are excluded, and the results go into the event stream.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use tokio::sync::{mpsc, oneshot};

use super::{
    FoundLeftovers, LeftoverReapResult, MIN_AGE, ScanOptions, by_pid, find_leftovers, reap_found,
};
use crate::api::leftovers::Leftovers;
use crate::api::messages::{EngineReply, EngineRequest, RequestKind, ScanContext};
use crate::api::peer::Peer;
use crate::api::{ProblemDetails, ScanReport, StatusCode};
use crate::config::Mode;
use crate::export::{EventBody, EventRecord, ProcessRef};
use crate::journal::recorded::recorded_sessions;
use crate::reap::{ReapOutcome, ReapResult};
use reaper_host::source::procfs::ProcfsError;
use reaper_host::sys;
use reaper_model::event::{ProcessKey, Provenance, TICK_NS};
use reaper_model::leftover::{
    Leftover, LeftoverRow, LeftoverVerdict, ProcessTable, RecordedSession, Uncertainty,
};

/// Interval and number of polls that wait for the end of a gap.
const GAP: (Duration, u32) = (Duration::from_millis(500), 240);

/// Scanner for leftovers. Its methods block, so the engine's thread must not call them. Clones share their state.
#[derive(Clone)]
pub struct Scanner {
    requests: mpsc::Sender<EngineRequest>,
    journal: Option<PathBuf>,
    /// Reason why the users' keeps are unknown.
    keeps_error: Option<&'static str>,
    /// Whether a clone is reaping leftovers.
    busy: Arc<AtomicBool>,
    /// Trees that wait for the delay of a rule: the root of the subtree, and the time of its discovery in ns of
    /// CLOCK_MONOTONIC.
    waiting: Arc<Mutex<HashMap<ProcessKey, u64>>>,
}

/// Data of the journal: recorded sessions, and kept processes.
type JournalRecords = (Vec<RecordedSession>, Vec<ProcessKey>);

/// Claim to reap leftovers, released on drop.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Reasons why a scan failed.
#[derive(Debug, thiserror::Error)]
enum ScanError {
    #[error("the service is stopping; try again after it has restarted")]
    Stopping,
    #[error("it is unknown which processes users keep: {0}")]
    Keeps(String),
    #[error(transparent)]
    Procfs(#[from] ProcfsError),
}

impl From<ScanError> for ProblemDetails {
    fn from(error: ScanError) -> ProblemDetails {
        let status = match error {
            ScanError::Stopping => StatusCode::SERVICE_UNAVAILABLE,
            ScanError::Keeps(_) | ScanError::Procfs(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        ProblemDetails::new(status, error.to_string())
    }
}

impl Scanner {
    /// Creates a scanner. `requests` leads to the engine, `journal` is the database of the service if it keeps one.
    pub fn new(requests: mpsc::Sender<EngineRequest>, journal: Option<PathBuf>) -> Scanner {
        Scanner {
            requests,
            journal,
            keeps_error: None,
            busy: Arc::default(),
            waiting: Arc::default(),
        }
    }

    /// Sets the reason why the users' keeps are unknown. Then nothing is reaped.
    pub fn with_keeps_error(self, error: Option<&'static str>) -> Scanner {
        Scanner {
            keeps_error: error,
            ..self
        }
    }

    /// Starts a thread that scans for leftovers from before the service started, and reports them in the stream.
    ///
    /// With `reap` in enforce mode, it also reaps those with strong evidence, if needed after the delay of a rule.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(self, reap: bool) -> io::Result<()> {
        let work = move || {
            let mut delay = self.scan_once(reap, true);
            while let Ok(Some(time)) = delay {
                sys::trim();
                std::thread::sleep(time);
                delay = self.scan_once(reap, false);
            }
            match delay {
                // Another scan is reaping, or the service stopped.
                Ok(_) | Err(ScanError::Stopping) => {}
                Err(error) => tracing::error!(
                    "leftovers from before this service started are not reaped, as the scan failed: {error}; run `reaper scan` to \
                     look for them, or restart the service to try again"
                ),
            }
            sys::trim();
        };
        let thread = std::thread::Builder::new().name("leftovers".into());
        thread.spawn(work).map(drop)
    }

    /// Scans once, reports the leftovers, and reaps those to reap in enforce mode with `reap`. Without `first`, reports
    /// only leftovers to reap.
    ///
    /// Returns when to scan again. `None` if nothing waits for a delay, nothing may be reaped, or another scan is
    /// reaping. Waits for the end of a gap for up to two minutes.
    fn scan_once(&self, reap: bool, first: bool) -> Result<Option<Duration>, ScanError> {
        // A scan without reaping needs no claim.
        let busy = reap.then(|| self.claim());
        if matches!(busy, Some(None)) {
            return Ok(None);
        }
        let mut watched = self.scan_context()?;
        for _ in 0..GAP.1 {
            if !watched.gap {
                break;
            }
            std::thread::sleep(GAP.0);
            watched = self.scan_context()?;
        }
        watched.enforce &= reap;
        let records = self.read_journal().unwrap_or_else(|error| {
            if watched.enforce {
                tracing::warn!(
                    "leftovers from before this service started are reported, but not reaped: {error}"
                );
            }
            watched.enforce = false;
            JournalRecords::default()
        });
        let options = self.options(&watched, None, MIN_AGE, false, records);
        let mut found = self.scan(&options)?;
        let delays = found
            .leftovers
            .iter()
            .filter_map(|leftover| match leftover.verdict {
                LeftoverVerdict::Wait { remaining_ns, .. } => {
                    Some(Duration::from_nanos(remaining_ns))
                }
                // After that time it is old enough.
                LeftoverVerdict::Report(Uncertainty::Young) => Some(MIN_AGE),
                _ => None,
            });
        let delay = delays.max().filter(|_| watched.enforce);
        if !first {
            found
                .leftovers
                .retain(|leftover| leftover.verdict == LeftoverVerdict::Reap);
        }
        self.end(&watched, &options, &found)?;
        Ok(delay)
    }

    /// Scans, and updates the trees that wait for the delay of a rule.
    fn scan(&self, options: &ScanOptions) -> Result<FoundLeftovers, ProcfsError> {
        let found = find_leftovers(options, &HashSet::new())?;
        let now = sys::monotonic();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let is_alive = |key: &ProcessKey| {
            let row = found.table.rows.get(&key.pid);
            row.is_some_and(|row| row.entry.key == *key)
        };
        waiting.retain(|subtree_root, _| is_alive(subtree_root));
        for leftover in &found.leftovers {
            if matches!(leftover.verdict, LeftoverVerdict::Wait { .. }) {
                waiting.entry(leftover.subtree_root).or_insert(now);
            }
        }
        drop(waiting);
        Ok(found)
    }

    /// Returns the trees that wait for the delay of a rule, with the ns of CLOCK_MONOTONIC since their discovery.
    fn waited(&self) -> HashMap<ProcessKey, u64> {
        let now = sys::monotonic();
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = |(subtree_root, since): (&ProcessKey, &u64)| {
            (*subtree_root, now.saturating_sub(*since))
        };
        waiting.iter().map(waited).collect()
    }

    /// Scans on behalf of a user, and adds the leftovers to the report. Users other than root get only their own
    /// processes.
    fn add_to_report(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
        records: JournalRecords,
    ) -> Result<(ScanOptions, FoundLeftovers), ScanError> {
        let uid = (!peer.is_root()).then_some(peer.uid);
        let options = self.options(watched, uid, min_age.unwrap_or(MIN_AGE), true, records);
        let found = self.scan(&options)?;
        report.observes = !watched.enforce;
        report.add_leftovers(&found.table, &found.leftovers);
        Ok((options, found))
    }

    /// Returns a claim to reap leftovers. `None` if another scan has it.
    fn claim(&self) -> Option<Busy> {
        let was = self.busy.swap(true, Ordering::AcqRel);
        (!was).then(|| Busy(Arc::clone(&self.busy)))
    }

    /// Reads the recorded sessions and the kept processes. They are empty if there is no journal.
    fn read_journal(&self) -> Result<JournalRecords, ScanError> {
        if let Some(why) = self.keeps_error {
            return Err(ScanError::Keeps(why.into()));
        }
        let Some(journal) = &self.journal else {
            return Ok(JournalRecords::default());
        };
        let boot_id = sys::host::Host::read().boot_id;
        recorded_sessions(journal, &boot_id).map_err(|error| ScanError::Keeps(error.to_string()))
    }

    /// Returns the settings of a scan. `uid` limits it to processes of this user, as does the scope without `uid`.
    fn options(
        &self,
        watched: &ScanContext,
        uid: Option<u32>,
        min_age: Duration,
        requested_by_user: bool,
        (recorded, kept): JournalRecords,
    ) -> ScanOptions {
        ScanOptions {
            rules: watched.rules.clone(),
            scope: watched.scope.clone(),
            uid: uid.or(watched.scope.uid),
            min_age,
            members: by_pid(&watched.members),
            watched_since: Some(watched.started_ns),
            recorded,
            kept,
            waited: self.waited(),
            requested_by_user,
        }
    }

    /// Reports the leftovers in the stream. In enforce mode, also reaps those with the verdict `reap`, and reports the
    /// outcomes. Returns `None` if none exist, or in observe mode.
    fn end(
        &self,
        watched: &ScanContext,
        options: &ScanOptions,
        found: &FoundLeftovers,
    ) -> Result<Option<LeftoverReapResult>, ScanError> {
        let (uid, min_age, requested_by_user) =
            (options.uid, options.min_age, options.requested_by_user);
        let is_due = |leftover: &&Leftover| leftover.verdict == LeftoverVerdict::Reap;
        // All others are reported only for the root of each subtree.
        let is_reported = |leftover: &&Leftover| match leftover.verdict {
            LeftoverVerdict::Reap => true,
            LeftoverVerdict::Report(_) | LeftoverVerdict::Wait { .. } => {
                leftover.key == leftover.subtree_root
            }
            LeftoverVerdict::Keep { .. } => false,
        };
        let FoundLeftovers { table, leftovers } = found;
        let names = Names::new(table, &options.recorded);
        let reported = leftovers.iter().filter(is_reported);
        let reported =
            reported.filter_map(|leftover| Some((names.of_key(leftover.key)?, leftover.clone())));
        let mode = match watched.enforce {
            true => Mode::Enforce.name(),
            false => Mode::Observe.name(),
        };
        self.emit(reported.map(|(process, leftover)| EventBody::Leftover {
            process,
            leftover,
            mode,
        }))?;
        if !watched.enforce || !leftovers.iter().any(|leftover| is_due(&leftover)) {
            return Ok(None);
        }
        let scan = |claimed: &HashSet<ProcessKey>| -> Result<FoundLeftovers, ScanError> {
            // A process that has become a member meanwhile belongs to the engine.
            let watched = self.scan_context()?;
            let records = self.read_journal();
            let is_unsure = records.is_err();
            let records =
                records.unwrap_or_else(|_| (options.recorded.clone(), options.kept.clone()));
            let options = self.options(&watched, uid, min_age, requested_by_user, records);
            let mut found = find_leftovers(&options, claimed)?;
            if watched.gap || is_unsure || !watched.enforce {
                let is_claimed =
                    |leftover: &Leftover| watched.enforce && claimed.contains(&leftover.key);
                found.leftovers.retain(is_claimed);
            }
            Ok(found)
        };
        let done = reap_found(found, &options.rules, watched.times, scan)?;
        self.report_done(&names, &done)?;
        Ok(Some(done))
    }

    /// Reports the outcomes in the stream, and before them the leftovers that were discovered late.
    fn report_done(&self, names: &Names<'_>, done: &LeftoverReapResult) -> Result<(), ScanError> {
        let late = done.late.iter();
        self.emit(late.map(|(row, leftover)| EventBody::Leftover {
            process: names.of_row(row),
            leftover: leftover.clone(),
            // Discovered while others were reaped.
            mode: Mode::Enforce.name(),
        }))?;
        let outcome = |end: &ReapResult| {
            let late = done.late.iter().find(|(row, _)| row.entry.key == end.key);
            let process = match late {
                Some((row, _)) => names.of_row(row),
                None => names.of_key(end.key)?,
            };
            Some(EventBody::Outcome {
                process,
                outcome: end.outcome,
                signal: end.signal.map(|signal| signal.as_str()),
                duration: end.duration,
                memory: end
                    .memory
                    .filter(|_| matches!(end.outcome, ReapOutcome::Exited(_))),
            })
        };
        self.emit(done.ended.iter().filter_map(outcome))
    }

    /// Sends records to the engine for the stream, with the present time.
    fn emit(&self, bodies: impl Iterator<Item = EventBody>) -> Result<(), ScanError> {
        let boot_ns = sys::boot_time();
        let records: Vec<_> = bodies.map(|body| EventRecord { boot_ns, body }).collect();
        if records.is_empty() {
            return Ok(());
        }
        self.request(RequestKind::Emit(records)).map(drop)
    }

    /// Requests the present members, rules and settings from the engine. Blocks until it answers.
    fn scan_context(&self) -> Result<ScanContext, ScanError> {
        match self.request(RequestKind::ScanContext)? {
            EngineReply::ScanContext(watched) => Ok(*watched),
            _ => Err(ScanError::Stopping),
        }
    }

    /// Sends a request to the engine as root. Blocks until it answers, and fails if the service stops first.
    fn request(&self, kind: RequestKind) -> Result<EngineReply, ScanError> {
        let (reply, answered) = oneshot::channel();
        let peer = Peer { uid: 0 };
        let request = EngineRequest { peer, kind, reply };
        let sent = self.requests.blocking_send(request);
        sent.map_err(|_| ScanError::Stopping)?;
        answered.blocking_recv().map_err(|_| ScanError::Stopping)
    }
}

impl Leftovers for Scanner {
    fn report(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
    ) -> Result<(), ProblemDetails> {
        let records = self.read_journal().unwrap_or_else(|error| {
            tracing::warn!(
                "this scan may miss leftovers of earlier sessions and list processes that users keep: {error}"
            );
            JournalRecords::default()
        });
        self.add_to_report(report, watched, peer, min_age, records)?;
        Ok(())
    }

    fn reap(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
    ) -> Result<(), ProblemDetails> {
        let Some(_busy) = self.claim() else {
            let message =
                "leftovers are already being reaped, as the event stream reports; try again later";
            return Err(ProblemDetails::new(
                StatusCode::SERVICE_UNAVAILABLE,
                message,
            ));
        };
        let records = self.read_journal()?;
        let (options, found) = self.add_to_report(report, watched, peer, min_age, records)?;
        if let Some(done) = self.end(watched, &options, &found)? {
            report.add_outcomes(&done);
        }
        Ok(())
    }
}

/// Descriptions of processes in the stream.
struct Names<'a> {
    table: &'a ProcessTable,
    /// Keys of recorded processes by pid and start tick.
    recorded: HashMap<(u32, u64), ProcessKey>,
}

impl<'a> Names<'a> {
    fn new(table: &'a ProcessTable, recorded: &[RecordedSession]) -> Names<'a> {
        let members = recorded.iter().flat_map(|session| &session.members);
        let recorded = members.map(|key| ((key.pid, key.start / TICK_NS), *key));
        Names {
            table,
            recorded: recorded.collect(),
        }
    }

    /// Returns the description of a process. `None` if the scan did not find it.
    fn of_key(&self, key: ProcessKey) -> Option<ProcessRef> {
        let row = self.table.rows.get(&key.pid)?;
        (row.entry.key == key).then(|| self.of_row(row))
    }

    fn of_row(&self, row: &LeftoverRow) -> ProcessRef {
        let entry = &row.entry;
        // /proc has start times in ticks only. The stream uses the exact key under which the process was recorded.
        let tick = (entry.key.pid, entry.key.start / TICK_NS);
        let name = self.recorded.get(&tick);
        let parent = self.table.rows.get(&entry.parent);
        ProcessRef {
            key: name.copied().unwrap_or(entry.key),
            parent: parent.map(|parent| parent.entry.key),
            birth_parent: None,
            image: Arc::clone(&entry.image),
            uids: entry.uids,
            session: None,
            provenance: Provenance::Procfs,
            evidence: None,
        }
    }
}
