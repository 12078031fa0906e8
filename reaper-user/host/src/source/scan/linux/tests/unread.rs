//! Tests of the time of the last complete scan while processes cannot be read.

use std::path::{Path, PathBuf};

use crate::source::Source;
use crate::source::scan::linux::unread::PASSES_MAX;
use crate::source::scan::{Scan, ScanOptions};
use reaper_model::event::EventKind;

/// Adds a process that cannot be read, because its `status` is a directory.
fn unread(root: &Path, pid: u32) -> PathBuf {
    let dir = root.join(pid.to_string());
    std::fs::create_dir_all(dir.join("status")).unwrap();
    let stat = format!("{pid} (x) S 0 4 5 0{}\n", " 0".repeat(44));
    std::fs::write(dir.join("stat"), stat).unwrap();
    std::fs::write(dir.join("cmdline"), "x\0").unwrap();
    dir
}

/// Runs a pass. Returns the number of discovered processes and the time of the last complete scan.
fn scan_once(scan: &mut Scan) -> (usize, u64) {
    let mut found = 0;
    scan.scan_now();
    scan.drain(&mut |event| found += usize::from(matches!(event.kind, EventKind::Discovered(_))));
    (found, scan.last_scan().unwrap())
}

#[test]
fn unreadable_new_process_holds_back_the_last_scan() {
    let root = tempfile::tempdir().unwrap();
    let mut scan = Scan::of(root.path(), &ScanOptions::default()).unwrap();
    let (_, empty) = scan_once(&mut scan);
    assert!(empty > 0);
    let dir = unread(root.path(), 7);
    assert_eq!(scan_once(&mut scan), (0, empty));
    assert_eq!(scan_once(&mut scan), (0, empty));
    std::fs::remove_dir(dir.join("status")).unwrap();
    std::fs::write(dir.join("status"), "Uid:\t1\t1\t1\t1\n").unwrap();
    let (found, all) = scan_once(&mut scan);
    assert!(found == 1 && all > empty, "{found}");
}

#[test]
fn last_scan_waits_for_limited_passes_and_not_after_an_exit() {
    let root = tempfile::tempdir().unwrap();
    let mut scan = Scan::of(root.path(), &ScanOptions::default()).unwrap();
    let (_, empty) = scan_once(&mut scan);
    unread(root.path(), 7);
    for _ in 0..PASSES_MAX {
        assert_eq!(scan_once(&mut scan), (0, empty));
    }
    let (_, given_up) = scan_once(&mut scan);
    assert!(given_up > empty);
    // Another unreadable process holds it back again.
    let other = unread(root.path(), 8);
    let (_, waits) = scan_once(&mut scan);
    assert_eq!(waits, given_up);
    std::fs::remove_dir_all(other).unwrap();
    assert!(scan_once(&mut scan).1 > waits);
}
