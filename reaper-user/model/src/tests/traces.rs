//! Whose those are of whom nothing is left of their makers but marks and the directory that they work in.

use std::path::Path;
use std::sync::Arc;

use super::inferred::found;
use super::rules::{read, world};
use super::world::World;
use crate::event::{ExitStatus, Image, ProcEntry, ProcessKey, TICK_NS, Uids};
use crate::facts::{Fact, FactSet, Facts, InheritedFacts};
use crate::leftover::EnvMarkers;
use crate::session::Evidence;

/// Who is adopted by it is adopted.
const INIT: u32 = 1;

fn begin() -> (World, ProcessKey) {
    with_rules("")
}

/// A world with a shell, whose agents are `cc` (claude-code), `codex` and `opencode`.
fn with_rules(rules: &str) -> (World, ProcessKey) {
    let agents = ["cc' \ncomm = 'cc", "opencode'\ncomm = 'opencode"];
    let agents = agents.map(|agent| format!("[[agent]]\nname = '{agent}'\n"));
    let agents = agents.concat().replace("'cc' ", "'claude-code'");
    let mut w = world(read(&format!("honor_keep = false\n{rules}\n{agents}")));
    w.model.set_infers_membership(true);
    let shell = found(&mut w, INIT, "bash", |_| {});
    // What it starts may have its marks from it.
    know(&mut w, shell, "A=1;", "", "");
    (w, shell)
}

/// What is read of one: its environment, where `;` is the end of a variable, its directory and its unit.
fn know(w: &mut World, key: ProcessKey, environ: &str, directory: &str, unit: &str) {
    let trace = EnvMarkers::of(
        environ.replace(';', "\0").as_bytes(),
        !environ.ends_with('…'),
    );
    let directory = Some(Arc::from(Path::new(directory))).filter(|_| !directory.is_empty());
    let facts = Facts {
        inherited: Fact::Known(Arc::new(InheritedFacts {
            env_markers: trace,
            directory,
        })),
        unit: Fact::Known(unit.into()),
        ..Facts::NOTHING
    };
    let now = w.now;
    w.model
        .set_facts(key, FactSet::INHERITED | FactSet::UNIT, facts, now);
}

/// An agent in a session of its own, that works there.
fn agent(
    w: &mut World,
    parent: ProcessKey,
    program: &str,
    environ: &str,
    directory: &str,
) -> ProcessKey {
    let key = found(w, parent.pid, program, |_| {});
    assert!(w.model.sessions.by_root(key).is_some(), "{program}");
    know(w, key, environ, directory, "");
    key
}

/// The root whose an orphan is by what has been read of it, and what says so.
fn concluded(w: &mut World, key: ProcessKey) -> Option<(ProcessKey, Evidence)> {
    assert!(!w.is_member(key) && w.model.facts_to_attribute(key).is_empty());
    let joined = w.model.attribute(key);
    assert_eq!(joined.first(), Some(&key).filter(|_| w.is_member(key)));
    let evidence = w.model.tree.get(key)?.state.member.inferred;
    Some((w.root_of(key)?, evidence?))
}

/// The same of one that is found now.
fn whose(w: &mut World, environ: &str, directory: &str) -> Option<(ProcessKey, Evidence)> {
    let key = found(w, INIT, "server", |_| {});
    assert!(w.model.is_unattributed(key));
    know(w, key, environ, directory, "");
    concluded(w, key)
}

fn marks_of(agent: ProcessKey) -> String {
    format!("A=1;CLAUDECODE=1;CLAUDE_PID={};", agent.pid)
}

const BY_PID: Evidence = Evidence::Marker("CLAUDE_PID");

#[test]
fn a_mark_that_names_the_pid_says_whose_it_is() {
    let (mut w, shell) = begin();
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    let other = agent(&mut w, shell, "cc", "", "/srv/app");
    for agent in [one, other] {
        for directory in ["", "/srv/app", "/srv/other"] {
            let said = whose(&mut w, &marks_of(agent), directory);
            assert_eq!(said, Some((agent, BY_PID)));
        }
    }
    // Nobody's pid, a stranger's, an agent's of another kind, the pid alone, and not all of the environment.
    let codex = agent(&mut w, shell, "codex", "", "/srv/codex");
    for environ in [
        "CLAUDECODE=1;CLAUDE_PID=99999;".to_owned(),
        marks_of(shell),
        marks_of(codex),
        format!("CLAUDE_PID={};", one.pid),
        format!("{}…", marks_of(one)),
        // One by which it is somebody else's too.
        format!("{}CODEX_CI=1;", marks_of(one)),
        format!("{}OPENCODE=1;OPENCODE_PID=99999;", marks_of(one)),
    ] {
        assert_eq!(whose(&mut w, &environ, "/srv/codex"), None, "{environ}");
    }
}

#[test]
fn a_mark_without_a_pid_is_that_of_the_only_one_that_ran() {
    let (mut w, shell) = begin();
    let codex = agent(&mut w, shell, "codex", "", "/srv/a");
    agent(&mut w, shell, "cc", "", "/srv/b");
    let mark = Evidence::Marker("CODEX_CI");
    assert_eq!(whose(&mut w, "CODEX_CI=1;", "/srv/b"), Some((codex, mark)));
    let second = agent(&mut w, shell, "codex", "", "/srv/b");
    assert_eq!(whose(&mut w, "CODEX_CI=1;", ""), None);
    assert_eq!(whose(&mut w, "CODEX_CI=1;", "/srv/c"), None);
    // Where it works may tell which of them it is.
    let told = whose(&mut w, "CODEX_CI=1;", "/srv/a/web");
    assert_eq!(told, Some((codex, Evidence::Directory)));
    w.dies_by_signal(second);
    let told = whose(&mut w, "CODEX_CI=1;", "");
    assert_eq!(told, Some((codex, mark)), "the other was gone");
    w.dies_by_signal(codex);
    assert_eq!(whose(&mut w, "CODEX_CI=1;", "/srv/a"), None);
}

#[test]
fn a_mark_that_somebody_may_have_handed_on_is_none() {
    let (mut w, shell) = begin();
    let plain = agent(&mut w, shell, "cc", "", "");
    let tmux = "TMUX=/tmp/tmux,77,0;";
    let inside = agent(
        &mut w,
        shell,
        "cc",
        &format!("{tmux}TERM_PROGRAM=vscode;"),
        "",
    );
    let marked = |agent, more: &str| marks_of(agent) + more;
    assert_eq!(whose(&mut w, &marked(plain, tmux), ""), None);
    assert_eq!(
        whose(&mut w, &marked(inside, "TERM_PROGRAM=vscode;"), ""),
        None
    );
    assert_eq!(
        whose(&mut w, &marked(inside, "TMUX=/tmp/t,78,0;"), ""),
        None
    );
    assert_eq!(
        whose(&mut w, &marked(inside, tmux), ""),
        Some((inside, BY_PID)),
        "that has been there before it"
    );
    // Where its root has it from is another's.
    let second = agent(&mut w, shell, "cc", "CODEX_CI=1;GEMINI_CLI=1;", "");
    let environ = marked(second, "CODEX_CI=1;GEMINI_CLI=1;");
    assert_eq!(whose(&mut w, &environ, ""), Some((second, BY_PID)));
    // In a pid namespace of its own the pid is another's.
    let capsule = found(&mut w, INIT, "init", |_| {});
    w.model.tree.get_mut(capsule).unwrap().namespace_init = true;
    let within = found(&mut w, capsule.pid, "server", |_| {});
    know(&mut w, within, &marks_of(plain), "", "");
    assert_eq!(concluded(&mut w, within), None);
}

#[test]
fn who_works_where_one_agent_does_is_its_own() {
    let (mut w, shell) = begin();
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
        assert_eq!(whose(&mut w, "A=1;", directory), expected, "{directory}");
    }
    for environ in ["TMUX=/tmp/t,7,0;", "STY=7.x;", "NVIM=x;", "CODEX_CI=1;…"] {
        assert_eq!(whose(&mut w, environ, "/srv/app"), None, "{environ}");
    }
    // Of one more it is not known where it works.
    let blind = found(&mut w, shell.pid, "codex", |_| {});
    let key = found(&mut w, INIT, "server", |_| {});
    let wanted = w.model.facts_to_attribute(key);
    assert_eq!(
        wanted.iter().map(|(of, _)| *of).collect::<Vec<_>>(),
        [key, blind]
    );
    know(&mut w, key, "A=1;", "/srv/app", "");
    w.model.set_facts(
        blind,
        FactSet::INHERITED | FactSet::UNIT,
        Facts::unreadable(),
        w.now,
    );
    assert_eq!(concluded(&mut w, key), None);
    w.dies_by_signal(blind);
    assert_eq!(
        whose(&mut w, "A=1;", "/srv/app"),
        own,
        "it had ended by then"
    );
    // Where two work, it is nobody's.
    agent(&mut w, shell, "codex", "", "/srv/app");
    assert_eq!(whose(&mut w, "A=1;", "/srv/app"), None);
}

#[test]
fn look_alikes_are_nobodys() {
    let (mut w, shell) = begin();
    let before = found(&mut w, INIT, "server", |_| {});
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    let stranger = found(&mut w, shell.pid, "bash", |_| {});
    let orphan = |w: &mut World, program: &str, change: &dyn Fn(&mut ProcEntry)| {
        w.now += TICK_NS;
        let key = w.new_key();
        w.row_with(key, INIT, program, |seen| {
            let mut image = Image::clone(&seen.image);
            (image.sid, image.pgid) = (key.pid, key.pid);
            seen.image = Arc::new(image);
            change(seen);
        })
    };
    let image = |change: fn(&mut Image, u32), pid: u32| {
        move |seen: &mut ProcEntry| change(Arc::make_mut(&mut seen.image), pid)
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
        orphan(&mut w, "server", &|seen| seen.uids = root),
        orphan(&mut w, "server", &|seen| seen.uids = changed),
        orphan(&mut w, "kitty", &|_| {}),
        // It is a person's shell's, by group or by session.
        orphan(
            &mut w,
            "server",
            &image(|image, pid| image.pgid = pid, stranger.pid),
        ),
        orphan(
            &mut w,
            "server",
            &image(|image, pid| image.sid = pid, stranger.pid),
        ),
        // Whoever has it is no adopter: a terminal and its shell.
        found(&mut w, stranger.pid, "bash", |_| {}),
    ];
    let marked = marks_of(one);
    for key in all {
        for environ in ["A=1;", &marked] {
            know(&mut w, key, environ, "/srv/app", "");
            assert!(w.model.attribute(key).is_empty(), "{key:?} {environ}");
        }
    }
    // Where it works says nothing of what has a terminal, is hidden, or began when the agent had ended; nor does
    // anything of what somebody manages.
    let typed = orphan(&mut w, "server", &|seen| {
        Arc::make_mut(&mut seen.image).tty = 7
    });
    let hidden = found(&mut w, 7, "server", |_| {});
    for key in [typed, hidden] {
        know(&mut w, key, "A=1;", "/srv/app", "");
        assert_eq!(concluded(&mut w, key), None);
        know(&mut w, key, &marked, "/srv/app", "");
        assert_eq!(concluded(&mut w, key), Some((one, BY_PID)));
    }
    let managed = found(&mut w, INIT, "server", |_| {});
    for environ in ["A=1;", &marked] {
        know(&mut w, managed, environ, "/srv/app", "web.service");
        assert_eq!(concluded(&mut w, managed), None);
    }
    know(&mut w, one, "", "/srv/app", "web.service");
    assert_eq!(
        concluded(&mut w, managed),
        Some((one, BY_PID)),
        "so is its agent"
    );
    // In the terminal that its agent was typed in too, by way of a wrapper.
    let codex = found(&mut w, shell.pid, "codex", |image| image.sid = shell.pid);
    know(&mut w, codex, "", "/srv/codex", "");
    let beside = found(&mut w, INIT, "server", |image| {
        (image.sid, image.pgid) = (shell.pid, stranger.pid)
    });
    know(&mut w, beside, "A=1;", "/srv/codex", "");
    assert_eq!(concluded(&mut w, beside), None);
    know(&mut w, beside, "CODEX_CI=1;", "", "");
    let mark = Evidence::Marker("CODEX_CI");
    assert_eq!(concluded(&mut w, beside), Some((codex, mark)));
    let of_group = found(&mut w, INIT, "server", |image| image.pgid = beside.pid);
    assert_eq!(
        w.model.tree.get(of_group).unwrap().state.member.inferred,
        Some(mark)
    );
    w.dies_by_signal(one);
    assert_eq!(whose(&mut w, "A=1;", "/srv/app"), None);
    assert_eq!(whose(&mut w, &marked, "/srv/app"), Some((one, BY_PID)));
}

#[test]
fn of_agents_in_agents_it_is_the_one_that_is_named_or_the_outermost() {
    let (mut w, shell) = begin();
    let outer = agent(&mut w, shell, "opencode", "", "/srv/app");
    let marks = format!("OPENCODE=1;OPENCODE_PID={};", outer.pid);
    let inner = agent(&mut w, outer, "cc", &marks, "/srv/app");
    let own = Evidence::Marker("OPENCODE_PID");
    assert_eq!(whose(&mut w, &marks, ""), Some((outer, own)));
    let both = marks.clone() + &marks_of(inner);
    let (root, _) = whose(&mut w, &both, "").unwrap();
    assert_eq!(root, inner);
    let told = whose(&mut w, "A=1;", "/srv/app");
    assert_eq!(told, Some((outer, Evidence::Directory)));
    // Its root had no time to be asked where its marks come from.
    let hasty = found(&mut w, outer.pid, "cc", |_| {});
    w.model.set_facts(
        hasty,
        FactSet::INHERITED | FactSet::UNIT,
        Facts::unreadable(),
        w.now,
    );
    let (root, _) = whose(&mut w, &(marks + &marks_of(hasty)), "").unwrap();
    assert_eq!(root, hasty);
}

#[test]
fn an_answer_that_comes_late_still_counts() {
    let reap = "[[rule]]\nname = 'r'\naction = 'reap'\ninferred = true\n";
    for (rules, expected) in [("", "report inferred"), (reap, "reap root_exited r")] {
        for directory in [false, true] {
            let (mut w, shell) = with_rules(rules);
            let one = agent(&mut w, shell, "cc", "", "/srv/app");
            let key = found(&mut w, INIT, "server", |_| {});
            // It dies before anything has been read, and its session closes.
            w.end(one, ExitStatus::Exited(0), Some(super::world::INIT));
            assert_eq!(w.session_events().last().unwrap(), "closed claude-code");
            let (environ, place) = match directory {
                true => ("A=1;".to_owned(), "/srv/app"),
                false => (marks_of(one), ""),
            };
            know(&mut w, key, &environ, place, "");
            assert_eq!(w.model.attribute(key), [key]);
            assert_eq!(w.root_of(key), Some(one));
            assert_eq!(w.why(key), expected);
            w.exit(key);
            assert_eq!(w.session_events(), ["closed claude-code"]);
        }
    }
    // The pid is another agent's by then.
    let (mut w, shell) = begin();
    let one = agent(&mut w, shell, "cc", "", "");
    w.dies_by_signal(one);
    let key = found(&mut w, INIT, "server", |_| {});
    w.now += TICK_NS;
    let again = ProcessKey {
        start: w.now,
        ..one
    };
    let again = w.row(again, shell.pid, "cc");
    know(&mut w, again, "", "", "");
    know(&mut w, key, &marks_of(one), "", "");
    assert_eq!(concluded(&mut w, key), Some((one, BY_PID)));
    assert_eq!(whose(&mut w, &marks_of(one), ""), Some((again, BY_PID)));
}

#[test]
fn what_it_has_begotten_meanwhile_is_a_member_too() {
    let (mut w, shell) = with_rules("[[boundary]]\nname = 'tmux'\ncomm = 'tmux'\n");
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    let key = found(&mut w, INIT, "server", |_| {});
    let worker = found(&mut w, key.pid, "worker", |_| {});
    let below = found(&mut w, worker.pid, "worker", |_| {});
    let tmux = found(&mut w, worker.pid, "tmux", |_| {});
    let pane = found(&mut w, tmux.pid, "bash", |_| {});
    let codex = found(&mut w, worker.pid, "codex", |_| {});
    assert!(!w.model.is_unattributed(worker), "its maker is known");
    know(&mut w, key, "A=1;", "/srv/app", "");
    know(&mut w, codex, "", "", "");
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
    assert!(w.model.attribute(key).is_empty(), "it is known by now");
}

#[test]
fn nobody_is_asked_who_cannot_be_a_member() {
    let (mut w, shell) = begin();
    let orphan = found(&mut w, INIT, "server", |_| {});
    assert!(!w.model.is_unattributed(orphan), "there has been no agent");
    let one = agent(&mut w, shell, "cc", "", "/srv/app");
    let member = found(&mut w, one.pid, "npm", |_| {});
    let tool = found(&mut w, INIT, "server", |image| image.pgid = member.pid);
    let child = found(&mut w, shell.pid, "make", |image| image.sid = shell.pid);
    for key in [one, member, tool, child, orphan, shell] {
        assert!(!w.model.is_unattributed(key) && w.model.facts_to_attribute(key).is_empty());
    }
    let suspect = found(&mut w, INIT, "server", |_| {});
    assert!(w.model.is_unattributed(suspect));
    assert_eq!(
        w.model.facts_to_attribute(suspect),
        [(suspect, FactSet::INHERITED | FactSet::UNIT)]
    );
    w.model.set_infers_membership(false);
    assert!(
        !w.model.is_unattributed(suspect),
        "the kernel tells who is born"
    );
}

/// What is said of an orphan whose marks name an agent that has died, with another agent below a shell alive.
fn of_a_dead_one(environ_of_shell: Option<&str>, environ_of_other: &str) -> Option<Evidence> {
    let (mut w, shell) = begin();
    let one = agent(&mut w, shell, "cc", "", "");
    let inner = found(&mut w, shell.pid, "zsh", |_| {});
    let marks = marks_of(one);
    let with_marks = |environ: &str| environ.replace("MARKS", &marks);
    agent(&mut w, inner, "codex", &with_marks(environ_of_other), "");
    let key = found(&mut w, INIT, "server", |_| {});
    w.dies_by_signal(one);
    know(&mut w, key, &marks, "", "");
    assert_eq!(
        w.model.facts_to_attribute(key),
        [(inner, FactSet::INHERITED)]
    );
    match environ_of_shell {
        Some(environ) => know(&mut w, inner, &with_marks(environ), "", ""),
        None => {
            let unread = Facts::unreadable();
            w.model.set_facts(inner, FactSet::INHERITED, unread, w.now);
        }
    }
    let said = concluded(&mut w, key);
    assert!(said.is_none_or(|(root, _)| root == one));
    said.map(|(_, evidence)| evidence)
}

#[test]
fn mark_carried_by_a_living_agent_names_no_session() {
    assert_eq!(of_a_dead_one(Some("A=1;"), "B=1;"), Some(BY_PID));
    assert_eq!(of_a_dead_one(Some("A=1;"), "MARKS"), None);
    // The shell above it was started inside of the one that is dead.
    assert_eq!(of_a_dead_one(Some("MARKS"), "B=1;"), None);
    assert_eq!(of_a_dead_one(Some("MARKS…"), "B=1;"), None);
    assert_eq!(of_a_dead_one(None, "B=1;"), None);
}
