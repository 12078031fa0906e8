//! A scanner beside an engine of which only the answers are made up: on one process of this test's.

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

/// A child, ended with this.
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

/// A scanner without a journal, and the records that it sent.
fn scanner(answer: ScanContext) -> (Scanner, Arc<Mutex<Vec<EventRecord>>>) {
    scanner_with(answer, None)
}

fn scanner_with(
    answer: ScanContext,
    journal: Option<PathBuf>,
) -> (Scanner, Arc<Mutex<Vec<EventRecord>>>) {
    let (asks, mut asked) = mpsc::channel::<EngineRequest>(1);
    let told = Arc::new(Mutex::new(Vec::new()));
    let also = Arc::clone(&told);
    std::thread::spawn(move || {
        while let Some(EngineRequest {
            question,
            answer: to,
            ..
        }) = asked.blocking_recv()
        {
            let _ = to.send(match question {
                RequestKind::Watched => EngineReply::Watched(Box::new(answer.clone())),
                RequestKind::Emit(records) => {
                    also.lock().unwrap().extend(records);
                    EngineReply::Emitted
                }
                other => panic!("{other:?}"),
            });
        }
    });
    (Scanner::new(asks, journal), told)
}

fn find(report: &ScanReport, key: ProcessKey) -> Option<&'static str> {
    let at = |list: &[crate::api::Finding]| list.iter().any(|found| found.pid == key.pid);
    if at(&report.reapable) {
        return Some("found");
    }
    at(&report.kept).then_some("spared")
}

#[test]
fn what_is_watched_is_left_to_the_engine() {
    let sleeper = Sleeper::start();
    // Until the program runs, its environment is this one's.
    while Procfs::default().start_ticks(sleeper.key().pid).is_none()
        || std::fs::read(format!("/proc/{}/comm", sleeper.key().pid)).unwrap() != b"sleep\n"
    {
        std::thread::yield_now();
    }
    let said = |watched: ScanContext| {
        let mut report = ScanReport::by("service");
        let (scanner, _) = scanner(watched.clone());
        scanner.report(&mut report, &watched, ROOT, None).unwrap();
        find(&report, sleeper.key())
    };
    assert_eq!(said(watched(Vec::new(), false)), Some("spared"));
    assert_eq!(said(watched(vec![sleeper.key()], false)), None);
    let mut of_before = watched(Vec::new(), false);
    of_before.started_ns = 0;
    assert_eq!(said(of_before), None, "its lineage is known");
    let mut report = ScanReport::by("service");
    let (scanner, _) = scanner(watched(Vec::new(), false));
    let stranger = Peer { uid: 4242 };
    let watched = watched(Vec::new(), false);
    scanner
        .report(&mut report, &watched, stranger, None)
        .unwrap();
    assert_eq!(find(&report, sleeper.key()), None);
}

#[test]
fn what_is_found_is_told_and_weak_evidence_signals_nobody() {
    let mut sleeper = Sleeper::start();
    let key = sleeper.key();
    let (scanner, told) = scanner(watched(Vec::new(), false));
    while std::fs::read(format!("/proc/{}/comm", key.pid)).unwrap() != b"sleep\n" {
        std::thread::yield_now();
    }
    let mut report = ScanReport::by("service");
    let look = watched(Vec::new(), false);
    scanner.reap(&mut report, &look, ROOT, None).unwrap();
    assert_eq!(find(&report, key), Some("spared"));
    let told = told.lock().unwrap();
    let of = |record: &EventRecord| match &record.body {
        EventBody::Leftover {
            process: who,
            leftover: stray,
        } if who.key.pid == key.pid => Some(stray.verdict.clone()),
        _ => None,
    };
    let verdict = told.iter().find_map(of);
    assert_eq!(
        verdict,
        Some(LeftoverVerdict::Report(leftover::Uncertainty::NoOwner))
    );
    assert!(
        !told
            .iter()
            .any(|record| matches!(record.body, EventBody::Outcome { .. }))
    );
    assert!(sleeper.0.try_wait().unwrap().is_none(), "it lives");
}

#[test]
fn who_cannot_tell_what_is_kept_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("journal.db");
    std::fs::write(&journal, "no database at all").unwrap();
    let look = watched(Vec::new(), false);
    let (of_damaged, _) = scanner_with(look.clone(), Some(journal));
    let (of_unsure, _) = scanner(look.clone());
    for scanner in [of_damaged, of_unsure.with_keeps_error(Some("no journal"))] {
        let mut report = ScanReport::by("service");
        let refusal = scanner.reap(&mut report, &look, ROOT, None).unwrap_err();
        assert_eq!(refusal.error, "failed");
        assert!(refusal.message.contains("want kept"), "{refusal:?}");
        scanner.report(&mut report, &look, ROOT, None).unwrap();
    }
}
