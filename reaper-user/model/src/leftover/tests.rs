//! Tables of processes, and what is to be said of one of them.

mod living;
mod owner;
mod spared;
mod unsure;
mod waiting;
mod work;

use super::*;
use crate::event::{Image, Uids};
use crate::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, SessionIs, UidIs};

const S: u64 = 1_000_000_000;
const SHELL: &str =
    "/bin/bash\0-c\0source /home/u/.claude/shell-snapshots/snapshot-bash-1.sh && eval x";

/// A process: its start is in seconds.
#[derive(Debug)]
struct P {
    pid: u32,
    parent: u32,
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
            login_uid: self.login_uid,
            nested: self.nested,
            inner_pid: self.inner_pid,
        }
    }
}

fn rules() -> Ruleset {
    let rule = |name: &str, action, exe: &str| {
        let condition = Condition {
            field: Field::Exe,
            any_of: vec![Pattern::exe(exe).unwrap()],
            negative: false,
        };
        Rule::new(name, action, vec![Matcher::new(vec![condition])])
    };
    let mut other_uid = Rule::new("other-uid", Action::Keep, Vec::new());
    other_uid.when.uid = Some(UidIs::Other);
    let mut servers = Rule::new("servers", Action::Reap, Vec::new());
    servers.after = 600 * S;
    servers.when.session = SessionIs::Ok;
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

/// Init, a user's service manager (50), a login shell (60) and this program below it (61).
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

/// What is asked beside the usual.
struct Asked {
    uid: Option<u32>,
    scope: Scope,
    members: HashMap<u32, ProcessKey>,
    since: Option<u64>,
    kept: Vec<ProcessKey>,
    min_age: u64,
    waited: HashMap<ProcessKey, u64>,
    by_order: bool,
}

fn ask(table: &ProcessTable, change: impl FnOnce(&mut Asked)) -> Vec<Leftover> {
    ask_recorded(table, &[], change)
}

fn ask_recorded(
    table: &ProcessTable,
    recorded: &[RecordedSession],
    change: impl FnOnce(&mut Asked),
) -> Vec<Leftover> {
    let mut asked = Asked {
        uid: None,
        scope: Scope::default(),
        members: HashMap::new(),
        since: None,
        kept: Vec::new(),
        min_age: 600 * S,
        waited: HashMap::new(),
        by_order: true,
    };
    change(&mut asked);
    let question = LeftoverQuery {
        rules: &rules(),
        recorded,
        own_pid: 61,
        uid: asked.uid,
        scope: &asked.scope,
        members: &asked.members,
        watched_since: asked.since,
        kept: &asked.kept,
        min_age: asked.min_age,
        now: 10_000 * S,
        honor_keep: true,
        waited: &asked.waited,
        by_order: asked.by_order,
    };
    find(table, &question)
}

/// What is said of this pid: `reap`, or the name of what speaks for it; `-` for nothing.
fn said(strays: &[Leftover], pid: u32) -> &'static str {
    match strays.iter().find(|stray| stray.key.pid == pid) {
        None => "-",
        Some(stray) if stray.verdict == LeftoverVerdict::Reap => "reap",
        Some(stray) => stray.reason(),
    }
}

#[track_caller]
fn check(expected: &str, processes: &[P]) {
    let strays = ask(&table(processes), |_| {});
    let last = processes.last().map_or(0, |p| p.pid);
    assert_eq!(said(&strays, last), expected, "{strays:#?}");
}

const DEAD: &str = "CLAUDECODE=1\0CLAUDE_PID=4100\0";
const BARE: &str = "CLAUDECODE=1\0";
const NODE: &str = "/usr/bin/node\0server.js";

#[test]
fn an_owner_that_is_gone() {
    check("reap", &[p(200, 1, 100, NODE, DEAD)]);
    check("reap", &[p(200, 50, 100, NODE, DEAD)]);
    // Its pid is a younger one's.
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
    // Two agents are named, and one lives.
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
fn unknown_is_never_dead() {
    let mut unread = table(&[p(200, 1, 100, NODE, DEAD)]);
    unread.unread.insert(4100, Some(0));
    assert_eq!(said(&ask(&unread, |_| {}), 200), "owner_uncertain");
    // Its agent's pid is one of another namespace.
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
    assert_eq!(said(&ask(&cut, |_| {}), 200), "unreadable");
    // Nobody knows its parent.
    check("not_orphan", &[p(200, 199, 100, NODE, DEAD)]);
}

#[test]
fn an_orphan_has_a_parent_that_did_not_beget_it() {
    let keeper = |env| p(150, 60, 50, "/usr/bin/keeper", env);
    let of_session = |sid| P {
        sid,
        ..p(200, 150, 100, NODE, DEAD)
    };
    // A subreaper of whatever kind, and one from a session that is over.
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
    // Its parent has the mark too, and what that is a child of has adopted it: one tree.
    let tree = [
        p(200, 1, 100, "/bin/sh", DEAD),
        p(201, 200, 101, NODE, DEAD),
    ];
    let strays = ask(&table(&tree), |_| {});
    assert_eq!(said(&strays, 201), "reap");
    assert!(
        strays
            .iter()
            .all(|stray| stray.subtree_root.pid == 201 || stray.subtree_root.pid == 200)
    );
    // What descends from it needs no mark.
    check(
        "reap",
        &[p(200, 1, 100, NODE, DEAD), p(201, 200, 101, "/bin/mcp", "")],
    );
}

#[test]
fn below_a_multiplexer_the_mark_lies() {
    let server = || p(300, 1, 50, "/usr/bin/tmux", DEAD);
    check("boundary", &[server()]);
    check("boundary", &[server(), p(301, 300, 60, "/bin/zsh", DEAD)]);
    // What a pane left behind, while its server lives and when it is gone.
    let left = "CLAUDECODE=1\0CLAUDE_PID=4100\0TMUX=/tmp/tmux-1000/default,300,0\0";
    check("multiplexed", &[server(), p(302, 1, 70, NODE, left)]);
    check("multiplexed", &[p(302, 1, 70, NODE, left)]);
    // The agent ran in it: the server has no mark.
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
fn zellij_without_the_mark_answers_for_itself_only() {
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
fn below_a_terminal_the_mark_lies() {
    let terminal = || p(310, 1, 50, "/usr/bin/kitty", DEAD);
    check("terminal", &[terminal(), p(311, 310, 60, "/bin/zsh", DEAD)]);
    // What its tabs have left behind, which no lineage tells any more.
    check("multiplexed", &[terminal(), p(312, 1, 70, NODE, DEAD)]);
    // It came later, and so did its mark.
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
    // `(server &)` in a shell that is no leftover, below something that nobody knows for a terminal.
    let shell = p(311, 305, 60, "/bin/zsh", DEAD);
    check("terminal_session", &[shell, of_session(311)]);
    // In the session of a shell that the agent was typed at, and in that of a leftover.
    check("reap", &[of_session(60)]);
    check("reap", &[p(311, 1, 60, "/bin/bash", DEAD), of_session(311)]);
}

#[test]
fn tool_shells() {
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
    // It came later.
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
    // Its owner is gone for sure, so its age is none of it.
    check("reap", &[p(200, 1, 9900, SHELL, DEAD)]);
    // To speak of it is not to be one.
    let grep = "/bin/grep\0/shell-snapshots/snapshot-";
    check("-", &[p(200, 1, 100, grep, "")]);
    let strays = ask(&table(&[p(200, 1, 9900, SHELL, BARE)]), |q| {
        q.min_age = 60 * S
    });
    assert_eq!(said(&strays, 200), "reap");
}

#[test]
fn a_recorded_session() {
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
        let strays = ask_recorded(&all, std::slice::from_ref(&recorded), |_| {});
        assert_eq!(said(&strays, 200), expected, "{recorded:?}");
    }
    // Its agent may have handed over while nobody looked.
    let claude = RecordedSession {
        agent: "claude-code".into(),
        ..alike(100, 4300)
    };
    let heir = P {
        sid: 91,
        tty: 7,
        ..p(90, 60, 120, "/x/claude", "")
    };
    let all = table(&[p(200, 60, 100, NODE, ""), heir]);
    let strays = ask_recorded(&all, std::slice::from_ref(&claude), |_| {});
    assert_eq!(said(&strays, 200), "agent_alive");
    // A user wants it kept.
    let kept = [ProcessKey {
        pid: 200,
        start: 100 * S,
    }];
    let strays = ask_recorded(&all, &[alike(100, 4300)], |q| q.kept = kept.to_vec());
    assert_eq!(said(&strays, 200), "kept_by_user");
}

#[test]
fn an_environment_tells_no_secrets() {
    let trace = EnvMarkers::of(b"A=1\0TOKEN=x\0CODEX_CI=1\0=\0\0B\0CLAUDE_PID=12\0", true);
    let marks: Vec<_> = trace
        .markers
        .iter()
        .map(|mark| (mark.variable, mark.agent_pid))
        .collect();
    assert_eq!(marks, [("CLAUDE_PID", Some(12)), ("CODEX_CI", None)]);
    let told = format!(
        "{:?}",
        EnvMarkers::of(b"CODEX_THREAD_ID=0198-secret\0", true)
    );
    assert!(!told.contains("secret"), "{told}");
    assert!(!EnvMarkers::of(b"REAPER_KEEP=0\0", true).keep);
    assert_eq!(EnvMarkers::of(b"CLAUDE_PID=1\0", true).owners().count(), 0);
}
