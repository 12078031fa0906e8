use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::thread;
use std::time::Instant;

use nix::fcntl::{FallocateFlags, Flock, fallocate};

use super::super::record::{
    CommandStarted, Line, RecordedProcess, RunHeader, RunResult, tests::header,
};
use super::super::{Run, RunOutcome};
use super::*;
use reaper_host::source::procfs::Procfs;
use reaper_model::event::TICK_NS;

fn runs(dir: &tempfile::TempDir) -> Runs {
    Runs::open(&dir.path().join("a/runs")).unwrap()
}

fn named(name: &str) -> Run {
    let mut run = Run::new(Command::new("true"));
    run.name = Some(name.to_owned());
    run
}

/// Time limit for a condition that a test waits for.
const DEADLINE: Duration = Duration::from_secs(30);

/// A process that is killed on drop.
struct TestProcess(Child);

impl TestProcess {
    fn new(script: &str) -> TestProcess {
        let mut command = Command::new("sh");
        TestProcess(
            command
                .args(["-c", script])
                .process_group(0)
                .spawn()
                .unwrap(),
        )
    }

    fn identity(&self) -> RecordedProcess {
        let pid = self.0.id();
        let start_ns = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
        RecordedProcess {
            pid: Some(pid),
            start_ns,
        }
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes the record of a run without a supervisor, and returns its path.
fn write_dead_run(
    runs: &Runs,
    command: Option<RecordedProcess>,
    change: impl FnOnce(&mut RunHeader),
) -> PathBuf {
    let mut header = header("left22");
    header.boot_id = boot_id(Path::new("/"));
    header.pid_namespace = reaper_host::sys::non_initial_pid_namespace().unwrap();
    header.grace_ms = 300;
    change(&mut header);
    let path = runs.path("left22", OPEN);
    let mut bytes = serde_json::to_vec(&Line::Run(Box::new(header))).unwrap();
    bytes.push(b'\n');
    fs::write(&path, bytes).unwrap();
    if let Some(process) = command {
        append(
            &open(&path).unwrap(),
            &Line::Command(CommandStarted { process, at: 1 }),
        )
        .unwrap();
    }
    path
}

#[test]
fn record_is_private_and_locked_while_its_run_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(runs.dir()), 0o700);
    let recording = runs.create_record(&named("x")).unwrap();
    let path = runs.path(recording.id(), OPEN);
    assert_eq!(mode(&path), 0o600);
    let known = runs.find("x").unwrap();
    assert!(known.has_supervisor().unwrap());
    assert_eq!(known.record.header.supervisor.pid, Some(std::process::id()));
    assert!(
        runs.close_dead().unwrap().is_empty(),
        "a supervised run was closed"
    );
    drop(recording);
    assert!(!known.has_supervisor().unwrap());
    assert_eq!(runs.close_dead().unwrap().len(), 1);
    assert!(runs.list(false).unwrap().is_empty());
}

#[test]
fn directory_writable_by_others_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [0o777, 0o1777, 0o770] {
        fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
        let refused = Runs::open(dir.path()).unwrap_err();
        assert!(matches!(refused, RecordError::Exposed { .. }), "{refused}");
    }
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    Runs::open(dir.path()).unwrap();
    assert_eq!(fs::metadata(dir.path()).unwrap().mode() & 0o777, 0o700);
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(dir.path(), Some(4242), None).unwrap();
        let refused = Runs::open(dir.path()).unwrap_err();
        assert!(refused.to_string().contains("owner 4242"), "{refused}");
    }
}

#[test]
fn run_is_found_by_id_name_and_start_of_id() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let web = runs.create_record(&named("web")).unwrap();
    let taken = runs.create_record(&named("web")).unwrap_err();
    assert!(taken.to_string().contains(web.id()), "{taken}");
    let id = web.id().to_owned();
    for word in ["web", &id, &id[..4]] {
        assert_eq!(runs.find(word).unwrap().id(), id, "{word}");
    }
    for word in ["", "we", "webb", "1", "-"] {
        let Err(RecordError::Unknown(_)) = runs.find(word) else {
            panic!("{word:?} finds a run");
        };
    }
    web.close(RunResult::unobserved(RunOutcome::Success, "x"))
        .unwrap();
    // A name finds the open run of that name, or else the last one.
    let next = runs.create_record(&named("web")).unwrap();
    assert_eq!(runs.find("web").unwrap().id(), next.id());
    assert_eq!(runs.find(&id).unwrap().id(), id);
    for id in ["aaaaa2", "aaaaa3"] {
        let mut bytes = serde_json::to_vec(&Line::Run(Box::new(header(id)))).unwrap();
        bytes.push(b'\n');
        fs::write(runs.path(id, CLOSED), bytes).unwrap();
    }
    let error = runs.find("aaaaa").unwrap_err().to_string();
    assert!(error.contains("aaaaa2, aaaaa3"), "{error}");
}

/// All claims return the same outcome, which is also the recorded one.
#[test]
fn concurrent_claims_give_one_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let mut stopped = 0;
    for n in 0..1000 {
        let recording = runs.create_record(&Run::new(Command::new("true"))).unwrap();
        let path = runs.path(recording.id(), OPEN);
        let claim = |outcome| {
            let file = open(&path).unwrap();
            super::super::record_writer::claim(&file, outcome)
                .unwrap()
                .outcome()
                .unwrap()
        };
        let (stop, own, other) = thread::scope(|scope| {
            let stop = scope.spawn(|| claim(RunOutcome::Cancelled));
            let other = scope.spawn(|| claim(RunOutcome::Cancelled));
            if n % 2 == 0 {
                thread::yield_now();
            }
            let own = recording.claim(RunOutcome::Timeout);
            (stop.join().unwrap(), own, other.join().unwrap())
        });
        assert!(stop == own && other == own, "{stop:?} {own:?} {other:?}");
        stopped += usize::from(own == RunOutcome::Cancelled);
        recording.close(RunResult::unobserved(own, "x")).unwrap();
        let record = RunRecord::parse(&fs::read(path.with_extension(CLOSED)).unwrap()).unwrap();
        assert_eq!(record.claim.unwrap().outcome, own);
        assert_eq!(record.outcome(), Some(own));
    }
    println!("the stop was first in {stopped} of 1000 runs");
    assert!(runs.files().unwrap().len() <= CLOSED_MAX + CLOSED_SLACK);
}

#[test]
fn processes_of_a_dead_run_are_ended() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let mut tree = TestProcess::new("sleep 600 & sleep 600 & wait");
    let mut unrelated = TestProcess::new("exec sleep 600");
    write_dead_run(&runs, Some(tree.identity()), |_| ());
    // The shell may start its children only while it is being ended. They are found too.
    let closed = runs.close_dead().unwrap();
    let result = closed[0].record.result.as_ref().unwrap();
    assert_eq!(result.outcome, RunOutcome::Death);
    assert!(result.ended >= 1 && result.left.is_empty(), "{result:?}");
    assert!(!tree.lives() && unrelated.lives());
    assert!(runs.close_dead().unwrap().is_empty());
    assert_eq!(
        runs.find("left22").unwrap().record.result.as_ref(),
        Some(result)
    );
}

#[test]
fn unproven_processes_are_not_signalled() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let mut process = TestProcess::new("exec sleep 600");
    let identity = process.identity();
    let reused_pid = RecordedProcess {
        start_ns: identity.start_ns - TICK_NS,
        ..identity
    };
    let another_boot = |header: &mut RunHeader| header.boot_id = "another".to_owned();
    for (command, change, closed) in [
        (
            Some(reused_pid),
            Box::new(|_: &mut RunHeader| ()) as Box<dyn Fn(&mut RunHeader)>,
            true,
        ),
        (Some(identity), Box::new(another_boot), true),
        (
            Some(identity),
            Box::new(|header| header.boot_id.clear()),
            true,
        ),
        (
            Some(identity),
            Box::new(|header| header.pid_namespace ^= 1),
            false,
        ),
        (None, Box::new(|header| header.supervisor = identity), true),
    ] {
        let path = write_dead_run(&runs, command, change);
        assert_eq!(runs.close_dead().unwrap().len(), usize::from(closed));
        assert_eq!(path.exists(), !closed);
        assert!(process.lives());
        let _ = fs::remove_file(&path);
    }
    // A run that includes this process is not closed.
    let own = std::process::id();
    let start_ns = Procfs::default().start_ticks(own).unwrap() * TICK_NS;
    let itself = RecordedProcess {
        pid: Some(own),
        start_ns,
    };
    write_dead_run(&runs, Some(itself), |_| ());
    assert!(runs.close_dead().unwrap().is_empty());
}

#[test]
fn stop_with_supervisor_pid_0_reports_a_damaged_record() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    write_dead_run(&runs, None, |header| header.supervisor.pid = Some(0));
    let error = runs.stop(&runs.find("left22").unwrap()).unwrap_err();
    assert!(error.to_string().contains("is damaged"), "{error}");
}

#[test]
fn dead_run_is_closed_with_its_claim_or_result() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let process = TestProcess::new("exec sleep 600");
    let path = write_dead_run(&runs, Some(process.identity()), |_| ());
    super::super::record_writer::claim(&open(&path).unwrap(), RunOutcome::Timeout).unwrap();
    let closed = runs.close_dead().unwrap();
    assert_eq!(closed[0].record.outcome(), Some(RunOutcome::Timeout));
    // A run with a result is only renamed.
    let path = write_dead_run(&runs, None, |_| ());
    let result = RunResult::unobserved(RunOutcome::Success, "x");
    append(&open(&path).unwrap(), &Line::Over(Box::new(result))).unwrap();
    assert!(runs.close_dead().unwrap().is_empty());
    assert_eq!(
        runs.find("left22").unwrap().record.outcome(),
        Some(RunOutcome::Success)
    );
    assert!(!path.exists());
}

#[test]
fn damaged_records_are_renamed_and_others_listed() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let recording = runs.create_record(&named("fine")).unwrap();
    for (name, bytes) in [
        ("bad222.run", &b"\0\0\0"[..]),
        ("bad223.over", b"{}\n"),
        ("bad224.run", b""),
        ("later2.run", b"{\"run\":{\"schema\":9}}\n"),
    ] {
        fs::write(runs.dir().join(name), bytes).unwrap();
    }
    // A record with another id in its file name.
    fs::copy(
        runs.path(recording.id(), OPEN),
        runs.dir().join("bad225.run"),
    )
    .unwrap();
    fs::create_dir(runs.dir().join("bad226.run")).unwrap();
    runs.close_dead().unwrap();
    let all = runs.list(true).unwrap();
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].id(), recording.id());
    for id in ["bad222", "bad223", "bad224", "bad225"] {
        assert!(runs.path(id, DAMAGED).exists(), "{id}");
    }
    assert!(runs.path("later2", OPEN).exists());
}

#[test]
fn old_records_of_closed_runs_are_pruned() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let age = |path: &Path, age: Duration| {
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    };
    for n in 0..150 {
        for kind in [CLOSED, LOG] {
            let path = runs.path(&format!("x{n}"), kind);
            fs::write(&path, "").unwrap();
            age(&path, Duration::from_secs(n));
        }
    }
    age(
        &runs.path("x3", CLOSED),
        CLOSED_AGE + Duration::from_secs(9),
    );
    fs::write(runs.path("young2", NEW), "").unwrap();
    fs::write(runs.path("old222", NEW), "").unwrap();
    age(&runs.path("old222", NEW), WRITING_MAX * 2);
    runs.prune();
    let left = runs.files().unwrap();
    let count = |kind: &str| {
        left.iter()
            .filter(|path| path.extension().unwrap() == kind)
            .count()
    };
    assert_eq!(
        (count(CLOSED), count(LOG), count(NEW)),
        (CLOSED_MAX, CLOSED_MAX, 1)
    );
    assert!(!runs.path("x3", CLOSED).exists() && runs.path("x0", CLOSED).exists());
}

/// None of the processes exits before all have had SIGTERM.
#[test]
fn dead_runs_are_closed_in_parallel() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let cwd = dir.path().display();
    let processes: Vec<TestProcess> = (0..3)
        .map(|n| {
            let all = "until [ -e 0 ] && [ -e 1 ] && [ -e 2 ]; do sleep 0.01; done";
            TestProcess::new(&format!(
                "cd {cwd}; trap ': > {n}; {all}; exit' TERM; : > up{n}; while :; do sleep 0.01; done"
            ))
        })
        .collect();
    for (n, process) in processes.iter().enumerate() {
        let (up, until) = (dir.path().join(format!("up{n}")), Instant::now() + DEADLINE);
        while !up.exists() {
            assert!(Instant::now() < until, "process {n} does not start");
            thread::sleep(Duration::from_millis(2));
        }
        let id = format!("left{n}");
        let path = write_dead_run(&runs, Some(process.identity()), |header| {
            header.id.clone_from(&id);
            header.grace_ms = 20_000;
        });
        fs::rename(path, runs.path(&id, OPEN)).unwrap();
    }
    let closed = runs.close_dead().unwrap();
    let results = closed
        .iter()
        .filter_map(|known| known.record.result.as_ref());
    assert_eq!(closed.len(), 3);
    assert!(
        results.clone().all(|result| result.killed == 0),
        "{closed:?}"
    );
    assert!(runs.list(false).unwrap().is_empty());
}

/// On a full disk, a line that needs another block fails.
#[test]
fn record_reserves_blocks_for_later_lines() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let probe = File::create(dir.path().join("probe")).unwrap();
    if let Err(errno) = fallocate(&probe, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, 1) {
        eprintln!("skipped: this file system cannot reserve space: {errno}");
        return;
    }
    // With many lengths, so that the later lines of at least one cross a block.
    for length in (0..4096).step_by(256) {
        let mut run = named("x");
        run.session = Some("x".repeat(length));
        let recording = runs.create_record(&run).unwrap();
        let path = runs.path(recording.id(), OPEN);
        let blocks = |path: &Path| fs::metadata(path).unwrap().blocks();
        let before = blocks(&path);
        let process = runs.find("x").unwrap().record.header.supervisor;
        append(
            &open(&path).unwrap(),
            &Line::Command(CommandStarted { process, at: 1 }),
        )
        .unwrap();
        recording.claim(RunOutcome::Timeout);
        recording
            .close(RunResult::unobserved(RunOutcome::Timeout, "x"))
            .unwrap();
        let after = blocks(&path.with_extension(CLOSED));
        assert!(
            after <= before,
            "{after} blocks at the end, {before} at the start, session of {length} bytes"
        );
    }
}

#[test]
fn refused_stop_names_no_pid_of_another_pid_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    write_dead_run(&runs, None, |header| {
        header.pid_namespace ^= 1;
        header.supervisor.pid = Some(4_190_001);
    });
    let error = runs.stop(&runs.find("left22").unwrap()).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("another pid namespace"), "{error}");
    assert!(!error.contains("4190001"), "{error}");
}

/// The run was killed with its container. It cannot be closed from here.
#[test]
fn name_of_a_run_without_supervisor_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let left = write_dead_run(&runs, None, |header| {
        header.name = Some("web".to_owned());
        header.pid_namespace ^= 1;
    });
    let process = TestProcess::new("exec sleep 600").identity();
    append(
        &open(&left).unwrap(),
        &Line::Command(CommandStarted { process, at: 1 }),
    )
    .unwrap();
    assert!(runs.close_dead().unwrap().is_empty());
    let lock = lock_record(&left, false).unwrap().expect("not locked");
    let error = runs.create_record(&named("web")).unwrap_err();
    assert!(matches!(error, RecordError::NameTaken { .. }), "{error}");
    drop(lock);
    let recording = runs.create_record(&named("web")).unwrap();
    assert_eq!(runs.find("web").unwrap().id(), recording.id());
}

#[test]
fn locked_or_closed_record_cannot_be_locked() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let path = write_dead_run(&runs, None, |_| ());
    let first: Flock<File> = lock_record(&path, false).unwrap().expect("not locked");
    assert!(lock_record(&path, false).unwrap().is_none());
    fs::rename(&path, path.with_extension(CLOSED)).unwrap();
    drop(first);
    assert!(
        lock_record(&path, false).unwrap().is_none(),
        "the record is closed"
    );
}
