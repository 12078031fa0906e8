//! A /proc made by hand, with what kernels and containers can throw at its readers.

use std::os::unix::fs::PermissionsExt;

use nix::errno::Errno;
use proptest::prelude::*;

use crate::damage::{mutated, proc_self_file};
use crate::source::scan::linux::read::{Reader, ScanReading};
use crate::sys::proc_file::Stat;
use reaper_model::event::{ExitStatus, ProcessKey, TICK_NS};

/// A /proc of files, and a reader.
struct Fake {
    dir: tempfile::TempDir,
    reader: Reader,
}

impl Fake {
    fn new() -> Fake {
        let dir = tempfile::tempdir().unwrap();
        let reader = Reader::open(dir.path()).unwrap();
        Fake { dir, reader }
    }

    fn process(&self, pid: u32, stat: impl AsRef<[u8]>) {
        let dir = self.dir.path().join(pid.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("stat"), stat).unwrap();
    }

    fn look(&mut self, stat: impl AsRef<[u8]>) -> ScanReading {
        self.process(7, stat);
        self.reader.look(7)
    }
}

/// Fields as proc(5) numbers them, up to the last.
fn stat(comm: &str, change: &[(usize, &str)]) -> String {
    let mut fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
    let common = [(3, "S"), (9, "4194304"), (8, "-1"), (20, "1")];
    for (field, value) in common.iter().chain(change) {
        fields[field - 3] = (*value).into();
    }
    format!("7 ({comm}) {}\n", fields.join(" "))
}

#[test]
fn names_may_hold_anything() {
    let mut fake = Fake::new();
    for comm in [
        "a b",
        "a) S 1 (b",
        ")",
        "(",
        "",
        "new\nline",
        "7 (x) Z 1",
        "\u{fffd}",
    ] {
        let ScanReading::Alive(glimpse) = fake.look(stat(comm, &[])) else {
            panic!("{comm:?}");
        };
        let start = 22 * TICK_NS;
        assert_eq!(glimpse.key, ProcessKey { pid: 7, start });
        assert_eq!(glimpse.parent, 4);
        let print = glimpse.fingerprint;
        assert_eq!((print.pgid, print.sid, print.tty), (5, 6, 7));
        assert_eq!(print.exec, [28, 48]);
        assert_eq!(&print.comm[..comm.len()], comm.as_bytes());
    }
    // Those of the kernel's workers are longer than others.
    let long = "x".repeat(64);
    assert!(
        matches!(fake.look(stat(&long, &[])), ScanReading::Alive(g) if g.fingerprint.comm == [b'x'; 16])
    );
}

#[test]
fn who_is_there_and_who_is_not() {
    let mut fake = Fake::new();
    assert_eq!(fake.look(stat("x", &[(3, "Z")])), ScanReading::Gone);
    assert_eq!(fake.look(stat("x", &[(3, "X")])), ScanReading::Gone);
    // Others of its threads run on.
    let leader = fake.look(stat("x", &[(3, "Z"), (20, "2")]));
    assert!(matches!(leader, ScanReading::Alive(_)));
    assert_eq!(fake.look(stat("k", &[(9, "2129984")])), ScanReading::Kernel);
    assert_eq!(fake.reader.look(8), ScanReading::Gone);
    // Negative where nothing is to be told.
    let inner = fake.look(stat("x", &[(4, "0"), (5, "-1"), (6, "-1"), (7, "-1")]));
    assert!(matches!(inner, ScanReading::Alive(g) if g.parent == 0 && g.fingerprint.sid == 0));
    // As wrapped as the kernel can make it.
    let most = "18446744073709551615";
    let wrapped = fake.look(stat("x", &[(14, most), (15, most), (20, most), (52, "-9")]));
    assert!(matches!(wrapped, ScanReading::Alive(_)));
    // A directory where a file should be.
    std::fs::create_dir_all(fake.dir.path().join("9/stat")).unwrap();
    assert_eq!(fake.reader.look(9), ScanReading::Unreadable(Errno::EISDIR));
}

#[test]
fn each_pass_lists_all_processes_or_fails() {
    let mut fake = Fake::new();
    for count in [0, 5, 3000] {
        (1..=count).for_each(|pid| fake.process(pid, stat("x", &[])));
        for _ in 0..2 {
            let mut listed = Vec::new();
            fake.reader.pass(|pid, _| listed.push(pid)).unwrap();
            listed.sort_unstable();
            assert!(listed.into_iter().eq(1..=count));
        }
    }
    std::fs::remove_dir_all(fake.dir.path()).unwrap();
    let gone = fake.reader.pass(|pid, _| panic!("{pid}"));
    assert_eq!(gone, Err(Errno::ENOENT));
}

/// As somebody who may not read what is others'.
fn as_nobody<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|threads| {
        let work = || {
            // Of this thread alone; it does nothing for who is not root.
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
            work()
        };
        threads.spawn(work).join().unwrap()
    })
}

#[test]
fn what_may_not_be_read_is_not_gone() {
    let mut fake = Fake::new();
    for (pid, closed) in [(7, "7"), (8, "8/stat")] {
        fake.process(pid, stat("x", &[]));
        let path = fake.dir.path().join(closed);
        let nothing = std::fs::Permissions::from_mode(0o000);
        std::fs::set_permissions(path, nothing).unwrap();
    }
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(fake.dir.path(), open).unwrap();
    let looks = as_nobody(|| [7, 8, 9].map(|pid| fake.reader.look(pid)));
    let denied = || ScanReading::Unreadable(Errno::EACCES);
    assert_eq!(looks, [denied(), denied(), ScanReading::Gone]);
    // So that it can be removed by who is not root.
    let open = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(fake.dir.path().join("7"), open).unwrap();
}

#[test]
fn what_is_no_whole_file_is_malformed() {
    let mut fake = Fake::new();
    let whole = stat("x", &[]);
    for length in 0..whole.len() {
        assert_eq!(
            fake.look(&whole[..length]),
            ScanReading::Malformed,
            "{length}"
        );
    }
    for (field, value) in [
        (4, "4294967296"),
        (4, "x"),
        (22, "18446744073709551616"),
        // More ns than there are.
        (22, "18446744073709551615"),
        (28, "0x7f"),
    ] {
        let look = fake.look(stat("x", &[(field, value)]));
        assert_eq!(look, ScanReading::Malformed, "{field} {value}");
    }
    assert_eq!(fake.look("\n"), ScanReading::Malformed);
    assert_eq!(fake.look(")(\n"), ScanReading::Malformed);
    assert_eq!(fake.look("7 (x) S 1 2 3\n"), ScanReading::Malformed);
    assert_eq!(fake.look([b'x'; 10_000]), ScanReading::Malformed);
}

#[test]
fn a_pass_looks_at_all_and_at_nothing_else() {
    let mut fake = Fake::new();
    for pid in [1, 20, 4_194_304] {
        fake.process(pid, stat("x", &[]));
    }
    for other in ["self", "1x", "-1", "99999999999", "sys"] {
        std::fs::create_dir_all(fake.dir.path().join(other)).unwrap();
    }
    // Gone since it was listed.
    std::fs::create_dir_all(fake.dir.path().join("30")).unwrap();
    for _ in 0..2 {
        let mut all = Vec::new();
        fake.reader
            .pass(|pid, look| all.push((pid, matches!(look, ScanReading::Alive(_)))))
            .unwrap();
        all.sort_unstable();
        assert_eq!(all, [(1, true), (20, true), (30, false), (4_194_304, true)]);
    }
}

#[test]
fn how_one_has_ended_is_known_where_the_kernel_shows_it() {
    let mut fake = Fake::new();
    let mut status = |change: &[(usize, &str)], start: u64| {
        fake.process(7, stat("x", change));
        let start = start * TICK_NS;
        fake.reader.status(ProcessKey { pid: 7, start })
    };
    let zombie = (3, "Z");
    assert_eq!(
        status(&[zombie, (52, "256")], 22),
        Some(ExitStatus::Exited(1))
    );
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    assert_eq!(status(&[zombie, (52, "9")], 22), Some(killed));
    assert_eq!(
        status(&[zombie, (35, "1"), (52, "0")], 22),
        Some(ExitStatus::Exited(0))
    );
    let hidden = [zombie, (35, "0"), (52, "0")];
    assert_eq!(status(&hidden, 22), None, "not ours to know");
    assert_eq!(status(&[zombie, (52, "9")], 23), None, "another");
    assert_eq!(status(&[(52, "9")], 22), None, "it lives");
}

proptest! {
    #[test]
    fn nothing_is_too_odd_to_be_read(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        Fake::new().look(&bytes);
    }

    #[test]
    fn what_is_read_of_real_ones_that_were_damaged_is_theirs(bytes in mutated(proc_self_file("stat"))) {
        if let ScanReading::Alive(found) = Fake::new().look(&bytes) {
            let stat = Stat::parse(&bytes).unwrap();
            prop_assert_eq!(found.key.start, stat.start * TICK_NS);
            prop_assert_eq!(found.parent, stat.parent);
        }
    }

    #[test]
    fn numbers_may_be_any(fields in prop::collection::vec("-?[0-9]{1,21}|[A-Z]", 0..60)) {
        Fake::new().look(format!("7 (x) {}\n", fields.join(" ")));
    }
}
