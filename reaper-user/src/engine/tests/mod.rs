//! Runs the engine on a simulated kernel.

mod service;
mod sim;

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::sync::{mpsc, oneshot};

use super::*;
use crate::api::messages::{EngineReply, EngineRequest, RequestKind};
use crate::api::peer::Peer;
use crate::export::{Consumer, Writer};
use reaper_model::event::ExitStatus;
use sim::SimKernel;

const RULES: &str = r#"
    defaults.agents = false
    [[agent]]
    name = "agent"
    comm = "agent"
    [[rule]]
    name = "later"
    action = "reap"
    session = "gone"
    comm = "server"
    after = "10min"
"#;

const AGENT: u32 = 100;
const CHILD: u32 = 101;
/// Not started by the agent.
const CANARY: u32 = 200;

/// Consumer that stops the engine at a record.
struct StopAt {
    is_last: fn(&EventBody) -> bool,
    stop: Option<oneshot::Sender<()>>,
}

impl Consumer for StopAt {
    fn on_records(&mut self, records: &[EventRecord]) -> Option<EventRecord> {
        if records.iter().any(|record| (self.is_last)(&record.body)) {
            drop(self.stop.take());
        }
        None
    }
}

/// Returns a kernel with an agent and its child.
fn boot(child: &'static str) -> Arc<SimKernel> {
    let sim = SimKernel::boot();
    for (pid, parent, comm) in [
        (1, 0, "init"),
        (CANARY, 1, "canary"),
        (AGENT, 1, "agent"),
        (CHILD, AGENT, child),
    ] {
        sim.start(pid, parent, comm);
    }
    sim
}

fn settings(mode: Mode) -> EngineSettings {
    let config = Config::parse(RULES, Path::new("test")).unwrap();
    EngineSettings {
        mode,
        mode_reason: None,
        events: EventScope::Agents,
        scope: Scope::default(),
        scope_names: Vec::new(),
        cgroups: Vec::new(),
        times: Times::default(),
        running: config.clone(),
        config,
        load: Arc::new(|| Err("not reloaded".into())),
        keeps: Vec::new(),
        keep_store: None,
        kernel_reap: false,
        leave_pinned: false,
        rejected_sources: Vec::new(),
        socket: None,
        next_command: None,
    }
}

/// Starts an agent with a child, calls `happen`, and runs the engine until a record matches `is_last`.
fn run(
    mode: Mode,
    child: &'static str,
    happen: impl FnOnce(&SimKernel),
    is_last: fn(&EventBody) -> bool,
) -> (Totals, Vec<(u32, Signal)>) {
    run_until(mode, child, happen, Some(is_last))
}

/// Same as [`run`]. Without `is_last` the engine is stopped before it runs.
fn run_until(
    mode: Mode,
    child: &'static str,
    happen: impl FnOnce(&SimKernel),
    is_last: Option<fn(&EventBody) -> bool>,
) -> (Totals, Vec<(u32, Signal)>) {
    let sim = boot(child);
    let settings = settings(mode);
    let (mut sink, writer) = Writer::start(Vec::new()).unwrap();
    let (stop, stopped) = oneshot::channel();
    let stop = is_last.map(|_| stop);
    let is_last = is_last.unwrap_or(|_| false);
    sink.set_consumer(StopAt { is_last, stop });
    let (kernel, source) = sim.interfaces();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let totals = runtime.block_on(async {
        let engine = Engine::start(kernel, source, settings, sink).unwrap();
        happen(&sim);
        let stop = async {
            let _ = stopped.await;
            Stop::because("test")
        };
        let (_sender, requests) = mpsc::channel(1);
        let run = engine.run(stop, requests);
        tokio::time::timeout(Duration::from_secs(60), run).await
    });
    writer.join();
    (
        totals.expect("timeout before the last record").unwrap(),
        sim.sent(),
    )
}

fn kill_agent(sim: &SimKernel) {
    let (signal, core) = (Signal::SIGKILL as u8, false);
    sim.exit(AGENT, ExitStatus::Signalled { signal, core });
}

#[test]
fn orphan_of_a_killed_agent_is_reaped() {
    let (totals, sent) = run(Mode::Enforce, "child", kill_agent, |body| {
        matches!(body, EventBody::SessionClose { .. })
    });
    assert_eq!((totals.sessions, totals.reaped, totals.failed), (1, 1, 0));
    let first = (CHILD, Signal::SIGTERM);
    assert_eq!(sent, [first]);
}

#[test]
fn observe_decides_and_sends_nothing() {
    let (totals, sent) = run(
        Mode::Observe,
        "child",
        kill_agent,
        |body| matches!(body, EventBody::Decision { decision, .. } if decision.verdict == "reap"),
    );
    assert_eq!((totals.reaped, totals.signals), (0, 0));
    assert_eq!(sent, []);
}

#[test]
fn session_closes_after_the_delay_of_its_last_member() {
    let (totals, sent) = run(Mode::Enforce, "server", kill_agent, |body| {
        matches!(body, EventBody::SessionClose { .. })
    });
    assert_eq!((totals.reaped, totals.failed), (1, 0));
    assert_eq!(sent, [(CHILD, Signal::SIGTERM)]);
}

#[test]
fn process_with_a_reused_pid_is_not_signalled() {
    let happen = |sim: &SimKernel| {
        sim.reuse_when_opened(CHILD);
        kill_agent(sim);
    };
    let (totals, sent) = run(Mode::Enforce, "child", happen, |body| {
        matches!(body, EventBody::SessionClose { .. })
    });
    assert_eq!((totals.reaped, totals.signals), (0, 0));
    assert_eq!(sent, []);
}

#[test]
fn process_that_ignores_sigterm_is_killed_after_the_grace() {
    let (totals, sent) = run(Mode::Enforce, "stubborn", kill_agent, |body| {
        matches!(body, EventBody::SessionClose { .. })
    });
    assert_eq!((totals.reaped, totals.failed), (1, 0));
    let signals = [Signal::SIGTERM, Signal::SIGCONT, Signal::SIGKILL];
    assert_eq!(sent, signals.map(|signal| (CHILD, signal)));
}

#[test]
fn orphan_of_an_agent_that_was_read_late_is_reaped() {
    const LATE: u32 = 150;
    const TOOL: u32 = 151;
    let happen = |sim: &SimKernel| {
        let time = sim.report_unread(LATE, 1, "agent");
        let tool_time = sim.report_unread(TOOL, LATE, "tool");
        sim.report_late(TOOL, tool_time);
        sim.report_late(LATE, time);
        let (signal, core) = (Signal::SIGKILL as u8, false);
        sim.exit(LATE, ExitStatus::Signalled { signal, core });
    };
    let (totals, sent) = run(Mode::Enforce, "child", happen, |body| {
        matches!(body, EventBody::SessionClose { .. })
    });
    assert_eq!((totals.sessions, totals.reaped, totals.failed), (2, 1, 0));
    assert_eq!(sent, [(TOOL, Signal::SIGTERM)]);
}

#[test]
fn stopped_service_finishes_what_is_due() {
    let (totals, sent) = run_until(Mode::Enforce, "child", kill_agent, None);
    assert_eq!((totals.reaped, totals.failed), (1, 0));
    assert_eq!(sent, [(CHILD, Signal::SIGTERM)]);
}

#[test]
fn stopped_service_does_not_wait_for_facts_forever() {
    let happen = |sim: &SimKernel| {
        sim.hold_facts();
        kill_agent(sim);
    };
    let (totals, sent) = run_until(Mode::Enforce, "child", happen, None);
    assert_eq!((totals.reaped, totals.failed), (0, 0));
    assert_eq!(sent, []);
}

/// Its pid may have been reused. The user may see the new process, but the engine does not know it.
#[test]
fn exited_process_of_another_user_is_not_found() {
    let sim = boot("child");
    let (kernel, source) = sim.interfaces();
    let (sink, writer) = Writer::start(Vec::new()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (asks, requests) = mpsc::channel(1);
    let explain = async |uid| {
        let (reply, answered) = oneshot::channel();
        let request = EngineRequest {
            peer: Peer { uid },
            kind: RequestKind::Explain { pid: CHILD },
            reply,
        };
        assert!(asks.send(request).await.is_ok());
        answered.await.unwrap()
    };
    let refusal = runtime.block_on(async {
        let engine = Engine::start(kernel, source, settings(Mode::Observe), sink).unwrap();
        sim.exit(CHILD, ExitStatus::Exited(0));
        let (stop, stopped) = oneshot::channel::<()>();
        let stop_engine = async {
            let _ = stopped.await;
            Stop::because("test")
        };
        let ask = async {
            while !matches!(explain(0).await, EngineReply::ExplainExited(_)) {}
            let reply = explain(1001).await;
            drop(stop);
            reply
        };
        let both = async { tokio::join!(engine.run(stop_engine, requests), ask) };
        tokio::time::timeout(Duration::from_secs(60), both).await
    });
    writer.join();
    let EngineReply::Refused(refusal) = refusal.expect("a reply in time").1 else {
        panic!("the process is shown");
    };
    assert_eq!(refusal.status, 404, "{}", refusal.detail);
}
