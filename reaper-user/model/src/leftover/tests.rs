//! Search of small process tables, with the expected result for one process.

mod kept;
mod living;
mod owner;
mod uncertain;
mod waiting;
mod work;

use super::*;
use crate::event::{Image, Uids};
use crate::ruleset::{
    Action, Condition, Field, Matcher, Pattern, Rule, SessionCondition, UidCondition,
};

const S: u64 = 1_000_000_000;
const SHELL: &str =
    "/bin/bash\0-c\0source /home/u/.claude/shell-snapshots/snapshot-bash-1.sh && eval x";

/// Process of a table.
#[derive(Debug)]
struct P {
    pid: u32,
    parent: u32,
    /// Seconds since boot.
    start: u64,
    argv: &'static str,
    env: Option<&'static str>,
    unit: &'static str,
    sid: u32,
    uid: u32,
    euid: u32,
    login_uid: Option<u32>,
    listening: Fact<bool>,
    nested: bool,
    inner_pid: Option<u32>,
    tty: u32,
}

fn p(pid: u32, parent: u32, start: u64, argv: &'static str, env: &'static str) -> P {
    P {
        pid,
        parent,
        start,
        argv,
        env: Some(env),
        unit: "",
        sid: pid,
        uid: 1000,
        euid: 1000,
        login_uid: None,
        listening: Fact::Known(false),
        nested: false,
        inner_pid: None,
        tty: 0,
    }
}

impl P {
    fn row(&self) -> LeftoverRow {
        let exe = self.argv.split('\0').next().unwrap_or_default();
        let comm = exe.rsplit('/').next().unwrap_or_default();
        let argv = format!("{}\0", self.argv).into_bytes();
        let image = Image {
            comm: comm.into(),
            exe: exe.into(),
            argv_full_len: argv.len() as u32,
            argv,
            sid: self.sid,
            tty: self.tty,
            ..Image::default()
        };
        LeftoverRow {
            entry: ProcEntry {
                read_at: 0,
                key: ProcessKey {
                    pid: self.pid,
                    start: self.start * S,
                },
                exact: false,
                pidfd_inode: 0,
                membership: None,
                parent: self.parent,
                uids: Uids {
                    real: self.uid,
                    effective: self.euid,
                },
                image: Arc::new(image),
                kernel_thread: false,
                namespace_init: false,
            },
            unit: Fact::Known(self.unit.into()),
            env_markers: match self.env {
                Some(env) => Fact::Known(EnvMarkers::of(env.as_bytes(), true)),
                None => Fact::Unreadable,
            },
            listening: self.listening,
            window: Fact::Known(false),
            login_uid: self.login_uid,
            nested: self.nested,
            inner_pid: self.inner_pid,
        }
    }
}

/// Returns a rule about a program.
fn rule(name: &str, action: Action, exe: &str) -> Rule {
    let condition = Condition {
        field: Field::Exe,
        any_of: vec![Pattern::exe(exe).unwrap()],
        negative: false,
    };
    Rule::new(name, action, vec![Matcher::new(vec![condition])])
}

fn rules() -> Ruleset {
    let mut other_uid = Rule::new("other-uid", Action::Keep, Vec::new());
    other_uid.when.uid = Some(UidCondition::Other);
    let mut servers = Rule::new("servers", Action::Reap, Vec::new());
    servers.delay_ns = 600 * S;
    servers.when.session = SessionCondition::Ok;
    servers.when.listening = Some(true);
    Ruleset::new(vec![
        other_uid,
        rule("tmux", Action::Boundary, "**/tmux"),
        rule("claude-daemon", Action::Boundary, "**/claude-server"),
        rule("claude-code", Action::Agent, "**/claude"),
        rule("codex", Action::Agent, "**/codex"),
        rule("ssh-agent", Action::Keep, "**/ssh-agent"),
        rule("compositors", Action::Keep, "**/sway"),
        servers,
    ])
}

/// Returns a table with init, a user's service manager (50), a login shell (60) and this program below it (61).
fn table(more: &[P]) -> ProcessTable {
    let mut init = p(1, 0, 0, "/usr/lib/systemd/systemd", "");
    init.env = None;
    let mut all = vec![
        init,
        p(50, 1, 5, "/usr/lib/systemd/systemd\0--user", ""),
        p(60, 1, 6, "/bin/zsh", "HOME=/home/u"),
        p(61, 60, 9000, "/usr/bin/reaper\0scan", ""),
    ];
    let mut rows: HashMap<u32, LeftoverRow> = all.drain(..).map(|p| (p.pid, p.row())).collect();
    rows.extend(more.iter().map(|p| (p.pid, p.row())));
    ProcessTable {
        rows,
        unread: HashMap::new(),
    }
}

/// Parameters of a search that differ between tests.
struct Options {
    rules: Ruleset,
    uid: Option<u32>,
    scope: Scope,
    members: HashMap<u32, ProcessKey>,
    since: Option<u64>,
    kept: Vec<ProcessKey>,
    min_age: u64,
    waited: HashMap<ProcessKey, u64>,
    requested_by_user: bool,
}

fn scan(table: &ProcessTable, change: impl FnOnce(&mut Options)) -> Vec<Leftover> {
    scan_recorded(table, &[], change)
}

fn scan_recorded(
    table: &ProcessTable,
    recorded: &[RecordedSession],
    change: impl FnOnce(&mut Options),
) -> Vec<Leftover> {
    let mut options = Options {
        rules: rules(),
        uid: None,
        scope: Scope::default(),
        members: HashMap::new(),
        since: None,
        kept: Vec::new(),
        min_age: 600 * S,
        waited: HashMap::new(),
        requested_by_user: true,
    };
    change(&mut options);
    let query = LeftoverQuery {
        rules: &options.rules,
        recorded,
        own_pid: 61,
        uid: options.uid,
        scope: &options.scope,
        members: &options.members,
        watched_since: options.since,
        kept: &options.kept,
        min_age: options.min_age,
        now: 10_000 * S,
        honor_keep: true,
        waited: &options.waited,
        requested_by_user: options.requested_by_user,
    };
    find(table, &query)
}

/// Returns `reap` or the reason for another verdict; `-` if the process is not a leftover.
fn why(found: &[Leftover], pid: u32) -> &'static str {
    match found.iter().find(|leftover| leftover.key.pid == pid) {
        None => "-",
        Some(leftover) if leftover.verdict == LeftoverVerdict::Reap => "reap",
        Some(leftover) => leftover.reason(),
    }
}

#[track_caller]
fn check(expected: &str, processes: &[P]) {
    let found = scan(&table(processes), |_| {});
    let last = processes.last().map_or(0, |p| p.pid);
    assert_eq!(why(&found, last), expected, "{found:#?}");
}

const DEAD: &str = "CLAUDECODE=1\0CLAUDE_PID=4100\0";
const BARE: &str = "CLAUDECODE=1\0";
const NODE: &str = "/usr/bin/node\0server.js";

#[test]
fn leftover_of_exited_agent_is_reaped() {
    check("reap", &[p(200, 1, 100, NODE, DEAD)]);
    check("reap", &[p(200, 50, 100, NODE, DEAD)]);
    // A younger process reuses the pid.
    check(
        "reap",
        &[p(4100, 1, 101, "/bin/cat", ""), p(200, 1, 100, NODE, DEAD)],
    );
    check(
        "owner_alive",
        &[p(4100, 60, 99, "/x/claude", ""), p(200, 1, 100, NODE, DEAD)],
    );
    check(
        "owner_alive",
        &[p(4100, 60, 99, "/bin/cat", ""), p(200, 1, 100, NODE, DEAD)],
    );
    check(
        "owner_alive",
        &[p(4100, 60, 100, "/bin/cat", ""), p(200, 1, 100, NODE, DEAD)],
    );
    // Two agents are named, and one is alive.
    let both = "CLAUDE_PID=4100\0OPENCODE_PID=4200\0";
    check(
        "owner_alive",
        &[
            p(4200, 60, 50, "/bin/opencode", ""),
            p(200, 1, 100, NODE, both),
        ],
    );
    check(
        "reap",
        &[p(200, 1, 100, NODE, "OPENCODE=1\0OPENCODE_PID=4200\0")],
    );
    check("no_owner", &[p(200, 1, 100, NODE, BARE)]);
    check("no_owner", &[p(200, 1, 100, NODE, "CLAUDE_PID=x\0")]);
    check("-", &[p(200, 1, 100, NODE, "HOME=/\0")]);
}

#[test]
fn leftover_with_unreadable_facts_is_not_reaped() {
    let mut unread = table(&[p(200, 1, 100, NODE, DEAD)]);
    unread.unread.insert(4100, Some(0));
    assert_eq!(why(&scan(&unread, |_| {}), 200), "owner_uncertain");
    // The pid of its agent is one of another namespace.
    let mut inside = p(200, 1, 100, NODE, DEAD);
    inside.nested = true;
    check("owner_uncertain", &[inside]);
    let mut secret = p(201, 200, 101, NODE, "");
    secret.env = None;
    check("unreadable", &[p(200, 1, 100, NODE, DEAD), secret]);
    let mut cut = table(&[p(200, 1, 100, NODE, DEAD)]);
    if let Some(row) = cut.rows.get_mut(&200) {
        row.env_markers = Fact::Known(EnvMarkers::of(DEAD.as_bytes(), false));
    }
    assert_eq!(why(&scan(&cut, |_| {}), 200), "unreadable");
    // Its parent is not in the table.
    check("not_orphan", &[p(200, 199, 100, NODE, DEAD)]);
}

#[test]
fn orphan_is_reaped_and_child_of_its_creator_is_not() {
    let keeper = |env| p(150, 60, 50, "/usr/bin/keeper", env);
    let of_session = |sid| P {
        sid,
        ..p(200, 150, 100, NODE, DEAD)
    };
    // Any subreaper that adopted it from a kernel session without a leader.
    check("reap", &[keeper("A=1\0"), of_session(180)]);
    let younger = p(180, 60, 101, "/bin/zsh", "");
    check("reap", &[younger, keeper("A=1\0"), of_session(180)]);
    // A program that starts others with an environment of its choice.
    check("not_orphan", &[keeper("A=1\0"), of_session(200)]);
    check("not_orphan", &[keeper("A=1\0"), of_session(150)]);
    check("not_orphan", &[keeper("A=1\0"), of_session(60)]);
    check("not_orphan", &[keeper("A=1\0"), of_session(0)]);
    check("not_orphan", &[keeper(DEAD), of_session(180)]);
    let mut secret = keeper("");
    secret.env = None;
    check("not_orphan", &[secret, of_session(180)]);
    // Its parent has the marker too, and was adopted itself: one tree.
    let tree = [
        p(200, 1, 100, "/bin/sh", DEAD),
        p(201, 200, 101, NODE, DEAD),
    ];
    let found = scan(&table(&tree), |_| {});
    assert_eq!(why(&found, 201), "reap");
    assert!(
        found
            .iter()
            .all(|leftover| leftover.subtree_root.pid == 201 || leftover.subtree_root.pid == 200)
    );
    // Its descendants need no marker.
    check(
        "reap",
        &[p(200, 1, 100, NODE, DEAD), p(201, 200, 101, "/bin/mcp", "")],
    );
}

#[test]
fn marker_from_multiplexer_is_not_evidence() {
    let server = || p(300, 1, 50, "/usr/bin/tmux", DEAD);
    check("boundary", &[server()]);
    check("boundary", &[server(), p(301, 300, 60, "/bin/zsh", DEAD)]);
    // A leftover of a pane, while the server is alive and after its exit.
    let left = "CLAUDECODE=1\0CLAUDE_PID=4100\0TMUX=/tmp/tmux-1000/default,300,0\0";
    check("multiplexed", &[server(), p(302, 1, 70, NODE, left)]);
    check("multiplexed", &[p(302, 1, 70, NODE, left)]);
    // The agent ran in the multiplexer: the server has no marker.
    check(
        "reap",
        &[
            p(300, 1, 50, "/usr/bin/tmux", "A=1\0"),
            p(302, 1, 70, NODE, left),
        ],
    );
    let screen = "CLAUDECODE=1\0CLAUDE_PID=4100\0STY=300.pts-1.host\0";
    check("multiplexed", &[p(302, 1, 70, NODE, screen)]);
    check(
        "multiplexed",
        &[p(
            302,
            1,
            70,
            NODE,
            "CLAUDECODE=1\0CLAUDE_PID=4100\0ZELLIJ=0\0",
        )],
    );
}

#[test]
fn zellij_server_without_marker_clears_only_its_panes() {
    let server = |start| p(300, 1, start, "/usr/bin/zellij", "A=1\0");
    for (start, env, expected) in [
        (50, "CLAUDE_PID=4100\0CLAUDECODE=1\0ZELLIJ=0\0", "reap"),
        (
            80,
            "CLAUDE_PID=4100\0CLAUDECODE=1\0ZELLIJ=0\0",
            "multiplexed",
        ),
        (
            50,
            "CLAUDE_PID=4100\0CLAUDECODE=1\0ABDUCO_SESSION=a\0",
            "multiplexed",
        ),
    ] {
        check(expected, &[server(start), p(302, 1, 70, NODE, env)]);
    }
}

#[test]
fn marker_from_terminal_is_not_evidence() {
    let terminal = || p(310, 1, 50, "/usr/bin/kitty", DEAD);
    check("terminal", &[terminal(), p(311, 310, 60, "/bin/zsh", DEAD)]);
    // A leftover of a tab, which does not descend from the terminal any more.
    check("multiplexed", &[terminal(), p(312, 1, 70, NODE, DEAD)]);
    // The terminal and its marker are younger.
    check(
        "reap",
        &[
            p(310, 1, 80, "/usr/bin/kitty", DEAD),
            p(312, 1, 70, NODE, DEAD),
        ],
    );
    check(
        "reap",
        &[
            p(310, 1, 50, "/usr/bin/kitty", "A=1\0"),
            p(312, 1, 70, NODE, DEAD),
        ],
    );
    let of_session = |sid| P {
        sid,
        ..p(312, 1, 70, NODE, DEAD)
    };
    // `(server &)` in a shell that is not a leftover, below an unknown terminal.
    let shell = p(311, 305, 60, "/bin/zsh", DEAD);
    check("terminal_session", &[shell, of_session(311)]);
    // In the kernel session of the shell from which the agent was started, and in that of a leftover.
    check("reap", &[of_session(60)]);
    check("reap", &[p(311, 1, 60, "/bin/bash", DEAD), of_session(311)]);
}

#[test]
fn old_orphaned_tool_shell_is_reaped() {
    check("reap", &[p(200, 1, 100, SHELL, BARE)]);
    check("reap", &[p(200, 50, 100, SHELL, "")]);
    check(
        "reap",
        &[p(200, 1, 100, SHELL, BARE), p(201, 200, 200, NODE, BARE)],
    );
    check("young", &[p(200, 1, 9900, SHELL, BARE)]);
    check(
        "not_orphan",
        &[p(150, 60, 50, "/bin/x", ""), p(200, 150, 100, SHELL, BARE)],
    );
    check(
        "agent_alive",
        &[p(70, 60, 99, "/x/claude", ""), p(200, 1, 100, SHELL, BARE)],
    );
    // The agent is younger.
    check(
        "reap",
        &[p(70, 60, 101, "/x/claude", ""), p(200, 1, 100, SHELL, BARE)],
    );
    check(
        "owner_alive",
        &[
            p(4100, 60, 99, "/x/claude", ""),
            p(200, 1, 100, SHELL, DEAD),
        ],
    );
    // Its agent has exited for certain, so its age does not matter.
    check("reap", &[p(200, 1, 9900, SHELL, DEAD)]);
    // A program that only names the snapshot is not a tool shell.
    let grep = "/bin/grep\0/shell-snapshots/snapshot-";
    check("-", &[p(200, 1, 100, grep, "")]);
    let found = scan(&table(&[p(200, 1, 9900, SHELL, BARE)]), |q| {
        q.min_age = 60 * S
    });
    assert_eq!(why(&found, 200), "reap");
}

#[test]
fn recorded_member_of_exited_root_is_reaped() {
    let alike = |start: u64, root: u32| RecordedSession {
        agent: "codex".into(),
        root: ProcessKey {
            pid: root,
            start: 20 * S,
        },
        uid: Some(1000),
        members: HashSet::from_iter([ProcessKey {
            pid: 200,
            start: start * S + 7,
        }]),
    };
    let all = table(&[p(200, 60, 100, NODE, ""), p(90, 60, 20, "/bin/cat", "")]);
    for (recorded, expected) in [
        (alike(100, 4300), "reap"),
        // Another process with that pid.
        (alike(99, 4300), "-"),
        (alike(100, 90), "owner_alive"),
    ] {
        let found = scan_recorded(&all, std::slice::from_ref(&recorded), |_| {});
        assert_eq!(why(&found, 200), expected, "{recorded:?}");
    }
    // The agent may have passed the session on while no service watched.
    let claude = RecordedSession {
        agent: "claude-code".into(),
        ..alike(100, 4300)
    };
    let successor = P {
        sid: 91,
        tty: 7,
        ..p(90, 60, 120, "/x/claude", "")
    };
    let all = table(&[p(200, 60, 100, NODE, ""), successor]);
    let found = scan_recorded(&all, std::slice::from_ref(&claude), |_| {});
    assert_eq!(why(&found, 200), "agent_alive");
    // A user keeps it.
    let kept = [ProcessKey {
        pid: 200,
        start: 100 * S,
    }];
    let found = scan_recorded(&all, &[alike(100, 4300)], |q| q.kept = kept.to_vec());
    assert_eq!(why(&found, 200), "kept_by_user");
}

#[test]
fn env_markers_contain_no_values() {
    let env_markers = EnvMarkers::of(b"A=1\0TOKEN=x\0CODEX_CI=1\0=\0\0B\0CLAUDE_PID=12\0", true);
    let markers: Vec<_> = env_markers
        .markers
        .iter()
        .map(|marker| (marker.variable, marker.agent_pid))
        .collect();
    assert_eq!(markers, [("CLAUDE_PID", Some(12)), ("CODEX_CI", None)]);
    let text = format!(
        "{:?}",
        EnvMarkers::of(b"CODEX_THREAD_ID=0198-secret\0", true)
    );
    assert!(!text.contains("secret"), "{text}");
    assert!(!EnvMarkers::of(b"REAPER_KEEP=0\0", true).keep);
    assert_eq!(
        EnvMarkers::of(b"CLAUDE_PID=1\0", true).agent_pids().count(),
        0
    );
}
