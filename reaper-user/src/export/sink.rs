//! Passes records from the engine to the outputs through a writer thread, without blocking the engine.

#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::consumer::Consumer;
use super::hint::Hints;
use super::journald;
use super::line::{Detail, LineWriter};
use super::line_file::{LineFile, LineFileState};
use super::recent::Recent;
use super::terminal::width;
use super::{DecisionNames, EventBody, EventRecord, WaitInfo, json};
use reaper_host::facts::listening_ports;
use reaper_host::source::procfs::Procfs;
use reaper_host::sys;

/// Number of queued records above which lifecycle records are dropped. Above twice as many, all are dropped.
const QUEUED_MAX: usize = 65_536;

/// Time limit for the last records to be written.
const JOIN_MAX: Duration = Duration::from_secs(2);
/// Limit of processes in a batch whose ports are read.
const PORTS_MAX: usize = 16;
/// Number of records after which the writer updates its progress.
const CHUNK: usize = 1024;
/// Capacity of an empty batch.
const BATCH: usize = 64;

/// Format of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lines for people.
    Lines(Detail),
    Json,
}

/// State of a format.
enum Encoder {
    Lines(Box<LineWriter>),
    Json,
}

/// An output of the stream.
pub struct StreamOutput {
    /// Path of the file, or `stdout`.
    name: String,
    encoder: Encoder,
    writer: Box<dyn Write + Send>,
    /// State of a file, which counts its lost lines.
    file: Option<Arc<LineFileState>>,
    /// Returns the width of the output, `None` if it is not a terminal.
    width: fn() -> Option<usize>,
    /// Whether the reader has closed it. Nothing more is written then.
    closed: bool,
    /// Whether a write has failed since the last flush that succeeded.
    failing: bool,
    /// Hints between the lines for people; `None` for no hints.
    hints: Option<Hints>,
}

impl StreamOutput {
    /// Creates an output to standard output, with colours if that is a terminal that supports them.
    ///
    /// # Errors
    /// As `dup(2)`.
    pub fn stdout(format: Format) -> io::Result<StreamOutput> {
        let name = "stdout".to_owned();
        Ok(match format {
            Format::Json => StreamOutput::lines(name, LineFile::stdout()?),
            Format::Lines(detail) => {
                let mut lines = LineWriter::new(detail);
                lines.for_journal = journald::is_journal(io::stdout());
                StreamOutput {
                    encoder: Encoder::Lines(Box::new(lines)),
                    width,
                    ..StreamOutput::json(name, Box::new(super::terminal::stdout()))
                }
            }
        })
    }

    fn json(name: String, writer: Box<dyn Write + Send>) -> StreamOutput {
        StreamOutput {
            name,
            encoder: Encoder::Json,
            writer,
            file: None,
            width: || None,
            closed: false,
            failing: false,
            hints: None,
        }
    }

    fn lines(name: String, file: LineFile) -> StreamOutput {
        StreamOutput {
            file: Some(file.state()),
            ..StreamOutput::json(name, Box::new(file))
        }
    }

    /// Adds hints between the lines for people, which name commands that query this service.
    pub fn with_hints(self) -> StreamOutput {
        StreamOutput {
            hints: Some(Hints::new(journald::is_journal(io::stdout()))),
            ..self
        }
    }

    /// Creates an output that appends JSON lines to a file, see [`LineFile`].
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn file(path: &Path) -> io::Result<StreamOutput> {
        LineFile::open(path).map(|file| StreamOutput::lines(path.display().to_string(), file))
    }
}

/// State that the sink and the writer share.
#[derive(Default)]
struct SinkState {
    /// Number of records that are passed on and not written yet.
    queued: AtomicUsize,
    /// Number of dropped records that are not reported yet.
    dropped: AtomicU64,
    /// Number of dropped records that are reported.
    reported: AtomicU64,
    /// States of the outputs that are files.
    files: Vec<Arc<LineFileState>>,
    callbacks: Mutex<WriteCallbacks>,
}

/// Losses of the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamLosses {
    /// Number of lines since the start that were dropped before an output, or could not be written to one.
    pub dropped: u64,
    /// Reason why an output cannot be written now.
    pub error: Option<String>,
}

impl SinkState {
    fn callbacks(&self) -> MutexGuard<'_, WriteCallbacks> {
        // The state is consistent even if a thread has panicked with the lock.
        let locked = self.callbacks.lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Callbacks that run once a number of records has been written.
///
/// Of all added ones, at most two are stored. The first one runs although records keep arriving. The last one runs when
/// no more records arrive.
#[derive(Default)]
struct WriteCallbacks {
    /// Number of records written since the start.
    written: u64,
    first: Option<(u64, Box<dyn FnOnce() + Send>)>,
    last: Option<(u64, Box<dyn FnOnce() + Send>)>,
}

impl WriteCallbacks {
    /// Adds a callback that runs once `after` records have been written since the start; at once if they have been. The
    /// number must not be lower than in earlier calls.
    fn add(&mut self, after: u64, f: Box<dyn FnOnce() + Send>) {
        if after <= self.written {
            f();
        } else if self.first.is_none() {
            self.first = Some((after, f));
        } else {
            self.last = Some((after, f));
        }
    }

    /// Counts records as written, and runs the callbacks that are due.
    fn on_written(&mut self, records: usize) {
        self.written += records as u64;
        while let Some((_, f)) = self.first.take_if(|(after, _)| *after <= self.written) {
            f();
            self.first = self.last.take();
        }
    }
}

/// The engine's end of the stream.
pub struct Sink {
    batch: Vec<EventRecord>,
    sender: Sender<Vec<EventRecord>>,
    /// Number of records passed on since the start.
    sent: u64,
    shared: Arc<SinkState>,
    /// Number of records that may be queued in addition to [`QUEUED_MAX`], until the queue is shorter than that.
    backlog_allowance: usize,
    journal: Option<Box<dyn Consumer>>,
    recent: Recent,
}

impl Sink {
    /// Returns what was decided about the last processes and how they ended.
    pub fn recent(&self) -> &Recent {
        &self.recent
    }

    /// Passes each later batch to the journal too.
    pub fn set_consumer(&mut self, journal: impl Consumer + 'static) {
        self.journal = Some(Box::new(journal));
    }

    /// Adds a record to the batch that [`Sink::flush`] passes on.
    pub fn push(&mut self, record: EventRecord) {
        self.recent.on_record(&record);
        self.batch.push(record);
    }

    /// Adds a record before all others of the batch, with a time that is not later than theirs.
    pub fn push_first(&mut self, mut record: EventRecord) {
        if let Some(first) = self.batch.first() {
            record.boot_ns = record.boot_ns.min(first.boot_ns);
        }
        self.batch.insert(0, record);
    }

    /// Passes on the records of the backlog of an earlier service. They do not count towards [`QUEUED_MAX`].
    pub fn flush_backlog(&mut self) {
        self.backlog_allowance += self.batch.len();
        self.flush();
    }

    /// Returns whether all records have been written, or dropped and reported as dropped.
    pub fn is_idle(&self) -> bool {
        self.batch.is_empty()
            && self.shared.dropped.load(Ordering::Relaxed) == 0
            && self.shared.queued.load(Ordering::Acquire) == 0
    }

    /// Returns the losses of all outputs.
    pub fn losses(&self) -> StreamLosses {
        let SinkState {
            dropped,
            reported,
            files,
            ..
        } = &*self.shared;
        let dropped = dropped.load(Ordering::Relaxed) + reported.load(Ordering::Relaxed);
        StreamLosses {
            dropped: dropped + files.iter().map(|file| file.lost()).sum::<u64>(),
            error: files.iter().find_map(|file| file.error()),
        }
    }

    /// Flushes, and runs `f` once all records pushed so far have been written or dropped.
    ///
    /// It runs on the writer's thread, or at once if no record is queued. A later call may replace a callback that has
    /// not run yet, but the last one always runs.
    pub fn on_written(&mut self, f: impl FnOnce() + Send + 'static) {
        self.flush();
        self.shared.callbacks().add(self.sent, Box::new(f));
    }

    /// Passes the batch on to journal and writer.
    ///
    /// Never blocks. If the writer is too far behind, records are dropped and counted, lifecycle records first.
    pub fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        // Before records are dropped: the journal has its own limit.
        if let Some(journal) = &mut self.journal {
            self.batch.extend(journal.on_records(&self.batch));
        }
        self.batch.retain(|record| !record.is_journal_only());
        let queued = self.shared.queued.load(Ordering::SeqCst);
        let n = self.batch.len();
        let bound = QUEUED_MAX + self.backlog_allowance;
        if queued > bound {
            self.batch
                .retain(|record| queued <= bound + QUEUED_MAX && !record.is_lifecycle());
        } else if queued <= QUEUED_MAX && n <= QUEUED_MAX {
            self.backlog_allowance = 0;
        }
        let dropped = n - self.batch.len();
        self.shared
            .dropped
            .fetch_add(dropped as u64, Ordering::Relaxed);
        if !self.batch.is_empty() {
            let batch: Vec<_> = self.batch.drain(..).collect();
            self.shared.queued.fetch_add(batch.len(), Ordering::Relaxed);
            self.sent += batch.len() as u64;
            // Fails if the writer's thread has panicked, which is logged.
            let _ = self.sender.send(batch);
        }
        self.batch.shrink_to(BATCH);
    }
}

/// The writer thread. It ends when the [`Sink`] is dropped.
pub struct Writer {
    done: Receiver<()>,
}

impl Writer {
    /// Starts a writer to these outputs.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(outputs: Vec<StreamOutput>) -> io::Result<(Sink, Writer)> {
        let (sender, receiver) = channel();
        let (end, done) = channel();
        let files = outputs.iter().filter_map(|output| output.file.clone());
        let shared = Arc::new(SinkState {
            files: files.collect(),
            ..SinkState::default()
        });
        let sink = Sink {
            batch: Vec::with_capacity(BATCH),
            sender,
            sent: 0,
            shared: Arc::clone(&shared),
            backlog_allowance: 0,
            journal: None,
            recent: Recent::default(),
        };
        let work = move || {
            let mut outputs = StreamOutputs {
                all: outputs,
                seq: 0,
            };
            loop {
                match outputs.receive(&receiver) {
                    Ok(mut batch) => {
                        read_ports(&mut batch);
                        write(&mut outputs, &batch, &shared);
                        emit_dropped(&mut outputs, &shared);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                outputs.write_due();
            }
            emit_dropped(&mut outputs, &shared);
            let _ = end.send(());
        };
        std::thread::Builder::new()
            .name("export".into())
            .spawn(work)?;
        Ok((sink, Writer { done }))
    }

    /// Waits at most [`JOIN_MAX`] until all records are written, because their reader may have stopped. The sink must
    /// be dropped before.
    pub fn join(self) {
        if self.done.recv_timeout(JOIN_MAX).is_err() {
            tracing::error!(
                "the event stream lacks its last records: its reader did not take them within {}s of the stop",
                JOIN_MAX.as_secs()
            );
        }
    }
}

/// Reads ports for decisions that wait because a process listens, at most [`PORTS_MAX`]. The engine does not, because
/// that would delay signals.
fn read_ports(batch: &mut [EventRecord]) {
    let waits = batch
        .iter_mut()
        .filter_map(|record| match &mut record.body {
            EventBody::Decision {
                process,
                decision: DecisionNames {
                    wait: Some(wait), ..
                },
            } if wait.conditions.contains(&"listening") => Some((process.key, wait)),
            _ => None,
        });
    for (key, wait) in waits.take(PORTS_MAX) {
        let WaitInfo {
            listener, ports, ..
        } = wait;
        let key = listener.as_ref().map_or(key, |listener| listener.key);
        *ports = listening_ports(&Procfs::default(), key);
    }
}

/// Writes a batch in chunks, and updates the progress after each.
fn write(outputs: &mut StreamOutputs, batch: &[EventRecord], shared: &SinkState) {
    for chunk in batch.chunks(CHUNK) {
        outputs.write(chunk);
        shared.queued.fetch_sub(chunk.len(), Ordering::SeqCst);
        shared.callbacks().on_written(chunk.len());
    }
}

/// Writes a record with the number of records dropped since the last such record, if there are any. Writes another one
/// for each file that lacks lines and can be written again.
fn emit_dropped(outputs: &mut StreamOutputs, shared: &SinkState) {
    let dropped = |by, count| EventRecord {
        boot_ns: sys::boot_time(),
        body: EventBody::Dropped { by, count },
    };
    let count = shared.dropped.load(Ordering::Relaxed);
    if count > 0 {
        outputs.write(&[dropped("stream", count)]);
        shared.reported.fetch_add(count, Ordering::Relaxed);
        shared.dropped.fetch_sub(count, Ordering::Relaxed);
    }
    for file in &shared.files {
        let count = file.unreported();
        if count > 0 {
            outputs.write(&[dropped("file", count)]);
            file.on_reported(count);
        }
    }
}

/// All outputs, with common sequence numbers.
struct StreamOutputs {
    all: Vec<StreamOutput>,
    seq: u64,
}

impl StreamOutputs {
    /// Waits for a batch, at most until a line is due.
    fn receive(
        &self,
        receiver: &Receiver<Vec<EventRecord>>,
    ) -> Result<Vec<EventRecord>, RecvTimeoutError> {
        let due = self.all.iter().filter_map(StreamOutput::next_due).min();
        match due {
            None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => {
                let wait = due.saturating_sub(sys::boot_time());
                receiver.recv_timeout(Duration::from_nanos(wait))
            }
        }
    }

    /// Writes the lines that are due.
    fn write_due(&mut self) {
        for output in self.all.iter_mut().filter(|it| it.next_due().is_some()) {
            output.write_due();
            output.flush();
        }
    }

    /// Writes records and flushes.
    fn write(&mut self, records: &[EventRecord]) {
        for record in records {
            self.seq += 1;
            for output in &mut self.all {
                output.write(record, self.seq);
            }
        }
        self.all.iter_mut().for_each(StreamOutput::flush);
    }
}

impl StreamOutput {
    fn write(&mut self, record: &EventRecord, seq: u64) {
        if self.closed {
            return;
        }
        let written = match &mut self.encoder {
            Encoder::Lines(lines) => lines.write(&mut self.writer, record, (self.width)()),
            Encoder::Json => json::write(&mut self.writer, record, seq),
        };
        let written = written.and_then(|()| match &mut self.hints {
            Some(hints) if matches!(self.encoder, Encoder::Lines(_)) => {
                hints.write_after(&mut self.writer, record, (self.width)())
            }
            _ => Ok(()),
        });
        self.check(written);
    }

    /// Returns when to call [`StreamOutput::write_due`] next, in ns since boot.
    fn next_due(&self) -> Option<u64> {
        match &self.encoder {
            Encoder::Lines(lines) if !self.closed => lines.next_due(),
            _ => None,
        }
    }

    fn write_due(&mut self) {
        if let Encoder::Lines(lines) = &mut self.encoder
            && !self.closed
        {
            let written = lines.write_due(&mut self.writer, sys::boot_time(), (self.width)());
            self.check(written);
        }
    }

    fn flush(&mut self) {
        if !self.closed {
            let flushed = self.writer.flush();
            self.failing &= flushed.is_err();
            self.check(flushed);
        }
    }

    /// Closes an output without a reader. Logs the first of other errors in a row: the next write may work again.
    fn check(&mut self, result: io::Result<()>) {
        let Err(error) = result else { return };
        if error.kind() == io::ErrorKind::BrokenPipe {
            self.closed = true;
        } else if !std::mem::replace(&mut self.failing, true) {
            tracing::error!(
                "cannot write events to {}: {error}; lines are left out until it can be written again",
                self.name
            );
        }
    }
}
