//! From the engine to the outputs, without ever holding the engine up.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::consumer::Consumer;
use super::{EventBody, EventRecord, json, line};
use reaper_host::sys;

/// Records on their way to the writer beyond which some are left out; beyond twice as many, all.
const WAITING_MAX: usize = 65_536;

/// How long the end of the stream may take to be read.
const PATIENCE: Duration = Duration::from_secs(2);
/// Records after which the writer says how far it has come.
const STRETCH: usize = 1024;
/// Records that are put aside without asking for more memory.
const BATCH: usize = 64;

/// How a line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people; with what every process does, or only what is decided and done.
    Lines {
        lifecycle: bool,
    },
    Json,
}

/// Where lines go.
pub struct StreamOutput {
    format: Format,
    writer: Box<dyn Write + Send>,
    /// The other end has gone.
    closed: bool,
}

impl StreamOutput {
    /// Standard output; colours only if it is a terminal that wants them.
    pub fn stdout(format: Format) -> StreamOutput {
        StreamOutput {
            format,
            writer: Box::new(super::terminal::stdout()),
            closed: false,
        }
    }

    /// JSON lines appended to a file, which only its owner may read: command lines are told in it.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn file(path: &Path) -> io::Result<StreamOutput> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(path)?;
        if ends_torn(path)? {
            // Whoever wrote it was killed at that; what it was about is told again.
            (&file).write_all(b"\n")?;
        }
        Ok(StreamOutput {
            format: Format::Json,
            writer: Box::new(BufWriter::new(file)),
            closed: false,
        })
    }
}

/// Whether a file ends in the middle of a line.
fn ends_torn(path: &Path) -> io::Result<bool> {
    let length = std::fs::metadata(path)?;
    if !length.is_file() || length.len() == 0 {
        return Ok(false);
    }
    let mut last = [0];
    File::open(path)?.read_exact_at(&mut last, length.len() - 1)?;
    Ok(last != *b"\n")
}

#[derive(Default)]
struct SinkState {
    waiting: AtomicUsize,
    dropped: AtomicU64,
    due: Mutex<WriteCallbacks>,
}

impl SinkState {
    fn due(&self) -> MutexGuard<'_, WriteCallbacks> {
        // Nothing is half done in it where a thread has panicked.
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is to be done once so many records have been written.
///
/// However many are asked for, two are kept: the first, so that something is done although records keep
/// coming, and the last, so that it is done in the end although none comes any more.
#[derive(Default)]
struct WriteCallbacks {
    written: u64,
    first: Option<(u64, Box<dyn FnOnce() + Send>)>,
    last: Option<(u64, Box<dyn FnOnce() + Send>)>,
}

impl WriteCallbacks {
    /// To be done after a number of records that is not less than that of any before.
    fn add(&mut self, after: u64, f: Box<dyn FnOnce() + Send>) {
        if after <= self.written {
            f();
        } else if self.first.is_none() {
            self.first = Some((after, f));
        } else {
            self.last = Some((after, f));
        }
    }

    fn wrote(&mut self, records: usize) {
        self.written += records as u64;
        while let Some((_, f)) = self.first.take_if(|(after, _)| *after <= self.written) {
            f();
            self.first = self.last.take();
        }
    }
}

/// The engine's end.
pub struct Sink {
    batch: Vec<EventRecord>,
    sender: Sender<Vec<EventRecord>>,
    /// Records handed over since the start.
    sent: u64,
    shared: Arc<SinkState>,
    /// Records that may wait beside the bound, until it is not reached any more.
    backlog_allowance: usize,
    journal: Option<Box<dyn Consumer>>,
}

impl Sink {
    /// Passes each later batch to a journal too.
    pub fn set_consumer(&mut self, journal: impl Consumer + 'static) {
        self.journal = Some(Box::new(journal));
    }

    /// Puts a record aside until [`Sink::flush`].
    pub fn push(&mut self, record: EventRecord) {
        self.batch.push(record);
    }

    /// Hands over all that has gathered since the last run, which is not counted as waiting too long.
    pub fn flush_backlog(&mut self) {
        self.backlog_allowance += self.batch.len();
        self.flush();
    }

    /// Whether nothing waits to be written.
    pub fn is_idle(&self) -> bool {
        self.batch.is_empty()
            && self.shared.dropped.load(Ordering::Relaxed) == 0
            && self.shared.waiting.load(Ordering::Acquire) == 0
    }

    /// Runs `f` once all that was pushed before has been written and flushed, or been given up; on the
    /// writer's thread, or at once if there is nothing to wait for. Hands over what has gathered.
    ///
    /// One that is still waiting when another comes may never be run, but the last one always is.
    pub fn on_written(&mut self, f: impl FnOnce() + Send + 'static) {
        self.flush();
        self.shared.due().add(self.sent, Box::new(f));
    }

    /// Hands over what has gathered. Never blocks: where the writer is too far behind, what every process
    /// does is left out first, and counted.
    pub fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        // Before anything is left out: what the stream has no room for, the journal may have.
        if let Some(journal) = &mut self.journal {
            self.batch.extend(journal.on_records(&self.batch));
        }
        self.batch.retain(|record| !record.is_journal_only());
        let waiting = self.shared.waiting.load(Ordering::SeqCst);
        let n = self.batch.len();
        let bound = WAITING_MAX + self.backlog_allowance;
        if waiting > bound {
            self.batch
                .retain(|record| waiting <= bound + WAITING_MAX && !record.is_lifecycle());
        } else if waiting <= WAITING_MAX && n <= WAITING_MAX {
            self.backlog_allowance = 0;
        }
        let left_out = n - self.batch.len();
        self.shared
            .dropped
            .fetch_add(left_out as u64, Ordering::Relaxed);
        if !self.batch.is_empty() {
            let batch: Vec<_> = self.batch.drain(..).collect();
            self.shared
                .waiting
                .fetch_add(batch.len(), Ordering::Relaxed);
            self.sent += batch.len() as u64;
            // A writer that is gone has said why.
            let _ = self.sender.send(batch);
        }
        self.batch.shrink_to(BATCH);
    }
}

/// The thread that writes. It ends when the [`Sink`] is dropped.
pub struct Writer {
    done: Receiver<()>,
}

impl Writer {
    /// Starts a writer to these outputs.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(outputs: Vec<StreamOutput>) -> io::Result<(Sink, Writer)> {
        let (sender, receiver) = channel();
        let (end, done) = channel();
        let shared = Arc::new(SinkState::default());
        let sink = Sink {
            batch: Vec::with_capacity(BATCH),
            sender,
            sent: 0,
            shared: Arc::clone(&shared),
            backlog_allowance: 0,
            journal: None,
        };
        let work = move || {
            let mut outputs = StreamOutputs {
                all: outputs,
                seq: 0,
            };
            while let Ok(batch) = receiver.recv() {
                write(&mut outputs, &batch, &shared);
                emit_dropped(&mut outputs, &shared);
            }
            emit_dropped(&mut outputs, &shared);
            let _ = end.send(());
        };
        std::thread::Builder::new()
            .name("export".into())
            .spawn(work)?;
        Ok((sink, Writer { done }))
    }

    /// Waits until all has been written, but not for ever: whoever reads may have stopped. The sink must
    /// be gone by then.
    pub fn join(self) {
        if self.done.recv_timeout(PATIENCE).is_err() {
            tracing::error!("the event stream is not read; its end is left out");
        }
    }
}

/// Writes a batch, and says on the way how far it has come.
fn write(outputs: &mut StreamOutputs, batch: &[EventRecord], shared: &SinkState) {
    for stretch in batch.chunks(STRETCH) {
        outputs.write(stretch);
        shared.waiting.fetch_sub(stretch.len(), Ordering::SeqCst);
        shared.due().wrote(stretch.len());
    }
}

/// Says how many records have been left out since this was last said.
fn emit_dropped(outputs: &mut StreamOutputs, shared: &SinkState) {
    let count = shared.dropped.load(Ordering::Relaxed);
    if count > 0 {
        outputs.write(&[EventRecord {
            time: sys::boot_time(),
            body: EventBody::Dropped {
                by: "stream",
                count,
            },
        }]);
        shared.dropped.fetch_sub(count, Ordering::Relaxed);
    }
}

/// All that lines go to, numbered alike.
struct StreamOutputs {
    all: Vec<StreamOutput>,
    seq: u64,
}

impl StreamOutputs {
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
        let written = match self.format {
            Format::Lines { lifecycle } if !line::is_shown(record, lifecycle) => Ok(()),
            Format::Lines { .. } => line::write(&mut self.writer, record),
            Format::Json => json::write(&mut self.writer, record, seq),
        };
        self.check(written);
    }

    fn flush(&mut self) {
        if !self.closed {
            let flushed = self.writer.flush();
            self.check(flushed);
        }
    }

    /// An output that fails is given up; the service goes on without it.
    fn check(&mut self, result: io::Result<()>) {
        if let Err(error) = result {
            self.closed = true;
            if error.kind() != io::ErrorKind::BrokenPipe {
                tracing::error!("the event stream cannot be written: {error}");
            }
        }
    }
}
