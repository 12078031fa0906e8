//! The journal's thread, and the handles through which other threads use it.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use hashbrown::HashSet;

use super::keep_writer::{ANSWER_TIMEOUT, KeepWriter};
use super::keeps::{JournalKeep, KeepUpdate};
use super::message::{JournalCounters, KeepChange, Message};
use super::prune::{self, INTERVAL};
use super::rows::{Journaled, RowWriter};
use super::store::{Store, is_corruption, is_transient};
use super::{JournalError, JournalOptions};
use crate::export::{Consumer, EventBody, EventRecord};
use reaper_host::sys;

/// Limit of records that wait for the database. Further ones are dropped.
const WAITING_MAX: usize = 65_536;
/// Time for which records are gathered for one transaction. A crash of the service loses them.
const GATHER_TIME: Duration = Duration::from_millis(20);
/// Time limit for opening the database. An upgrade can rewrite all of it.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of records in a transaction, and thus of the time that a keep waits.
const BATCH_MAX: usize = 2048;
/// First and longest delay before a failed write is retried.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(32));
/// Limit of damaged databases that are replaced.
const REPLACED_MAX: u32 = 3;

/// Open journal, with the handles of its thread.
pub struct Journal {
    sender: Sender<Message>,
    changes: Sender<KeepChange>,
    pub(super) shared: Arc<JournalCounters>,
    path: PathBuf,
    keeps: Vec<JournalKeep>,
    set_aside: bool,
    done: Receiver<()>,
}

impl Journal {
    /// Opens or creates the journal, and starts its thread. An unusable file is renamed with a warning. Waits for up to
    /// ten seconds.
    ///
    /// # Errors
    /// The directory cannot be created or used, the file system does not respond, or the journal has a newer schema.
    pub fn open(options: JournalOptions, boot_id: String) -> Result<Journal, JournalError> {
        let path = options.path();
        let (sender, receiver) = channel();
        let (changes, change_receiver) = channel();
        let (opened, ready) = channel();
        let (end, done) = channel();
        let shared = Arc::new(JournalCounters::default());
        let counters = Arc::clone(&shared);
        let work = move || {
            // Opened on this thread, so that a file system that hangs cannot block the service.
            match open(&options, &boot_id) {
                Ok((store, keeps)) => {
                    let set_aside = store.set_aside;
                    let mut thread =
                        JournalThread::new(store, keeps.clone(), options, boot_id, counters);
                    if opened.send(Ok((keeps, set_aside))).is_ok() {
                        thread.run(&receiver, &change_receiver);
                    }
                }
                Err(error) => drop(opened.send(Err(error))),
            }
            let _ = end.send(());
        };
        std::thread::Builder::new()
            .name("journal".into())
            .spawn(work)
            .map_err(JournalError::Thread)?;
        match ready.recv_timeout(OPEN_TIMEOUT) {
            Ok(opened) => {
                let (keeps, set_aside) = opened?;
                Ok(Journal {
                    sender,
                    changes,
                    shared,
                    path,
                    keeps,
                    set_aside,
                    done,
                })
            }
            Err(RecvTimeoutError::Timeout) => Err(JournalError::TimedOut {
                path,
                limit: OPEN_TIMEOUT,
            }),
            Err(RecvTimeoutError::Disconnected) => Err(JournalError::GivenUp { path }),
        }
    }

    /// Returns the valid keeps that were in the database when it was opened.
    pub fn keeps(&self) -> &[JournalKeep] {
        &self.keeps
    }

    /// Returns whether an earlier database was unusable. Its keeps may be missing.
    pub fn was_replaced(&self) -> bool {
        self.set_aside
    }

    /// Returns a handle to store keeps.
    pub fn keep_writer(&self) -> KeepWriter {
        KeepWriter {
            sender: self.sender.clone(),
            changes: self.changes.clone(),
            path: self.path.clone(),
        }
    }

    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Returns the consumer for the export sink.
    pub fn feed(&self) -> Feed {
        Feed {
            sender: self.sender.clone(),
            shared: Arc::clone(&self.shared),
            journaled: Journaled::default(),
            room: WAITING_MAX,
            unreported_drops: 0,
            full: false,
        }
    }

    /// Stops the journal's thread, and waits until all records are written. Waits for at most two seconds, as the
    /// disk may be full, and then logs an error.
    pub fn close(self) {
        // If the thread has ended, it has logged the reason.
        let _ = self.sender.send(Message::Stop);
        if self.done.recv_timeout(ANSWER_TIMEOUT).is_err() {
            tracing::error!(
                "the last records may be missing from the journal {}: writing them took longer than {}s; check whether its disk \
                 is full or slow",
                self.path.display(),
                ANSWER_TIMEOUT.as_secs()
            );
        }
    }
}

/// Consumer of the engine's records. Never blocks.
pub struct Feed {
    sender: Sender<Message>,
    shared: Arc<JournalCounters>,
    journaled: Journaled,
    /// Limit of waiting records.
    pub(super) room: usize,
    /// Number of dropped records that the stream has not reported yet.
    unreported_drops: u64,
    /// Whether the last records were dropped.
    full: bool,
}

impl Consumer for Feed {
    /// Queues the records that a journal keeps. Returns a record with the number of dropped records: after the first
    /// drop, when there is room again, and at the end.
    fn on_records(&mut self, records: &[EventRecord]) -> Option<EventRecord> {
        let kept = records.iter();
        let kept = kept.filter(|record| self.journaled.includes(record));
        let mut kept: Vec<EventRecord> = kept.cloned().collect();
        let was_full = self.full;
        if !kept.is_empty() {
            let waiting = self.shared.waiting.load(Ordering::Acquire);
            let room = self.room.saturating_sub(waiting);
            let dropped = kept.len().saturating_sub(room) as u64;
            kept.truncate(room);
            self.full = dropped > 0;
            self.unreported_drops += dropped;
            self.shared.dropped.fetch_add(dropped, Ordering::AcqRel);
            self.shared.waiting.fetch_add(kept.len(), Ordering::AcqRel);
            if !kept.is_empty() {
                // If the thread has given up, it has logged the reason.
                let _ = self.sender.send(Message::Records(kept));
            }
        }
        let last = matches!(records.last(), Some(record) if matches!(record.body, EventBody::Summary { .. }));
        let must_report = self.unreported_drops > 0 && (!was_full || !self.full || last);
        must_report.then(|| EventRecord {
            boot_ns: sys::boot_time(),
            body: EventBody::Dropped {
                by: "journal",
                count: std::mem::take(&mut self.unreported_drops),
            },
        })
    }
}

/// Opens the database, and reads its keeps.
fn open(
    options: &JournalOptions,
    boot_id: &str,
) -> Result<(Store, Vec<JournalKeep>), JournalError> {
    let mut store = Store::open(&options.path(), boot_id)?;
    match store.keeps() {
        Ok(keeps) => Ok((store, keeps)),
        Err(error) if is_corruption(&error) => {
            let why = format!("damaged ({error})");
            Ok((store.replace(&why, boot_id)?, Vec::new()))
        }
        Err(source) => Err(JournalError::Database {
            path: store.path,
            source,
        }),
    }
}

/// State of the journal's thread.
struct JournalThread {
    /// `None` after the journal was given up.
    store: Option<Store>,
    /// Keeps in the database, for a new one that replaces it.
    keeps: Vec<JournalKeep>,
    options: JournalOptions,
    boot_id: String,
    shared: Arc<JournalCounters>,
    /// Records to write.
    batch: VecDeque<EventRecord>,
    /// Time of the next write.
    write_at: Option<Instant>,
    /// Delay before the next retry. `None` while writes succeed.
    retry: Option<Duration>,
    /// Time of the last deletion of old records. `None` before the first one.
    pruned: Option<Instant>,
    /// Number of damaged databases that were replaced.
    replaced: u32,
}

impl JournalThread {
    fn new(
        store: Store,
        keeps: Vec<JournalKeep>,
        options: JournalOptions,
        boot_id: String,
        shared: Arc<JournalCounters>,
    ) -> JournalThread {
        JournalThread {
            store: Some(store),
            keeps,
            options,
            boot_id,
            shared,
            batch: VecDeque::new(),
            write_at: None,
            retry: None,
            pruned: None,
            replaced: 0,
        }
    }

    /// Runs until the journal is stopped. Sleeps while there is nothing to write. At the end writes what is left,
    /// without retries after an error.
    fn run(&mut self, receiver: &Receiver<Message>, changes: &Receiver<KeepChange>) {
        if let Some(Err(error)) = self.store.as_ref().map(Store::check) {
            self.on_permanent_error(&error);
        }
        loop {
            let message = match self.write_at {
                None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => receiver.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            for (change, reply) in changes.try_iter() {
                // A requester that no longer waits has already reported a timeout.
                let _ = reply.send(self.change(change));
            }
            match message {
                Ok(Message::Records(records)) => self.on_records_received(records),
                Ok(Message::KeepUpdateQueued) => {}
                Err(RecvTimeoutError::Timeout) => self.write(),
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        while !self.batch.is_empty() {
            let before = (self.batch.len(), self.replaced);
            self.write();
            if (self.batch.len(), self.replaced) == before {
                let path = self.options.path();
                let (count, path) = (before.0, path.display());
                tracing::error!(
                    "the last {count} records are missing from the journal {path}: it could not be written before the \
                     service stopped; see the earlier error"
                );
                return;
            }
        }
    }

    /// Adds records to the batch, which is written after [`GATHER_TIME`], or at once if it is full. After an error,
    /// it waits for the retry. Drops the records if the journal was given up.
    fn on_records_received(&mut self, records: Vec<EventRecord>) {
        if self.store.is_none() {
            self.shared
                .waiting
                .fetch_sub(records.len(), Ordering::AcqRel);
            return;
        }
        self.batch.extend(records);
        let write_at = Instant::now() + GATHER_TIME;
        self.write_at.get_or_insert(write_at);
        // After a failure, the delay of the retry applies.
        if self.retry.is_none() && self.batch.len() >= BATCH_MAX {
            self.write();
        }
    }

    /// Writes the oldest records, at most [`BATCH_MAX`]. The rest is written right after that. After a temporary error,
    /// they stay in the batch for a retry. If the journal was given up, all are dropped.
    fn write(&mut self) {
        self.reopen_if_removed();
        let Some(store) = &mut self.store else {
            return self.forget(self.batch.len());
        };
        let count = self.batch.len().min(BATCH_MAX);
        let written = write(
            store,
            self.batch.range(..count),
            &self.shared,
            (&self.options, &mut self.pruned),
        );
        match written {
            Ok(()) => {
                if self.retry.take().is_some() {
                    let path = self.options.path();
                    tracing::warn!("writing to the journal {} works again", path.display());
                }
                self.forget(count);
            }
            Err(error) if is_transient(&error) => self.retry_later(&error),
            Err(error) => self.on_permanent_error(&error),
        }
    }

    /// Removes the first `count` records of the batch. The rest is written right after that.
    fn forget(&mut self, count: usize) {
        self.batch.drain(..count);
        self.shared.waiting.fetch_sub(count, Ordering::AcqRel);
        if self.batch.is_empty() {
            self.batch = VecDeque::new();
        }
        self.write_at = (!self.batch.is_empty()).then(Instant::now);
    }

    /// Schedules a retry of the write. The delay doubles with each failure, within [`RETRY_DELAYS`]. Logs the first
    /// failure.
    fn retry_later(&mut self, error: &rusqlite::Error) {
        let delay = self
            .retry
            .map_or(RETRY_DELAYS.0, |delay| (delay * 2).min(RETRY_DELAYS.1));
        if self.retry.is_none() {
            tracing::error!(
                "cannot write to the journal {}: {error}{}; retrying, while up to {WAITING_MAX} records wait",
                self.options.path().display(),
                super::advice(error)
            );
        }
        self.retry = Some(delay);
        self.write_at = Some(Instant::now() + delay);
    }

    /// Handles a permanent error: replaces a damaged database, and drops a batch that cannot be written.
    fn on_permanent_error(&mut self, error: &rusqlite::Error) {
        if is_corruption(error) {
            return self.replace_store(&format!("damaged ({error})"));
        }
        let count = self.batch.len().min(BATCH_MAX);
        tracing::error!(
            "cannot write {count} records to the journal {}: {error}; they are dropped; report this as a bug",
            self.options.path().display()
        );
        self.shared
            .dropped
            .fetch_add(count as u64, Ordering::AcqRel);
        self.forget(count);
    }

    /// Renames a damaged database, and continues with a new one. Gives the journal up if that fails, or instead of it
    /// after [`REPLACED_MAX`] replacements.
    fn replace_store(&mut self, why: &str) {
        let Some(store) = self.store.take() else {
            return;
        };
        self.replaced += 1;
        let opened = if self.replaced > REPLACED_MAX {
            Err(format!(
                "the journal {} was damaged more than {REPLACED_MAX} times: check its disk, then restart the service",
                self.options.path().display()
            ))
        } else {
            let opened = store.replace(why, &self.boot_id);
            opened.map_err(|error| error.to_string())
        };
        self.adopt(opened);
    }

    /// Creates a new database if the file was removed or replaced.
    fn reopen_if_removed(&mut self) {
        if self
            .store
            .as_ref()
            .is_some_and(|store| !store.is_in_place())
        {
            self.store = None;
            let path = self.options.path();
            tracing::warn!(
                "the journal {} was removed or replaced while in use; creating a new one, without its earlier records",
                path.display()
            );
            let opened = Store::open(&path, &self.boot_id);
            self.adopt(opened.map_err(|error| error.to_string()));
        }
    }

    /// Continues with a new database. Copies the keeps into it. After an error, gives the journal up and drops the
    /// batch.
    fn adopt(&mut self, opened: Result<Store, String>) {
        let opened = opened.and_then(|mut store| {
            let kept = store.change(&KeepUpdate::Keep(self.keeps.clone()));
            let failed = |source| {
                let path = self.options.path();
                JournalError::Database { path, source }.to_string()
            };
            kept.map_err(failed).map(|()| store)
        });
        match opened {
            Ok(store) => self.store = Some(store),
            Err(error) => {
                tracing::error!(
                    "{error}; until it restarts, the service runs without a history, and keeps are lost when it stops"
                );
                self.forget(self.batch.len());
            }
        }
    }

    /// Stores a change of the keeps at once. Then applies it to the copy in memory.
    fn change(&mut self, change: KeepUpdate) -> Result<(), JournalError> {
        self.reopen_if_removed();
        let path = self.options.path();
        let Some(store) = &mut self.store else {
            return Err(JournalError::GivenUp { path });
        };
        let written = store.change(&change);
        written.map_err(|source| JournalError::Database { path, source })?;
        match change {
            KeepUpdate::Keep(keeps) => {
                let name = |keep: &JournalKeep| (keep.by_uid, keep.made_at);
                let is_new = |old: &&JournalKeep| {
                    let same = |new: &JournalKeep| new.is_explicit && new.key == old.key;
                    old.is_explicit && keeps.iter().any(same)
                };
                let replaced = self.keeps.iter().filter(is_new).map(name);
                let replaced: HashSet<_> = replaced.collect();
                self.keeps.retain(|old| !replaced.contains(&name(old)));
                self.keeps.extend(keeps);
            }
            KeepUpdate::Unkeep { by, made } => self
                .keeps
                .retain(|keep| (keep.by_uid, keep.made_at) != (by, made)),
        }
        Ok(())
    }
}

/// Writes a batch and the number of dropped records in one transaction. In the same one, deletes the oldest records of
/// a database that is too large and, once in [`INTERVAL`], records that are too old.
fn write<'a>(
    store: &mut Store,
    batch: impl Iterator<Item = &'a EventRecord>,
    shared: &JournalCounters,
    (options, pruned): (&JournalOptions, &mut Option<Instant>),
) -> rusqlite::Result<()> {
    let boot = store.boot;
    let dropped = shared.dropped.load(Ordering::Acquire);
    let must_prune = pruned.is_none_or(|at| at.elapsed() >= INTERVAL);
    let transaction = store.transaction()?;
    let rows = RowWriter {
        transaction: &transaction,
        boot,
    };
    for record in batch {
        rows.write(record)?;
    }
    if dropped > 0 {
        rows.dropped(dropped, sys::boot_time())?;
    }
    let mut shrunk = false;
    if must_prune {
        shrunk |= prune::older_than(&transaction, prune::cutoff(options.max_age), boot)?;
    }
    shrunk |= prune::larger_than(&transaction, options.max_size, boot)?;
    transaction.commit()?;
    shared.dropped.fetch_sub(dropped, Ordering::AcqRel);
    if must_prune {
        *pruned = Some(Instant::now());
    }
    if shrunk {
        prune::shrink(store)?;
    }
    Ok(())
}
