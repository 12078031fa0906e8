//! Tests the cost of a pass over unchanged processes.

use std::path::Path;

use crate::source::Source;
use crate::source::scan::{Scan, ScanOptions};
use crate::sys::allocations::allocations;
use reaper_model::event::EventKind;

fn process(root: &Path, pid: u32) {
    let dir = root.join(pid.to_string());
    std::fs::create_dir(&dir).unwrap();
    let zeros = " 0".repeat(30);
    let stat = format!("{pid} (x) S 0 4 5 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 7{zeros}\n");
    for (name, content) in [
        ("stat", &*stat),
        ("status", "Uid:\t1\t1\t1\t1\n"),
        ("cmdline", "x\0"),
    ] {
        std::fs::write(dir.join(name), content).unwrap();
    }
}

#[test]
fn pass_over_unchanged_processes_allocates_nothing() {
    for count in [10, 1000] {
        let dir = tempfile::tempdir().unwrap();
        (1..=count).for_each(|pid| process(dir.path(), pid));
        let mut scan = Scan::of(dir.path(), &ScanOptions::default()).unwrap();
        let mut seen = 0;
        scan.drain(&mut |event| seen += u32::from(matches!(event.kind, EventKind::Discovered(_))));
        assert_eq!(seen, count);
        for _ in 0..3 {
            scan.scan_now();
            let asked = allocations(|| {
                scan.drain(&mut |event| panic!("{event:?}"));
            });
            assert_eq!(asked, 0, "{count}");
        }
    }
}
