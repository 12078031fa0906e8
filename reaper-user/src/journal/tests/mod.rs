//! Journals in temporary directories.

mod damage;
mod keeping;
mod limits;
mod requests;
mod upgrade;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tempfile::TempDir;

use super::history::{self, HistoryQuery, HistorySession};
use super::*;
use crate::export::{
    Consumer, DecisionNames, EventBody, EventRecord, FreedMemory, Lifecycle, ProcessRef, SessionRef,
};
use reaper_host::source::procfs::ProcessMemory;
use reaper_host::sys;
use reaper_model::event::{ExitStatus, Image, ProcessKey, Provenance, Uids};
use reaper_model::ruleset::SessionKind;

const BOOT: &str = "5c5ab1f5-0000-4000-8000-000000000001";

/// A temporary directory, and the options of the journal in it.
struct World {
    dir: TempDir,
    options: JournalOptions,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let options = JournalOptions {
            directory: dir.path().join("state"),
            ..JournalOptions::default()
        };
        World { dir, options }
    }

    fn open(&self) -> Journal {
        Journal::open(self.options.clone(), BOOT.into()).unwrap()
    }

    /// Opens the journal, passes records to it, and closes it.
    fn store(&self, records: &[EventRecord]) {
        let journal = self.open();
        assert!(journal.feed().on_records(records).is_none(), "dropped");
        eventually("all records are written", || {
            journal.shared.waiting.load(Ordering::Acquire) == 0
        });
        journal.close();
    }

    fn path(&self) -> PathBuf {
        self.options.path()
    }

    fn history(&self, query: &HistoryQuery) -> Vec<HistorySession> {
        let mut sessions = Vec::new();
        history::read(&self.path(), query, |session| {
            sessions.push(session);
            Ok(())
        })
        .unwrap();
        sessions
    }

    /// Returns all stored sessions.
    fn all(&self) -> Vec<HistorySession> {
        self.history(&HistoryQuery::default())
    }

    /// Returns the number that a query selects.
    fn number(&self, sql: &str) -> i64 {
        let connection = Connection::open(self.path()).unwrap();
        connection.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// Returns the paths of renamed journals.
    fn renamed(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(&self.options.directory).unwrap();
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.retain(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with("journal.db.aside-")
                && !name.ends_with("-wal")
                && !name.ends_with("-shm")
        });
        files
    }
}

fn key(pid: u32) -> ProcessKey {
    let start = u64::from(pid) * 1_000_000;
    ProcessKey { pid, start }
}

fn session(root: u32) -> SessionRef {
    SessionRef {
        agent: "claude".into(),
        first_root: key(root),
    }
}

fn process(pid: u32, root: u32, uid: u32) -> ProcessRef {
    let image = Image {
        comm: b"sh".into(),
        argv: format!("sh\0-c\0run {pid} --token hunter2 now\0").into(),
        ..Image::default()
    };
    let uids = Uids {
        real: uid,
        effective: uid,
    };
    ProcessRef {
        key: key(pid),
        parent: None,
        birth_parent: None,
        image: Arc::new(image),
        uids,
        session: Some(session(root)),
        provenance: Provenance::Kernel,
        evidence: None,
    }
}

fn record(time: u64, body: EventBody) -> EventRecord {
    EventRecord {
        boot_ns: time,
        body,
    }
}

fn opened(time: u64, root: u32, uid: u32) -> EventRecord {
    let (process, rule) = (process(root, root, uid), "claude".into());
    let body = EventBody::SessionOpen {
        process,
        kind: SessionKind::Agent,
        rule,
        outer: None,
        starter: None,
    };
    record(time, body)
}

fn root_exited(time: u64, root: u32) -> EventRecord {
    let body = EventBody::SessionRootExit {
        session: session(root),
        kind: SessionKind::Agent,
        root: key(root),
        exit_status: ExitStatus::Signalled {
            signal: 9,
            core: false,
        },
        members: 1,
    };
    record(time, body)
}

fn closed(time: u64, root: u32, reaped: u32) -> EventRecord {
    let body = EventBody::SessionClose {
        session: session(root),
        is_repeat: false,
        kept_reasons: vec![],
        nested: vec![],
        reaped,
        kept: 0,
        failed: 0,
        would_have_reaped: 0,
        memory: FreedMemory {
            rss: 4096,
            swap: 0,
            unmeasured: 1,
        },
        lost_before: 0,
    };
    record(time, body)
}

fn decided(time: u64, process: ProcessRef, verdict: &'static str) -> EventRecord {
    let names = DecisionNames {
        verdict,
        mode: "enforce",
        reason: "root_gone",
        rule: (verdict == "keep").then(|| "my-servers".into()),
        wait: None,
        memory: None,
        ancestors: Arc::default(),
    };
    record(
        time,
        EventBody::Decision {
            process,
            decision: names,
        },
    )
}

fn outcome(time: u64, process: ProcessRef) -> EventRecord {
    let body = EventBody::Outcome {
        process,
        outcome: crate::reap::ReapOutcome::Exited(ExitStatus::Exited(3)),
        signal: Some("SIGTERM"),
        duration: Some(1_200_000),
        memory: Some(ProcessMemory { rss: 4096, swap: 0 }),
    };
    record(time, body)
}

fn exited(time: u64, process: ProcessRef, exit_status: ExitStatus) -> EventRecord {
    let body = EventBody::Lifecycle {
        process,
        provenance: Provenance::Kernel,
        event: Lifecycle::Exit {
            exit_status,
            peak_rss: 0,
        },
    };
    record(time, body)
}

/// Returns the records of a session from open to close, with a child that is reaped.
fn lifecycle(time: u64, root: u32, uid: u32) -> Vec<EventRecord> {
    let child = || process(root + 1, root, uid);
    vec![
        opened(time, root, uid),
        root_exited(time + 1_000_000_000, root),
        decided(time + 1_000_100_000, child(), "reap"),
        outcome(time + 1_002_000_000, child()),
        closed(time + 1_003_000_000, root, 1),
    ]
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !is_so() {
        assert!(Instant::now() < end, "timeout: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    let meta = std::fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    meta.permissions().mode() & 0o7777
}
