//! Stored records are read back.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::history::HistoryError;
use super::*;
use crate::journal::recorded::recorded_sessions;
use reaper_model::leftover::RecordedSession;

#[test]
fn history_has_session_with_decisions_and_outcomes() {
    let world = World::new();
    let mut records = lifecycle(sys::boot_time(), 100, 1000);
    records.insert(
        2,
        decided(sys::boot_time(), process(102, 100, 1000), "keep"),
    );
    world.store(&records);
    let all = world.all();
    let [session] = &all[..] else {
        panic!("{all:?}")
    };
    assert_eq!(session.name, "claude-100-5f5e100");
    let exit = (session.exit.code, session.exit.signal.as_deref());
    assert_eq!(
        (session.agent.as_str(), session.pid, session.uid, exit),
        ("claude", 100, Some(1000), (None, Some("SIGKILL")))
    );
    assert_eq!((session.reaped, session.memory.unmeasured), (1, 1));
    assert_eq!(session.memory.rss, 4096);
    let lasted = session
        .root_exited_at
        .unwrap()
        .duration_since(session.opened_at);
    assert_eq!(lasted.as_secs(), 1);
    assert!(session.closed_at > session.root_exited_at);
    let [kept, reaped] = &session.processes[..] else {
        panic!("{session:?}")
    };
    assert_eq!(kept.decisions[0].rule.as_deref(), Some("my-servers"));
    assert_eq!((kept.pid, kept.outcomes.len()), (102, 0));
    assert_eq!(reaped.entity_id, format!("{BOOT}-101000000-101"));
    assert_eq!(
        reaped.args,
        ["sh", "-c", "run 101 --token [redacted] now"],
        "the secret is redacted"
    );
    let outcome = &reaped.outcomes[0];
    assert_eq!(
        (outcome.exit.code, outcome.duration_ns),
        (Some(3), Some(1_200_000))
    );
    assert_eq!(outcome.rss, Some(4096));
    assert_eq!(outcome.signal.as_deref(), Some("SIGTERM"));
}

#[test]
fn repeated_close_updates_counts_but_not_the_time() {
    let world = World::new();
    let now = sys::boot_time();
    let close = |time, repeats, (reaped, kept)| {
        let mut record = closed(time, 100, reaped);
        if let EventBody::SessionClose {
            is_repeat: a,
            kept: k,
            ..
        } = &mut record.body
        {
            (*a, *k) = (repeats, kept);
        }
        record
    };
    world.store(&[
        opened(now, 100, 0),
        root_exited(now + 1, 100),
        close(now + 2, false, (1, 2)),
    ]);
    let first = world.all()[0].clone();
    assert_eq!((first.reaped, first.kept), (1, 2));
    world.store(&[close(now + 1_000_000_000, true, (2, 1))]);
    let last = &world.all()[0];
    assert_eq!(
        (last.reaped, last.kept, last.closed_at),
        (2, 1, first.closed_at)
    );
}

#[test]
fn other_records_are_not_stored() {
    let world = World::new();
    let body = EventBody::MemberMapFull {
        count: 1,
        capacity: 1,
    };
    let fork = EventBody::Lifecycle {
        event: crate::export::Lifecycle::Fork,
        process: process(5, 5, 0),
        provenance: Provenance::Kernel,
    };
    world.store(&[record(1, body), record(1, fork)]);
    assert_eq!(world.number("SELECT count(*) FROM process"), 0);
}

#[test]
fn repeated_records_are_stored_once() {
    let world = World::new();
    let now = sys::boot_time();
    world.store(&lifecycle(now, 100, 0));
    let before = world.all();
    // A resumed service counts from 0.
    let mut repeated = lifecycle(now, 100, 0);
    *repeated.last_mut().unwrap() = closed(now + 9_000_000_000, 100, 0);
    world.store(&repeated);
    assert_eq!(world.all(), before);
    // A decision that differs from the previous one is stored.
    let child = || process(101, 100, 0);
    world.store(&[decided(now, child(), "keep"), decided(now, child(), "reap")]);
    assert_eq!(world.number("SELECT count(*) FROM decision"), 3);
}

#[test]
fn query_filters_by_time_agent_name_and_user() {
    let world = World::new();
    let now = sys::boot_time();
    let mut records = lifecycle(now, 100, 1000);
    records.extend(lifecycle(now + 5_000_000_000, 200, 0));
    // A process of another user in the first session.
    records.push(decided(now, process(103, 100, 0), "keep"));
    world.store(&records);
    let names = |query: HistoryQuery| -> Vec<u32> {
        world
            .history(&query)
            .iter()
            .map(|session| session.pid)
            .collect()
    };
    assert_eq!(names(HistoryQuery::default()), [100, 200], "newest last");
    let since = |seconds: i64| {
        let opened = world.all()[0].opened_at;
        let since = opened + jiff::SignedDuration::from_secs(seconds);
        HistoryQuery {
            since: Some(since),
            ..HistoryQuery::default()
        }
    };
    assert_eq!(
        (names(since(0)), names(since(4))),
        (vec![100, 200], vec![200])
    );
    let agent = |agent: &str| HistoryQuery {
        agent: Some(agent.into()),
        ..HistoryQuery::default()
    };
    assert_eq!(
        (names(agent("claude")).len(), names(agent("codex")).len()),
        (2, 0)
    );
    let named = |name: &str| HistoryQuery {
        session: Some(name.into()),
        ..HistoryQuery::default()
    };
    assert_eq!(names(named("claude-200")), [200]);
    assert!(names(named("no-such")).is_empty());
    let own = HistoryQuery {
        uid: Some(1000),
        ..HistoryQuery::default()
    };
    let own = world.history(&own);
    assert_eq!((own.len(), own[0].pid, own[0].processes.len()), (1, 100, 1));
}

#[test]
fn history_of_a_pid_and_of_the_newest_sessions() {
    let world = World::new();
    let now = sys::boot_time();
    let mut records = lifecycle(now, 100, 1000);
    records.extend(lifecycle(now + 5_000_000_000, 200, 1000));
    // The same pid in another session, later.
    let again = || ProcessRef {
        key: ProcessKey {
            start: 7,
            ..key(101)
        },
        ..process(101, 200, 1000)
    };
    records.push(decided(now + 6_000_000_000, again(), "reap"));
    records.push(decided(now, process(102, 100, 1000), "keep"));
    world.store(&records);
    let found = |pids: &[u32], limit| {
        let sessions = world.history(&HistoryQuery {
            pids: pids.to_vec(),
            limit,
            ..HistoryQuery::default()
        });
        let pids = |session: &HistorySession| session.processes.iter().map(|p| p.pid).collect();
        let found = sessions.iter().map(|session| (session.pid, pids(session)));
        found.collect::<Vec<(u32, Vec<u32>)>>()
    };
    assert_eq!(found(&[101], None), [(100, vec![101]), (200, vec![101])]);
    assert_eq!(found(&[101], Some(1)), [(200, vec![101])]);
    assert_eq!(found(&[], Some(1)), [(200, vec![101, 201])]);
    assert_eq!(
        found(&[100], None),
        [(100, vec![102, 101])],
        "the agent's whole session"
    );
    assert_eq!(found(&[999], None), []);
    let several = found(&[102, 999, 201], None);
    assert_eq!(several, [(100, vec![102]), (200, vec![201])]);
    let with_agent = found(&[100, 201], None);
    assert_eq!(with_agent, [(100, vec![102, 101]), (200, vec![201])]);

    let last = |pid, uid| history::last_with_pid(&world.path(), BOOT, pid, uid).unwrap();
    let (session, process) = last(101, None).unwrap();
    assert_eq!((session.pid, process.start_in(BOOT)), (200, Some(7)));
    assert_eq!(
        last(101, Some(1000)).map(|(session, _)| session.pid),
        Some(200)
    );
    assert!(last(101, Some(1001)).is_none() && last(999, None).is_none());
    let other_boot = history::last_with_pid(&world.path(), "another", 101, None);
    assert!(other_boot.unwrap().is_none());
}

#[test]
fn exit_of_a_process_that_was_decided_about_is_stored() {
    let world = World::new();
    let now = sys::boot_time();
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    let member = |pid| process(pid, 100, 1000);
    world.store(&[
        opened(now, 100, 1000),
        decided(now, member(101), "keep"),
        decided(now, member(102), "reap"),
        decided(now, member(103), "keep"),
        exited(now + 1_000_000, member(101), ExitStatus::Exited(3)),
        exited(now + 1_000_000, member(102), killed),
        // No decision, so no row.
        exited(now + 1_000_000, member(104), ExitStatus::Exited(0)),
    ]);
    let session = &world.all()[0];
    let exits = session.processes.iter();
    let mut exits: Vec<_> = exits
        .map(|p| (p.pid, p.exit.code, p.own_exit().map(|(at, _)| at)))
        .collect();
    exits.sort_unstable();
    let at = session.opened_at + Duration::from_millis(1);
    // It is unknown whether the service has sent the signal to 102.
    let expected = [
        (101, Some(3), Some(at)),
        (102, None, None),
        (103, None, None),
    ];
    assert_eq!(exits, expected);
    let signal = &session.processes[1].exit.signal;
    assert_eq!(session.processes[1].pid, 102);
    assert_eq!(signal.as_deref(), Some("SIGKILL"));
    assert_eq!(
        world.number("SELECT count(*) FROM process WHERE pid = 104"),
        0
    );
}

#[test]
fn reaped_process_has_a_rule_that_keeps_it() {
    let world = World::new();
    let mut records = lifecycle(sys::boot_time(), 100, 1000);
    records.push(decided(sys::boot_time(), process(102, 100, 1000), "keep"));
    world.store(&records);
    let rules = world.all()[0]
        .processes
        .iter()
        .map(|p| (p.pid, p.keep_rule.clone()))
        .collect::<Vec<_>>();
    let rule = "[[keep]]\nname = \"my-sh-bbfe\"\ncomm = \"sh\"\n";
    assert_eq!(rules, [(102, None), (101, Some(rule.into()))]);
}

#[test]
fn history_has_outer_session_and_relaunched_root() {
    let world = World::new();
    let mut inner = opened(2, 200, 0);
    if let EventBody::SessionOpen { outer, .. } = &mut inner.body {
        *outer = Some(session(100));
    }
    let mut process = process(101, 100, 0);
    process.image = Arc::new(Image {
        argv: b"claude\0--resume\0".into(),
        ..Image::default()
    });
    let (session, old_root) = (session(100), key(100));

    let relaunched = EventBody::SessionRelaunch {
        session,
        process,
        old_root,
    };
    world.store(&[opened(1, 100, 0), inner, record(3, relaunched)]);
    let all = world.all();
    assert_eq!(all[0].args, ["claude", "--resume"]);
    assert_eq!(
        all[1].outer_session_id.as_deref(),
        Some("claude-100-5f5e100")
    );
}

#[test]
fn files_are_accessible_to_the_owner_only() {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    let world = World::new();
    let file = |suffix: &str| files::with_suffix(&world.path(), suffix);
    let all = || [file(""), file("-wal"), file("-shm")].map(|path| mode(&path));
    let journal = world.open();
    journal.feed().on_records(&lifecycle(1, 100, 0));
    eventually("the session is written", || world.all().len() == 1);
    assert_eq!(all(), [0o600; 3]);
    assert_eq!(mode(&world.options.directory), 0o700);
    drop(journal);
    std::fs::set_permissions(world.path(), Permissions::from_mode(0o644)).unwrap();
    let journal = world.open();
    journal.feed().on_records(&lifecycle(1, 200, 0));
    eventually("the session is written", || world.all().len() == 2);
    assert_eq!(all(), [0o600; 3]);
}

#[test]
fn keeps_survive_a_restart_until_they_expire() {
    let world = World::new();
    let now = sys::monotonic();
    let keep = |pid, awake: Option<u64>| JournalKeep {
        key: key(pid),
        session: key(100),
        is_explicit: true,
        tree: pid == 1,
        by_uid: 1000,
        made_at: u64::from(pid),
        until: awake.map(|awake| KeepExpiry { awake, wall: 9 }),
    };
    let kept = [keep(1, None), keep(2, Some(now + 3_600_000_000_000))];
    let journal = world.open();
    assert!(journal.keeps().is_empty());
    let store = journal.keep_writer();
    store.keep(&kept).unwrap();
    store.keep(&[keep(3, None), keep(4, Some(now))]).unwrap();
    store.unkeep(1000, 3).unwrap();
    store.unkeep(1001, 2).unwrap();
    store.unkeep(1000, 99).unwrap();
    // A second request for the same process.
    let replaced = JournalKeep {
        by_uid: 0,
        ..kept[0]
    };
    store.keep(&[replaced]).unwrap();
    journal.close();
    assert!(store.keep(&kept).is_err(), "the journal is closed");
    let journal = world.open();
    assert_eq!(journal.keeps(), [replaced, kept[1]]);
    journal.close();
    let other = Journal::open(world.options.clone(), "another boot".into()).unwrap();
    assert!(other.keeps().is_empty(), "they are of another boot");
}

#[test]
fn recorded_sessions_have_members_without_outcome() {
    let world = World::new();
    let now = sys::boot_time();
    let mut records = lifecycle(now, 100, 0);
    // One member has a decision without an outcome. The other belongs to a session with an unknown root.
    records.push(decided(now, process(102, 100, 0), "reap"));
    records.push(decided(now, process(302, 300, 0), "reap"));
    world.store(&records);
    let journal = world.open();
    let keep = JournalKeep {
        key: key(102),
        session: key(100),
        is_explicit: true,
        tree: false,
        by_uid: 0,
        made_at: 0,
        until: None,
    };
    journal.keep_writer().keep(&[keep]).unwrap();
    journal.close();
    let (sessions, kept) = recorded_sessions(&world.path(), BOOT).unwrap();
    let expected = RecordedSession {
        agent: "claude".into(),
        root: key(100),
        uid: Some(0),
        members: [key(102)].into_iter().collect(),
    };
    assert_eq!((sessions, kept), (vec![expected], vec![key(102)]));
    // A user keeps a process with its descendants.
    for (tree, until, count) in [
        (true, Some(1), 1),
        (true, Some(u64::MAX >> 1), 0),
        (true, None, 0),
        (false, None, 1),
    ] {
        let until = until.map(|awake| KeepExpiry { awake, wall: 0 });
        let journal = world.open();
        let keep = JournalKeep {
            tree,
            until,
            ..keep
        };
        journal.keep_writer().keep(&[keep]).unwrap();
        journal.close();
        let (sessions, _) = recorded_sessions(&world.path(), BOOT).unwrap();
        assert_eq!(sessions.len(), count, "{keep:?}");
    }
    let other = recorded_sessions(&world.path(), "another boot").unwrap();
    assert_eq!(other, (Vec::new(), Vec::new()));
    // The dropped record may be a relaunch of the root.
    let connection = Connection::open(world.path()).unwrap();
    let sql = "INSERT INTO dropped (time, count) VALUES (1, 1)";
    connection.execute(sql, []).unwrap();
    let (sessions, kept) = recorded_sessions(&world.path(), BOOT).unwrap();
    assert_eq!((sessions, kept), (Vec::new(), vec![key(102)]));
}

/// Name of the test that runs itself as a child to be killed. The variable [`JOURNAL`] has the directory.
const KILLED: &str = "journal::tests::keeping::crash_during_writes_keeps_confirmed_keeps";
const JOURNAL: &str = "REAPER_TEST_JOURNAL";

/// Writes forever, and prints a line for each stored keep.
fn write_without_end(directory: PathBuf) {
    let options = JournalOptions {
        directory,
        ..JournalOptions::default()
    };
    let journal = Journal::open(options, BOOT.into()).unwrap();
    let mut feed = journal.feed();
    for root in (1..).map(|n| n * 10) {
        feed.on_records(&lifecycle(1, root, 0));
        if root % 1000 == 0 {
            let keep = JournalKeep {
                key: key(root),
                session: key(100),
                is_explicit: true,
                tree: false,
                by_uid: 0,
                // Each request has a distinct time. A later request with the same time would replace it.
                made_at: root.into(),
                until: None,
            };
            // A busy machine may answer after the time limit.
            eventually("the keep is stored", || {
                journal.keep_writer().keep(&[keep]).is_ok()
            });
            println!("kept {root}");
            // No record may be dropped.
            eventually("the journal catches up", || {
                journal.shared.waiting.load(Ordering::Acquire) < 10_000
            });
        }
    }
}

#[test]
fn crash_during_writes_keeps_confirmed_keeps() {
    if let Some(directory) = std::env::var_os(JOURNAL) {
        return write_without_end(directory.into());
    }
    let world = World::new();
    for round in 0..5_u64 {
        let program = std::env::current_exe().unwrap();
        let mut child = Command::new(program)
            .args(["--exact", "--nocapture", KILLED])
            .env(JOURNAL, &world.options.directory)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut stored = lines.filter_map(|line| line.unwrap().strip_prefix("kept ")?.parse().ok());
        let last: Vec<u32> = stored.by_ref().take(3 + round as usize * 7).collect();
        // The writes are at a different point in each round.
        std::thread::sleep(Duration::from_millis(round * 11));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(last.len(), 3 + round as usize * 7, "the child exited early");
        let journal = world.open();
        for root in last {
            let kept = journal.keeps().iter().any(|keep| keep.key == key(root));
            assert!(kept, "the keep of {root} is missing");
        }
        journal.close();
        assert!(world.renamed().is_empty(), "the journal was found damaged");
        assert_eq!(
            world.number(
                "SELECT count(*) FROM pragma_integrity_check WHERE integrity_check <> 'ok'"
            ),
            0
        );
        // Records were passed in order, so only the last session can be incomplete.
        let incomplete = "SELECT count(*) FROM session WHERE closed IS NULL";
        assert!(world.number(incomplete) <= 1 + round as i64);
    }
    assert!(world.number("SELECT count(*) FROM outcome") > 100);
}

#[test]
fn unreadable_journal_error_states_the_reason() {
    let world = World::new();
    let error =
        |path: &Path| history::read(path, &HistoryQuery::default(), |_| Ok(())).unwrap_err();
    let missing = error(&world.path());
    assert!(matches!(missing, HistoryError::Missing(_)), "{missing}");
    assert!(
        missing
            .to_string()
            .contains("start the service, which writes it")
    );
    let file = world.dir.path().join("other");
    std::fs::write(
        &file,
        "not a database, but long enough to be read as one ".repeat(20),
    )
    .unwrap();
    assert!(matches!(error(&file), HistoryError::NotAJournal(_)));
    // No release had this version.
    world.store(&lifecycle(1, 100, 0));
    Connection::open(world.path())
        .unwrap()
        .pragma_update(None, "user_version", 2)
        .unwrap();
    assert!(matches!(error(&world.path()), HistoryError::NotAJournal(_)));
}
