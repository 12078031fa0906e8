use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::*;
use crate::export::{FreedMemory, SessionRef};
use crate::journal::{self, Journal};
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::ruleset::SessionKind;

/// An output that collects what is written, and that a test can block.
#[derive(Clone, Default)]
struct BlockableOutput {
    written: Arc<Mutex<Vec<u8>>>,
    gate: Arc<Mutex<()>>,
    flushed: Arc<AtomicBool>,
}

impl BlockableOutput {
    fn start(&self) -> (Sink, Writer) {
        let output = StreamOutput::json("test".into(), Box::new(io::BufWriter::new(self.clone())));
        Writer::start(vec![output]).unwrap()
    }

    /// Blocks all writes until the guard is dropped.
    fn block(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap()
    }

    /// Returns the names of all written events, in order.
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

impl Write for BlockableOutput {
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

/// Returns a record that is not a lifecycle record.
fn record() -> EventRecord {
    let body = EventBody::MemberMapFull {
        count: 1,
        capacity: 1,
    };
    EventRecord { boot_ns: 0, body }
}

/// Pushes records as at a restart: in few batches, each larger than [`QUEUED_MAX`].
fn flood(sink: &mut Sink, records: usize) {
    for n in 0..records {
        sink.push(record());
        if n % (QUEUED_MAX + 1) == QUEUED_MAX {
            sink.flush();
        }
    }
    sink.flush();
}

#[test]
fn backlog_is_written_completely() {
    let out = BlockableOutput::default();
    let (mut sink, writer) = out.start();
    let blocked = out.block();
    for _ in 0..4 * QUEUED_MAX {
        sink.push(record());
    }
    sink.flush_backlog();
    // Later records can still use the whole queue.
    flood(&mut sink, QUEUED_MAX);
    drop(blocked);
    // So many records may take longer than `JOIN_MAX`, so only the last one is left to `join`.
    eventually(|| sink.is_idle());
    sink.push(record());
    sink.flush();
    drop(sink);
    writer.join();
    let counts = (out.count("member_map.full"), out.count("dropped"));
    assert_eq!(counts, (5 * QUEUED_MAX + 1, 0));
}

#[test]
fn blocked_output_drops_and_counts_records() {
    let out = BlockableOutput::default();
    let (mut sink, writer) = out.start();
    let blocked = out.block();
    // If this blocked, the output would never be unblocked.
    flood(&mut sink, 4 * QUEUED_MAX);
    assert!(!sink.is_idle());
    drop(blocked);
    eventually(|| sink.is_idle());
    drop(sink);
    writer.join();
    assert!(out.count("member_map.full") < 4 * QUEUED_MAX);
    assert_eq!(out.count("dropped"), 1);
}

#[test]
fn on_written_runs_after_all_earlier_records() {
    let out = BlockableOutput::default();
    let (mut sink, writer) = out.start();
    assert!(sink.is_idle());
    let blocked = out.block();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for pushed in 1..=1000 {
        sink.push(record());
        let (seen, out) = (Arc::clone(&seen), out.clone());
        sink.on_written(move || {
            let flushed = out.flushed.load(Ordering::SeqCst);
            let written = out.events().len();
            seen.lock().unwrap().push((pushed, written, flushed));
        });
    }
    assert!(!sink.is_idle());
    // Only the first and the last callback are stored.
    assert!(Arc::strong_count(&seen) <= 3);
    drop(blocked);
    eventually(|| seen.lock().unwrap().len() == 2);
    assert_eq!(*seen.lock().unwrap(), [(1, 1, true), (1000, 1000, true)]);
    eventually(|| sink.is_idle());
    let (sender, ran) = channel();
    sink.on_written(move || sender.send(()).unwrap());
    assert!(ran.try_recv().is_ok(), "the callback did not run at once");
    drop(sink);
    writer.join();
}

#[test]
fn on_written_runs_while_records_keep_arriving() {
    let out = BlockableOutput::default();
    let (mut sink, _writer) = out.start();
    let (sender, ran) = channel();
    let end = Instant::now() + Duration::from_secs(120);
    for pushed in 0_u64.. {
        // So many calls that the last callback is replaced before it can run.
        sink.push(record());
        let sender = sender.clone();
        sink.on_written(move || sender.send(pushed).unwrap());
        if ran.try_iter().count() > 0 && pushed > 1000 {
            break;
        }
        assert!(Instant::now() < end, "none of {pushed} callbacks has run");
    }
}

#[test]
fn on_written_runs_after_drops_and_with_a_closed_output() {
    let out = BlockableOutput::default();
    let (mut sink, writer) = out.start();
    let blocked = out.block();
    flood(&mut sink, 4 * QUEUED_MAX);
    let (sender, ran) = channel();
    sink.on_written(move || sender.send(()).unwrap());
    drop(blocked);
    ran.recv().unwrap();
    eventually(|| sink.is_idle());
    assert_eq!(
        out.count("dropped"),
        1,
        "not reported without a later record"
    );
    drop(sink);
    writer.join();

    let closed = StreamOutput {
        closed: true,
        ..StreamOutput::json("test".into(), Box::new(io::sink()))
    };
    let (mut sink, _writer) = Writer::start(vec![closed]).unwrap();
    let (sender, ran) = channel();
    sink.push(record());
    sink.on_written(move || sender.send(()).unwrap());
    ran.recv().unwrap();
}

#[test]
fn empty_batches_are_not_sent_and_memory_is_bounded() {
    let (sender, receiver) = channel();
    let shared = Arc::new(SinkState::default());
    let mut sink = Sink {
        batch: Vec::new(),
        sender,
        sent: 0,
        shared: Arc::clone(&shared),
        backlog_allowance: 0,
        journal: None,
        recent: Default::default(),
    };
    for _ in 0..2 * BATCH {
        sink.push(record());
    }
    sink.flush();
    let batch = receiver.try_recv().unwrap();
    assert_eq!((batch.len(), batch.capacity()), (2 * BATCH, 2 * BATCH));
    assert!(sink.batch.capacity() <= BATCH);

    shared.queued.store(2 * QUEUED_MAX + 1, Ordering::SeqCst);
    sink.push(record());
    sink.flush();
    assert!(receiver.try_recv().is_err(), "an empty batch was sent");
    assert_eq!(shared.dropped.load(Ordering::SeqCst), 1);
}

#[test]
fn journal_receives_records_while_the_output_is_blocked() {
    let dir = tempfile::tempdir().unwrap();
    let options = journal::JournalOptions {
        directory: dir.path().join("journal"),
        ..journal::JournalOptions::default()
    };
    let file = options.path();
    let journal = Journal::open(options, "boot".into()).unwrap();
    let out = BlockableOutput::default();
    let (mut sink, writer) = out.start();
    sink.set_consumer(journal.feed());
    let blocked = out.block();
    flood(&mut sink, 4 * QUEUED_MAX);
    let first_root = ProcessKey { pid: 42, start: 7 };
    let session = SessionRef {
        agent: "claude".into(),
        first_root,
    };
    let root_exit = EventBody::SessionRootExit {
        session,
        kind: SessionKind::Agent,
        root: first_root,
        exit_status: ExitStatus::Exited(0),
        members: 0,
    };
    sink.push(EventRecord {
        boot_ns: 1,
        body: root_exit,
    });
    sink.flush();
    eventually(|| {
        let mut sessions = Vec::new();
        let read = journal::history::read(&file, &Default::default(), |session| {
            sessions.push(session.name);
            Ok(())
        });
        read.unwrap();
        sessions == ["claude-42-7"]
    });
    drop(blocked);
    drop(sink);
    writer.join();
    journal.close();
}

#[test]
fn repeated_close_is_not_in_the_stream() {
    let out = BlockableOutput::default();
    let (mut sink, writer) = out.start();
    let first_root = ProcessKey { pid: 42, start: 7 };
    for is_repeat in [false, true] {
        let session = SessionRef {
            agent: "claude".into(),
            first_root,
        };
        let body = EventBody::SessionClose {
            session,
            is_repeat,
            reaped: 1,
            kept: u32::from(!is_repeat),
            kept_reasons: vec![],
            nested: vec![],
            failed: 0,
            would_have_reaped: 0,
            memory: FreedMemory::default(),
            lost_before: 0,
        };
        sink.push(EventRecord { boot_ns: 1, body });
        sink.flush();
    }
    drop(sink);
    writer.join();
    assert_eq!(out.count("session.close"), 1);
}

/// All outputs report the loss. The numbers of the lines show it.
#[test]
fn lines_that_a_file_lost_are_reported_when_it_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let moved = dir.path().join("moved");
    std::fs::create_dir(dir.path().join("logs")).unwrap();
    let path = dir.path().join("logs/events.jsonl");
    let output = StreamOutput::file(&path).unwrap();
    let (mut sink, writer) = Writer::start(vec![output]).unwrap();
    let mut push = |records| {
        for _ in 0..records {
            sink.push(record());
        }
        sink.flush();
        eventually(|| sink.is_idle());
        sink.losses()
    };
    assert_eq!(push(2), StreamLosses::default());
    // Neither the file nor its directory exists.
    std::fs::rename(dir.path().join("logs"), &moved).unwrap();
    let losses = push(3);
    assert_eq!(losses.dropped, 3);
    assert!(losses.error.unwrap().contains("No such file"));
    std::fs::create_dir(dir.path().join("logs")).unwrap();
    push(1);
    drop(sink);
    writer.join();
    let lines = std::fs::read_to_string(path).unwrap();
    let lines = lines
        .lines()
        .map(|line| -> serde_json::Value { serde_json::from_str(line).unwrap() });
    let lines: Vec<_> = lines.collect();
    assert_eq!((lines.len(), &lines[0]["seq"]), (2, &6.into()));
    let dropped = &lines[1];
    assert_eq!(
        (&dropped["dropped_by"], &dropped["count"]),
        (&"file".into(), &3.into())
    );
    assert_eq!(dropped["seq"], 7);
}

fn eventually(mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < end, "the condition does not become true");
        std::thread::sleep(Duration::from_millis(1));
    }
}
