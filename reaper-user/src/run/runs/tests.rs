use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::thread;
use std::time::Instant;

use nix::fcntl::{FallocateFlags, Flock, fallocate};

use super::super::record::{
    CommandStarted, Line, RecordedProcess, RunHeader, RunResult, tests::start,
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

/// How long anything may take before a test gives up on it.
const DEADLINE: Duration = Duration::from_secs(30);

/// A process that is ended with this.
struct Guest(Child);

impl Guest {
    fn new(script: &str) -> Guest {
        let mut command = Command::new("sh");
        Guest(
            command
                .args(["-c", script])
                .process_group(0)
                .spawn()
                .unwrap(),
        )
    }

    fn who(&self) -> RecordedProcess {
        let pid = self.0.id();
        let start_ns = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
        RecordedProcess { pid, start_ns }
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The record of a run whose owner is gone.
fn leave(
    runs: &Runs,
    command: Option<RecordedProcess>,
    change: impl FnOnce(&mut RunHeader),
) -> PathBuf {
    let mut start = start("left22");
    start.boot_id = boot_id(Path::new("/"));
    start.pid_namespace = reaper_host::sys::non_initial_pid_namespace().unwrap();
    start.grace_ms = 300;
    change(&mut start);
    let path = runs.path("left22", OPEN);
    let mut bytes = serde_json::to_vec(&Line::Run(Box::new(start))).unwrap();
    bytes.push(b'\n');
    fs::write(&path, bytes).unwrap();
    if let Some(who) = command {
        append(
            &open(&path).unwrap(),
            &Line::Command(CommandStarted {
                process: who,
                at: 1,
            }),
        )
        .unwrap();
    }
    path
}

#[test]
fn what_is_written_down_is_its_owners_alone() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(runs.dir()), 0o700);
    let recording = runs.begin(&named("x")).unwrap();
    let path = runs.path(recording.id(), OPEN);
    assert_eq!(mode(&path), 0o600);
    let known = runs.find("x").unwrap();
    assert!(known.has_supervisor().unwrap());
    assert_eq!(known.record.header.wrapper.pid, std::process::id());
    assert!(runs.close_dead().unwrap().is_empty(), "it has its owner");
    drop(recording);
    assert!(!known.has_supervisor().unwrap());
    assert_eq!(runs.close_dead().unwrap().len(), 1);
    assert!(runs.list(false).unwrap().is_empty());
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
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
fn a_run_is_found_by_id_name_and_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let web = runs.begin(&named("web")).unwrap();
    let taken = runs.begin(&named("web")).unwrap_err();
    assert!(taken.to_string().contains(web.id()), "{taken}");
    let id = web.id().to_owned();
    for word in ["web", &id, &id[..4]] {
        assert_eq!(runs.find(word).unwrap().id(), id, "{word}");
    }
    for word in ["", "we", "webb", "1", "-"] {
        let Err(RecordError::Unknown(_)) = runs.find(word) else {
            panic!("{word:?} is found");
        };
    }
    web.close(RunResult::unobserved(RunOutcome::Success, "x"))
        .unwrap();
    // Of those that have had a name it is the last one, or the one that lives.
    let next = runs.begin(&named("web")).unwrap();
    assert_eq!(runs.find("web").unwrap().id(), next.id());
    assert_eq!(runs.find(&id).unwrap().id(), id);
    for letter in ["aaaaa2", "aaaaa3"] {
        let mut bytes = serde_json::to_vec(&Line::Run(Box::new(start(letter)))).unwrap();
        bytes.push(b'\n');
        fs::write(runs.path(letter, CLOSED), bytes).unwrap();
    }
    let error = runs.find("aaaaa").unwrap_err().to_string();
    assert!(error.contains("aaaaa2, aaaaa3"), "{error}");
}

/// Whoever claims, all are told the same, and that is what is recorded.
#[test]
fn a_stop_that_races_the_owner_gives_one_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let mut stopped = 0;
    for n in 0..1000 {
        let recording = runs.begin(&Run::new(Command::new("true"))).unwrap();
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
    println!("{stopped} of 1000 were stopped in time");
    assert!(runs.files().unwrap().len() <= CLOSED_MAX + CLOSED_SLACK);
}

#[test]
fn what_a_lost_run_has_left_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let mut tree = Guest::new("sleep 600 & sleep 600 & wait");
    let mut stranger = Guest::new("exec sleep 600");
    leave(&runs, Some(tree.who()), |_| ());
    // The shell may not have started its children yet: they come while it is being ended, and are found too.
    let closed = runs.close_dead().unwrap();
    let over = closed[0].record.result.as_ref().unwrap();
    assert_eq!(over.outcome, RunOutcome::Death);
    assert!(over.ended >= 1 && over.left.is_empty(), "{over:?}");
    assert!(!tree.lives() && stranger.lives());
    assert!(runs.close_dead().unwrap().is_empty());
    assert_eq!(
        runs.find("left22").unwrap().record.result.as_ref(),
        Some(over)
    );
}

#[test]
fn nothing_is_signalled_that_is_not_proven_to_be_its() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let mut guest = Guest::new("exec sleep 600");
    let who = guest.who();
    let other = RecordedProcess {
        start_ns: who.start_ns - TICK_NS,
        ..who
    };
    let of_another_boot = |start: &mut RunHeader| start.boot_id = "another".to_owned();
    for (command, change, closed) in [
        // The pid is another's now.
        (
            Some(other),
            Box::new(|_: &mut RunHeader| ()) as Box<dyn Fn(&mut RunHeader)>,
            true,
        ),
        (Some(who), Box::new(of_another_boot), true),
        (Some(who), Box::new(|start| start.boot_id.clear()), true),
        (Some(who), Box::new(|start| start.pid_namespace ^= 1), false),
        (None, Box::new(|start| start.wrapper = who), true),
    ] {
        let path = leave(&runs, command, change);
        assert_eq!(runs.close_dead().unwrap().len(), usize::from(closed));
        assert_eq!(path.exists(), !closed);
        assert!(guest.lives());
        let _ = fs::remove_file(&path);
    }
    // Nor this process.
    let own = std::process::id();
    let start_ns = Procfs::default().start_ticks(own).unwrap() * TICK_NS;
    leave(&runs, Some(RecordedProcess { pid: own, start_ns }), |_| ());
    assert!(runs.close_dead().unwrap().is_empty());
}

#[test]
fn what_was_claimed_holds_when_its_owner_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let guest = Guest::new("exec sleep 600");
    let path = leave(&runs, Some(guest.who()), |_| ());
    super::super::record_writer::claim(&open(&path).unwrap(), RunOutcome::Timeout).unwrap();
    let closed = runs.close_dead().unwrap();
    assert_eq!(closed[0].record.outcome(), Some(RunOutcome::Timeout));
    // One that has nothing but its new name missing.
    let path = leave(&runs, None, |_| ());
    let over = RunResult::unobserved(RunOutcome::Success, "x");
    append(&open(&path).unwrap(), &Line::Over(Box::new(over))).unwrap();
    assert!(runs.close_dead().unwrap().is_empty());
    assert_eq!(
        runs.find("left22").unwrap().record.outcome(),
        Some(RunOutcome::Success)
    );
    assert!(!path.exists());
}

#[test]
fn what_is_damaged_is_set_aside_and_the_rest_works() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let recording = runs.begin(&named("fine")).unwrap();
    for (name, bytes) in [
        ("bad222.run", &b"\0\0\0"[..]),
        ("bad223.over", b"{}\n"),
        ("bad224.run", b""),
        ("later2.run", b"{\"run\":{\"schema\":9}}\n"),
    ] {
        fs::write(runs.dir().join(name), bytes).unwrap();
    }
    // One under another's name.
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
fn those_that_are_closed_are_kept_to_a_bound() {
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
    let of = |kind: &str| {
        left.iter()
            .filter(|path| path.extension().unwrap() == kind)
            .count()
    };
    assert_eq!((of(CLOSED), of(LOG), of(NEW)), (CLOSED_MAX, CLOSED_MAX, 1));
    assert!(!runs.path("x3", CLOSED).exists() && runs.path("x0", CLOSED).exists());
}

/// Each has its own grace, and they have it at the same time: none of these ends before all are asked to.
#[test]
fn the_dead_are_closed_beside_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let asked = dir.path().display();
    let guests: Vec<Guest> = (0..3)
        .map(|n| {
            let all = "until [ -e 0 ] && [ -e 1 ] && [ -e 2 ]; do sleep 0.01; done";
            Guest::new(&format!(
                "cd {asked}; trap ': > {n}; {all}; exit' TERM; : > up{n}; while :; do sleep 0.01; done"
            ))
        })
        .collect();
    for (n, guest) in guests.iter().enumerate() {
        let (up, until) = (dir.path().join(format!("up{n}")), Instant::now() + DEADLINE);
        while !up.exists() {
            assert!(Instant::now() < until, "guest {n} does not come up");
            thread::sleep(Duration::from_millis(2));
        }
        let id = format!("left{n}");
        let path = leave(&runs, Some(guest.who()), |start| {
            start.id.clone_from(&id);
            start.grace_ms = 20_000;
        });
        fs::rename(path, runs.path(&id, OPEN)).unwrap();
    }
    let closed = runs.close_dead().unwrap();
    let over = closed
        .iter()
        .filter_map(|known| known.record.result.as_ref());
    assert_eq!(closed.len(), 3);
    assert!(over.clone().all(|over| over.killed == 0), "{closed:?}");
    assert!(runs.list(false).unwrap().is_empty());
}

/// What is full can be neither written to nor waited for: it has had its room before.
#[test]
fn a_record_has_room_for_what_follows() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let probe = File::create(dir.path().join("probe")).unwrap();
    if let Err(errno) = fallocate(&probe, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, 1) {
        eprintln!("left out: this file system keeps no room: {errno}");
        return;
    }
    // Of each length, so that after one of them what follows begins a new block.
    for length in (0..4096).step_by(256) {
        let mut run = named("x");
        run.session = Some("x".repeat(length));
        let recording = runs.begin(&run).unwrap();
        let path = runs.path(recording.id(), OPEN);
        let blocks = |path: &Path| fs::metadata(path).unwrap().blocks();
        let before = blocks(&path);
        let who = runs.find("x").unwrap().record.header.wrapper;
        append(
            &open(&path).unwrap(),
            &Line::Command(CommandStarted {
                process: who,
                at: 1,
            }),
        )
        .unwrap();
        recording.claim(RunOutcome::Timeout);
        recording
            .close(RunResult::unobserved(RunOutcome::Timeout, "x"))
            .unwrap();
        let after = blocks(&path.with_extension(CLOSED));
        assert!(
            after <= before,
            "{after} blocks after {before}, with {length} bytes more"
        );
    }
}

/// Killed with its container, it cannot be closed from here: its name is free all the same.
#[test]
fn a_name_is_free_when_its_owner_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let left = leave(&runs, None, |start| {
        start.name = Some("web".to_owned());
        start.pid_namespace ^= 1;
    });
    let who = Guest::new("exec sleep 600").who();
    append(
        &open(&left).unwrap(),
        &Line::Command(CommandStarted {
            process: who,
            at: 1,
        }),
    )
    .unwrap();
    assert!(runs.close_dead().unwrap().is_empty());
    let owner = lock_record(&left, false).unwrap().expect("nobody has it");
    let error = runs.begin(&named("web")).unwrap_err();
    assert!(matches!(error, RecordError::NameTaken { .. }), "{error}");
    drop(owner);
    let recording = runs.begin(&named("web")).unwrap();
    assert_eq!(runs.find("web").unwrap().id(), recording.id());
}

#[test]
fn a_lock_is_not_for_two() {
    let dir = tempfile::tempdir().unwrap();
    let runs = runs(&dir);
    let path = leave(&runs, None, |_| ());
    let first: Flock<File> = lock_record(&path, false).unwrap().expect("nobody has it");
    assert!(lock_record(&path, false).unwrap().is_none());
    fs::rename(&path, path.with_extension(CLOSED)).unwrap();
    drop(first);
    assert!(
        lock_record(&path, false).unwrap().is_none(),
        "it is not there"
    );
}
