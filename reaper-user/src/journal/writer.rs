//! The journal's thread, and what others have of it.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use hashbrown::HashSet;

use super::keeper::{KeepWriter, PATIENCE};
use super::keeps::{JournalKeep, KeepUpdate};
use super::message::{JournalCounters, KeepChange, Message};
use super::prune::{self, EVERY};
use super::rows::{RowWriter, is_journaled};
use super::store::{Store, is_corruption, is_transient};
use super::{JournalError, JournalOptions};
use crate::export::{Consumer, EventBody, EventRecord};
use reaper_host::sys;

/// Records that may wait for the database; what comes beyond is dropped.
const WAITING_MAX: usize = 65_536;
/// How long records are gathered for one change of the database: what is lost if this program is killed.
const GATHER: Duration = Duration::from_millis(20);
/// Time limit for opening the database, which may have to be upgraded: that can rewrite all of it.
const OPENING_MAX: Duration = Duration::from_secs(10);
/// Records of one change, at most: a keep waits for no more than that.
const BATCH: usize = 2048;
/// How long after a failure it is tried again: at first, and at last.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(32));
/// Damaged databases that are set aside before it is given up.
const ASIDE_MAX: u32 = 3;

/// An open journal.
pub struct Journal {
    sender: Sender<Message>,
    asking: Sender<KeepChange>,
    pub(super) shared: Arc<JournalCounters>,
    path: PathBuf,
    keeps: Vec<JournalKeep>,
    set_aside: bool,
    done: Receiver<()>,
}

impl Journal {
    /// Opens the journal, or begins one, and starts its thread.
    ///
    /// # Errors
    /// The directory cannot be made or used, its file system does not answer, or the journal has a newer schema. A
    /// file that is damaged or no journal is no error: it is set aside, which is warned of.
    pub fn open(options: JournalOptions, boot_id: String) -> Result<Journal, JournalError> {
        let path = options.path();
        let (sender, receiver) = channel();
        let (asking, asked) = channel();
        let (opened, ready) = channel();
        let (end, done) = channel();
        let shared = Arc::new(JournalCounters::default());
        let of_thread = Arc::clone(&shared);
        let work = move || {
            // Here, so that a file system that hangs does not hang the service.
            match open(&options, &boot_id) {
                Ok((store, keeps)) => {
                    let set_aside = store.set_aside;
                    let mut work =
                        JournalThread::new(store, keeps.clone(), options, boot_id, of_thread);
                    if opened.send(Ok((keeps, set_aside))).is_ok() {
                        work.run(&receiver, &asked);
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
        match ready.recv_timeout(OPENING_MAX) {
            Ok(opened) => {
                let (keeps, set_aside) = opened?;
                Ok(Journal {
                    sender,
                    asking,
                    shared,
                    path,
                    keeps,
                    set_aside,
                    done,
                })
            }
            Err(_) => Err(JournalError::TimedOut { path }),
        }
    }

    /// The keeps that were in it when it was opened, of this boot and not over.
    pub fn keeps(&self) -> &[JournalKeep] {
        &self.keeps
    }

    /// Whether what was there could not be used, so that keeps may be missing.
    pub fn was_replaced(&self) -> bool {
        self.set_aside
    }

    /// For writing keeps.
    pub fn keeper(&self) -> KeepWriter {
        KeepWriter {
            sender: self.sender.clone(),
            asking: self.asking.clone(),
            path: self.path.clone(),
        }
    }

    /// The database.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// For the export sink.
    pub fn feed(&self) -> Feed {
        Feed {
            sender: self.sender.clone(),
            shared: Arc::clone(&self.shared),
            room: WAITING_MAX,
            unreported_drops: 0,
            full: false,
        }
    }

    /// Waits until all that was handed over is written, but not for ever: the disk may be full.
    pub fn close(self) {
        // A thread that is gone has said why.
        let _ = self.sender.send(Message::Stop);
        if self.done.recv_timeout(PATIENCE).is_err() {
            tracing::error!("the end of the journal {} is left out", self.path.display());
        }
    }
}

/// The engine's end: takes what crosses, and never blocks.
pub struct Feed {
    sender: Sender<Message>,
    shared: Arc<JournalCounters>,
    /// Records that may wait.
    pub(super) room: usize,
    /// Dropped since that was last told in the stream.
    unreported_drops: u64,
    /// The last records found no room.
    full: bool,
}

impl Consumer for Feed {
    /// Queues the records that a journal keeps.
    ///
    /// Returns the number of dropped records: at the first one, when there is room again, and at the end.
    fn on_records(&mut self, records: &[EventRecord]) -> Option<EventRecord> {
        let kept = records.iter().filter(|record| is_journaled(record));
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
                // A thread that has given up has said why.
                let _ = self.sender.send(Message::Records(kept));
            }
        }
        let last = matches!(records.last(), Some(record) if matches!(record.body, EventBody::Summary { .. }));
        let tell = self.unreported_drops > 0 && (!was_full || !self.full || last);
        tell.then(|| EventRecord {
            time: sys::boot_time(),
            body: EventBody::Dropped {
                by: "journal",
                count: std::mem::take(&mut self.unreported_drops),
            },
        })
    }
}

/// Opens the database, and reads the keeps in it.
fn open(
    options: &JournalOptions,
    boot_id: &str,
) -> Result<(Store, Vec<JournalKeep>), JournalError> {
    let mut store = Store::open(&options.path(), boot_id)?;
    match store.keeps() {
        Ok(keeps) => Ok((store, keeps)),
        Err(error) if is_corruption(&error) => {
            let why = format!("it is damaged ({error})");
            Ok((store.replace(&why, boot_id)?, Vec::new()))
        }
        Err(source) => Err(JournalError::Database {
            path: store.path,
            source,
        }),
    }
}

/// What the thread works with.
struct JournalThread {
    /// `None` once it was given up.
    store: Option<Store>,
    /// As they are in the database, for a new one.
    keeps: Vec<JournalKeep>,
    options: JournalOptions,
    boot_id: String,
    shared: Arc<JournalCounters>,
    /// To be written next.
    batch: VecDeque<EventRecord>,
    /// When.
    write_at: Option<Instant>,
    /// How long it is waited after the next failure; `None` while it works.
    retry: Option<Duration>,
    pruned: Option<Instant>,
    aside: u32,
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
            aside: 0,
        }
    }

    /// Works until it is stopped. Sleeps for good while there is nothing to write.
    fn run(&mut self, receiver: &Receiver<Message>, asked: &Receiver<KeepChange>) {
        if let Some(Err(error)) = self.store.as_ref().map(Store::check) {
            self.failed(&error);
        }
        loop {
            let message = match self.write_at {
                None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => receiver.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            for (change, reply) in asked.try_iter() {
                // Who does not wait for it any more has been told that it failed.
                let _ = reply.send(self.change(change));
            }
            match message {
                Ok(Message::Records(records)) => self.take(records),
                Ok(Message::KeepUpdateQueued) => {}
                Err(RecvTimeoutError::Timeout) => self.write(),
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        while !self.batch.is_empty() {
            let before = (self.batch.len(), self.aside);
            self.write();
            if (self.batch.len(), self.aside) == before {
                let path = self.options.path();
                let (count, path) = (before.0, path.display());
                tracing::error!("the last {count} records are not in the journal {path}");
                return;
            }
        }
    }

    fn take(&mut self, records: Vec<EventRecord>) {
        if self.store.is_none() {
            self.shared
                .waiting
                .fetch_sub(records.len(), Ordering::AcqRel);
            return;
        }
        self.batch.extend(records);
        let due = Instant::now() + GATHER;
        self.write_at.get_or_insert(due);
        // After a failure it is waited for its time.
        if self.retry.is_none() && self.batch.len() >= BATCH {
            self.write();
        }
    }

    /// Writes what has gathered first; the rest is due at once.
    fn write(&mut self) {
        self.reopen_if_removed();
        let Some(store) = &mut self.store else {
            return self.forget(self.batch.len());
        };
        let count = self.batch.len().min(BATCH);
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
                    tracing::warn!("the journal {} is written again", path.display());
                }
                self.forget(count);
            }
            Err(error) if is_transient(&error) => self.retry_later(&error),
            Err(error) => self.failed(&error),
        }
    }

    /// Takes out the first records of the batch; what is left is due at once.
    fn forget(&mut self, count: usize) {
        self.batch.drain(..count);
        self.shared.waiting.fetch_sub(count, Ordering::AcqRel);
        if self.batch.is_empty() {
            self.batch = VecDeque::new();
        }
        self.write_at = (!self.batch.is_empty()).then(Instant::now);
    }

    fn retry_later(&mut self, error: &rusqlite::Error) {
        let pause = self.retry.map_or(RETRY.0, |pause| (pause * 2).min(RETRY.1));
        if self.retry.is_none() {
            tracing::error!(
                "the journal {} cannot be written: {error}; it is tried again, and {WAITING_MAX} records \
                 kept for it meanwhile",
                self.options.path().display()
            );
        }
        self.retry = Some(pause);
        self.write_at = Some(Instant::now() + pause);
    }

    /// Sees to an error that does not pass by itself: a damaged database is set aside, a batch that
    /// cannot be written is given up.
    fn failed(&mut self, error: &rusqlite::Error) {
        if is_corruption(error) {
            return self.replace_store(&format!("it is damaged ({error})"));
        }
        let count = self.batch.len().min(BATCH);
        tracing::error!("{count} records cannot be written to the journal: {error}; this is a bug");
        self.shared
            .dropped
            .fetch_add(count as u64, Ordering::AcqRel);
        self.forget(count);
    }

    fn replace_store(&mut self, why: &str) {
        let Some(store) = self.store.take() else {
            return;
        };
        self.aside += 1;
        let begun = if self.aside > ASIDE_MAX {
            Err("too many of them were damaged".to_owned())
        } else {
            let begun = store.replace(why, &self.boot_id);
            begun.map_err(|error| error.to_string())
        };
        self.adopt(begun);
    }

    /// Begins a new one where the old one was removed or replaced.
    fn reopen_if_removed(&mut self) {
        if self
            .store
            .as_ref()
            .is_some_and(|store| !store.is_in_place())
        {
            self.store = None;
            let path = self.options.path();
            tracing::warn!(
                "the journal {} was removed; a new one is begun",
                path.display()
            );
            let opened = Store::open(&path, &self.boot_id);
            self.adopt(opened.map_err(|error| error.to_string()));
        }
    }

    /// Goes on with a new database, in which there are no keeps yet.
    fn adopt(&mut self, begun: Result<Store, String>) {
        let begun = begun.and_then(|mut store| {
            let kept = store.change(&KeepUpdate::Keep(self.keeps.clone()));
            kept.map_err(|error| error.to_string()).map(|()| store)
        });
        match begun {
            Ok(store) => self.store = Some(store),
            Err(error) => {
                tracing::error!("{error}; the service goes on without a journal");
                self.forget(self.batch.len());
            }
        }
    }

    fn change(&mut self, change: KeepUpdate) -> Result<(), JournalError> {
        self.reopen_if_removed();
        let path = self.options.path();
        let Some(store) = &mut self.store else {
            return Err(JournalError::TimedOut { path });
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

/// Writes a batch in one change, with what was dropped before it, and takes out what is too old or too
/// much.
fn write<'a>(
    store: &mut Store,
    batch: impl Iterator<Item = &'a EventRecord>,
    shared: &JournalCounters,
    (options, pruned): (&JournalOptions, &mut Option<Instant>),
) -> rusqlite::Result<()> {
    let boot = store.boot;
    let dropped = shared.dropped.load(Ordering::Acquire);
    let old = pruned.is_none_or(|at| at.elapsed() >= EVERY);
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
    if old {
        shrunk |= prune::older_than(&transaction, prune::cutoff(options.max_age), boot)?;
    }
    shrunk |= prune::larger_than(&transaction, options.max_size, boot)?;
    transaction.commit()?;
    shared.dropped.fetch_sub(dropped, Ordering::AcqRel);
    if old {
        *pruned = Some(Instant::now());
    }
    if shrunk {
        prune::shrink(store)?;
    }
    Ok(())
}
