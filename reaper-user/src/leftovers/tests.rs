//! A scanner with a simulated engine, and a real process of the test.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;

use super::*;
use crate::api::ScanReport;
use crate::api::leftovers::Leftovers;
use crate::api::messages::{EngineReply, EngineRequest, RequestKind, ScanContext};
use crate::api::peer::Peer;
use crate::config::Config;
use crate::export::{EventBody, EventRecord};
use reaper_model::event::TICK_NS;

const ROOT: Peer = Peer { uid: 0 };

/// Child process that is killed on drop.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Sleeper {
        let mut command = Command::new("sleep");
        command
            .arg("3009")
            .env("CLAUDECODE", "1")
            .stdin(Stdio::null());
        Sleeper(command.spawn().unwrap())
    }

    fn key(&self) -> ProcessKey {
        let pid = self.0.id();
        let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
        ProcessKey { pid, start }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn watched(members: Vec<ProcessKey>, gap: bool) -> ScanContext {
    let own = std::process::id();
    let start = Procfs::default().start_ticks(own).unwrap() * TICK_NS;
    ScanContext {
        members,
        rules: Config::default().rules,
        scope: Scope {
            roots: vec![ProcessKey { pid: own, start }],
            ..Scope::default()
        },
        started_ns: sys::boot_time(),
        enforce: true,
        times: Times::default(),
        gap,
    }
}

/// Returns a scanner without a journal, and the records that it sends.
fn scanner(context: ScanContext) -> (Scanner, Arc<Mutex<Vec<EventRecord>>>) {
    scanner_with(context, None)
}

fn scanner_with(
    context: ScanContext,
    journal: Option<PathBuf>,
) -> (Scanner, Arc<Mutex<Vec<EventRecord>>>) {
    let (requests, mut received) = mpsc::channel::<EngineRequest>(1);
    let emitted = Arc::new(Mutex::new(Vec::new()));
    let records_of_thread = Arc::clone(&emitted);
    std::thread::spawn(move || {
        while let Some(EngineRequest { kind, reply, .. }) = received.blocking_recv() {
            let _ = reply.send(match kind {
                RequestKind::ScanContext => EngineReply::ScanContext(Box::new(context.clone())),
                RequestKind::Emit(records) => {
                    records_of_thread.lock().unwrap().extend(records);
                    EngineReply::Emitted
                }
                other => panic!("{other:?}"),
            });
        }
    });
    (Scanner::new(requests, journal), emitted)
}

fn find(report: &ScanReport, key: ProcessKey) -> Option<&'static str> {
    let at = |list: &[crate::api::Finding]| list.iter().any(|found| found.pid == key.pid);
    if at(&report.reapable) {
        return Some("found");
    }
    at(&report.kept).then_some("kept")
}

#[test]
fn scan_in_service_excludes_members() {
    let sleeper = Sleeper::start();
    // Before its exec, the child has the environment of this process.
    while Procfs::default().start_ticks(sleeper.key().pid).is_none()
        || std::fs::read(format!("/proc/{}/comm", sleeper.key().pid)).unwrap() != b"sleep\n"
    {
        std::thread::yield_now();
    }
    let scan = |watched: ScanContext| {
        let mut report = ScanReport::new("service");
        let (scanner, _) = scanner(watched.clone());
        scanner.report(&mut report, &watched, ROOT, None).unwrap();
        find(&report, sleeper.key())
    };
    assert_eq!(scan(watched(Vec::new(), false)), Some("kept"));
    assert_eq!(scan(watched(vec![sleeper.key()], false)), None);
    let mut older_service = watched(Vec::new(), false);
    older_service.started_ns = 0;
    assert_eq!(scan(older_service), None, "its lineage is known");
    let mut report = ScanReport::new("service");
    let (scanner, _) = scanner(watched(Vec::new(), false));
    let other_user = Peer { uid: 4242 };
    let watched = watched(Vec::new(), false);
    scanner
        .report(&mut report, &watched, other_user, None)
        .unwrap();
    assert_eq!(find(&report, sleeper.key()), None);
}

#[test]
fn leftover_with_weak_evidence_is_reported_not_reaped() {
    let mut sleeper = Sleeper::start();
    let key = sleeper.key();
    let (scanner, emitted) = scanner(watched(Vec::new(), false));
    while std::fs::read(format!("/proc/{}/comm", key.pid)).unwrap() != b"sleep\n" {
        std::thread::yield_now();
    }
    let mut report = ScanReport::new("service");
    let context = watched(Vec::new(), false);
    scanner.reap(&mut report, &context, ROOT, None).unwrap();
    assert_eq!(find(&report, key), Some("kept"));
    let emitted = emitted.lock().unwrap();
    let verdict_of = |record: &EventRecord| match &record.body {
        EventBody::Leftover {
            process, leftover, ..
        } if process.key.pid == key.pid => Some(leftover.verdict.clone()),
        _ => None,
    };
    let verdict = emitted.iter().find_map(verdict_of);
    assert_eq!(
        verdict,
        Some(LeftoverVerdict::Report(leftover::Uncertainty::NoOwner))
    );
    assert!(
        !emitted
            .iter()
            .any(|record| matches!(record.body, EventBody::Outcome { .. }))
    );
    assert!(sleeper.0.try_wait().unwrap().is_none(), "it was killed");
}

#[test]
fn unknown_keeps_prevent_reaping() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("journal.db");
    std::fs::write(&journal, "not a database").unwrap();
    let context = watched(Vec::new(), false);
    let (with_damaged_journal, _) = scanner_with(context.clone(), Some(journal));
    let (without_journal, _) = scanner(context.clone());
    for scanner in [
        with_damaged_journal,
        without_journal.with_keeps_error(Some("no journal")),
    ] {
        let mut report = ScanReport::new("service");
        let refusal = scanner.reap(&mut report, &context, ROOT, None).unwrap_err();
        assert_eq!(refusal.status, 500);
        assert!(refusal.detail.contains("users keep"), "{refusal:?}");
        scanner.report(&mut report, &context, ROOT, None).unwrap();
    }
}
