//! Unused servers of agents, and agents that speak a protocol with a client that has exited.

use nix::sys::signal::Signal;

use super::{CONFIG, ScenarioEntry, ScenarioRun};
use crate::proc::ProcessKey;
use crate::world::World;

pub const SCENARIOS: &[ScenarioEntry] = &[
    ("unused-managed-server", unused_managed_server),
    ("unused-server-is-reported", unused_server_is_reported),
    ("idle-agent-in-an-idle-agent", idle_agent_in_an_idle_agent),
    ("opencode-serve-whose-terminal-is-closed", |view| {
        terminal_is_closed(view, "opencode-serve");
    }),
    ("codex-server-whose-terminal-is-closed", |view| {
        terminal_is_closed(view, "codex-stdio");
    }),
    ("stdio-agent-on-pipes", |view| {
        stdio_agent_without_client(view, "pipes");
    }),
    ("stdio-agent-on-sockets", |view| {
        stdio_agent_without_client(view, "sockets");
    }),
];

const CODEX: &str = "node_modules/@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex";
const OPENCODE: &str = "node_modules/opencode-ai/bin/opencode.exe";
const GEMINI: &str = "{dir}/node_modules/.bin/gemini";
const CLAUDE: &str = "node_modules/@anthropic-ai/claude-code/bin/claude.exe";

/// Built-in rules in their order, with shorter delays.
const IDLE_RULES: &str = r#"
[[rule]]
name = "agents-without-client"
action = "reap"
session = "alive"
orphan = true
hung_up = true
idle = "1s"
any = [
    { script = "**/gemini", options = "--acp" },
    { exe = "**/codex", args = "app-server", not_options = "--listen*" },
]
[[rule]]
name = "unused-managed-servers"
action = "reap"
session = "alive"
server = true
idle = "3s"
tty = false
exe = "**/codex"
args = "app-server"
options = "--managed-daemon"
[[rule]]
name = "unused-servers"
action = "report"
session = "alive"
server = true
idle = "1s"
tty = false
"#;

const IDLE_AGENTS: &str = r#"
[[rule]]
name = "idle-agents"
action = "report"
session = "alive"
idle = "1s"
"#;

fn world(view: &ScenarioRun) -> World {
    let mut world = World::new(true);
    let provide = |world: &World, name: &str, words: &[&str]| {
        let words: Vec<String> = words.iter().map(|word| (*word).into()).collect();
        world.provide(name, &words);
    };
    let managed = [
        CODEX,
        "app-server",
        "--listen",
        "unix://",
        "--managed-daemon",
    ];
    provide(&world, "codex", &[CODEX]);
    provide(&world, "codex-app-server", &managed);
    provide(&world, "codex-stdio", &[CODEX, "app-server"]);
    provide(&world, "opencode-serve", &[OPENCODE, "serve"]);
    provide(&world, "gemini-acp", &["bin/node", GEMINI, "--acp"]);
    let relaunched = ["bin/node", "--max-old-space-size=99", GEMINI, "--acp"];
    provide(&world, "gemini-relaunched", &relaunched);
    provide(&world, "claude-print", &[CLAUDE, "-p"]);
    view.watch(&mut world, &format!("{CONFIG}{IDLE_RULES}"));
    world
}

/// Two managed servers outlive their agent: the one with an idle client lives until the client exits.
fn unused_managed_server(view: &ScenarioRun) {
    let mut world = world(view);
    let server = |role: &str, tool: &str| {
        format!("{role}=double+no-input+as:codex-app-server+serve+{tool}+setsid")
    };
    let (used, unused) = (server("used", "used-tool"), server("unused", "unused-tool"));
    // The client connects as soon as the server listens.
    world.spawn("client", "client used");
    world.spawn("agent", &format!("as:codex agent {used} die=exit+0"));
    for role in ["agent", "used", "used-tool", "client"] {
        world.await_processes(role, 1);
    }
    world.spawn("other", &format!("as:codex agent {unused}"));
    for role in ["other", "unused", "unused-tool"] {
        world.await_processes(role, 1);
    }
    view.await_seen(&world, &["used", "used-tool", "unused", "unused-tool"]);
    world.open_gate("die-agent");
    view.await_gone(&world, &["unused", "unused-tool"]);
    world.assert_alive(&["used", "used-tool", "client"]);
    world.kill("client");
    view.await_gone(&world, &["used", "used-tool"]);
    let tool = world.process("used-tool");
    if let Some(events) = view.end(world, &["other"]) {
        // The tool gets the whole grace period although its server was killed.
        let signals = events.iter().filter(|e| e.is("signal", tool));
        let signals: Vec<_> = signals.filter_map(|e| e.signal.as_deref()).collect();
        assert_eq!(signals, ["SIGTERM"]);
    }
}

/// A server that a user started is reported with the memory of its tree, and lives.
fn unused_server_is_reported(view: &ScenarioRun) {
    let mut world = world(view);
    world.spawn("server", "no-input as:opencode-serve serve tool setsid");
    for role in ["server", "tool"] {
        world.await_processes(role, 1);
    }
    view.await_seen(&world, &["server", "tool"]);
    let server = world.process("server");
    let report = world.await_event("the server is reported", |e| {
        e.is("decision", server) && e.decision.as_deref() == Some("report")
    });
    assert_eq!(report.rule.as_deref(), Some("unused-servers"));
    assert!(report.memory_rss.is_some_and(|bytes| bytes > 0));
    world.spawn("client", "client server");
    world.await_event("the server is in use again", |e| {
        e.is("decision", server) && e.decision.as_deref() == Some("keep")
    });
    view.end(world, &["server", "tool", "client"]);
}

/// A later daemon evaluates both trees at once. It reports the inner root, and the outer root when no agent runs below
/// it.
fn idle_agent_in_an_idle_agent(view: &ScenarioRun) {
    let mut world = World::new(true);
    world.provide("codex", &[CODEX.into()]);
    world.spawn(
        "outer",
        "no-input as:codex agent inner=no-input+as:codex+agent+tool=sleep",
    );
    for role in ["outer", "inner", "tool"] {
        world.await_processes(role, 1);
    }
    view.watch(&mut world, &format!("{CONFIG}{IDLE_AGENTS}"));
    let await_reported = |world: &World, role: &str| {
        let root = world.process(role);
        world.await_event(&format!("'{role}' is reported"), |e| {
            e.is("decision", root) && e.decision.as_deref() == Some("report")
        });
    };
    await_reported(&world, "inner");
    world.kill("inner");
    view.await_gone(&world, &["tool"]);
    await_reported(&world, "outer");
    view.end(world, &["outer"]);
}

/// A server in the foreground of a terminal is reaped when the terminal closes.
fn terminal_is_closed(view: &ScenarioRun, server: &str) {
    let mut world = world(view);
    let how = format!("terminal as:{server} tool=setsid mcp=env-i+setsid");
    world.spawn("terminal", &how);
    for role in ["terminal", "agent", "tool", "mcp"] {
        world.await_processes(role, 1);
    }
    view.await_seen(&world, &["agent", "tool", "mcp"]);
    world.kill("terminal");
    view.await_gone(&world, &["agent", "tool", "mcp"]);
    view.await_closed(&world, 1);
    view.end(world, &[]);
}

/// An agent is reaped when its client is killed, which hangs up its pipes or sockets. Agents with another state of their
/// standard streams live.
fn stdio_agent_without_client(view: &ScenarioRun, ends: &str) {
    let mut world = world(view);
    let agent = |role: &str| {
        let (inner, mcp) = (format!("{role}-inner"), format!("{role}-mcp"));
        format!("{role} as:gemini-acp agent {inner}=as:gemini-relaunched+agent+{mcp}=sleep")
    };
    // Agents that must live:
    // - `open`, `holder`: the client is open although the agent's parent exited. `holder` is stopped too.
    // - `suspended`: the client is stopped.
    // - `echo`: only the input is hung up.
    let codex = |role: &str| format!("{role} as:codex-stdio parent {role}-mcp sleep");
    world.spawn("open", &format!("editor {ends} orphan {}", codex("served")));
    world.spawn("holder", &format!("editor {ends} orphan {}", agent("held")));
    world.spawn(
        "suspended",
        &format!("editor {ends} child {}", agent("paused")),
    );
    world.spawn(
        "echo",
        "editor file orphan print as:claude-print agent job=sleep",
    );
    world.spawn("editor", &format!("editor {ends} child {}", agent("acp")));
    world.spawn(
        "codex-editor",
        &format!("editor {ends} child {}", codex("closed")),
    );
    let trees = ["held", "paused", "acp"].iter();
    let trees = trees.flat_map(|role| {
        [
            role.to_string(),
            format!("{role}-inner"),
            format!("{role}-mcp"),
        ]
    });
    let others = [
        "print",
        "job",
        "served",
        "served-mcp",
        "closed",
        "closed-mcp",
    ]
    .map(String::from);
    let trees: Vec<String> = trees.chain(others).collect();
    for role in trees.iter().map(String::as_str) {
        world.await_processes(role, 1);
    }
    let roles: Vec<&str> = trees.iter().map(String::as_str).collect();
    view.await_seen(&world, &roles);
    for role in ["holder", "suspended"] {
        stop(world.process(role));
    }
    ["editor", "codex-editor"]
        .iter()
        .for_each(|role| world.kill(role));
    let gone = ["acp", "acp-inner", "acp-mcp", "closed", "closed-mcp"];
    view.await_gone(&world, &gone);
    if view.is_fully_supported() {
        let acp = world.process("acp");
        let decision = world.await_event("the agent is reaped", |e| {
            e.is("decision", acp) && e.decision.as_deref() == Some("reap")
        });
        assert_eq!(decision.rule.as_deref(), Some("agents-without-client"));
    }
    let alive: Vec<&str> = roles
        .into_iter()
        .filter(|role| !gone.contains(role))
        .collect();
    let clients = ["holder", "suspended", "echo", "open"];
    view.end(world, &[&alive[..], &clients].concat());
}

/// Sends SIGSTOP to a process of this test.
fn stop(key: ProcessKey) {
    assert!(key.is_alive(), "{key:?} has exited");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(key.pid), Signal::SIGSTOP).expect("stop it");
}
