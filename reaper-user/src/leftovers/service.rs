//! The same in a service: what it watches is its own, and what is done is told in its stream.

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
use crate::api::{ErrorResponse, ScanReport};
use crate::export::{EventBody, EventRecord, ProcessRef};
use crate::journal::recorded::recorded_sessions;
use crate::reap::{ReapOutcome, ReapResult};
use reaper_host::source::procfs::ProcfsError;
use reaper_host::sys;
use reaper_model::event::{ProcessKey, Provenance, TICK_NS};
use reaper_model::leftover::{
    Leftover, LeftoverRow, LeftoverVerdict, ProcessTable, RecordedSession, Uncertainty,
};

/// How often it is looked whether events are still missing, and how often that is done.
const GAP: (Duration, u32) = (Duration::from_millis(500), 240);

/// Looks for leftovers beside an engine. Blocks: not for its thread. Clones share what they do.
#[derive(Clone)]
pub struct Scanner {
    asks: mpsc::Sender<EngineRequest>,
    journal: Option<PathBuf>,
    /// Why it cannot be told what users want kept.
    keeps_error: Option<&'static str>,
    /// Somebody ends what was found.
    busy: Arc<AtomicBool>,
    /// By their heads, trees that a rule gives time, and since when they are known, monotonic.
    waiting: Arc<Mutex<HashMap<ProcessKey, u64>>>,
}

/// What the journal tells: recorded sessions, and who is kept.
type JournalRecords = (Vec<RecordedSession>, Vec<ProcessKey>);

/// Held by who ends what was found.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Why there was no look.
#[derive(Debug, thiserror::Error)]
enum ScanError {
    #[error("the service is stopping")]
    Stopping,
    #[error("what users want kept cannot be told: {0}")]
    Keeps(String),
    #[error(transparent)]
    Procfs(#[from] ProcfsError),
}

impl From<ScanError> for ErrorResponse {
    fn from(error: ScanError) -> ErrorResponse {
        let word = match error {
            ScanError::Stopping => "busy",
            ScanError::Keeps(_) | ScanError::Procfs(_) => "failed",
        };
        ErrorResponse::new(word, error.to_string())
    }
}

impl Scanner {
    /// `asks` is the engine's; `journal` is the service's, if it keeps one.
    pub fn new(asks: mpsc::Sender<EngineRequest>, journal: Option<PathBuf>) -> Scanner {
        Scanner {
            asks,
            journal,
            keeps_error: None,
            busy: Arc::default(),
            waiting: Arc::default(),
        }
    }

    /// Why it cannot be told what users want kept, if so: then nothing is ended.
    pub fn with_keeps_error(self, unsure: Option<&'static str>) -> Scanner {
        Scanner {
            keeps_error: unsure,
            ..self
        }
    }

    /// Looks once for what is older than the service, tells of it in the stream, and where decisions are carried
    /// out ends what strong evidence speaks for, what a rule gives time when that is over: on a thread of its own,
    /// as soon as the engine answers.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn begin(self, reap: bool) -> io::Result<()> {
        let work = move || {
            let mut rest = self.look_once(reap, true);
            while let Ok(Some(time)) = rest {
                sys::trim();
                std::thread::sleep(time);
                rest = self.look_once(reap, false);
            }
            match rest {
                // It is over before it began.
                Ok(_) | Err(ScanError::Stopping) => {}
                Err(error) => tracing::error!("no look for what agents left behind: {error}"),
            }
            sys::trim();
        };
        let thread = std::thread::Builder::new().name("leftovers".into());
        thread.spawn(work).map(drop)
    }

    /// Gives when to look again, for those whose time is not over. `first`: all is told, and not only of whom
    /// something is done.
    fn look_once(&self, reap: bool, first: bool) -> Result<Option<Duration>, ScanError> {
        // Who only looks is in nobody's way.
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
        let told = self.read_journal().unwrap_or_else(|error| {
            if watched.enforce {
                tracing::warn!("what agents left behind is told of and not ended: {error}");
            }
            watched.enforce = false;
            JournalRecords::default()
        });
        let terms = self.terms(&watched, None, MIN_AGE, false, told);
        let mut found = self.look(&terms)?;
        let rests = found
            .leftovers
            .iter()
            .filter_map(|stray| match stray.verdict {
                LeftoverVerdict::Wait { rest, .. } => Some(Duration::from_nanos(rest)),
                // By then it is old enough.
                LeftoverVerdict::Report(Uncertainty::Young) => Some(MIN_AGE),
                _ => None,
            });
        let rest = rests.max().filter(|_| watched.enforce);
        if !first {
            found
                .leftovers
                .retain(|stray| stray.verdict == LeftoverVerdict::Reap);
        }
        self.end(&watched, &terms, &found)?;
        Ok(rest)
    }

    /// Looks, and takes note of whom a rule gives time.
    fn look(&self, terms: &ScanOptions) -> Result<FoundLeftovers, ProcfsError> {
        let found = find_leftovers(terms, &HashSet::new())?;
        let now = sys::monotonic();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let lives = |key: &ProcessKey| {
            let row = found.table.rows.get(&key.pid);
            row.is_some_and(|row| row.entry.key == *key)
        };
        waiting.retain(|head, _| lives(head));
        for stray in &found.leftovers {
            if matches!(stray.verdict, LeftoverVerdict::Wait { .. }) {
                waiting.entry(stray.subtree_root).or_insert(now);
            }
        }
        drop(waiting);
        Ok(found)
    }

    fn waited(&self) -> HashMap<ProcessKey, u64> {
        let now = sys::monotonic();
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = |(head, since): (&ProcessKey, &u64)| (*head, now.saturating_sub(*since));
        waiting.iter().map(waited).collect()
    }

    fn look_for(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
        told: JournalRecords,
    ) -> Result<(ScanOptions, FoundLeftovers), ScanError> {
        let uid = (!peer.is_root()).then_some(peer.uid);
        let terms = self.terms(watched, uid, min_age.unwrap_or(MIN_AGE), true, told);
        let found = self.look(&terms)?;
        report.observes = !watched.enforce;
        report.add(&found.table, &found.leftovers);
        Ok((terms, found))
    }

    fn claim(&self) -> Option<Busy> {
        let was = self.busy.swap(true, Ordering::AcqRel);
        (!was).then(|| Busy(Arc::clone(&self.busy)))
    }

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

    fn terms(
        &self,
        watched: &ScanContext,
        uid: Option<u32>,
        min_age: Duration,
        by_order: bool,
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
            by_order,
        }
    }

    /// Tells what was found, and ends what is to be reaped, unless nothing is. `None`: there was nothing to end.
    fn end(
        &self,
        watched: &ScanContext,
        terms: &ScanOptions,
        found: &FoundLeftovers,
    ) -> Result<Option<LeftoverReapResult>, ScanError> {
        let (uid, min_age, by_order) = (terms.uid, terms.min_age, terms.by_order);
        let is_due = |stray: &&Leftover| stray.verdict == LeftoverVerdict::Reap;
        // Of the others one word a tree is enough.
        let is_told = |stray: &&Leftover| match stray.verdict {
            LeftoverVerdict::Reap => true,
            LeftoverVerdict::Report(_) | LeftoverVerdict::Wait { .. } => {
                stray.key == stray.subtree_root
            }
            LeftoverVerdict::Keep { .. } => false,
        };
        let FoundLeftovers {
            table,
            leftovers: strays,
        } = found;
        let names = Names::new(table, &terms.recorded);
        let told = strays.iter().filter(is_told);
        let told = told.filter_map(|stray| Some((names.who(stray.key)?, stray.clone())));
        self.emit(told.map(|(who, stray)| EventBody::Leftover {
            process: who,
            leftover: stray,
        }))?;
        if !watched.enforce || !strays.iter().any(|stray| is_due(&stray)) {
            return Ok(None);
        }
        let look = |held: &HashSet<ProcessKey>| -> Result<FoundLeftovers, ScanError> {
            // Who has become a member meanwhile is the engine's.
            let watched = self.scan_context()?;
            let told = self.read_journal();
            let unsure = told.is_err();
            let told = told.unwrap_or_else(|_| (terms.recorded.clone(), terms.kept.clone()));
            let terms = self.terms(&watched, uid, min_age, by_order, told);
            let mut found = find_leftovers(&terms, held)?;
            if watched.gap || unsure || !watched.enforce {
                let stays = |stray: &Leftover| watched.enforce && held.contains(&stray.key);
                found.leftovers.retain(stays);
            }
            Ok(found)
        };
        let done = reap_found(found, watched.times, look)?;
        self.tell_done(&names, &done)?;
        Ok(Some(done))
    }

    fn tell_done(&self, names: &Names<'_>, done: &LeftoverReapResult) -> Result<(), ScanError> {
        let late = done.late.iter();
        self.emit(late.map(|(row, stray)| EventBody::Leftover {
            process: names.who_of(row),
            leftover: stray.clone(),
        }))?;
        let outcome = |end: &ReapResult| {
            let late = done.late.iter().find(|(row, _)| row.entry.key == end.key);
            let who = match late {
                Some((row, _)) => names.who_of(row),
                None => names.who(end.key)?,
            };
            Some(EventBody::Outcome {
                process: who,
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

    fn emit(&self, bodies: impl Iterator<Item = EventBody>) -> Result<(), ScanError> {
        let time = sys::boot_time();
        let records: Vec<_> = bodies.map(|body| EventRecord { time, body }).collect();
        if records.is_empty() {
            return Ok(());
        }
        self.ask(RequestKind::Emit(records)).map(drop)
    }

    fn scan_context(&self) -> Result<ScanContext, ScanError> {
        match self.ask(RequestKind::Watched)? {
            EngineReply::Watched(watched) => Ok(*watched),
            _ => Err(ScanError::Stopping),
        }
    }

    fn ask(&self, question: RequestKind) -> Result<EngineReply, ScanError> {
        let (answer, answered) = oneshot::channel();
        let peer = Peer { uid: 0 };
        let ask = EngineRequest {
            peer,
            question,
            answer,
        };
        let sent = self.asks.blocking_send(ask);
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
    ) -> Result<(), ErrorResponse> {
        let told = self.read_journal().unwrap_or_else(|error| {
            tracing::warn!("sessions of before are not looked for: {error}");
            JournalRecords::default()
        });
        self.look_for(report, watched, peer, min_age, told)?;
        Ok(())
    }

    fn reap(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
    ) -> Result<(), ErrorResponse> {
        let Some(_busy) = self.claim() else {
            let what = "what was found is being reaped already: the event stream tells of it";
            return Err(ErrorResponse::new("busy", what));
        };
        let told = self.read_journal()?;
        let (terms, found) = self.look_for(report, watched, peer, min_age, told)?;
        if let Some(done) = self.end(watched, &terms, &found)? {
            report.done(&done);
        }
        Ok(())
    }
}

/// By what processes are told of.
struct Names<'a> {
    table: &'a ProcessTable,
    /// Those recorded, by pid and tick.
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

    fn who(&self, key: ProcessKey) -> Option<ProcessRef> {
        let row = self.table.rows.get(&key.pid)?;
        (row.entry.key == key).then(|| self.who_of(row))
    }

    fn who_of(&self, row: &LeftoverRow) -> ProcessRef {
        let seen = &row.entry;
        // The table knows starts to the tick: it is told of by the name under which it was recorded.
        let tick = (seen.key.pid, seen.key.start / TICK_NS);
        let name = self.recorded.get(&tick);
        let parent = self.table.rows.get(&seen.parent);
        ProcessRef {
            key: name.copied().unwrap_or(seen.key),
            parent: parent.map(|parent| parent.entry.key),
            birth_parent: None,
            image: Arc::clone(&seen.image),
            uids: seen.uids,
            session: None,
            provenance: Provenance::Procfs,
            evidence: None,
        }
    }
}
