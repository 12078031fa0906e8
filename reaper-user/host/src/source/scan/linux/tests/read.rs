//! Tests of reading `stat` files, with unusual contents that kernels and containers can produce.

use std::os::unix::fs::PermissionsExt;

use nix::errno::Errno;
use proptest::prelude::*;

use crate::damage::{mutated, proc_self_file};
use crate::source::scan::linux::read::{Reader, ScanReading};
use crate::sys::proc_file::Stat;
use reaper_model::event::{ExitStatus, ProcessKey, TICK_NS};

/// A directory that stands for /proc, and a reader.
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

    fn read(&mut self, stat: impl AsRef<[u8]>) -> ScanReading {
        self.process(7, stat);
        self.reader.read_row(7)
    }
}

/// Returns a `stat` file with some fields changed. Fields are numbered as in proc(5).
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
        let ScanReading::Alive(row) = fake.read(stat(comm, &[])) else {
            panic!("{comm:?}");
        };
        let start = 22 * TICK_NS;
        assert_eq!(row.key, ProcessKey { pid: 7, start });
        assert_eq!(row.parent, 4);
        let print = row.fingerprint;
        assert_eq!((print.pgid, print.sid, print.tty), (5, 6, 7));
        assert_eq!(print.exec, [28, 48]);
        assert_eq!(&print.comm[..comm.len()], comm.as_bytes());
    }
    // Names of kernel workers are longer than others.
    let long = "x".repeat(64);
    assert!(
        matches!(fake.read(stat(&long, &[])), ScanReading::Alive(g) if g.fingerprint.comm == [b'x'; 16])
    );
}

#[test]
fn zombies_kernel_threads_and_free_pids_are_recognised() {
    let mut fake = Fake::new();
    assert_eq!(fake.read(stat("x", &[(3, "Z")])), ScanReading::Gone);
    assert_eq!(fake.read(stat("x", &[(3, "X")])), ScanReading::Gone);
    // Other threads of the process run.
    let leader = fake.read(stat("x", &[(3, "Z"), (20, "2")]));
    assert!(matches!(leader, ScanReading::Alive(_)));
    assert_eq!(fake.read(stat("k", &[(9, "2129984")])), ScanReading::Kernel);
    assert_eq!(fake.reader.read_row(8), ScanReading::Gone);
    // Fields without a value are negative.
    let inner = fake.read(stat("x", &[(4, "0"), (5, "-1"), (6, "-1"), (7, "-1")]));
    assert!(matches!(inner, ScanReading::Alive(g) if g.parent == 0 && g.fingerprint.sid == 0));
    // Counters that have wrapped around.
    let most = "18446744073709551615";
    let wrapped = fake.read(stat("x", &[(14, most), (15, most), (20, most), (52, "-9")]));
    assert!(matches!(wrapped, ScanReading::Alive(_)));
    // A directory where a file should be.
    std::fs::create_dir_all(fake.dir.path().join("9/stat")).unwrap();
    assert_eq!(
        fake.reader.read_row(9),
        ScanReading::Unreadable(Errno::EISDIR)
    );
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

/// Runs `work` as a user without permission to read the files of others.
fn as_unprivileged<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|threads| {
        let work = || {
            // Changes this thread only, and has no effect unless the user is root.
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
            work()
        };
        threads.spawn(work).join().unwrap()
    })
}

#[test]
fn process_without_read_permission_is_not_gone() {
    let mut fake = Fake::new();
    for (pid, closed) in [(7, "7"), (8, "8/stat")] {
        fake.process(pid, stat("x", &[]));
        let path = fake.dir.path().join(closed);
        let nothing = std::fs::Permissions::from_mode(0o000);
        std::fs::set_permissions(path, nothing).unwrap();
    }
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(fake.dir.path(), open).unwrap();
    let rows = as_unprivileged(|| [7, 8, 9].map(|pid| fake.reader.read_row(pid)));
    let denied = || ScanReading::Unreadable(Errno::EACCES);
    assert_eq!(rows, [denied(), denied(), ScanReading::Gone]);
    // Lets users other than root remove the directory.
    let open = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(fake.dir.path().join("7"), open).unwrap();
}

#[test]
fn incomplete_or_invalid_file_is_malformed() {
    let mut fake = Fake::new();
    let whole = stat("x", &[]);
    for length in 0..whole.len() {
        assert_eq!(
            fake.read(&whole[..length]),
            ScanReading::Malformed,
            "{length}"
        );
    }
    for (field, value) in [
        (4, "4294967296"),
        (4, "x"),
        (22, "18446744073709551616"),
        // The start overflows in ns.
        (22, "18446744073709551615"),
        (28, "0x7f"),
    ] {
        let read = fake.read(stat("x", &[(field, value)]));
        assert_eq!(read, ScanReading::Malformed, "{field} {value}");
    }
    assert_eq!(fake.read("\n"), ScanReading::Malformed);
    assert_eq!(fake.read(")(\n"), ScanReading::Malformed);
    assert_eq!(fake.read("7 (x) S 1 2 3\n"), ScanReading::Malformed);
    assert_eq!(fake.read([b'x'; 10_000]), ScanReading::Malformed);
}

#[test]
fn pass_reads_all_pids_and_nothing_else() {
    let mut fake = Fake::new();
    for pid in [1, 20, 4_194_304] {
        fake.process(pid, stat("x", &[]));
    }
    for other in ["self", "1x", "-1", "99999999999", "sys"] {
        std::fs::create_dir_all(fake.dir.path().join(other)).unwrap();
    }
    // This process exits after it was listed.
    std::fs::create_dir_all(fake.dir.path().join("30")).unwrap();
    for _ in 0..2 {
        let mut all = Vec::new();
        fake.reader
            .pass(|pid, read| all.push((pid, matches!(read, ScanReading::Alive(_)))))
            .unwrap();
        all.sort_unstable();
        assert_eq!(all, [(1, true), (20, true), (30, false), (4_194_304, true)]);
    }
}

#[test]
fn exit_status_of_a_zombie_is_read_if_the_kernel_shows_it() {
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
    assert_eq!(status(&hidden, 22), None, "hidden from this user");
    assert_eq!(status(&[zombie, (52, "9")], 23), None, "another process");
    assert_eq!(status(&[(52, "9")], 22), None, "still alive");
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        Fake::new().read(&bytes);
    }

    #[test]
    fn damaged_real_files_yield_the_fields_they_contain(bytes in mutated(proc_self_file("stat"))) {
        if let ScanReading::Alive(found) = Fake::new().read(&bytes) {
            let stat = Stat::parse(&bytes).unwrap();
            prop_assert_eq!(found.key.start, stat.start * TICK_NS);
            prop_assert_eq!(found.parent, stat.parent);
        }
    }

    #[test]
    fn arbitrary_fields_do_not_panic(fields in prop::collection::vec("-?[0-9]{1,21}|[A-Z]", 0..60)) {
        Fake::new().read(format!("7 (x) {}\n", fields.join(" ")));
    }
}
