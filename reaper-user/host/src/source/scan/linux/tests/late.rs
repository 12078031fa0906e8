//! Up to when all have been told of, while some cannot be read.

use std::path::{Path, PathBuf};

use crate::source::Source;
use crate::source::scan::linux::late::PASSES_MAX;
use crate::source::scan::{Scan, ScanOptions};
use reaper_model::event::EventKind;

/// A process whose uids are in its `status`, which is a file only later.
fn unread(root: &Path, pid: u32) -> PathBuf {
    let dir = root.join(pid.to_string());
    std::fs::create_dir_all(dir.join("status")).unwrap();
    let stat = format!("{pid} (x) S 0 4 5 0{}\n", " 0".repeat(44));
    std::fs::write(dir.join("stat"), stat).unwrap();
    std::fs::write(dir.join("cmdline"), "x\0").unwrap();
    dir
}

/// Looks once more: who was found, and until when all have been told of.
fn look(scan: &mut Scan) -> (usize, u64) {
    let mut found = 0;
    scan.scan_now();
    scan.drain(&mut |event| found += usize::from(matches!(event.kind, EventKind::Discovered(_))));
    (found, scan.last_scan().unwrap())
}

#[test]
fn who_is_new_and_cannot_be_read_is_waited_for() {
    let root = tempfile::tempdir().unwrap();
    let mut scan = Scan::of(root.path(), &ScanOptions::default()).unwrap();
    let (_, empty) = look(&mut scan);
    assert!(empty > 0);
    let dir = unread(root.path(), 7);
    assert_eq!(look(&mut scan), (0, empty));
    assert_eq!(look(&mut scan), (0, empty));
    std::fs::remove_dir(dir.join("status")).unwrap();
    std::fs::write(dir.join("status"), "Uid:\t1\t1\t1\t1\n").unwrap();
    let (found, all) = look(&mut scan);
    assert!(found == 1 && all > empty, "{found}");
}

#[test]
fn but_not_for_ever_nor_once_it_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let mut scan = Scan::of(root.path(), &ScanOptions::default()).unwrap();
    let (_, empty) = look(&mut scan);
    unread(root.path(), 7);
    for _ in 0..PASSES_MAX {
        assert_eq!(look(&mut scan), (0, empty));
    }
    let (_, given_up) = look(&mut scan);
    assert!(given_up > empty);
    // Another is waited for again.
    let other = unread(root.path(), 8);
    let (_, waits) = look(&mut scan);
    assert_eq!(waits, given_up);
    std::fs::remove_dir_all(other).unwrap();
    assert!(look(&mut scan).1 > waits);
}
