use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::*;
use crate::export::{FreedMemory, SessionRef};
use crate::journal::{self, Journal};
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::ruleset::SessionKind;

/// What came out, and a gate that the writer waits at.
#[derive(Clone, Default)]
struct Slow {
    written: Arc<Mutex<Vec<u8>>>,
    gate: Arc<Mutex<()>>,
    flushed: Arc<AtomicBool>,
}

impl Slow {
    fn start(&self) -> (Sink, Writer) {
        let output = StreamOutput {
            format: Format::Json,
            writer: Box::new(BufWriter::new(self.clone())),
            closed: false,
        };
        Writer::start(vec![output]).unwrap()
    }

    /// While this is held nothing is written.
    fn stop(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap()
    }

    /// The names of all events, in order.
    fn events(&self) -> Vec<String> {
        let text = String::from_utf8(self.written.lock().unwrap().clone()).unwrap();
        let line = |line: &str| -> serde_json::Value { serde_json::from_str(line).unwrap() };
        text.lines()
            .map(|text| line(text)["event"].as_str().unwrap().to_owned())
            .collect()
    }

    fn count(&self, name: &str) -> usize {
        self.events().iter().filter(|event| *event == name).count()
    }
}

impl Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _gate = self.gate.lock().unwrap();
        self.flushed.store(false, Ordering::SeqCst);
        self.written.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushed.store(true, Ordering::SeqCst);
        Ok(())
    }
}

fn decided() -> EventRecord {
    let body = EventBody::MemberMapFull {
        count: 1,
        capacity: 1,
    };
    EventRecord { time: 0, body }
}

/// Pushes records as they come at a restart: in few batches, each larger than the bound.
fn flood(sink: &mut Sink, records: usize) {
    for n in 0..records {
        sink.push(decided());
        if n % (WAITING_MAX + 1) == WAITING_MAX {
            sink.flush();
        }
    }
    sink.flush();
}

#[test]
fn what_has_gathered_since_the_last_run_is_told_whole() {
    let out = Slow::default();
    let (mut sink, writer) = out.start();
    let stopped = out.stop();
    for _ in 0..4 * WAITING_MAX {
        sink.push(decided());
    }
    sink.flush_backlog();
    // What follows has the room that it would have had without.
    flood(&mut sink, WAITING_MAX);
    drop(stopped);
    // For so many a busy machine may need longer than the end is waited for: only the last one is left to that.
    eventually(|| sink.is_idle());
    sink.push(decided());
    sink.flush();
    drop(sink);
    writer.join();
    let told = (out.count("member_map.full"), out.count("dropped"));
    assert_eq!(told, (5 * WAITING_MAX + 1, 0));
}

#[test]
fn a_slow_reader_holds_nobody_up_and_is_told_what_was_left_out() {
    let out = Slow::default();
    let (mut sink, writer) = out.start();
    let stopped = out.stop();
    // Were it held up, the gate that is closed here would never open.
    flood(&mut sink, 4 * WAITING_MAX);
    assert!(!sink.is_idle());
    drop(stopped);
    eventually(|| sink.is_idle());
    drop(sink);
    writer.join();
    assert!(out.count("member_map.full") < 4 * WAITING_MAX);
    assert_eq!(out.count("dropped"), 1);
}

#[test]
fn what_comes_then_comes_after_what_was_pushed_before() {
    let out = Slow::default();
    let (mut sink, writer) = out.start();
    assert!(sink.is_idle());
    let stopped = out.stop();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for pushed in 1..=1000 {
        sink.push(decided());
        let (seen, out) = (Arc::clone(&seen), out.clone());
        sink.on_written(move || {
            let flushed = out.flushed.load(Ordering::SeqCst);
            let written = out.events().len();
            seen.lock().unwrap().push((pushed, written, flushed));
        });
    }
    assert!(!sink.is_idle());
    // However long nobody reads, no more wait than the first and the last.
    assert!(Arc::strong_count(&seen) <= 3);
    drop(stopped);
    eventually(|| seen.lock().unwrap().len() == 2);
    assert_eq!(*seen.lock().unwrap(), [(1, 1, true), (1000, 1000, true)]);
    eventually(|| sink.is_idle());
    let (ran, told) = channel();
    sink.on_written(move || ran.send(()).unwrap());
    assert!(told.try_recv().is_ok(), "not at once");
    drop(sink);
    writer.join();
}

#[test]
fn what_comes_then_comes_though_records_keep_coming() {
    let out = Slow::default();
    let (mut sink, _writer) = out.start();
    let (ran, told) = channel();
    let end = Instant::now() + Duration::from_secs(120);
    for pushed in 0_u64.. {
        // Asked for so often that the last one is hardly ever due.
        sink.push(decided());
        let ran = ran.clone();
        sink.on_written(move || ran.send(pushed).unwrap());
        if told.try_iter().count() > 0 && pushed > 1000 {
            break;
        }
        assert!(Instant::now() < end, "none of {pushed} has come");
    }
}

#[test]
fn what_comes_then_comes_though_lines_were_left_out_or_nobody_reads() {
    let out = Slow::default();
    let (mut sink, writer) = out.start();
    let stopped = out.stop();
    flood(&mut sink, 4 * WAITING_MAX);
    let (ran, told) = channel();
    sink.on_written(move || ran.send(()).unwrap());
    drop(stopped);
    told.recv().unwrap();
    eventually(|| sink.is_idle());
    assert_eq!(
        out.count("dropped"),
        1,
        "told though nothing more was pushed"
    );
    drop(sink);
    writer.join();

    let closed = StreamOutput {
        format: Format::Json,
        writer: Box::new(io::sink()),
        closed: true,
    };
    let (mut sink, _writer) = Writer::start(vec![closed]).unwrap();
    let (ran, told) = channel();
    sink.push(decided());
    sink.on_written(move || ran.send(()).unwrap());
    told.recv().unwrap();
}

#[test]
fn nothing_is_handed_over_where_all_is_left_out_and_no_more_memory_than_is_needed() {
    let (sender, receiver) = channel();
    let shared = Arc::new(SinkState::default());
    let mut sink = Sink {
        batch: Vec::new(),
        sender,
        sent: 0,
        shared: Arc::clone(&shared),
        backlog_allowance: 0,
        journal: None,
    };
    for _ in 0..2 * BATCH {
        sink.push(decided());
    }
    sink.flush();
    let batch = receiver.try_recv().unwrap();
    assert_eq!((batch.len(), batch.capacity()), (2 * BATCH, 2 * BATCH));
    assert!(sink.batch.capacity() <= BATCH);

    shared.waiting.store(2 * WAITING_MAX + 1, Ordering::SeqCst);
    sink.push(decided());
    sink.flush();
    assert!(receiver.try_recv().is_err(), "an empty batch");
    assert_eq!(shared.dropped.load(Ordering::SeqCst), 1);
}

#[test]
fn a_journal_has_what_is_decided_though_nobody_reads_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    let options = journal::JournalOptions {
        directory: dir.path().join("journal"),
        ..journal::JournalOptions::default()
    };
    let file = options.path();
    let journal = Journal::open(options, "boot".into()).unwrap();
    let out = Slow::default();
    let (mut sink, writer) = out.start();
    sink.set_consumer(journal.feed());
    let stopped = out.stop();
    flood(&mut sink, 4 * WAITING_MAX);
    let first_root = ProcessKey { pid: 42, start: 7 };
    let session = SessionRef {
        agent: "claude".into(),
        first_root,
    };
    let gone = EventBody::SessionRootExit {
        session,
        kind: SessionKind::Agent,
        root: first_root,
        exit_status: ExitStatus::Exited(0),
        members: 0,
    };
    sink.push(EventRecord {
        time: 1,
        body: gone,
    });
    sink.flush();
    eventually(|| {
        let mut told = Vec::new();
        let read = journal::history::read(&file, &Default::default(), |session| {
            told.push(session.name);
            Ok(())
        });
        read.unwrap();
        told == ["claude-42-7"]
    });
    drop(stopped);
    drop(sink);
    writer.join();
    journal.close();
}

#[test]
fn close_that_was_reported_before_is_not_in_the_stream() {
    let out = Slow::default();
    let (mut sink, writer) = out.start();
    let first_root = ProcessKey { pid: 42, start: 7 };
    for again in [false, true] {
        let session = SessionRef {
            agent: "claude".into(),
            first_root,
        };
        let body = EventBody::SessionClose {
            session,
            is_repeat: again,
            reaped: 1,
            kept: u32::from(!again),
            kept_reasons: vec![],
            nested: vec![],
            failed: 0,
            memory: FreedMemory::default(),
            lost_before: 0,
        };
        sink.push(EventRecord { time: 1, body });
        sink.flush();
    }
    drop(sink);
    writer.join();
    assert_eq!(out.count("session.close"), 1);
}

fn eventually(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !is_so() {
        assert!(Instant::now() < end, "not in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}
