//! Table of the trees that follow the common scenario.

use super::process_spec::{ProcessSpec, VictimExit};
use super::scenario::Scenario;
use crate::world::World;

const PATIENT: &str = "grace = \"4s\"\nkill_timeout = \"10s\"\n";
/// Config with an agent, a boundary and a keep rule in addition to the built-in ones.
pub const OWN_RULES: &str = r#"
grace = "200ms"
kill_timeout = "10s"

[[agent]]
name = "my-agent"
comm = "test-agent"

[[boundary]]
name = "my-wall"
comm = "test-wall"

[[keep]]
name = "my-keeper"
exe = "**/bin/test-keeper"
"#;

/// Config with a grace that is too short for the clean-up of `trap`, and a rule that gives it more time.
const SHORT_GRACE: &str = r#"
grace = "1ms"
kill_timeout = "1s"

[[rule]]
name = "my-state"
action = "reap"
grace = "5min"
exe = "**/bin/test-state"
"#;

/// Returns the trees that take minutes on a small machine.
pub fn soaks() -> Vec<Scenario> {
    let children = ProcessSpec::child("leaf", "fork sleep").times(10_000);
    vec![Scenario::new("ten-thousand-children", &[children])]
}

/// Returns all rows. The name says what is special about the tree.
pub fn rows() -> Vec<Scenario> {
    let row = Scenario::new;
    let (child, below, detached) = (
        ProcessSpec::child,
        ProcessSpec::below,
        ProcessSpec::detached,
    );
    let (kept, outside) = (ProcessSpec::kept, ProcessSpec::no_decision);
    vec![
        row(
            "plain",
            &[
                child("leaf", "sleep"),
                child("shell", "parent tool sleep"),
                below("tool", ""),
            ],
        ),
        row(
            "before-the-daemon",
            &[child("shell", "parent tool setsid"), below("tool", "")],
        )
        .daemon_after_tree(),
        row(
            "own-tree",
            &[
                kept("shell", "parent host host beside ignore-term", "never_self"),
                kept("host", "", "never_self"),
                kept("daemon", "", "never_self"),
                below("beside", ""),
                child("leaf", "setsid"),
            ],
        )
        .daemon_inside_tree(),
        row(
            "own-tree-as-an-orphan",
            &[
                ProcessSpec::killed_by_test("shell")
                    .started_as("parent host host beside ignore-term"),
                kept("host", "", "never_self"),
                kept("daemon", "", "never_self"),
                below("beside", ""),
                child("leaf", "setsid"),
            ],
        )
        .daemon_inside_tree(),
        row("user-rule", &[child("leaf", "sleep")])
            .image("test-agent")
            .config(OWN_RULES),
        // Ways to detach from the parent.
        row("setsid", &[child("leaf", "setsid")]),
        row("env-i", &[child("leaf", "env-i sleep")]),
        row("double-fork", &[detached("daemon", "double setsid")]),
        row("no-exec", &[child("leaf", "fork setsid")]),
        row(
            "short-lived-intermediates",
            &[detached("leaf", "triple-fork setsid")],
        ),
        row(
            "clone-parent",
            &[child("creator", "clone-sibling"), child("twin", "")],
        ),
        row("clone-parent-of-the-agent", &[below("twin", "twin")]),
        // Reactions to a signal.
        row(
            "term-ignored",
            &[
                child("leaf", "ignore-term"),
                child("shell", "parent deep ignore-term"),
                below("deep", ""),
            ],
        ),
        row("term-trap", &[child("shell", "trap")])
            .config(PATIENT)
            .also(|world| {
                assert!(
                    world.dir().join("cleaned").exists(),
                    "the trap handler did not finish"
                );
            }),
        row("stopped", &[child("leaf", "stopped")]),
        row("fork-bomb", &[child("bomb", "fork-bomb-on-term")]),
        row(
            "runaway",
            &[child("runner", "fork-chain-on-term").may_exit_first()],
        )
        .also(World::await_only_canaries),
        // Threads.
        row("leader-thread-first", &[child("leaf", "leader-first")]),
        row("exec-from-a-thread", &[child("leaf", "thread-exec")]),
        // Ways to exit.
        row("segfault", &[child("leaf", "sleep")])
            .victim_exit(VictimExit::Signalled("segfault", "SIGSEGV")),
        row("exit-group", &[child("leaf", "sleep")])
            .victim_exit(VictimExit::Exited("exit-group 50", 7)),
        row(
            "exit-0",
            &[child("leaf", "sleep"), detached("other", "double sleep")],
        )
        .victim_exit(VictimExit::Exited("exit 0", 0)),
        row("exit-3", &[child("leaf", "sleep")]).victim_exit(VictimExit::Exited("exit 3", 3)),
        // Many, and deep.
        row(
            "thousand-children",
            &[child("leaf", "fork sleep").times(1_000)],
        ),
        row(
            "chain",
            &[
                child("upper-end", "parent upper chain 200 100"),
                below("upper", "").times(100),
                ProcessSpec::killed_by_test("middle"),
                detached("cut", ""),
                below("lower", "").times(98),
            ],
        ),
        // Adopters.
        row(
            "subreaper-inside",
            &[
                child("nurse", "nested-subreaper"),
                detached("leaf", "").to("nurse"),
            ],
        ),
        row(
            "adopted-by-init",
            &[
                child("leaf", "sleep").to("init"),
                detached("other", "double sleep").to("init"),
            ],
        )
        .no_subreaper(),
        row(
            "adopter-never-waits",
            &[
                child("leaf", "sleep").to("never-waiting-subreaper"),
                outside("never-waiting-subreaper", ""),
            ],
        )
        .via("never-waiting-subreaper"),
        row("zombie-below", &[child("leaf", "zombie-parent")]),
        row(
            "namespace-init",
            &[
                child("creator", "namespace"),
                below("init", "").may_exit_first(),
                below("inside", "").may_exit_first().by_way("in-namespace"),
                below("inside-too", "")
                    .may_exit_first()
                    .by_way("in-namespace"),
            ],
        ),
        // Processes between the launcher and the agent.
        row("shim-execs", &[child("leaf", "sleep")]).via("shim-exec"),
        row("shim-execs-from-a-thread", &[child("leaf", "sleep")]).via("shim-thread"),
        row("shim-spawns-and-exits", &[child("leaf", "sleep")]).via("shim-spawn"),
        // Nested agents.
        row(
            "outer-agent-first",
            &[
                child("leaf", "sleep"),
                child("inner", "as:claude agent inner-leaf=ignore-term"),
                below("inner-leaf", ""),
            ],
        ),
        row(
            "inner-agent-first",
            &[
                child("leaf", "sleep"),
                ProcessSpec::killed_by_test("inner")
                    .started_as("as:claude agent inner-leaf=ignore-term"),
                below("inner-leaf", ""),
            ],
        ),
        row(
            "no-relaunch-after-a-crash",
            &[
                child("second", "as:claude agent leaf=sleep"),
                below("leaf", ""),
                outside("terminal", ""),
            ],
        )
        .via("terminal"),
        // Processes that are not reaped.
        row(
            "boundary",
            &[
                outside("wall", "as:test-wall parent user sleep"),
                outside("user", ""),
                child("leaf", "sleep"),
            ],
        )
        .config(OWN_RULES),
        row(
            "agent-below-a-boundary",
            &[
                outside(
                    "wall",
                    "as:test-wall parent second as:claude agent second-leaf=sleep",
                ),
                outside("second", ""),
                outside("second-leaf", ""),
                child("leaf", "sleep"),
            ],
        )
        .config(OWN_RULES),
        row(
            "keep-rule",
            &[
                kept("keeper", "as:test-keeper parent under sleep", "keep_rule"),
                kept("under", "", "ancestor_kept"),
            ],
        )
        .config(OWN_RULES),
        row("grace-of-a-rule", &[child("state", "as:test-state trap")])
            .config(SHORT_GRACE)
            .also(|world| {
                assert!(
                    world.dir().join("cleaned").exists(),
                    "the program was killed before the grace of its rule"
                );
            }),
        row(
            "helper-of-a-rule-with-grace",
            &[
                child("state", "as:test-state with-helper helper"),
                below("helper", ""),
                child("leaf", "sleep"),
            ],
        )
        .config(SHORT_GRACE)
        .also(|world| {
            assert!(
                world.dir().join("cleaned").exists(),
                "the helper was signalled before the program had cleaned up"
            );
        }),
        row(
            "other-uid",
            &[
                kept("nobody", "other-uid parent under sleep", "other_uid"),
                kept("under", "", "other_uid"),
            ],
        ),
        row(
            "privileges-dropped-without-exec",
            &[kept("server", "drop-privileges", "other_uid")],
        ),
    ]
}
