//! Tests that malformed `stat` files are reported once.

use crate::source::scan::{Scan, ScanOptions};
use crate::source::{Drained, Malformation, Source};
use reaper_model::event::Event;

/// A directory that stands for /proc, and a scan of it.
struct World {
    dir: tempfile::TempDir,
    scan: Scan,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let scan = Scan::of(dir.path(), &ScanOptions::default()).unwrap();
        World { dir, scan }
    }

    fn stat(&self, pid: u32, stat: &str) {
        let dir = self.dir.path().join(pid.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("stat"), stat).unwrap();
    }

    /// Runs a pass, and returns the number of newly malformed files and the last of them.
    fn malformed(&mut self) -> (u64, Option<Malformation>) {
        self.scan.scan_now();
        let drained = self.scan.drain(&mut |event: Event| panic!("{event:?}"));
        let Drained {
            malformed,
            malformation,
            ..
        } = drained;
        (malformed, malformation)
    }
}

#[test]
fn malformed_file_is_reported_once_until_its_process_exits() {
    let mut w = World::new();
    assert_eq!(w.malformed(), (0, None));
    w.stat(7, "7 (x) S 1");
    assert_eq!(w.malformed(), (1, Some(Malformation::Stat(7))));
    assert_eq!(w.malformed(), (0, None));
    w.stat(8, "");
    assert_eq!(w.malformed(), (1, Some(Malformation::Stat(8))));
    // A file that can be parsed in between is not reported again.
    let zombie = format!("7 (x) Z 1{}\n", " 0".repeat(48));
    let kernels = zombie.replace(" Z 1 0 0 0 0 0", " S 1 0 0 0 0 2129984");
    w.stat(8, &kernels);
    assert_eq!(w.malformed(), (0, None));
    w.stat(8, "8 (x");
    assert_eq!(w.malformed(), (0, None));
    // Once the process is a zombie or gone, a later process with its pid is reported again.
    w.stat(7, &zombie);
    assert_eq!(w.malformed(), (0, None));
    std::fs::remove_dir_all(w.dir.path().join("8")).unwrap();
    assert_eq!(w.malformed(), (0, None));
    w.stat(7, "7 (x) S 1");
    w.stat(8, "8 (x");
    assert_eq!(w.malformed().0, 2);
}
