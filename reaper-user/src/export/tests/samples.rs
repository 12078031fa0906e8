//! Sample records of every kind, with and without their optional fields.

use std::sync::Arc;

use nix::sys::signal::Signal;

use crate::export::*;
use crate::reap::{ReapFailure, ReapOutcome, ReleaseReason, SentBy, SentSignal};
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::activity::TreeMemory;
use reaper_model::event::{ExitStatus, Image, ProcessKey, Provenance, Uids};
use reaper_model::leftover::{
    KeepReason, Leftover, LeftoverEvidence, LeftoverVerdict, Uncertainty,
};
use reaper_model::policy::Reason;
use reaper_model::ruleset::SessionKind;

const ROOT: ProcessKey = ProcessKey { pid: 42, start: 7 };
const PARENT: ProcessKey = ProcessKey { pid: 41, start: 5 };
const INIT: ProcessKey = ProcessKey { pid: 1, start: 0 };
const KILLED: ExitStatus = ExitStatus::Signalled {
    signal: 15,
    core: false,
};
const DUMPED: ExitStatus = ExitStatus::Signalled {
    signal: 6,
    core: true,
};
const UNNAMED: ExitStatus = ExitStatus::Signalled {
    signal: 40,
    core: false,
};
const MEMORY: FreedMemory = FreedMemory {
    rss: 1 << 30,
    swap: 1 << 29,
    unmeasured: 2,
};

/// Returns all samples, one second apart.
pub fn records() -> Vec<EventRecord> {
    let bodies = [
        service(),
        lifecycle(),
        sessions(),
        decisions(),
        leftovers(),
        keeps(),
        signals(),
        outcomes(),
        gaps(),
        waits(),
        observed(),
    ];
    let bodies = bodies.into_iter().flatten();
    let record = |(body, n): (EventBody, u64)| EventRecord {
        boot_ns: n * 1_000_000_000,
        body,
    };
    bodies.zip(1..).map(record).collect()
}

fn session(pid: u32) -> SessionRef {
    SessionRef {
        agent: "claude".into(),
        first_root: ProcessKey { pid, ..ROOT },
    }
}

/// Returns a root with few known facts.
fn process() -> ProcessRef {
    let image = Image {
        comm: b"claude".into(),
        argv: b"claude\0--token\0hunter2\0".into(),
        ..Image::default()
    };
    ProcessRef {
        key: ROOT,
        parent: None,
        birth_parent: None,
        image: Arc::new(image),
        uids: Uids::default(),
        session: Some(session(42)),
        provenance: Provenance::Kernel,
        evidence: None,
    }
}

/// Returns a member with all facts, and with text that is harmful on a terminal.
fn member() -> ProcessRef {
    let image = Image {
        comm: b"n\x1b[1m\xffde".into(),
        exe: b"/usr/bin/n\xffde".into(),
        argv: "node\0a b\0\u{202e}x\0\"quoted\\\"\0".into(),
        truncated: true,
        cgroup_id: 4242,
        ..Image::default()
    };
    ProcessRef {
        key: ProcessKey { pid: 43, start: 9 },
        parent: Some(ROOT),
        birth_parent: Some(PARENT),
        image: Arc::new(image),
        uids: Uids {
            real: 1000,
            effective: 1001,
        },
        ..process()
    }
}

/// Returns a process without a session and without arguments.
fn untracked() -> ProcessRef {
    let image = Image {
        comm: b"kworker".into(),
        ..Image::default()
    };
    ProcessRef {
        image: Arc::new(image),
        session: None,
        provenance: Provenance::Procfs,
        ..member()
    }
}

fn inferred(
    evidence: &'static str,
    variable: Option<&'static str>,
    directory: Option<&str>,
) -> ProcessRef {
    let evidence = Some(EvidenceRef {
        evidence,
        variable,
        directory: directory.map(str::to_owned),
    });
    ProcessRef {
        evidence,
        provenance: Provenance::Inferred,
        ..member()
    }
}

fn service() -> Vec<EventBody> {
    let resumed = Resumed {
        sessions: 2,
        backlog: 2048,
        lost: 5,
    };
    let rejected = RejectedSource {
        source: "ebpf",
        reason: "no BTF".to_owned(),
    };
    let reload = |applied, message: &str| EventBody::ConfigReload {
        applied,
        message: message.to_owned(),
    };
    vec![
        EventBody::Ready {
            mode: "enforce",
            mode_reason: None,
            config: ConfigFile::default(),
            socket: None,
            next_command: None,
            source: "ebpf",
            rejected_sources: Vec::new(),
            processes: 3,
            version: env!("CARGO_PKG_VERSION"),
            scope: Vec::new(),
            resumed: None,
            pin_dir: None,
            kernel_reap: true,
            ring_size: Some(65_536),
        },
        EventBody::Ready {
            mode: "observe",
            mode_reason: Some("no right\nto signal".to_owned()),
            config: ConfigFile {
                path: Some("/etc/reaper/config.toml".to_owned()),
                exists: true,
            },
            socket: Some("/run/reaper/r\n.sock".to_owned()),
            next_command: Some("reaper tree".to_owned()),
            source: "proc_connector",
            rejected_sources: vec![rejected],
            processes: 3,
            version: env!("CARGO_PKG_VERSION"),
            scope: vec!["uid 1000".to_owned(), "cgroup /x".to_owned()],
            resumed: Some(resumed),
            pin_dir: Some("/sys/fs/bpf/r\n".to_owned()),
            kernel_reap: false,
            ring_size: None,
        },
        EventBody::CaughtUp {
            records: 7,
            duration: 1_500_000,
        },
        reload(true, "2 rules\n1 agent"),
        reload(false, "line 3: unknown key"),
        EventBody::Dropped {
            by: "journal",
            count: 7,
        },
        EventBody::Dropped {
            by: "stream",
            count: 8,
        },
        EventBody::Malformed {
            count: 2,
            reason: "record of kind 99".to_owned(),
        },
        EventBody::Summary {
            count: Totals::default(),
            reason: "SIGTERM",
            pin_dir: Some("/sys/fs/bpf/r".to_owned()),
            first_waiting: Vec::new(),
        },
        EventBody::Summary {
            count: Totals {
                sessions: 1,
                reaped: 2,
                kept: 3,
                waiting: 2,
                failed: 4,
                would_have_reaped: 0,
                signals: 5,
                events: 6,
                lost: 7,
                memory: MEMORY,
            },
            reason: "SIGINT",
            pin_dir: None,
            first_waiting: vec![process()],
        },
    ]
}

fn lifecycle() -> Vec<EventBody> {
    let event = |event, process: ProcessRef| EventBody::Lifecycle {
        event,
        provenance: process.provenance,
        process,
    };
    let exit = |exit_status| Lifecycle::Exit {
        exit_status,
        peak_rss: 4096,
    };
    let orphan = |old_parent, comm: &[u8]| EventBody::Orphan {
        process: member(),
        old_parent,
        parent_command: comm.to_vec(),
    };
    let reparent =
        |old_parent: Option<_>, adopter: Option<_>, namespace_ending| EventBody::Reparent {
            process: process(),
            old_parent,
            old_parent_comm: old_parent.map_or_else(Vec::new, |_| b"sh".to_vec()),
            adopter: adopter.map(|key| Adopter {
                key,
                comm: b"systemd".to_vec(),
            }),
            namespace_ending,
            provenance: Provenance::Kernel,
        };
    vec![
        event(Lifecycle::Fork, member()),
        event(Lifecycle::Fork, untracked()),
        event(Lifecycle::Fork, inferred("process_group", None, None)),
        event(Lifecycle::Exec, process()),
        event(Lifecycle::Move, member()),
        event(exit(ExitStatus::Exited(3)), member()),
        event(exit(DUMPED), member()),
        event(exit(UNNAMED), process()),
        event(exit(ExitStatus::Unknown), process()),
        orphan(Some(PARENT), b"s\xffh"),
        orphan(None, b""),
        reparent(Some(PARENT), Some(INIT), false),
        reparent(Some(PARENT), None, true),
        reparent(None, None, false),
    ]
}

fn sessions() -> Vec<EventBody> {
    let open = |kind, outer, starter| EventBody::SessionOpen {
        process: process(),
        kind,
        rule: "claude".into(),
        outer,
        starter,
    };
    let resume = |root| EventBody::SessionResume {
        session: session(42),
        root_exited: matches!(root, ResumedRoot::Exited { .. }),
        root,
        members: 3,
    };
    let exited = ResumedRoot::Exited {
        session: session(42),
        key: ROOT,
    };
    let root_exit = |kind, exit_status| EventBody::SessionRootExit {
        session: session(42),
        kind,
        root: ROOT,
        exit_status,
        members: 4,
    };
    let close = |memory, kept_reasons, nested, lost_before| EventBody::SessionClose {
        session: session(42),
        is_repeat: false,
        reaped: 5,
        kept: 1,
        kept_reasons,
        nested,
        failed: 0,
        would_have_reaped: 0,
        memory,
        lost_before,
    };
    let nested = |pid, kept, waiting| NestedSummary {
        session: session(pid),
        root_pid: pid,
        kept,
        waiting,
    };
    let reasons = vec!["keep_rule", "kept_by_user"];
    let boundary = |session| EventBody::Boundary {
        process: untracked(),
        session,
        rule: "tmux".into(),
    };
    vec![
        open(SessionKind::Agent, None, None),
        open(SessionKind::Agent, Some(session(40)), None),
        open(SessionKind::Agent, None, Some(session(40))),
        open(SessionKind::Server, None, Some(session(40))),
        resume(ResumedRoot::Alive(process())),
        resume(exited),
        root_exit(SessionKind::Agent, KILLED),
        root_exit(SessionKind::Server, ExitStatus::Exited(0)),
        EventBody::SessionRelaunch {
            session: session(42),
            process: member(),
            old_root: ROOT,
        },
        close(FreedMemory::default(), vec![], vec![], 0),
        close(MEMORY, reasons, vec![], 0),
        close(
            FreedMemory::default(),
            vec![],
            vec![nested(43, 0, 1), nested(44, 2, 3)],
            6,
        ),
        boundary(Some(session(42))),
        boundary(None),
    ]
}

fn decisions() -> Vec<EventBody> {
    let decision = |process, verdict, reason, rule: Option<&str>, memory| EventBody::Decision {
        process,
        decision: DecisionNames {
            verdict,
            mode: "enforce",
            reason,
            rule: rule.map(Into::into),
            wait: None,
            memory,
            ancestors: Arc::default(),
        },
    };
    let memory = |swap| Some(TreeMemory { rss: 1 << 30, swap });
    let marked = inferred("marker", Some("CLAUDE_PID"), None);
    let within = inferred("cwd", None, Some("/home/u/p\u{202e}"));
    vec![
        decision(process(), "reap", "root_exited", None, None),
        decision(process(), "reap", "reap_rule", Some("big"), memory(0)),
        decision(
            process(),
            "report",
            "report_rule",
            Some("big"),
            memory(1 << 20),
        ),
        decision(marked, "wait", "rule_delay", Some("slow"), None),
        decision(within, "keep", "unreadable", None, None),
    ]
}

fn leftover(mode: &'static str, evidence: LeftoverEvidence, verdict: LeftoverVerdict) -> EventBody {
    EventBody::Leftover {
        process: untracked(),
        leftover: Leftover {
            key: untracked().key,
            subtree_root: ROOT,
            agent: "claude".into(),
            evidence,
            verdict,
        },
        mode,
    }
}

fn leftovers() -> Vec<EventBody> {
    let leftover = |evidence, verdict| leftover("enforce", evidence, verdict);
    let owner = LeftoverEvidence::ExitedAgent {
        variable: "CLAUDE_PID",
        pid: 40,
    };
    let keep = LeftoverVerdict::Keep {
        reason: KeepReason::KeepRule,
        rule: Some("mine".into()),
        relative: Some(44),
    };
    let wait = LeftoverVerdict::Wait {
        rule: "slow".into(),
        remaining_ns: 5_000_000_000,
        relative: None,
    };
    let report = LeftoverVerdict::Report(Uncertainty::Young);
    vec![
        leftover(owner, LeftoverVerdict::Reap),
        leftover(LeftoverEvidence::ToolShell, report),
        leftover(LeftoverEvidence::Recorded { root: 39 }, keep),
        leftover(LeftoverEvidence::Recorded { root: 0 }, wait),
    ]
}

fn keeps() -> Vec<EventBody> {
    let keep = |kept, processes| EventBody::Keep {
        process: process(),
        by: 1000,
        kept,
        processes,
    };
    let lasts = |until, tree| Some(KeepDuration { until, tree });
    vec![
        keep(lasts(None, false), 1),
        keep(lasts(Some(90_000_000_001), true), 3),
        keep(None, 2),
    ]
}

fn signals() -> Vec<EventBody> {
    let sent = |signal, by, latency| EventBody::Signal {
        process: process(),
        sent: SentSignal {
            key: ROOT,
            signal,
            latency,
            by,
        },
    };
    vec![
        sent(Signal::SIGTERM, SentBy::Service, Some(22_000)),
        sent(Signal::SIGKILL, SentBy::Kernel, None),
    ]
}

fn outcomes() -> Vec<EventBody> {
    let outcome = |outcome, signal, duration, memory| EventBody::Outcome {
        process: process(),
        outcome,
        signal,
        duration,
        memory,
    };
    let memory = |rss| Some(ProcessMemory { rss, swap: 0 });
    let exited = |status, memory| {
        let duration = Some(2_000_000);
        let exited = ReapOutcome::Exited(status);
        outcome(exited, Some("SIGTERM"), duration, memory)
    };
    let failed = |failure| outcome(ReapOutcome::Failed(failure), Some("SIGKILL"), Some(7), None);
    let not_sent = |reason| outcome(ReapOutcome::NotSent(reason), None, None, None);
    vec![
        exited(KILLED, memory(3 << 20)),
        exited(ExitStatus::Exited(0), memory(2 << 20)),
        exited(ExitStatus::Unknown, None),
        failed(ReapFailure::Stopped),
        failed(ReapFailure::Eperm),
        failed(ReapFailure::Errno(22)),
        failed(ReapFailure::KillTimeout('D')),
        failed(ReapFailure::KillTimeout('R')),
        not_sent(ReleaseReason::AlreadyExited),
        not_sent(ReleaseReason::NotDue(Reason::KeptByUser)),
        not_sent(ReleaseReason::UidUnreadable),
        not_sent(ReleaseReason::ObserveMode),
        not_sent(ReleaseReason::PidReused),
    ]
}

fn gaps() -> Vec<EventBody> {
    let gap = |reason, total| EventBody::GapOpen {
        reason,
        source: "ebpf",
        total,
        by_kind: [
            ("fork", total),
            ("exec", 0),
            ("exit", 0),
            ("reparent", 0),
            ("cgroup.migrate", 0),
        ],
    };
    vec![
        gap("records_lost", 4),
        gap("restart", 0),
        gap("member_map_full", 4),
        gap("record_malformed", 4),
        gap("source_failed", 0),
        EventBody::GapClose {
            reason: "records_lost",
            total: 4,
            processes_recovered: 2,
            exits_recovered: 1,
            duration: 1_500_000,
        },
        EventBody::MemberMapFull {
            count: 9,
            capacity: 1024,
        },
    ]
}

fn waits() -> Vec<EventBody> {
    let waits = |listener, ports| EventBody::Decision {
        process: member(),
        decision: DecisionNames {
            verdict: "wait",
            mode: "enforce",
            reason: "rule_delay",
            rule: Some("asked-for-servers".into()),
            wait: Some(WaitInfo {
                until: 700_000_000_000,
                conditions: vec!["listening", "root_succeeded"],
                listener,
                ports,
            }),
            memory: None,
            ancestors: Arc::default(),
        },
    };
    let listener = Listener {
        key: ProcessKey { pid: 44, start: 10 },
        comm: b"vite\xff".to_vec(),
        is_below: true,
    };
    vec![waits(None, vec![5173]), waits(Some(listener), vec![])]
}

/// Returns records of a service that only observes.
fn observed() -> Vec<EventBody> {
    let would_reap = |process| EventBody::Decision {
        process,
        decision: DecisionNames {
            verdict: "reap",
            mode: "observe",
            reason: "root_exited",
            rule: None,
            wait: None,
            memory: None,
            ancestors: Arc::default(),
        },
    };
    let owner = LeftoverEvidence::ExitedAgent {
        variable: "CLAUDE_PID",
        pid: 40,
    };
    let exited = EventBody::Lifecycle {
        event: Lifecycle::Exit {
            exit_status: ExitStatus::Exited(0),
            peak_rss: 4096,
        },
        provenance: Provenance::Kernel,
        process: member(),
    };
    let closed = EventBody::SessionClose {
        session: session(42),
        is_repeat: false,
        reaped: 0,
        kept: 0,
        kept_reasons: vec![],
        nested: vec![],
        failed: 0,
        would_have_reaped: 2,
        memory: FreedMemory::default(),
        lost_before: 0,
    };
    vec![
        would_reap(process()),
        would_reap(member()),
        would_reap(member()),
        exited,
        leftover("observe", owner, LeftoverVerdict::Reap),
        closed,
        EventBody::Summary {
            count: Totals {
                sessions: 2,
                would_have_reaped: 4,
                ..Totals::default()
            },
            reason: "SIGINT",
            pin_dir: None,
            first_waiting: Vec::new(),
        },
    ]
}
