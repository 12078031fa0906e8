//! Tests with a simulated /proc that has unusual contents, and with the real one.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::*;
use crate::source::ProcessTable;
use reaper_model::event::{ProcessKey, TICK_NS, Uids};

mod bytes;

/// A directory that stands for /proc.
struct Fake {
    dir: tempfile::TempDir,
}

impl Fake {
    fn new() -> Fake {
        Fake {
            dir: tempfile::tempdir().unwrap(),
        }
    }
    fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    /// Adds a process or thread in directory `dir`.
    fn task(&self, dir: &str, comm: &str, state: char, threads: u32) {
        self.file(&format!("{dir}/stat"), stat(comm, state, threads));
        self.file(
            &format!("{dir}/status"),
            "Name:\tx\nUid:\t1000\t1001\t1002\t1003\nNSpid:\t7\n",
        );
        self.file(&format!("{dir}/cmdline"), "prog\0--flag\0\0last\0");
        self.file(&format!("{dir}/cgroup"), "9:pids:/other\n0::/agents/one\n");
        symlink(
            "/usr/bin/prog (deleted)",
            self.dir.path().join(dir).join("exe"),
        )
        .unwrap();
    }
    fn procfs(&self) -> Procfs {
        Procfs::new(self.dir.path())
    }
    fn alive(&self, pid: u32) -> ProcEntry {
        match self.procfs().read(pid) {
            Ok(ProcessReading::Alive(seen)) => seen,
            other => panic!("pid {pid}: {other:?}"),
        }
    }
}

fn stat(comm: &str, state: char, threads: u32) -> String {
    let between = " 0".repeat(25);
    format!(
        "7 ({comm}) {state} 3 40 41 34816 -1 4194304 0 0 0 0 1 2 0 0 20 0 {threads} 0 123456{between} \
         1000 21000 0 0 0\n"
    )
}

fn all(procfs: &Procfs) -> Snapshot {
    procfs.snapshot_of(procfs.pids().unwrap()).unwrap()
}

#[test]
fn all_facts_of_a_process_are_read() {
    let fake = Fake::new();
    fake.task("7", "prog", 'S', 1);
    let mount = fake.dir.path().join("a mount");
    std::fs::create_dir_all(mount.join("agents/one")).unwrap();
    let escaped = mount.display().to_string().replace(' ', "\\040");
    fake.file(
        "self/mountinfo",
        format!("31 23 0:28 / /elsewhere rw - tmpfs t rw\n41 31 0:38 / {escaped} rw shared:1 - cgroup2 cgroup2 rw\n"),
    );
    let seen = fake.alive(7);
    assert_eq!(
        seen.key,
        ProcessKey {
            pid: 7,
            start: 123_456 * TICK_NS
        }
    );
    assert_eq!(seen.parent, 3);
    assert_eq!(
        seen.uids,
        Uids {
            real: 1000,
            effective: 1001
        }
    );
    assert!(!seen.kernel_thread && !seen.namespace_init);
    let image = &seen.image;
    assert_eq!((image.pgid, image.sid, image.tty), (40, 41, 34816));
    assert_eq!(image.comm, b"prog");
    assert_eq!(image.exe, b"/usr/bin/prog");
    assert_eq!(image.argv, b"prog\0--flag\0\0last\0");
    assert_eq!((image.argv_full_len, image.truncated), (18, false));
    assert_eq!(
        image.cgroup_id,
        std::fs::metadata(mount.join("agents/one")).unwrap().ino()
    );

    let procfs = fake.procfs();
    assert_eq!(procfs.start_ticks(7), Some(123_456));
    assert_eq!(procfs.state(7), Some('S'));
    assert_eq!(procfs.rss_bytes(7), Some(0));
    fake.file("7/status", "Name:\tx\nVmRSS:\t     900 kB\n");
    assert_eq!(procfs.rss_bytes(7), Some(900 << 10));
    assert_eq!(
        (procfs.start_ticks(8), procfs.state(8), procfs.rss_bytes(8)),
        (None, None, None)
    );
}

#[test]
fn names_may_hold_anything() {
    for comm in ["a b", "a) S 1 (b", ")", "(", "", "new\nline", "7 (x) Z 1"] {
        let fake = Fake::new();
        fake.task("7", comm, 'R', 1);
        let seen = fake.alive(7);
        assert_eq!(seen.image.comm, comm.as_bytes());
        assert_eq!(seen.parent, 3, "{comm:?}");
    }
}

#[test]
fn long_arguments_are_cut_but_keep_the_full_length() {
    let fake = Fake::new();
    fake.task("7", "prog", 'S', 1);
    fake.file("7/cmdline", vec![b'a'; ARGV_MAX + 5000]);
    let image = fake.alive(7).image;
    assert!(image.truncated);
    assert_eq!(image.argv, vec![b'a'; ARGV_MAX]);
    assert_eq!(image.argv_full_len, 20_000);

    fake.file("7/cmdline", [vec![b'a'; ARGV_MAX - 1], vec![0]].concat());
    let image = fake.alive(7).image;
    assert_eq!(
        (
            image.truncated,
            image.argv_full_len as usize,
            image.argv.len()
        ),
        (false, ARGV_MAX, ARGV_MAX)
    );

    fake.file("7/cmdline", "title without an end");
    let image = fake.alive(7).image;
    assert_eq!(
        (image.truncated, image.argv_full_len, image.argv.len()),
        (false, 21, 21)
    );
    fake.file("7/cmdline", "");
    assert_eq!(fake.alive(7).image.argv.len(), 0);
}

#[test]
fn process_with_exited_leader_and_living_thread_is_alive() {
    let fake = Fake::new();
    fake.task("7", "leader", 'Z', 3);
    fake.task("7/task/7", "leader", 'Z', 3);
    fake.task("7/task/8", "gone", 'X', 3);
    std::fs::remove_file(fake.dir.path().join("7/exe")).unwrap();
    fake.file("7/cmdline", "");
    assert!(matches!(fake.procfs().read(7), Ok(ProcessReading::Zombie)));
    fake.task("7/task/9", "worker", 'S', 3);
    let seen = fake.alive(7);
    assert_eq!(seen.image.comm, b"leader");
    assert_eq!(seen.image.exe, b"/usr/bin/prog");
    assert_eq!(seen.image.args().count(), 4);
}

#[test]
fn namespace_inits_and_kernel_threads_are_recognised() {
    let fake = Fake::new();
    fake.task("7", "init", 'S', 1);
    for (ids, expected) in [
        ("1", false),
        ("7", false),
        ("7\t1", true),
        ("7\t5\t1", true),
        ("7\t12", false),
    ] {
        fake.file("7/status", format!("Uid:\t0\t0\t0\t0\nNSpid:\t{ids}\n"));
        assert_eq!(fake.alive(7).namespace_init, expected, "{ids}");
    }
    fake.file(
        "7/stat",
        stat("kworker/u8:0-events_unbound", 'I', 1).replace("4194304", "69238880"),
    );
    let seen = fake.alive(7);
    assert!(seen.kernel_thread);
    assert_eq!(seen.image.comm, b"kworker/u8:0-ev");
    assert!(seen.image.exe.is_empty() && seen.image.argv.is_empty());
}

#[test]
fn malformed_entries_are_counted_and_the_rest_is_read() {
    let fake = Fake::new();
    fake.task("7", "fine", 'S', 1);
    fake.task("8", "zombie", 'Z', 1);
    for (pid, bad) in [
        (10, ""),
        (11, "11 (x"),
        (12, "12 (x) S"),
        (13, "13 (x) S 1 2 3 huh"),
        (14, "garbage\0\u{fffd}"),
    ] {
        fake.task(&pid.to_string(), "x", 'S', 1);
        fake.file(&format!("{pid}/stat"), bad);
    }
    fake.task("15", "x", 'S', 1);
    fake.file("15/status", "Uid:\tinvalid\n");
    std::fs::create_dir(fake.dir.path().join("16")).unwrap();
    fake.file("17", "a file, not a process");
    fake.file("version", "not a number");
    std::fs::create_dir(fake.dir.path().join("99999999999999")).unwrap();
    let all = all(&fake.procfs());
    assert_eq!(all.rows.len(), 1);
    assert_eq!((all.zombies, all.vanished, all.unreadable), (1, 1, 7));
    let error = fake.procfs().read(13).unwrap_err().to_string();
    assert!(
        error.starts_with("cannot parse ") && error.contains("/13/stat: unexpected format"),
        "{error}"
    );
    let error = Procfs::new("/nonexistent").pids().unwrap_err().to_string();
    assert!(error.starts_with("cannot read /nonexistent: "), "{error}");
}

#[test]
fn unknown_cgroup_has_id_0() {
    let fake = Fake::new();
    fake.task("7", "x", 'S', 1);
    assert_eq!(fake.alive(7).image.cgroup_id, 0);
    let mount = fake.dir.path().display();
    fake.file(
        "self/mountinfo",
        format!("1 2 0:1 / {mount} rw - cgroup2 c rw\n"),
    );
    assert_eq!(fake.alive(7).image.cgroup_id, 0, "removed");
    fake.file("7/cgroup", "0::/../..\n");
    assert_eq!(fake.alive(7).image.cgroup_id, 0, "outside");
    fake.file("7/cgroup", "0::/\n");
    assert_eq!(
        fake.alive(7).image.cgroup_id,
        std::fs::metadata(fake.dir.path()).unwrap().ino()
    );
}

#[test]
fn this_process_is_in_the_real_table() {
    let procfs = Procfs::default();
    let all = all(&procfs);
    let me = std::process::id();
    let seen = all.rows.iter().find(|row| row.key.pid == me).unwrap();
    assert_eq!(seen.parent, std::os::unix::process::parent_id());
    assert_eq!(
        seen.image.exe,
        std::env::current_exe().unwrap().as_os_str().as_bytes()
    );
    let args: Vec<_> = std::env::args_os().map(OsString::into_vec).collect();
    assert!(seen.image.args().eq(args));
    assert_eq!(procfs.start_ticks(me), Some(seen.key.start / TICK_NS));
    assert!(procfs.rss_bytes(me).unwrap() > 0);
    assert!(matches!(
        procfs.read(u32::MAX),
        Ok(ProcessReading::Vanished)
    ));
}

/// Polls until `done`, with a deadline.
fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn child_is_alive_then_zombie_then_vanished() {
    let procfs = Procfs::default();
    let long = "x".repeat(20_000);
    let mut child = Command::new("sh")
        .args(["-c", "read line", "a name\nof two lines", &long])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let start = b"sh\0-c\0read line\0a name\nof two lines\0xxx";
    until("the child does not run", || match procfs.read(pid) {
        Ok(ProcessReading::Alive(seen)) => {
            seen.image.argv.starts_with(start) && seen.image.comm == b"sh"
        }
        _ => false,
    });
    let Ok(ProcessReading::Alive(seen)) = procfs.read(pid) else {
        panic!("the child is gone");
    };
    assert!(seen.image.truncated);
    assert_eq!(seen.image.argv.len(), ARGV_MAX);
    assert_eq!(
        seen.image.argv_full_len as usize,
        start.len() - 3 + long.len() + 1
    );
    child.kill().unwrap();
    until("the child is no zombie", || {
        matches!(procfs.read(pid), Ok(ProcessReading::Zombie))
    });
    // `read` returns `Zombie` already when the process begins to exit, a moment before its state is Z.
    until("the child has no state Z", || {
        procfs.state(pid) == Some('Z')
    });
    assert_eq!(procfs.rss_bytes(pid), Some(0));
    child.wait().unwrap();
    assert!(matches!(procfs.read(pid), Ok(ProcessReading::Vanished)));
}
