//! Interpreters that rules recognise only by the resolved path of their script.

use reaper_common::{MEMBER_CANDIDATE, MEMBER_KERNEL_KILLABLE, MEMBER_ROOT, MEMBER_TRACKED};

use toml::de::DeTable;

use super::rules::{ruled, set_facts, world};
use super::world::{self, INIT, World, session_event_names};
use crate::Reclassified;
use crate::event::{ExitStatus, Membership, ProcessKey};
use crate::facts::{Fact, FactSet, Facts};
use crate::policy::Verdict;
use crate::rules::Rules;

const RULES: &str = "[[agent]]\nname = 'gemini'\nexe = '**/node'\nscript = '**/gemini.js'\n\
     [[server]]\nname = 'serve'\nexe = '**/node'\nscript = '**/serve.js'\n\
     [[boundary]]\nname = 'editor'\nexe = '**/node'\nscript = '**/editor.js'\n\
     [[keep]]\nname = 'daemon'\nexe = '**/node'\nscript = '**/daemon.js'\n\
     [[agent]]\nname = 'shell'\nexe = '**/zsh'\nscript = '**/agent.sh'\n";

fn start() -> World {
    world(ruled(RULES))
}

pub(super) fn resolve_script(w: &mut World, key: ProcessKey, script: Option<&str>) -> Reclassified {
    let node = w.model.tree.get(key).unwrap();
    let matched = |path: &str| w.model.rules.matched_script(&node.image, path.into());
    let found = Facts {
        script: script.map_or(Fact::Unreadable, |path| Fact::Known(matched(path))),
        ..Facts::NOTHING
    };
    set_facts(w, key, FactSet::SCRIPT, found);
    let now = w.now;
    let mut out = Vec::new();
    let all = w.model.reclassify(key, now, &mut out);
    w.session_events.extend(session_event_names(&w.model, &out));
    world::assert_consistent(&w.model);
    all
}

#[test]
fn only_script_without_a_match_as_given_is_resolved() {
    for (program, expected) in [
        ("node my-tool", true),
        ("node ./x/a.js", true),
        ("node /x/gemini.js", false),
        ("node -e code", false),
        ("node", false),
        // Scripts are resolved only for interpreters that a rule names.
        ("perl my-tool", false),
        ("zsh my-tool", true),
        ("zsh -c code", false),
    ] {
        let mut w = start();
        let key = w.spawn(INIT, program);
        assert_eq!(w.model.is_awaited(key), expected, "{program}");
        // The copy has not executed the program itself.
        let copy = w.fork(key);
        assert!(!w.model.is_awaited(copy));
        w.exit(key);
        assert!(!w.model.is_awaited(key));
    }
}

#[test]
fn agent_by_resolved_script_owns_its_earlier_children() {
    let mut w = start();
    let agent = w.spawn(INIT, "node my-tool");
    let shell = w.spawn(agent, "sh");
    let tool = w.spawn(shell, "npm");
    w.exit(shell);
    let mux = w.spawn(agent, "editor");
    let inner = w.spawn(agent, "claude");
    let inner_tool = w.spawn(inner, "sh");
    w.session_events();
    let all = resolve_script(&mut w, agent, Some("/lib/gemini.js"));
    assert_eq!(w.session_events(), ["opened gemini"]);
    assert_eq!(all.joined, [tool, mux]);
    assert_eq!([tool, mux].map(|key| w.root_of(key)), [Some(agent); 2]);
    assert_eq!(w.root_of(inner_tool), Some(inner));
    assert!(!w.model.is_awaited(agent));
    w.kill(agent);
    // The inner agent's session is nested in the one that opened later.
    for key in [tool, mux, inner, inner_tool] {
        assert_eq!(w.why(key), "reap root_exited");
    }
}

#[test]
fn agent_by_resolved_script_does_not_own_children_before_exec() {
    let mut w = start();
    let agent = w.spawn(INIT, "node wrapper");
    let server = w.spawn(agent, "sh");
    let of_server = w.spawn(server, "npm");
    w.exec(agent, "node my-tool");
    let tool = w.spawn(agent, "sh");
    // The exec may be reported once more.
    let exec = w.events[w.events.len() - 3].clone();
    w.apply(exec);
    let all = resolve_script(&mut w, agent, Some("/lib/gemini.js"));
    assert_eq!(all.joined, [tool]);
    w.kill(agent);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!([server, of_server].map(|key| w.root_of(key)), [None; 2]);
}

#[test]
fn awaited_scripts_may_be_nested() {
    for (outer_is_agent, inner_first) in
        [(true, true), (true, false), (false, true), (false, false)]
    {
        let mut w = start();
        let outer = w.spawn(INIT, "node my-tool");
        let shell = w.spawn(outer, "sh");
        let inner = w.spawn(shell, "node other");
        let tool = w.spawn(inner, "npm");
        let resolve = |w: &mut World, key| {
            let script = match (key == outer, outer_is_agent) {
                (true, true) => "/lib/gemini.js",
                (true, false) => "/x/other.js",
                (false, true) => "/x/other.js",
                (false, false) => "/lib/gemini.js",
            };
            resolve_script(w, key, Some(script));
        };
        match inner_first {
            true => [inner, outer].map(|key| resolve(&mut w, key)),
            false => [outer, inner].map(|key| resolve(&mut w, key)),
        };
        let root = if outer_is_agent { outer } else { inner };
        let expected = outer_is_agent.then_some(outer);
        assert_eq!([outer, shell].map(|key| w.root_of(key)), [expected; 2]);
        assert_eq!([inner, tool].map(|key| w.root_of(key)), [Some(root); 2]);
        assert!(![outer, inner].iter().any(|key| w.model.is_awaited(*key)));
    }
}

#[test]
fn boundary_below_an_awaited_agent_stays_a_boundary() {
    let mut w = start();
    let agent = w.spawn(INIT, "node my-tool");
    let editor = w.spawn(agent, "node /x/editor.js");
    let work = w.spawn(editor, "sh");
    let all = resolve_script(&mut w, agent, Some("/lib/gemini.js"));
    assert_eq!(all.joined, []);
    w.kill(agent);
    assert_eq!([editor, work].map(|key| w.root_of(key)), [None; 2]);
}

#[test]
fn script_without_a_rule_changes_nothing() {
    for script in [Some("/x/other.js"), None] {
        let mut w = start();
        let key = w.spawn(INIT, "node my-tool");
        let child = w.spawn(key, "sh");
        let all = resolve_script(&mut w, key, script);
        assert_eq!(all.joined, []);
        assert_eq!(w.model.take_released(), [child, key]);
        assert_eq!(w.session_events(), Vec::<String>::new());
        assert!(!w.model.is_awaited(key));
        w.kill(key);
        assert_eq!(w.decide(child).verdict, Verdict::Keep);
    }
}

#[test]
fn resolved_path_of_an_earlier_script_is_ignored() {
    let mut w = start();
    let key = w.spawn(INIT, "node my-tool");
    let before = w.model.tree.get(key).unwrap().image.clone();
    w.exec(key, "node another");
    let found = Facts {
        script: Fact::Known(
            w.model
                .rules
                .matched_script(&before, "/lib/gemini.js".into()),
        ),
        ..Facts::NOTHING
    };
    set_facts(&mut w, key, FactSet::SCRIPT, found);
    let now = w.now;
    let all = w.model.reclassify(key, now, &mut Vec::new());
    assert_eq!(all, Reclassified::default());
    assert!(w.model.is_awaited(key), "the path is requested again");
    w.exec(key, "bash");
    assert!(!w.model.is_awaited(key));
}

#[test]
fn changed_rules_determine_which_scripts_are_awaited() {
    let mut w = start();
    let key = w.spawn(INIT, "node my-tool");
    w.model.set_rules(ruled(RULES));
    assert!(w.model.is_awaited(key));
    assert!(w.model.needs_script(w.model.tree.get(key).unwrap()));
    w.model.set_rules(ruled(
        "[[agent]]\nname = 'mine'\nexe = '**/node'\nscript = 'my-tool'\n",
    ));
    assert!(!w.model.is_awaited(key));
    assert_eq!(w.model.take_released(), [key]);
}

#[test]
fn kernel_tracks_an_awaited_tree_until_it_is_resolved() {
    let mut w = start();
    let key = w.spawn(INIT, "node my-tool");
    let child = w.spawn(key, "sh");
    let root = key;
    let candidate = Membership {
        session: Some(root),
        flags: MEMBER_TRACKED | MEMBER_CANDIDATE,
    };
    for key in [key, child] {
        assert_eq!(w.model.wanted_membership(key), Some(candidate));
        assert!(!w.model.is_untracked(key));
    }
    resolve_script(&mut w, key, Some("/lib/gemini.js"));
    for (key, flags) in [(key, MEMBER_TRACKED | MEMBER_ROOT), (child, MEMBER_TRACKED)] {
        let wanted = w.model.wanted_membership(key).unwrap();
        assert_eq!(wanted.flags & !MEMBER_KERNEL_KILLABLE, flags);
        assert_eq!(wanted.session, Some(root));
    }

    let mut w = start();
    let key = w.spawn(INIT, "node my-tool");
    let child = w.spawn(key, "sh");
    resolve_script(&mut w, key, None);
    for key in [key, child] {
        assert_eq!(w.model.wanted_membership(key), None);
        assert!(w.model.is_untracked(key));
    }
}

#[test]
fn member_is_reclassified_by_its_resolved_script() {
    let mut w = start();
    let outer = w.spawn(INIT, "claude");
    let agent = w.spawn(outer, "node my-tool");
    let server = w.spawn(outer, "node other");
    let tool = w.spawn(server, "sh");
    let daemon = w.spawn(outer, "node my-daemon");
    // The service has already written the entry that the process had as a member.
    w.model
        .set_membership(agent, w.model.wanted_membership(agent));
    resolve_script(&mut w, agent, Some("/lib/gemini.js"));
    let all = resolve_script(&mut w, server, Some("/lib/serve.js"));
    assert_eq!(all.left, [tool]);
    resolve_script(&mut w, daemon, Some("/lib/daemon.js"));
    assert_eq!(w.root_of(agent), Some(agent));
    assert_eq!(w.root_of(tool), Some(server));
    w.kill(outer);
    assert_eq!(w.why(agent), "reap root_exited");
    assert_eq!(w.why(server), "keep root_alive");
    assert_eq!(w.why(daemon), "keep keep_rule daemon");
    w.exit_with(server, ExitStatus::Exited(0), None);
    assert_eq!(w.why(tool), "reap root_exited");
}

/// Returns a process of an agent that has exited.
fn due(program: &str) -> (World, ProcessKey) {
    let mut w = start();
    let agent = w.spawn(INIT, "claude");
    let key = w.spawn(agent, program);
    assert_eq!(w.why(key), "keep root_alive");
    w.kill(agent);
    (w, key)
}

#[test]
fn due_member_waits_for_a_script_that_might_keep_it() {
    for (program, expected) in [
        ("node my-tool", "wait unread"),
        ("node /x/a.js", "wait unread"),
        ("node /x/daemon.js", "keep keep_rule daemon"),
        ("node -e code", "reap root_exited"),
        ("node", "reap root_exited"),
        // Only an agent rule asks for scripts of zsh.
        ("zsh my-tool", "reap root_exited"),
        ("perl my-tool", "reap root_exited"),
    ] {
        let (w, key) = due(program);
        assert_eq!(w.why(key), expected, "{program}");
        let needs = match expected {
            "wait unread" => FactSet::SCRIPT,
            _ => FactSet::NONE,
        };
        assert_eq!(w.decide(key).needs, needs, "{program}");
    }
}

#[test]
fn due_member_is_decided_by_its_resolved_script() {
    for (script, expected) in [
        (Some("/lib/other.js"), "reap root_exited"),
        (Some("/lib/daemon.js"), "keep keep_rule daemon"),
        (Some("/lib/editor.js"), "keep not_a_member"),
        (None, "keep unreadable editor"),
    ] {
        let (mut w, key) = due("node my-tool");
        resolve_script(&mut w, key, script);
        assert_eq!(w.why(key), expected, "{script:?}");
    }
}

#[test]
fn reap_rule_waits_for_the_script_that_may_exclude_the_program() {
    let rules = "[[rule]]\nname = 'idle'\naction = 'reap'\nsession = 'any'\n\
         exe = ['**/node', '**/python']\nnot_script = '**/daemon.js'\n";
    for (script, expected) in [
        ("/lib/daemon.js", "keep root_alive"),
        ("/lib/other.js", "reap reap_rule idle"),
    ] {
        let mut w = world(ruled(rules));
        let agent = w.spawn(INIT, "claude");
        let node = w.spawn(agent, "node my-tool");
        assert_eq!(w.why(node), "wait unread idle");
        assert_eq!(w.decide(node).needs, FactSet::SCRIPT);
        resolve_script(&mut w, node, None);
        assert_eq!(w.why(node), "keep unreadable idle");
        resolve_script(&mut w, node, Some(script));
        assert_eq!(w.why(node), expected, "{script}");
        // A module has no path to resolve.
        let module = w.spawn(agent, "python -m tool");
        assert_eq!(w.why(module), "reap reap_rule idle");
    }
}

#[test]
fn resolved_script_keeps_a_process_with_a_complete_command_line() {
    for is_read_first in [true, false] {
        let (mut w, key) = due("node my-tool");
        let node = w.model.tree.get(key).unwrap();
        let argv = node.image.argv.clone();
        let matched = w.model.rules.matched(&node.image, argv, Vec::new());
        let found = Facts {
            arguments: Fact::Known(matched),
            ..Facts::NOTHING
        };
        if is_read_first {
            set_facts(&mut w, key, FactSet::ARGUMENTS, found.clone());
        }
        resolve_script(&mut w, key, Some("/lib/daemon.js"));
        if !is_read_first {
            set_facts(&mut w, key, FactSet::ARGUMENTS, found);
        }
        assert_eq!(w.why(key), "keep keep_rule daemon", "{is_read_first}");
    }
}

#[test]
fn unreadable_script_keeps_until_it_is_read() {
    let (mut w, key) = due("node my-tool");
    let child = w.spawn(key, "sleep");
    assert_eq!(w.why(child), "wait unread editor");
    assert_eq!(w.decide(child).relative, Some(key));
    resolve_script(&mut w, key, None);
    assert_eq!(w.why(child), "keep ancestor_kept editor");
    assert!(w.model.has_unreadable_facts(key));
    w.model.forget_unreadable(key);
    assert_eq!(w.why(key), "wait unread");
    resolve_script(&mut w, key, Some("/lib/other.js"));
    assert_eq!(
        [key, child].map(|key| w.why(key)),
        ["reap root_exited", "reap forked_after_root_exit"]
    );
}

#[test]
fn forgotten_script_is_read_again() {
    for is_gap in [true, false] {
        let (mut w, key) = due("node my-tool");
        let copy = w.fork(key);
        resolve_script(&mut w, key, Some("/lib/daemon.js"));
        assert_eq!(w.why(key), "keep keep_rule daemon");
        match is_gap {
            true => w.model.forget_program_facts(),
            false => w.model.set_rules(ruled(RULES)),
        }
        assert!(w.decide(key).needs.contains(FactSet::SCRIPT));
        assert_eq!(w.why(key), "wait unread");
        // The copy was forked before the script was read.
        w.exit(key);
        assert_eq!(w.why(copy), "wait unread");
        resolve_script(&mut w, copy, Some("/lib/daemon.js"));
        if !is_gap {
            assert_eq!(w.why(copy), "keep keep_rule daemon");
        }
    }
}

#[test]
fn member_with_built_in_rules_is_reaped_once_resolved() {
    let rules = Rules::read(DeTable::parse("").unwrap().get_ref()).unwrap();
    for (program, waits) in [
        ("node server.js", true),
        ("python3 app.py", true),
        ("python3 -m http.server", false),
        ("bash -c ./dev.sh", false),
        ("bash ./dev.sh", false),
    ] {
        let mut w = world(rules.in_force.clone());
        let agent = w.spawn(INIT, "codex");
        let key = w.spawn(agent, program);
        let found = Facts {
            markers: Fact::Known(0),
            unit: Fact::Known("".into()),
            listening: Fact::Known(false),
            ..Facts::NOTHING
        };
        let read = FactSet::MARKERS | FactSet::UNIT | FactSet::LISTENING;
        set_facts(&mut w, key, read, found);
        w.kill(agent);
        if waits {
            assert_eq!(w.why(key), "wait unread", "{program}");
            resolve_script(&mut w, key, Some("/srv/app/main"));
        }
        assert_eq!(w.why(key), "reap root_exited", "{program}");
    }
}
