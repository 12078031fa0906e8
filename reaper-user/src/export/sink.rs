//! From the engine to the outputs, without ever holding the engine up.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::{Body, Record, json, line};
use crate::model::event::Key;
use crate::sys;

/// Records on their way to the writer beyond which some are left out; beyond twice as many, all.
const WAITING_MAX: usize = 65_536;

/// How long the end of the stream may take to be read.
const PATIENCE: Duration = Duration::from_secs(2);
/// Records that a batch has room for from the start.
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
pub struct Output {
    format: Format,
    writer: Box<dyn Write + Send>,
    /// The other end has gone.
    closed: bool,
}

impl Output {
    /// Standard output; colours only if it is a terminal that wants them.
    pub fn stdout(format: Format) -> Output {
        Output {
            format,
            writer: Box::new(BufWriter::new(anstream::stdout())),
            closed: false,
        }
    }

    /// JSON lines appended to a file, which only its owner may read: command lines are told in it.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn file(path: &Path) -> io::Result<Output> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(path)?;
        Ok(Output {
            format: Format::Json,
            writer: Box::new(BufWriter::new(file)),
            closed: false,
        })
    }
}

/// Times of the stream: events carry ns since boot, lines the time of day.
pub struct Clock {
    /// Boot, in ns since the epoch.
    boot: i128,
    boot_id: String,
    zone: TimeZone,
}

impl Clock {
    /// `boot_id` is the kernel's random id of this boot.
    pub fn new(boot_id: String) -> Clock {
        let boot = i128::from(sys::wall_time()) - i128::from(sys::boot_time());
        Clock {
            boot,
            boot_id,
            zone: TimeZone::system(),
        }
    }

    pub fn wall(&self, boot_ns: u64) -> Timestamp {
        Timestamp::from_nanosecond(self.boot + i128::from(boot_ns)).unwrap_or_default()
    }

    /// Hours to milliseconds, local time.
    pub fn time_of_day(&self, boot_ns: u64) -> impl std::fmt::Display + use<> {
        self.wall(boot_ns)
            .to_zoned(self.zone.clone())
            .strftime("%H:%M:%S%.3f")
            .to_string()
    }

    /// A process's name that is never used again: boot, start, pid.
    pub fn entity(&self, key: Key) -> impl std::fmt::Display + use<'_> {
        std::fmt::from_fn(move |f| write!(f, "{}-{}-{}", self.boot_id, key.start, key.pid))
    }
}

#[derive(Default)]
struct Shared {
    waiting: AtomicUsize,
    dropped: AtomicU64,
}

/// The engine's end.
pub struct Sink {
    batch: Vec<Record>,
    sender: Sender<Vec<Record>>,
    shared: Arc<Shared>,
}

impl Sink {
    /// Puts a record aside until [`Sink::flush`].
    pub fn push(&mut self, record: Record) {
        self.batch.push(record);
    }

    /// Hands over what has gathered. Never blocks: where the writer is too far behind, what every process
    /// does is left out first, and counted.
    pub fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let waiting = self.shared.waiting.load(Ordering::Relaxed);
        let n = self.batch.len();
        if waiting > WAITING_MAX {
            self.batch
                .retain(|record| waiting <= 2 * WAITING_MAX && !record.is_lifecycle());
        }
        let left_out = n - self.batch.len();
        self.shared
            .dropped
            .fetch_add(left_out as u64, Ordering::Relaxed);
        self.shared
            .waiting
            .fetch_add(self.batch.len(), Ordering::Relaxed);
        let batch = std::mem::replace(&mut self.batch, Vec::with_capacity(BATCH));
        // A writer that is gone has said why.
        let _ = self.sender.send(batch);
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
    pub fn start(outputs: Vec<Output>, clock: Clock) -> io::Result<(Sink, Writer)> {
        let (sender, receiver) = channel();
        let (end, done) = channel();
        let shared = Arc::new(Shared::default());
        let sink = Sink {
            batch: Vec::new(),
            sender,
            shared: Arc::clone(&shared),
        };
        let work = move || {
            write_all(outputs, &clock, &receiver, &shared);
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

fn write_all(
    mut outputs: Vec<Output>,
    clock: &Clock,
    receiver: &Receiver<Vec<Record>>,
    shared: &Shared,
) {
    let mut seq = 0;
    while let Ok(batch) = receiver.recv() {
        let dropped = shared.dropped.swap(0, Ordering::Relaxed);
        let dropped = (dropped > 0).then(|| Record {
            time: sys::boot_time(),
            body: Body::Dropped { count: dropped },
        });
        for record in dropped.iter().chain(&batch) {
            seq += 1;
            outputs
                .iter_mut()
                .for_each(|output| output.write(record, seq, clock));
        }
        shared.waiting.fetch_sub(batch.len(), Ordering::Relaxed);
        outputs.iter_mut().for_each(Output::flush);
    }
}

impl Output {
    fn write(&mut self, record: &Record, seq: u64, clock: &Clock) {
        if self.closed {
            return;
        }
        let written = match self.format {
            Format::Lines { lifecycle } if !line::is_shown(record, lifecycle) => Ok(()),
            Format::Lines { .. } => line::write(&mut self.writer, record, clock),
            Format::Json => json::write(&mut self.writer, record, seq, clock),
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
