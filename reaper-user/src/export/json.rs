//! The stream: one flat JSON object a line, OpenTelemetry's names for what a process has.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::ser::Formatter;

use super::clock::EventClock;
use super::names::{
    SessionIdText, SignalName, event_name, outcome_name, outcome_reason, signaller_name,
};
use super::record::{
    EventBody, EventRecord, FreedMemory, KeepDuration, Lifecycle, NestedSummary, ProcessRef,
    SessionRef, Totals,
};
use super::redact;
use super::text::is_unprintable;
use crate::reap::ReapOutcome;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::activity::TreeMemory;
use reaper_model::event::{ExitStatus, ProcessKey};

/// Version of the stream: raised when a key changes its meaning or goes.
pub const SCHEMA: u32 = 1;

type Map<'a, W> =
    <&'a mut serde_json::Serializer<W, EscapingFormatter> as Serializer>::SerializeMap;
type Result = std::result::Result<(), serde_json::Error>;

/// Writes one record as one line.
pub fn write(
    out: &mut impl Write,
    record: &EventRecord,
    seq: u64,
    clock: &EventClock,
) -> io::Result<()> {
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, EscapingFormatter);
    let map = serializer.serialize_map(None)?;
    let mut line = Line { map, clock };
    line.whole(record, seq)?;
    line.map.end()?;
    out.write_all(b"\n")
}

/// A value as one line of JSON, as harmless as those of the stream.
pub fn to_json(value: &impl Serialize) -> Vec<u8> {
    let mut out = Vec::new();
    // Fails only where a map has keys that are no text.
    if let Err(error) = write_object(&mut out, value) {
        tracing::error!("cannot write an answer as JSON: {error}; this is a bug");
    }
    out
}

/// Writes a value as one line, as harmless as those of the stream.
///
/// # Errors
/// Of the writer.
pub fn write_object(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, EscapingFormatter);
    value.serialize(&mut serializer)?;
    out.write_all(b"\n")
}

/// Escapes more than JSON asks for: what some terminals take for a command (DEL, C1), some readers for the end of a line, and
/// what hides or reorders text. It reads back as the same text.
struct EscapingFormatter;

impl Formatter for EscapingFormatter {
    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        text: &str,
    ) -> io::Result<()> {
        let mut rest = text;
        while let Some(at) = rest.find(is_unprintable) {
            let (plain, tail) = rest.split_at(at);
            let mut tail = tail.chars();
            out.write_all(plain.as_bytes())?;
            if let Some(c) = tail.next() {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
            rest = tail.as_str();
        }
        out.write_all(rest.as_bytes())
    }
}

/// A nested session in the close of the one that it is nested in.
#[derive(Serialize)]
struct Nested {
    session_id: String,
    root_pid: u32,
    kept: u32,
    waiting: u32,
}

impl From<&NestedSummary> for Nested {
    fn from(rest: &NestedSummary) -> Nested {
        Nested {
            session_id: SessionIdText(&rest.session).to_string(),
            root_pid: rest.session.first_root.pid,
            kept: rest.kept,
            waiting: rest.waiting,
        }
    }
}

struct Line<'a, 'c, W: Write> {
    map: Map<'a, W>,
    clock: &'c EventClock,
}

impl<W: Write> Line<'_, '_, W> {
    fn put(&mut self, key: &str, value: impl Serialize) -> Result {
        self.map.serialize_entry(key, &value)
    }

    fn text(&mut self, key: &str, value: impl Display) -> Result {
        self.put(key, format_args!("{value}"))
    }

    fn whole(&mut self, record: &EventRecord, seq: u64) -> Result {
        self.put("schema", SCHEMA)?;
        self.put("seq", seq)?;
        self.text("time", self.clock.wall(record.time))?;
        self.put("time_boot_ns", record.time)?;
        self.put("event", event_name(&record.body))?;
        match &record.body {
            EventBody::Ready {
                mode,
                mode_reason,
                source,
                rejected_sources: passed_over,
                processes,
                scope,
                resumed,
                pin_dir: pinned,
                kernel_reap,
                ring_size,
            } => {
                self.put("mode", mode)?;
                if let Some(reason) = mode_reason {
                    self.put("mode_reason", reason)?;
                }
                self.put("source", source)?;
                self.put("rejected_sources", passed_over)?;
                self.put("processes", processes)?;
                self.put("scope", scope)?;
                self.put("version", env!("CARGO_PKG_VERSION"))?;
                if let Some(size) = ring_size {
                    self.put("ring_size", size)?;
                }
                self.put("kernel_reap", kernel_reap)?;
                if let Some(directory) = pinned {
                    self.put("pin_dir", directory)?;
                }
                let Some(resumed) = resumed else {
                    return self.put("resumed", false);
                };
                self.put("resumed", true)?;
                self.put("resumed_sessions", resumed.sessions)?;
                self.put("backlog_bytes", resumed.backlog)?;
                self.put("lost_before", resumed.lost)
            }
            EventBody::Lifecycle {
                what,
                process,
                provenance,
            } => {
                self.process(process)?;
                self.put("provenance", provenance.name())?;
                match what {
                    Lifecycle::Fork | Lifecycle::Exec | Lifecycle::Move => Ok(()),
                    Lifecycle::Exit {
                        exit_status: ended,
                        peak_rss,
                    } => {
                        self.ended(*ended)?;
                        self.put("process.memory.peak_rss", peak_rss)
                    }
                }
            }
            EventBody::Orphan {
                process,
                old_parent,
                parent_command,
            } => {
                self.process(process)?;
                self.old_parent(*old_parent)?;
                self.put("old_parent_comm", String::from_utf8_lossy(parent_command))
            }
            EventBody::Reparent {
                process,
                old_parent,
                old_parent_comm: _,
                adopter,
                adopter_comm,
                namespace_ending,
                provenance,
            } => {
                self.process(process)?;
                self.put("provenance", provenance.name())?;
                self.old_parent(*old_parent)?;
                if let Some(adopter) = adopter {
                    self.text("adopter_id", self.clock.entity_id(*adopter))?;
                    self.put("adopter_pid", adopter.pid)?;
                    self.put("adopter_comm", String::from_utf8_lossy(adopter_comm))?;
                }
                match namespace_ending {
                    true => self.put("no_adopter_reason", "pid_namespace_exiting"),
                    false => Ok(()),
                }
            }
            EventBody::SessionOpen {
                process,
                kind,
                rule,
                outer,
                starter,
            } => {
                self.process(process)?;
                self.put("session_kind", kind.name())?;
                self.put("rule", rule)?;
                if let Some(outer) = outer {
                    self.text("outer_session_id", SessionIdText(outer))?;
                }
                match starter {
                    Some(starter) => self.text("starter_session_id", SessionIdText(starter)),
                    None => Ok(()),
                }
            }
            EventBody::SessionResume {
                session,
                root,
                process,
                members,
                root_exited: root_gone,
            } => {
                match process {
                    Some(process) if process.session.is_some() => self.process(process)?,
                    _ => {
                        self.session(session)?;
                        self.text("entity_id", self.clock.entity_id(*root))?;
                        self.put("process.pid", root.pid)?;
                    }
                }
                self.put("members", members)?;
                self.put("root_exited", root_gone)
            }
            EventBody::SessionRootExit {
                session,
                kind,
                root,
                exit_status: ended,
                members,
            } => {
                self.session(session)?;
                self.put("session_kind", kind.name())?;
                self.text("entity_id", self.clock.entity_id(*root))?;
                self.put("process.pid", root.pid)?;
                self.put("members", members)?;
                self.ended(*ended)
            }
            EventBody::SessionRelaunch {
                session: _,
                process,
                old_root,
            } => {
                self.process(process)?;
                self.text("old_root_id", self.clock.entity_id(*old_root))
            }
            EventBody::SessionClose {
                session,
                is_repeat: _,
                reaped,
                kept,
                kept_reasons,
                nested,
                failed,
                memory,
                lost_before,
            } => {
                self.session(session)?;
                self.put("lost_before", lost_before)?;
                self.put("reaped", reaped)?;
                self.put("kept", kept)?;
                if !kept_reasons.is_empty() {
                    self.put("kept_reasons", kept_reasons)?;
                }
                if !nested.is_empty() {
                    let nested: Vec<Nested> = nested.iter().map(Nested::from).collect();
                    self.put("nested", nested)?;
                }
                self.put("failed", failed)?;
                self.given_back(memory)
            }
            EventBody::Boundary {
                process,
                session,
                rule,
            } => {
                self.process(process)?;
                self.put("rule", rule)?;
                match session {
                    Some(session) => self.text("left_session_id", SessionIdText(session)),
                    None => Ok(()),
                }
            }
            EventBody::Decision {
                process,
                decision: names,
            } => {
                self.process(process)?;
                self.put("decision", names.verdict)?;
                self.put("reason", names.reason)?;
                if let Some(rule) = &names.rule {
                    self.put("rule", rule)?;
                }
                let Some(TreeMemory { rss, swap }) = names.memory else {
                    return Ok(());
                };
                self.put("memory.rss", rss)?;
                self.put("memory.swap", swap)
            }
            EventBody::Leftover {
                process,
                leftover: stray,
            } => {
                self.process(process)?;
                self.put("agent", &stray.agent)?;
                self.put("decision", stray.verdict.name())?;
                self.put("reason", stray.reason())?;
                if let Some(rule) = stray.verdict.rule() {
                    self.put("rule", rule)?;
                }
                self.put("evidence", stray.evidence.name())?;
                if let Some(variable) = stray.evidence.variable() {
                    self.put("evidence_variable", variable)?;
                }
                if let Some(owner) = stray.evidence.owner() {
                    self.put("agent_pid", owner)?;
                }
                self.text("subtree_root_id", self.clock.entity_id(stray.subtree_root))?;
                self.put("subtree_root_pid", stray.subtree_root.pid)
            }
            EventBody::Keep {
                process,
                by,
                kept,
                processes,
            } => {
                self.process(process)?;
                self.put("by_uid", by)?;
                if let Some(KeepDuration { until, tree }) = kept {
                    if let Some(until) = until {
                        self.text("until", self.clock.wall(*until))?;
                    }
                    self.put("tree", tree)?;
                }
                self.put("processes", processes)
            }
            EventBody::ConfigReload { done, message } => {
                self.put("result", if *done { "applied" } else { "rejected" })?;
                self.text("message", message)
            }
            EventBody::Signal { process, sent } => {
                self.process(process)?;
                self.put("signal", sent.signal.as_str())?;
                self.put("result", "sent")?;
                self.put("sent_by", signaller_name(sent.by))?;
                match sent.latency {
                    Some(latency) => self.put("latency_ns", latency),
                    None => Ok(()),
                }
            }
            EventBody::Outcome {
                process,
                outcome,
                signal,
                duration,
                memory,
            } => {
                self.process(process)?;
                self.put("outcome", outcome_name(outcome))?;
                if let ReapOutcome::Exited(ended) = outcome {
                    self.ended(*ended)?;
                }
                if let Some(reason) = outcome_reason(outcome) {
                    self.put("reason", reason)?;
                }
                if let Some(signal) = signal {
                    self.put("signal", signal)?;
                }
                if let Some(ProcessMemory { rss, swap, pss }) = memory {
                    self.put("memory.rss", rss)?;
                    if let Some(pss) = pss {
                        self.put("memory.pss", pss)?;
                    }
                    self.put("memory.swap", swap)?;
                }
                match duration {
                    Some(duration) => self.put("duration_ns", duration),
                    None => Ok(()),
                }
            }
            EventBody::GapOpen {
                reason,
                source,
                total,
                by_kind,
            } => {
                self.put("reason", reason)?;
                self.put("source", source)?;
                self.put("lost", total)?;
                by_kind
                    .iter()
                    .try_for_each(|(kind, n)| self.put(&format!("lost_{kind}"), n))
            }
            EventBody::GapClose {
                reason,
                total,
                processes_recovered: found,
                exits_recovered: gone,
                duration,
            } => {
                self.put("reason", reason)?;
                self.put("lost", total)?;
                self.put("processes_recovered", found)?;
                self.put("exits_recovered", gone)?;
                self.put("duration_ns", duration)
            }
            EventBody::MemberMapFull {
                count,
                capacity: room,
            } => {
                self.put("count", count)?;
                self.put("capacity", room)
            }
            EventBody::CaughtUp { records, duration } => {
                self.put("records", records)?;
                self.put("duration_ns", duration)
            }
            EventBody::Dropped { by, count } => {
                self.put("dropped_by", by)?;
                self.put("count", count)
            }
            EventBody::Malformed { count, reason } => {
                self.put("count", count)?;
                self.put("reason", reason)
            }
            EventBody::Summary {
                count,
                reason,
                pin_dir: armed,
            } => {
                let Totals {
                    sessions,
                    reaped,
                    kept,
                    failed,
                    signals,
                    events,
                    lost,
                    memory,
                } = count;
                self.put("reason", reason)?;
                self.put("sessions", sessions)?;
                self.put("reaped", reaped)?;
                self.put("kept", kept)?;
                self.put("failed", failed)?;
                self.put("signals", signals)?;
                self.put("events", events)?;
                self.put("lost", lost)?;
                self.given_back(memory)?;
                match armed {
                    Some(directory) => self.put("pin_dir", directory),
                    None => Ok(()),
                }
            }
        }
    }

    fn process(&mut self, process: &ProcessRef) -> Result {
        self.text("entity_id", self.clock.entity_id(process.key))?;
        self.put("process.pid", process.key.pid)?;
        if let Some(parent) = process.parent {
            self.put("process.parent_pid", parent.pid)?;
            self.text("parent_id", self.clock.entity_id(parent))?;
        }
        if let Some(birth_parent) = process.birth_parent {
            self.text("birth_parent_id", self.clock.entity_id(birth_parent))?;
        }
        self.text("process.creation.time", self.clock.wall(process.key.start))?;
        self.put("process.start_ns", process.key.start)?;
        self.put("process.comm", String::from_utf8_lossy(&process.image.comm))?;
        if !process.image.exe.is_empty() {
            self.put(
                "process.executable.path",
                String::from_utf8_lossy(&process.image.exe),
            )?;
        }
        let args = redact::arguments(process.image.args());
        let args: Vec<_> = args
            .map(|arg| String::from_utf8_lossy(&arg).into_owned())
            .collect();
        self.put("process.args_count", args.len())?;
        self.put("process.command_args", args)?;
        self.put("truncated", process.image.truncated)?;
        if process.image.cgroup_id != 0 {
            self.put("process.linux.cgroup_id", process.image.cgroup_id)?;
        }
        self.put("process.user.id", process.uids.effective)?;
        self.put("process.real_user.id", process.uids.real)?;
        if let Some(session) = &process.session {
            self.session(session)?;
        }
        let Some(by) = &process.evidence else {
            return Ok(());
        };
        self.put("evidence", by.evidence)?;
        if let Some(variable) = by.variable {
            self.put("evidence_variable", variable)?;
        }
        match &by.directory {
            Some(directory) => self.put("evidence_directory", directory),
            None => Ok(()),
        }
    }

    fn session(&mut self, session: &SessionRef) -> Result {
        self.text("session_id", SessionIdText(session))?;
        self.put("agent", &session.agent)
    }

    fn given_back(&mut self, memory: &FreedMemory) -> Result {
        let FreedMemory {
            rss,
            pss,
            swap,
            unmeasured: unread,
        } = memory;
        self.put("memory.rss", rss)?;
        self.put("memory.pss", pss)?;
        self.put("memory.swap", swap)?;
        self.put("memory.unmeasured", unread)
    }

    fn old_parent(&mut self, parent: Option<ProcessKey>) -> Result {
        let Some(parent) = parent else { return Ok(()) };
        self.text("old_parent_id", self.clock.entity_id(parent))?;
        self.put("old_parent_pid", parent.pid)
    }

    fn ended(&mut self, ended: ExitStatus) -> Result {
        match ended {
            ExitStatus::Exited(code) => self.put("process.exit.code", code),
            ExitStatus::Signalled { signal, core } => {
                self.text("process.exit.signal", SignalName(signal))?;
                self.put("core_dumped", core)
            }
            ExitStatus::Unknown => Ok(()),
        }
    }
}
