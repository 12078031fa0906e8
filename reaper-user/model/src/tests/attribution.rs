//! Attribution of processes whose only evidence is environment markers and the working directory.

use std::path::Path;
use std::sync::Arc;

use super::inferred::discover;
use super::rules::{read, world};
use super::world::World;
use crate::event::{ExitStatus, Image, ProcEntry, ProcessKey, TICK_NS, Uids};
use crate::facts::{Fact, FactSet, Facts, InheritedFacts};
use crate::leftover::EnvMarkers;
use crate::session::Evidence;

/// Pid of the adopter of orphans.
const INIT: u32 = 1;

fn start() -> (World, ProcessKey) {
    with_rules("")
}

/// Returns a world with a shell. The agents are `cc` (claude-code), `codex` and `opencode`.
fn with_rules(rules: &str) -> (World, ProcessKey) {
    let agents = ["cc' \ncomm = 'cc", "opencode'\ncomm = 'opencode"];
    let agents = agents.map(|agent| format!("[[agent]]\nname = '{agent}'\n"));
    let agents = agents.concat().replace("'cc' ", "'claude-code'");
    let mut w = world(read(&format!("honor_keep = false\n{rules}\n{agents}")));
    w.model.set_infers_membership(true);
    let shell = discover(&mut w, INIT, "bash", |_| {});
    // Processes can inherit markers from the shell. So its environment must be known.
    set_evidence(&mut w, shell, "A=1;", "", "");
    (w, shell)
}

/// Delivers facts about a process: its environment (`;` ends a variable, a final `…` cuts it off), directory and unit.
fn set_evidence(w: &mut World, key: ProcessKey, environ: &str, directory: &str, unit: &str) {
    let trace = EnvMarkers::of(
        environ.replace(';', "\0").as_bytes(),
        !environ.ends_with('…'),
    );
    let directory = Some(Arc::from(Path::new(directory))).filter(|_| !directory.is_empty());
    let facts = Facts {
        inherited: Fact::Known(Arc::new(InheritedFacts {
            env_markers: trace,
            directory,
            ..InheritedFacts::default()
        })),
        unit: Fact::Known(unit.into()),
        ..Facts::NOTHING
    };
    let now = w.now;
    w.model
        .set_facts(key, FactSet::INHERITED | FactSet::UNIT, facts, now);
}

/// Discovers an agent that is a root, with this environment and working directory.
fn agent(
    w: &mut World,
    parent: ProcessKey,
    program: &str,
    environ: &str,
    directory: &str,
) -> ProcessKey {
    let key = discover(w, parent.pid, program, |_| {});
    assert!(w.model.sessions.by_root(key).is_some(), "{program}");
    set_evidence(w, key, environ, directory, "");
    key
}

/// Attributes an orphan whose facts are known. Returns the root and the evidence.
fn attribute(w: &mut World, key: ProcessKey) -> Option<(ProcessKey, Evidence)> {
    assert!(!w.is_member(key) && w.model.facts_to_attribute(key).is_empty());
    let joined = w.model.attribute(key);
    assert_eq!(joined.first(), Some(&key).filter(|_| w.is_member(key)));
    let evidence = w.model.tree.get(key)?.state.member.inferred;
    Some((w.root_of(key)?, evidence?))
}

/// Discovers an orphan with these facts and attributes it.
fn attribute_new(w: &mut World, environ: &str, directory: &str) -> Option<(ProcessKey, Evidence)> {
    let key = discover(w, INIT, "server", |_| {});
    assert!(w.model.is_unattributed(key));
    set_evidence(w, key, environ, directory, "");
    attribute(w, key)
}

fn markers_of(agent: ProcessKey) -> String {
    format!("A=1;CLAUDECODE=1;CLAUDE_PID={};", agent.pid)
}

const BY_PID: Evidence = Evidence::Marker("CLAUDE_PID");

#[test]
fn marker_with_a_pid_identifies_the_session() {
    let (mut w, shell) = start();
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    let other = agent(&mut w, shell, "cc", "", "/srv/app");
    for agent in [one, other] {
        for directory in ["", "/srv/app", "/srv/other"] {
            let found = attribute_new(&mut w, &markers_of(agent), directory);
            assert_eq!(found, Some((agent, BY_PID)));
        }
    }
    // An unused pid, the pid of a shell or of another kind of agent, only the pid, and an incomplete environment.
    let codex = agent(&mut w, shell, "codex", "", "/srv/codex");
    for environ in [
        "CLAUDECODE=1;CLAUDE_PID=99999;".to_owned(),
        markers_of(shell),
        markers_of(codex),
        format!("CLAUDE_PID={};", one.pid),
        format!("{}…", markers_of(one)),
        // Also a marker of another kind of agent.
        format!("{}CODEX_CI=1;", markers_of(one)),
        format!("{}OPENCODE=1;OPENCODE_PID=99999;", markers_of(one)),
    ] {
        assert_eq!(
            attribute_new(&mut w, &environ, "/srv/codex"),
            None,
            "{environ}"
        );
    }
}

#[test]
fn marker_without_a_pid_needs_a_single_running_agent() {
    let (mut w, shell) = start();
    let codex = agent(&mut w, shell, "codex", "", "/srv/a");
    agent(&mut w, shell, "cc", "", "/srv/b");
    let marker = Evidence::Marker("CODEX_CI");
    assert_eq!(
        attribute_new(&mut w, "CODEX_CI=1;", "/srv/b"),
        Some((codex, marker))
    );
    let second = agent(&mut w, shell, "codex", "", "/srv/b");
    assert_eq!(attribute_new(&mut w, "CODEX_CI=1;", ""), None);
    assert_eq!(attribute_new(&mut w, "CODEX_CI=1;", "/srv/c"), None);
    // The working directory decides between two agents.
    let found = attribute_new(&mut w, "CODEX_CI=1;", "/srv/a/web");
    assert_eq!(found, Some((codex, Evidence::Directory)));
    w.kill(second);
    let found = attribute_new(&mut w, "CODEX_CI=1;", "");
    assert_eq!(found, Some((codex, marker)), "the other agent has exited");
    w.kill(codex);
    assert_eq!(attribute_new(&mut w, "CODEX_CI=1;", "/srv/a"), None);
}

#[test]
fn marker_that_may_be_passed_on_is_no_evidence() {
    let (mut w, shell) = start();
    let plain = agent(&mut w, shell, "cc", "", "");
    let tmux = "TMUX=/tmp/tmux,77,0;";
    let inside = agent(
        &mut w,
        shell,
        "cc",
        &format!("{tmux}TERM_PROGRAM=vscode;"),
        "",
    );
    let markers = |agent, more: &str| markers_of(agent) + more;
    assert_eq!(attribute_new(&mut w, &markers(plain, tmux), ""), None);
    assert_eq!(
        attribute_new(&mut w, &markers(inside, "TERM_PROGRAM=vscode;"), ""),
        None
    );
    assert_eq!(
        attribute_new(&mut w, &markers(inside, "TMUX=/tmp/t,78,0;"), ""),
        None
    );
    assert_eq!(
        attribute_new(&mut w, &markers(inside, tmux), ""),
        Some((inside, BY_PID)),
        "the agent runs in the same tmux"
    );
    // Markers that the root has inherited itself are ignored.
    let second = agent(&mut w, shell, "cc", "CODEX_CI=1;GEMINI_CLI=1;", "");
    let environ = markers(second, "CODEX_CI=1;GEMINI_CLI=1;");
    assert_eq!(attribute_new(&mut w, &environ, ""), Some((second, BY_PID)));
    // In another pid namespace, the pid of the marker names another process.
    let namespace_init = discover(&mut w, INIT, "init", |_| {});
    w.model.tree.get_mut(namespace_init).unwrap().namespace_init = true;
    let child = discover(&mut w, namespace_init.pid, "server", |_| {});
    set_evidence(&mut w, child, &markers_of(plain), "", "");
    assert_eq!(attribute(&mut w, child), None);
}

#[test]
fn working_directory_of_a_single_agent_is_evidence() {
    let (mut w, shell) = start();
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    agent(&mut w, shell, "codex", "", "/srv/other");
    let own = Some((one, Evidence::Directory));
    for (directory, expected) in [
        ("/srv/app", own),
        ("/srv/app/web", own),
        ("/srv/apple", None),
        ("/srv", None),
        ("", None),
    ] {
        assert_eq!(
            attribute_new(&mut w, "A=1;", directory),
            expected,
            "{directory}"
        );
    }
    for environ in ["TMUX=/tmp/t,7,0;", "STY=7.x;", "NVIM=x;", "CODEX_CI=1;…"] {
        assert_eq!(
            attribute_new(&mut w, environ, "/srv/app"),
            None,
            "{environ}"
        );
    }
    // The working directory of another agent is unknown.
    let unreadable = discover(&mut w, shell.pid, "codex", |_| {});
    let key = discover(&mut w, INIT, "server", |_| {});
    let wanted = w.model.facts_to_attribute(key);
    assert_eq!(
        wanted.iter().map(|(of, _)| *of).collect::<Vec<_>>(),
        [key, unreadable]
    );
    set_evidence(&mut w, key, "A=1;", "/srv/app", "");
    w.model.set_facts(
        unreadable,
        FactSet::INHERITED | FactSet::UNIT,
        Facts::unreadable(),
        w.now,
    );
    assert_eq!(attribute(&mut w, key), None);
    w.kill(unreadable);
    assert_eq!(
        attribute_new(&mut w, "A=1;", "/srv/app"),
        own,
        "the other agent has exited"
    );
    // If two agents work in a directory, it is no evidence.
    agent(&mut w, shell, "codex", "", "/srv/app");
    assert_eq!(attribute_new(&mut w, "A=1;", "/srv/app"), None);
}

#[test]
fn similar_processes_are_not_attributed() {
    let (mut w, shell) = start();
    let before = discover(&mut w, INIT, "server", |_| {});
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    let other_shell = discover(&mut w, shell.pid, "bash", |_| {});
    let orphan = |w: &mut World, program: &str, change: &dyn Fn(&mut ProcEntry)| {
        w.now += TICK_NS;
        let key = w.new_key();
        w.row_with(key, INIT, program, |entry| {
            let mut image = Image::clone(&entry.image);
            (image.sid, image.pgid) = (key.pid, key.pid);
            entry.image = Arc::new(image);
            change(entry);
        })
    };
    let image = |change: fn(&mut Image, u32), pid: u32| {
        move |entry: &mut ProcEntry| change(Arc::make_mut(&mut entry.image), pid)
    };
    let root = Uids {
        real: 0,
        effective: 0,
    };
    let changed = Uids {
        effective: 0,
        ..super::world::USER
    };
    let all = [
        before,
        orphan(&mut w, "server", &|entry| entry.uids = root),
        orphan(&mut w, "server", &|entry| entry.uids = changed),
        orphan(&mut w, "kitty", &|_| {}),
        // In the process group or the kernel session of a shell.
        orphan(
            &mut w,
            "server",
            &image(|image, pid| image.pgid = pid, other_shell.pid),
        ),
        orphan(
            &mut w,
            "server",
            &image(|image, pid| image.sid = pid, other_shell.pid),
        ),
        // The parent is no adopter, like a terminal above its shell.
        discover(&mut w, other_shell.pid, "bash", |_| {}),
    ];
    let markers = markers_of(one);
    for key in all {
        for environ in ["A=1;", &markers] {
            set_evidence(&mut w, key, environ, "/srv/app", "");
            assert!(w.model.attribute(key).is_empty(), "{key:?} {environ}");
        }
    }
    // The working directory is no evidence for a process with a terminal or an unknown parent. No evidence counts for a
    // process in its own systemd unit.
    let typed = orphan(&mut w, "server", &|entry| {
        Arc::make_mut(&mut entry.image).tty = 7
    });
    let hidden = discover(&mut w, 7, "server", |_| {});
    for key in [typed, hidden] {
        set_evidence(&mut w, key, "A=1;", "/srv/app", "");
        assert_eq!(attribute(&mut w, key), None);
        set_evidence(&mut w, key, &markers, "/srv/app", "");
        assert_eq!(attribute(&mut w, key), Some((one, BY_PID)));
    }
    let managed = discover(&mut w, INIT, "server", |_| {});
    for environ in ["A=1;", &markers] {
        set_evidence(&mut w, managed, environ, "/srv/app", "web.service");
        assert_eq!(attribute(&mut w, managed), None);
    }
    set_evidence(&mut w, one, "", "/srv/app", "web.service");
    assert_eq!(
        attribute(&mut w, managed),
        Some((one, BY_PID)),
        "the agent is in the same unit"
    );
    // In the kernel session of the agent's terminal: the directory is no evidence, a marker is.
    let codex = discover(&mut w, shell.pid, "codex", |image| image.sid = shell.pid);
    set_evidence(&mut w, codex, "", "/srv/codex", "");
    let in_terminal = discover(&mut w, INIT, "server", |image| {
        (image.sid, image.pgid) = (shell.pid, other_shell.pid)
    });
    set_evidence(&mut w, in_terminal, "A=1;", "/srv/codex", "");
    assert_eq!(attribute(&mut w, in_terminal), None);
    set_evidence(&mut w, in_terminal, "CODEX_CI=1;", "", "");
    let marker = Evidence::Marker("CODEX_CI");
    assert_eq!(attribute(&mut w, in_terminal), Some((codex, marker)));
    let of_group = discover(&mut w, INIT, "server", |image| image.pgid = in_terminal.pid);
    assert_eq!(
        w.model.tree.get(of_group).unwrap().state.member.inferred,
        Some(marker)
    );
    w.kill(one);
    assert_eq!(attribute_new(&mut w, "A=1;", "/srv/app"), None);
    assert_eq!(
        attribute_new(&mut w, &markers, "/srv/app"),
        Some((one, BY_PID))
    );
}

#[test]
fn evidence_selects_the_named_nested_agent_or_the_outermost() {
    let (mut w, shell) = start();
    let outer = agent(&mut w, shell, "opencode", "", "/srv/app");
    let markers = format!("OPENCODE=1;OPENCODE_PID={};", outer.pid);
    let inner = agent(&mut w, outer, "cc", &markers, "/srv/app");
    let own = Evidence::Marker("OPENCODE_PID");
    assert_eq!(attribute_new(&mut w, &markers, ""), Some((outer, own)));
    let both = markers.clone() + &markers_of(inner);
    let (root, _) = attribute_new(&mut w, &both, "").unwrap();
    assert_eq!(root, inner);
    let found = attribute_new(&mut w, "A=1;", "/srv/app");
    assert_eq!(found, Some((outer, Evidence::Directory)));
    // The inherited markers of this root are unknown.
    let unreadable = discover(&mut w, outer.pid, "cc", |_| {});
    w.model.set_facts(
        unreadable,
        FactSet::INHERITED | FactSet::UNIT,
        Facts::unreadable(),
        w.now,
    );
    let (root, _) = attribute_new(&mut w, &(markers + &markers_of(unreadable)), "").unwrap();
    assert_eq!(root, unreadable);
}

#[test]
fn evidence_read_after_the_roots_exit_still_counts() {
    let reap = "[[rule]]\nname = 'r'\naction = 'reap'\ninferred = true\n";
    for (rules, expected) in [("", "report inferred"), (reap, "reap root_exited r")] {
        for directory in [false, true] {
            let (mut w, shell) = with_rules(rules);
            let one = agent(&mut w, shell, "cc", "", "/srv/app");
            let key = discover(&mut w, INIT, "server", |_| {});
            // The root exits before any fact is read, and its session closes.
            w.exit_with(one, ExitStatus::Exited(0), Some(super::world::INIT));
            assert_eq!(w.session_events().last().unwrap(), "closed claude-code");
            let (environ, place) = match directory {
                true => ("A=1;".to_owned(), "/srv/app"),
                false => (markers_of(one), ""),
            };
            set_evidence(&mut w, key, &environ, place, "");
            assert_eq!(w.model.attribute(key), [key]);
            assert_eq!(w.root_of(key), Some(one));
            assert_eq!(w.why(key), expected);
            w.exit(key);
            assert_eq!(w.session_events(), ["closed claude-code"]);
        }
    }
    // Another agent has reused the pid.
    let (mut w, shell) = start();
    let one = agent(&mut w, shell, "cc", "", "");
    w.kill(one);
    let key = discover(&mut w, INIT, "server", |_| {});
    w.now += TICK_NS;
    let again = ProcessKey {
        start: w.now,
        ..one
    };
    let again = w.row(again, shell.pid, "cc");
    set_evidence(&mut w, again, "", "", "");
    set_evidence(&mut w, key, &markers_of(one), "", "");
    assert_eq!(attribute(&mut w, key), Some((one, BY_PID)));
    assert_eq!(
        attribute_new(&mut w, &markers_of(one), ""),
        Some((again, BY_PID))
    );
}

#[test]
fn descendants_of_an_attributed_process_are_members() {
    let (mut w, shell) = with_rules("[[boundary]]\nname = 'tmux'\ncomm = 'tmux'\n");
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    let key = discover(&mut w, INIT, "server", |_| {});
    let worker = discover(&mut w, key.pid, "worker", |_| {});
    let below = discover(&mut w, worker.pid, "worker", |_| {});
    let tmux = discover(&mut w, worker.pid, "tmux", |_| {});
    let pane = discover(&mut w, tmux.pid, "bash", |_| {});
    let codex = discover(&mut w, worker.pid, "codex", |_| {});
    assert!(!w.model.is_unattributed(worker), "its parent is known");
    set_evidence(&mut w, key, "A=1;", "/srv/app", "");
    set_evidence(&mut w, codex, "", "", "");
    assert_eq!(w.model.attribute(key), [key, worker, below]);
    for member in [key, worker, below] {
        let node = w.model.tree.get(member).unwrap();
        assert_eq!(node.state.member.inferred, Some(Evidence::Directory));
        let (_, directory) = w.model.sessions.evidence(node).unwrap();
        assert_eq!(directory, Some(Path::new("/srv/app")));
        assert_eq!(w.root_of(member), Some(one));
    }
    assert!(!w.is_member(tmux) && !w.is_member(pane));
    assert_eq!(w.root_of(codex), Some(codex));
    assert!(w.model.attribute(key).is_empty(), "already attributed");
}

#[test]
fn facts_are_not_requested_for_impossible_members() {
    let (mut w, shell) = start();
    let orphan = discover(&mut w, INIT, "server", |_| {});
    assert!(!w.model.is_unattributed(orphan), "no agent has run yet");
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    let member = discover(&mut w, one.pid, "npm", |_| {});
    let tool = discover(&mut w, INIT, "server", |image| image.pgid = member.pid);
    let child = discover(&mut w, shell.pid, "make", |image| image.sid = shell.pid);
    for key in [one, member, tool, child, orphan, shell] {
        assert!(!w.model.is_unattributed(key) && w.model.facts_to_attribute(key).is_empty());
    }
    let late_orphan = discover(&mut w, INIT, "server", |_| {});
    assert!(w.model.is_unattributed(late_orphan));
    assert_eq!(
        w.model.facts_to_attribute(late_orphan),
        [(late_orphan, FactSet::INHERITED | FactSet::UNIT)]
    );
    w.model.set_infers_membership(false);
    assert!(!w.model.is_unattributed(late_orphan), "forks are reported");
}

/// Returns the evidence about an orphan. Its markers name an exited agent, while another agent below a shell is alive.
fn evidence_for_exited_agent(
    environ_of_shell: Option<&str>,
    environ_of_other: &str,
) -> Option<Evidence> {
    let (mut w, shell) = start();
    let one = agent(&mut w, shell, "cc", "", "");
    let inner = discover(&mut w, shell.pid, "zsh", |_| {});
    let markers = markers_of(one);
    let with_markers = |environ: &str| environ.replace("MARKERS", &markers);
    agent(&mut w, inner, "codex", &with_markers(environ_of_other), "");
    let key = discover(&mut w, INIT, "server", |_| {});
    w.kill(one);
    set_evidence(&mut w, key, &markers, "", "");
    assert_eq!(
        w.model.facts_to_attribute(key),
        [(inner, FactSet::INHERITED)]
    );
    match environ_of_shell {
        Some(environ) => set_evidence(&mut w, inner, &with_markers(environ), "", ""),
        None => {
            let unread = Facts::unreadable();
            w.model.set_facts(inner, FactSet::INHERITED, unread, w.now);
        }
    }
    let found = attribute(&mut w, key);
    assert!(found.is_none_or(|(root, _)| root == one));
    found.map(|(_, evidence)| evidence)
}

#[test]
fn marker_carried_by_a_living_agent_is_no_evidence() {
    assert_eq!(
        evidence_for_exited_agent(Some("A=1;"), "B=1;"),
        Some(BY_PID)
    );
    assert_eq!(evidence_for_exited_agent(Some("A=1;"), "MARKERS"), None);
    // The shell above the living agent was started by the exited agent.
    assert_eq!(evidence_for_exited_agent(Some("MARKERS"), "B=1;"), None);
    assert_eq!(evidence_for_exited_agent(Some("MARKERS…"), "B=1;"), None);
    assert_eq!(evidence_for_exited_agent(None, "B=1;"), None);
}
