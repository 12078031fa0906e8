//! Members whose exec event has only the beginning of a long command line.

use super::rules::{ruled, set_facts, world};
use super::world::{self, INIT, World, session_event_names};
use crate::event::{Image, ProcessKey};
use crate::facts::{Fact, FactSet, Facts};
use crate::ruleset::ProgramMatch;

/// Length of the part of a command line that an exec event has, in bytes.
const REPORTED_LEN: usize = 8192;
const RULES: &str = "[[keep]]\nname = 'daemon'\nexe = '**/java'\nargv = '* Daemon*'\n\
     [[boundary]]\nname = 'editor'\nexe = '**/java'\noptions = '--window'\n\
     [[server]]\nname = 'daemon-server'\nexe = '**/java'\nargs = 'serve'\nvalue_options = ['-cp']\n\
     [[agent]]\nname = 'wrapper'\nexe = '**/java'\nargs = 'run'\nvalue_options = ['-cp']\n";

/// Returns an image with an argument of 100 KB, and its complete command line.
fn long_image(program: &str, last: &str) -> (Image, Vec<u8>) {
    let mut image = Image::clone(&world::image(program, 0));
    let argv = [
        &image.argv,
        &[b'x'; 100_000][..],
        b"\0",
        last.as_bytes(),
        b"\0",
    ]
    .concat();
    image.argv = argv[..REPORTED_LEN].to_vec();
    (image.argv_full_len, image.truncated) = (argv.len() as u32, true);
    (image, argv)
}

/// Starts such a program. Returns its key and its complete command line.
fn spawn(w: &mut World, parent: ProcessKey, program: &str, last: &str) -> (ProcessKey, Vec<u8>) {
    let key = w.fork(parent);
    let (image, argv) = long_image(program, last);
    w.exec_image(key, image);
    (key, argv)
}

fn matched(w: &World, key: ProcessKey, argv: &[u8]) -> ProgramMatch {
    let node = w.model.tree.get(key).unwrap();
    w.model
        .rules
        .matched(&node.image, argv.to_vec(), Vec::new())
}

fn set_arguments(w: &mut World, key: ProcessKey, arguments: Fact<ProgramMatch>) -> Vec<ProcessKey> {
    let found = Facts {
        arguments,
        ..Facts::NOTHING
    };
    set_facts(w, key, FactSet::ARGUMENTS, found);
    let now = w.now;
    let mut out = Vec::new();
    let all = w.model.reclassify(key, now, &mut out);
    w.session_events.extend(session_event_names(&w.model, &out));
    world::assert_consistent(&w.model);
    assert_eq!(all.joined, []);
    all.left
}

/// Delivers the complete command line and returns the processes that leave their session.
fn read_arguments(w: &mut World, key: ProcessKey, argv: &[u8]) -> Vec<ProcessKey> {
    let matched = matched(w, key, argv);
    set_arguments(w, key, Fact::Known(matched))
}

fn start() -> (World, ProcessKey) {
    let mut w = world(ruled(RULES));
    let agent = w.spawn(INIT, "claude");
    (w, agent)
}

#[test]
fn truncated_command_line_is_decided_by_the_complete_one() {
    for (program, last, needs_read, expected) in [
        ("cat", "x", false, "reap root_exited"),
        ("java -cp", "Main", true, "reap root_exited"),
        ("java -cp", "Daemon 8", true, "keep keep_rule daemon"),
        ("java -cp", "--window", true, "keep not_a_member"),
        // The beginning of the command line is enough.
        ("java Daemon", "Main", true, "keep keep_rule daemon"),
    ] {
        let (mut w, agent) = start();
        let (key, argv) = spawn(&mut w, agent, program, last);
        assert_eq!(
            w.model.needs_arguments(w.model.tree.get(key).unwrap()),
            needs_read
        );
        assert_eq!(w.why(key), "keep root_alive");
        w.kill(agent);
        if needs_read && program != "java Daemon" {
            let decision = w.decide(key);
            assert_eq!(w.why(key), "wait unread", "{program} {last}");
            assert_eq!(
                (decision.needs, decision.relative),
                (FactSet::ARGUMENTS, None)
            );
        } else {
            assert_eq!(w.why(key), expected, "{program} {last}");
        }
        read_arguments(&mut w, key, &argv);
        assert_eq!(w.why(key), expected, "{program} {last}");
    }
}

#[test]
fn unreadable_command_line_keeps_until_it_is_read() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Main");
    let child = w.spawn(java, "sh");
    w.kill(agent);
    set_arguments(&mut w, java, Fact::Unreadable);
    assert_eq!(w.why(java), "keep unreadable editor");
    assert_eq!(w.why(child), "keep ancestor_kept editor");
    assert!(w.model.has_unreadable_facts(java));
    w.model.forget_unreadable(java);
    assert_eq!(w.why(java), "wait unread");
    read_arguments(&mut w, java, &argv);
    assert_eq!([java, child].map(|key| w.why(key)), ["reap root_exited"; 2]);
}

#[test]
fn descendant_waits_for_truncated_command_line_above_it() {
    for (last, expected) in [
        ("Main", "reap root_exited"),
        ("Daemon", "keep ancestor_kept daemon"),
    ] {
        let (mut w, agent) = start();
        let (java, argv) = spawn(&mut w, agent, "java -cp", last);
        let shell = w.spawn(java, "sh");
        let (inner, inner_argv) = spawn(&mut w, shell, "java -cp", "Main");
        let child = w.spawn(inner, "sleep");
        w.kill(agent);
        let requested = |w: &World, key| (w.why(key), w.decide(key).relative);
        let wait = || "wait unread editor".to_owned();
        assert_eq!(requested(&w, shell), (wait(), Some(java)));
        assert_eq!(requested(&w, child), (wait(), Some(inner)));
        assert_eq!(requested(&w, inner), ("wait unread".into(), None));
        // The nearest command line is read, and the next one above is still needed.
        read_arguments(&mut w, inner, &inner_argv);
        for key in [shell, inner, child] {
            assert_eq!(requested(&w, key), (wait(), Some(java)));
            assert_eq!(w.decide(key).needs, FactSet::ARGUMENTS);
        }
        read_arguments(&mut w, java, &argv);
        for key in [shell, inner, child] {
            assert_eq!(w.why(key), expected);
        }
    }
}

#[test]
fn descendant_of_kept_process_does_not_wait_for_unread() {
    let (mut w, agent) = start();
    let daemon = w.spawn(agent, "java Daemon");
    assert_eq!(w.why(daemon), "keep root_alive");
    let (java, _) = spawn(&mut w, daemon, "java -cp", "Main");
    let child = w.spawn(java, "sleep");
    w.kill(agent);
    let whys = [java, child].map(|key| w.why(key));
    assert_eq!(whys, ["wait unread", "keep ancestor_kept daemon"]);
}

#[test]
fn member_is_kernel_killable_only_with_complete_command_line() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Main");
    let child = w.spawn(java, "sleep");
    let is_killable = |w: &World, key| w.model.is_kernel_killable(w.model.tree.get(key).unwrap());
    for key in [java, child] {
        let found = Facts {
            markers: Fact::Known(0),
            ..Facts::NOTHING
        };
        set_facts(&mut w, key, FactSet::MARKERS, found);
        assert!(!is_killable(&w, key));
        assert!(!w.model.is_kept(w.model.tree.get(key).unwrap()));
    }
    read_arguments(&mut w, java, &argv);
    assert!(is_killable(&w, java) && is_killable(&w, child));
}

#[test]
fn command_line_of_an_earlier_program_is_ignored() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Main");
    let before = matched(&w, java, &argv);
    // The same arguments, and another program.
    let (image, argv) = long_image("java -cp", "Daemon");
    w.exec_image(java, image);
    set_arguments(&mut w, java, Fact::Known(before));
    w.kill(agent);
    assert_eq!(w.why(java), "wait unread");
    read_arguments(&mut w, java, &argv);
    assert_eq!(w.why(java), "keep keep_rule daemon");
    w.exec(java, "sleep");
    assert_eq!(w.why(java), "reap root_exited");
}

#[test]
fn child_inherits_command_line_read_before_its_fork() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Daemon");
    let early = w.fork(java);
    read_arguments(&mut w, java, &argv);
    w.now += 1_000_000;
    let late = w.fork(java);
    w.kill(agent);
    w.exit(java);
    assert_eq!(w.why(late), "keep keep_rule daemon");
    assert_eq!(w.why(early), "wait unread");
    read_arguments(&mut w, early, &argv);
    assert_eq!(w.why(early), "keep keep_rule daemon");
}

#[test]
fn changed_rules_need_the_command_line_again() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Daemon");
    read_arguments(&mut w, java, &argv);
    let rules = w.model.rules.clone();
    w.model.set_rules(rules);
    w.kill(agent);
    assert_eq!(w.why(java), "wait unread");
}

#[test]
fn boundary_by_complete_command_line_releases_descendants() {
    let (mut w, agent) = start();
    let sibling = w.spawn(agent, "sh");
    let (java, argv) = spawn(&mut w, agent, "java -cp", "--window");
    let child = w.spawn(java, "sh");
    let between = w.spawn(java, "sh");
    let orphan = w.spawn(between, "server");
    w.exit(between);
    let inner = w.spawn(child, "codex");
    let tool = w.spawn(inner, "sh");
    w.session_events();
    let mut released = read_arguments(&mut w, java, &argv);
    assert_eq!(w.session_events(), ["boundary editor in claude"]);
    let mut expected = [child, orphan];
    expected.sort_unstable();
    released.sort_unstable();
    assert_eq!(released, expected);
    let after = w.spawn(java, "sh");
    w.kill(agent);
    for key in [java, child, orphan, after] {
        assert_eq!(w.why(key), "keep not_a_member");
    }
    assert_eq!(w.why(tool), "keep root_alive", "a member of codex");
    assert_eq!(w.why(sibling), "reap root_exited");
    w.kill(inner);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn late_boundary_without_other_members_closes_session() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "--window");
    w.spawn(java, "sh");
    w.kill(agent);
    w.session_events();
    read_arguments(&mut w, java, &argv);
    assert_eq!(
        w.session_events(),
        ["boundary editor in claude", "closed claude"]
    );
}

#[test]
fn agent_by_complete_command_line_opens_a_session() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "run");
    let copy = w.fork(java);
    w.session_events();
    read_arguments(&mut w, java, &argv);
    assert_eq!(w.session_events(), ["opened wrapper"]);
    assert_eq!(w.root_of(java), Some(java));
    // The copy has not executed the program itself.
    read_arguments(&mut w, copy, &argv);
    assert_eq!((w.session_events(), w.root_of(copy)), (vec![], Some(agent)));
    let tool = w.spawn(java, "sh");
    w.kill(java);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn ancestor_waits_for_unread_command_line_of_a_server() {
    let rules = "[[rule]]\nname = 'servers'\naction = 'reap'\nafter = '10min'\nsession = 'any'\n\
         exe = '**/java'\nargv = '* Server*'\n";
    let mut w = world(ruled(rules));
    let agent = w.spawn(INIT, "claude");
    let npm = w.spawn(agent, "npm");
    let (java, argv) = spawn(&mut w, npm, "java -cp", "Server");
    w.kill(agent);
    w.model.set_time(w.now, 0);
    assert_eq!(w.decide(npm).relative, Some(java));
    read_arguments(&mut w, java, &argv);
    let whys = [npm, java].map(|key| w.why(key));
    assert_eq!(whys, ["wait rule_delay servers"; 2]);
}

#[test]
fn reap_rule_waits_for_the_rest_that_may_exclude_the_program() {
    for condition in [
        "not_options = '--stay'",
        "not_args = ['*', 'run', '--stay']",
        "not_argv = '* --stay*'",
        "not_argv_regex = '--stay$'",
        "any = [{ exe = '**/java', not_options = '--stay' }, { exe = '**/java', args = 'never' }]",
    ] {
        let of_any = condition.starts_with("any");
        let exe = if of_any { "" } else { "exe = '**/java'" };
        let rules = format!(
            "[[rule]]\nname = 'idle'\naction = 'reap'\nsession = 'any'\n{exe}\n{condition}\n\
             [[keep]]\nname = 'java'\nexe = '**/java'\n"
        );
        let last = match condition.contains("not_args") {
            true => "run\0--\0--stay",
            false => "--stay",
        };
        for (is_alive, last, expected) in [
            (true, "Main", "reap reap_rule idle"),
            (true, last, "keep root_alive"),
            (false, "Main", "reap root_exited idle"),
            (false, last, "keep keep_rule java"),
        ] {
            let mut w = world(ruled(&rules));
            let agent = w.spawn(INIT, "claude");
            let (java, argv) = spawn(&mut w, agent, "java", last);
            if !is_alive {
                w.kill(agent);
            }
            assert_eq!(w.why(java), "wait unread idle", "{condition}");
            assert_eq!(w.decide(java).needs, FactSet::ARGUMENTS);
            set_arguments(&mut w, java, Fact::Unreadable);
            assert_eq!(w.why(java), "keep unreadable idle", "{condition}");
            read_arguments(&mut w, java, &argv);
            assert_eq!(w.why(java), expected, "{condition} {last}");
        }
    }
}

#[test]
fn reap_rule_that_the_beginning_decides_waits_for_nothing() {
    let rules = "[[rule]]\nname = 'idle'\naction = 'reap'\nsession = 'any'\nexe = '**/java'\nargs = 'run'\n";
    let mut w = world(ruled(rules));
    let agent = w.spawn(INIT, "claude");
    let (java, _) = spawn(&mut w, agent, "java run", "--stay");
    assert_eq!(w.why(java), "reap reap_rule idle");
}

#[test]
fn server_by_complete_command_line_takes_its_descendants() {
    let (mut w, agent) = start();
    let (server, argv) = spawn(&mut w, agent, "java -cp", "serve");
    let shell = w.spawn(server, "sh");
    let tool = w.spawn(shell, "npm");
    w.exit(shell);
    assert_eq!(w.root_of(tool), Some(agent));
    let moved = read_arguments(&mut w, server, &argv);
    assert_eq!(moved, [tool]);
    assert_eq!(w.root_of(tool), Some(server));
    w.kill(agent);
    assert_eq!(
        [server, tool].map(|key| w.why(key)),
        ["keep root_alive", "keep detached"]
    );
    w.kill(server);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn root_that_proves_to_be_a_server_keeps_its_members() {
    let mut w = world(ruled(&format!(
        "{RULES}[[agent]]\nname = 'java-agent'\nexe = '**/java'\n"
    )));
    let (server, argv) = spawn(&mut w, INIT, "java -cp", "serve");
    let tool = w.spawn(server, "npm");
    let inner = w.spawn(tool, "claude");
    assert!(read_arguments(&mut w, server, &argv).is_empty());
    assert_eq!(w.root_of(tool), Some(server));
    w.kill(server);
    assert_eq!(
        [tool, inner].map(|key| w.why(key)),
        ["reap root_exited", "keep root_alive"]
    );
}
