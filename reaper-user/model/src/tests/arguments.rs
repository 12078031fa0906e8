//! Members of which an exec told only the beginning of a long command line.

use super::rules::{ruled, tell, world};
use super::world::{self, INIT, World, named};
use crate::event::{Image, ProcessKey};
use crate::facts::{Fact, FactSet, Facts};
use crate::ruleset::ProgramMatch;

/// Bytes of a command line that an exec tells.
const TOLD: usize = 8192;
const RULES: &str = "[[keep]]\nname = 'daemon'\nexe = '**/java'\nargv = '* Daemon*'\n\
     [[boundary]]\nname = 'editor'\nexe = '**/java'\noptions = '--window'\n\
     [[server]]\nname = 'daemon-server'\nexe = '**/java'\nargs = 'serve'\nvalue_options = ['-cp']\n\
     [[agent]]\nname = 'wrapper'\nexe = '**/java'\nargs = 'run'\nvalue_options = ['-cp']\n";

/// A program whose second argument has 100 KB, and its whole command line.
fn long(program: &str, last: &str) -> (Image, Vec<u8>) {
    let mut image = Image::clone(&world::image(program, 0));
    let argv = [
        &image.argv,
        &[b'x'; 100_000][..],
        b"\0",
        last.as_bytes(),
        b"\0",
    ]
    .concat();
    image.argv = argv[..TOLD].to_vec();
    (image.argv_full_len, image.truncated) = (argv.len() as u32, true);
    (image, argv)
}

/// Starts such a program; its whole command line is to be read later.
fn spawn(w: &mut World, parent: ProcessKey, program: &str, last: &str) -> (ProcessKey, Vec<u8>) {
    let key = w.fork(parent);
    let (image, argv) = long(program, last);
    w.runs(key, image);
    (key, argv)
}

fn matched(w: &World, key: ProcessKey, argv: &[u8]) -> ProgramMatch {
    let node = w.model.tree.get(key).unwrap();
    w.model.rules.matched(&node.image, argv.to_vec())
}

fn learn(w: &mut World, key: ProcessKey, arguments: Fact<ProgramMatch>) -> Vec<ProcessKey> {
    let found = Facts {
        arguments,
        ..Facts::NOTHING
    };
    tell(w, key, FactSet::ARGUMENTS, found);
    let now = w.now;
    let mut out = Vec::new();
    let all = w.model.reclassify(key, now, &mut out);
    w.session_events.extend(named(&w.model, &out));
    world::assert_consistent(&w.model);
    assert_eq!(all.joined, []);
    all.left
}

/// The whole command line has been read.
fn reads(w: &mut World, key: ProcessKey, argv: &[u8]) -> Vec<ProcessKey> {
    let matched = matched(w, key, argv);
    learn(w, key, Fact::Known(matched))
}

fn start() -> (World, ProcessKey) {
    let mut w = world(ruled(RULES));
    let agent = w.spawn(INIT, "claude");
    (w, agent)
}

#[test]
fn cut_command_line_is_decided_by_the_whole_one() {
    for (program, last, asks, expected) in [
        ("cat", "x", false, "reap root_exited"),
        ("java -cp", "Main", true, "reap root_exited"),
        ("java -cp", "Daemon 8", true, "keep keep_rule daemon"),
        ("java -cp", "--window", true, "keep not_a_member"),
        // What is there already decides that.
        ("java Daemon", "Main", true, "keep keep_rule daemon"),
    ] {
        let (mut w, agent) = start();
        let (key, argv) = spawn(&mut w, agent, program, last);
        assert_eq!(
            w.model.needs_arguments(w.model.tree.get(key).unwrap()),
            asks
        );
        assert_eq!(w.why(key), "keep root_alive");
        w.dies_by_signal(agent);
        if asks && program != "java Daemon" {
            let decision = w.decide(key);
            assert_eq!(w.why(key), "wait unread", "{program} {last}");
            assert_eq!(
                (decision.needs, decision.relative),
                (FactSet::ARGUMENTS, None)
            );
        } else {
            assert_eq!(w.why(key), expected, "{program} {last}");
        }
        reads(&mut w, key, &argv);
        assert_eq!(w.why(key), expected, "{program} {last}");
    }
}

#[test]
fn command_line_that_cannot_be_read_keeps_until_it_can() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Main");
    let child = w.spawn(java, "sh");
    w.dies_by_signal(agent);
    learn(&mut w, java, Fact::Unreadable);
    assert_eq!(w.why(java), "keep unreadable editor");
    assert_eq!(w.why(child), "keep ancestor_kept editor");
    assert!(w.model.is_unread(java));
    w.model.forget_unreadable(java);
    assert_eq!(w.why(java), "wait unread");
    reads(&mut w, java, &argv);
    assert_eq!([java, child].map(|key| w.why(key)), ["reap root_exited"; 2]);
}

#[test]
fn process_below_a_cut_command_line_waits_for_that() {
    for (last, expected) in [
        ("Main", "reap root_exited"),
        ("Daemon", "keep ancestor_kept daemon"),
    ] {
        let (mut w, agent) = start();
        let (java, argv) = spawn(&mut w, agent, "java -cp", last);
        let shell = w.spawn(java, "sh");
        let (inner, inner_argv) = spawn(&mut w, shell, "java -cp", "Main");
        let child = w.spawn(inner, "sleep");
        w.dies_by_signal(agent);
        let asked = |w: &World, key| (w.why(key), w.decide(key).relative);
        let wait = || "wait unread editor".to_owned();
        assert_eq!(asked(&w, shell), (wait(), Some(java)));
        assert_eq!(asked(&w, child), (wait(), Some(inner)));
        assert_eq!(asked(&w, inner), ("wait unread".into(), None));
        // The nearest is read, and what is farther up still decides.
        reads(&mut w, inner, &inner_argv);
        for key in [shell, inner, child] {
            assert_eq!(asked(&w, key), (wait(), Some(java)));
            assert_eq!(w.decide(key).needs, FactSet::ARGUMENTS);
        }
        reads(&mut w, java, &argv);
        for key in [shell, inner, child] {
            assert_eq!(w.why(key), expected);
        }
    }
}

#[test]
fn what_is_kept_for_sure_keeps_whatever_is_unread_below_it() {
    let (mut w, agent) = start();
    let daemon = w.spawn(agent, "java Daemon");
    assert_eq!(w.why(daemon), "keep root_alive");
    let (java, _) = spawn(&mut w, daemon, "java -cp", "Main");
    let child = w.spawn(java, "sleep");
    w.dies_by_signal(agent);
    let whys = [java, child].map(|key| w.why(key));
    assert_eq!(whys, ["wait unread", "keep ancestor_kept daemon"]);
}

#[test]
fn kernel_may_signal_a_member_only_when_its_command_line_is_read() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Main");
    let child = w.spawn(java, "sleep");
    let clear = |w: &World, key| w.model.is_kernel_killable(w.model.tree.get(key).unwrap());
    for key in [java, child] {
        let found = Facts {
            markers: Fact::Known(0),
            ..Facts::NOTHING
        };
        tell(&mut w, key, FactSet::MARKERS, found);
        assert!(!clear(&w, key));
        assert!(!w.model.is_kept(w.model.tree.get(key).unwrap()));
    }
    reads(&mut w, java, &argv);
    assert!(clear(&w, java) && clear(&w, child));
}

#[test]
fn answer_about_an_earlier_program_says_nothing() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Main");
    let before = matched(&w, java, &argv);
    // The same arguments, and another program.
    let (image, argv) = long("java -cp", "Daemon");
    w.runs(java, image);
    learn(&mut w, java, Fact::Known(before));
    w.dies_by_signal(agent);
    assert_eq!(w.why(java), "wait unread");
    reads(&mut w, java, &argv);
    assert_eq!(w.why(java), "keep keep_rule daemon");
    w.exec(java, "sleep");
    assert_eq!(w.why(java), "reap root_exited");
}

#[test]
fn child_has_the_command_line_of_its_parent_if_that_was_read_before() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Daemon");
    let early = w.fork(java);
    reads(&mut w, java, &argv);
    w.now += 1_000_000;
    let late = w.fork(java);
    w.dies_by_signal(agent);
    w.exit(java);
    assert_eq!(w.why(late), "keep keep_rule daemon");
    assert_eq!(w.why(early), "wait unread");
    reads(&mut w, early, &argv);
    assert_eq!(w.why(early), "keep keep_rule daemon");
}

#[test]
fn other_rules_need_the_command_line_again() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "Daemon");
    reads(&mut w, java, &argv);
    let rules = w.model.rules.clone();
    w.model.set_rules(rules);
    w.dies_by_signal(agent);
    assert_eq!(w.why(java), "wait unread");
}

#[test]
fn boundary_that_shows_late_takes_its_descendants_along() {
    let (mut w, agent) = start();
    let beside = w.spawn(agent, "sh");
    let (java, argv) = spawn(&mut w, agent, "java -cp", "--window");
    let child = w.spawn(java, "sh");
    let between = w.spawn(java, "sh");
    let orphan = w.spawn(between, "server");
    w.exit(between);
    let inner = w.spawn(child, "codex");
    let tool = w.spawn(inner, "sh");
    w.session_events();
    let released = reads(&mut w, java, &argv);
    assert_eq!(w.session_events(), ["boundary editor in claude"]);
    let mut expected = [child, orphan];
    expected.sort_unstable();
    let mut released = released;
    released.sort_unstable();
    assert_eq!(released, expected);
    let after = w.spawn(java, "sh");
    w.dies_by_signal(agent);
    for key in [java, child, orphan, after] {
        assert_eq!(w.why(key), "keep not_a_member");
    }
    assert_eq!(w.why(tool), "keep root_alive", "it is codex's");
    assert_eq!(w.why(beside), "reap root_exited");
    w.dies_by_signal(inner);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn boundary_that_shows_when_nothing_else_is_left_closes_the_session() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "--window");
    w.spawn(java, "sh");
    w.dies_by_signal(agent);
    w.session_events();
    reads(&mut w, java, &argv);
    assert_eq!(
        w.session_events(),
        ["boundary editor in claude", "closed claude"]
    );
}

#[test]
fn agent_that_shows_late_opens_a_session() {
    let (mut w, agent) = start();
    let (java, argv) = spawn(&mut w, agent, "java -cp", "run");
    let copy = w.fork(java);
    w.session_events();
    reads(&mut w, java, &argv);
    assert_eq!(w.session_events(), ["opened wrapper"]);
    assert_eq!(w.root_of(java), Some(java));
    // It has not run the program itself.
    reads(&mut w, copy, &argv);
    assert_eq!((w.session_events(), w.root_of(copy)), (vec![], Some(agent)));
    let tool = w.spawn(java, "sh");
    w.dies_by_signal(java);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn wait_for_an_unread_child_holds_its_relatives() {
    let rules = "[[rule]]\nname = 'servers'\naction = 'reap'\nafter = '10min'\nsession = 'any'\n\
         exe = '**/java'\nargv = '* Server*'\n";
    let mut w = world(ruled(rules));
    let agent = w.spawn(INIT, "claude");
    let npm = w.spawn(agent, "npm");
    let (java, argv) = spawn(&mut w, npm, "java -cp", "Server");
    w.dies_by_signal(agent);
    w.model.set_now(w.now);
    assert_eq!(w.decide(npm).relative, Some(java));
    reads(&mut w, java, &argv);
    let whys = [npm, java].map(|key| w.why(key));
    assert_eq!(whys, ["wait rule_delay servers"; 2]);
}

#[test]
fn server_by_its_whole_command_line_takes_its_descendants_along() {
    let (mut w, agent) = start();
    let (server, argv) = spawn(&mut w, agent, "java -cp", "serve");
    let shell = w.spawn(server, "sh");
    let tool = w.spawn(shell, "npm");
    w.exit(shell);
    assert_eq!(w.root_of(tool), Some(agent));
    let moved = reads(&mut w, server, &argv);
    assert_eq!(moved, [tool]);
    assert_eq!(w.root_of(tool), Some(server));
    w.dies_by_signal(agent);
    assert_eq!(
        [server, tool].map(|key| w.why(key)),
        ["keep root_alive", "keep detached"]
    );
    w.dies_by_signal(server);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn root_that_is_a_server_by_its_whole_command_line_keeps_its_tools() {
    let mut w = world(ruled(&format!(
        "{RULES}[[agent]]\nname = 'java-agent'\nexe = '**/java'\n"
    )));
    let (server, argv) = spawn(&mut w, INIT, "java -cp", "serve");
    let tool = w.spawn(server, "npm");
    let inner = w.spawn(tool, "claude");
    assert!(reads(&mut w, server, &argv).is_empty());
    assert_eq!(w.root_of(tool), Some(server));
    w.dies_by_signal(server);
    assert_eq!(
        [tool, inner].map(|key| w.why(key)),
        ["reap root_exited", "keep root_alive"]
    );
}
