//! The stream: one flat JSON object a line, OpenTelemetry's names for what a process has.

use std::fmt::Display;
use std::io::{self, Write};

use nix::sys::signal::Signal;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::ser::Formatter;

use super::record::{Body, Count, Lifecycle, Record, SessionRef, Who};
use super::redact;
use super::sink::Clock;
use crate::model::event::{Ended, Key};
use crate::reap::{Failure, Outcome, Released};

/// Version of the stream: raised when a key changes its meaning or goes.
pub const SCHEMA: u32 = 1;

type Map<'a, W> = <&'a mut serde_json::Serializer<W, Harmless> as Serializer>::SerializeMap;
type Result = std::result::Result<(), serde_json::Error>;

/// Writes one record as one line.
pub fn write(out: &mut impl Write, record: &Record, seq: u64, clock: &Clock) -> io::Result<()> {
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, Harmless);
    let map = serializer.serialize_map(None)?;
    let mut line = Line { map, clock };
    line.whole(record, seq)?;
    line.map.end()?;
    out.write_all(b"\n")
}

/// Escapes more than JSON asks for: what some terminals take for a command (DEL, C1) and some readers
/// for the end of a line.
struct Harmless;

impl Formatter for Harmless {
    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        text: &str,
    ) -> io::Result<()> {
        let mut rest = text;
        while let Some(at) =
            rest.find(|c| matches!(c, '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}'))
        {
            let (plain, tail) = rest.split_at(at);
            let mut tail = tail.chars();
            out.write_all(plain.as_bytes())?;
            if let Some(c) = tail.next() {
                write!(out, "\\u{:04x}", u32::from(c))?;
            }
            rest = tail.as_str();
        }
        out.write_all(rest.as_bytes())
    }
}

struct Line<'a, 'c, W: Write> {
    map: Map<'a, W>,
    clock: &'c Clock,
}

impl<W: Write> Line<'_, '_, W> {
    fn put(&mut self, key: &str, value: impl Serialize) -> Result {
        self.map.serialize_entry(key, &value)
    }

    fn text(&mut self, key: &str, value: impl Display) -> Result {
        self.put(key, format_args!("{value}"))
    }

    fn whole(&mut self, record: &Record, seq: u64) -> Result {
        self.put("schema", SCHEMA)?;
        self.put("seq", seq)?;
        self.text("time", self.clock.wall(record.time))?;
        self.put("time_boot_ns", record.time)?;
        self.put("event", name(&record.body))?;
        match &record.body {
            Body::Ready {
                mode,
                source,
                processes,
                scope,
            } => {
                self.put("mode", mode)?;
                self.put("source", source)?;
                self.put("processes", processes)?;
                self.put("scope", scope)?;
                self.put("version", env!("CARGO_PKG_VERSION"))
            }
            Body::Lifecycle {
                what,
                who,
                provenance,
            } => {
                self.who(who)?;
                self.put("provenance", provenance.name())?;
                match what {
                    Lifecycle::Fork | Lifecycle::Exec => Ok(()),
                    Lifecycle::Exit { ended, peak_rss } => {
                        self.ended(*ended)?;
                        self.put("process.memory.peak_rss", peak_rss)
                    }
                }
            }
            Body::Orphan {
                who,
                old_parent,
                parent_command,
            } => {
                self.who(who)?;
                self.old_parent(*old_parent)?;
                self.put(
                    "old_parent_command",
                    String::from_utf8_lossy(parent_command),
                )
            }
            Body::Reparent {
                who,
                old_parent,
                old_parent_command: _,
                adopter,
                adopter_command,
                provenance,
            } => {
                self.who(who)?;
                self.put("provenance", provenance.name())?;
                self.old_parent(*old_parent)?;
                if let Some(adopter) = adopter {
                    self.text("adopter_id", self.clock.entity(*adopter))?;
                    self.put("adopter_pid", adopter.pid)?;
                    self.put("adopter_command", String::from_utf8_lossy(adopter_command))?;
                }
                Ok(())
            }
            Body::SessionOpen { who, rule, outer } => {
                self.who(who)?;
                self.put("rule", rule)?;
                match outer {
                    Some(outer) => self.text("outer_session_id", SessionId(outer)),
                    None => Ok(()),
                }
            }
            Body::SessionRootGone {
                session,
                root,
                ended,
                members,
            } => {
                self.session(session)?;
                self.text("entity_id", self.clock.entity(*root))?;
                self.put("process.pid", root.pid)?;
                self.put("members", members)?;
                self.ended(*ended)
            }
            Body::SessionRelaunch {
                session: _,
                who,
                old_root,
            } => {
                self.who(who)?;
                self.text("old_root_id", self.clock.entity(*old_root))
            }
            Body::SessionClose {
                session,
                reaped,
                kept,
                failed,
                lost_before,
            } => {
                self.session(session)?;
                self.put("lost_before", lost_before)?;
                self.put("reaped", reaped)?;
                self.put("kept", kept)?;
                self.put("failed", failed)
            }
            Body::Boundary { who, session, rule } => {
                self.who(who)?;
                self.put("rule", rule)?;
                match session {
                    Some(session) => self.text("left_session_id", SessionId(session)),
                    None => Ok(()),
                }
            }
            Body::Decision { who, names } => {
                self.who(who)?;
                self.put("decision", names.verdict)?;
                self.put("reason", names.reason)?;
                match &names.rule {
                    Some(rule) => self.put("rule", rule),
                    None => Ok(()),
                }
            }
            Body::Signal { who, sent } => {
                self.who(who)?;
                self.put("signal", sent.signal.as_str())?;
                self.put("result", "sent")?;
                match sent.latency {
                    Some(latency) => self.put("latency_ns", latency),
                    None => Ok(()),
                }
            }
            Body::Outcome {
                who,
                outcome,
                signal,
                duration,
            } => {
                self.who(who)?;
                self.put("outcome", outcome_name(outcome))?;
                match outcome {
                    Outcome::Ended(ended) => self.ended(*ended)?,
                    Outcome::Failed(failure) => self.text("reason", FailureName(failure))?,
                    Outcome::Released(Released::NotDue(reason)) => {
                        self.put("reason", reason.name())?
                    }
                    Outcome::Released(Released::Unreadable) => self.put("reason", "unreadable")?,
                    Outcome::Released(Released::Observed) => self.put("reason", "observe")?,
                    Outcome::Released(Released::Gone) => self.put("reason", "gone")?,
                    Outcome::Released(Released::Identity) => self.put("reason", "identity")?,
                }
                if let Some(signal) = signal {
                    self.put("signal", signal)?;
                }
                match duration {
                    Some(duration) => self.put("duration_ns", duration),
                    None => Ok(()),
                }
            }
            Body::Lost { total, by_kind } => {
                self.put("lost", total)?;
                by_kind
                    .iter()
                    .try_for_each(|(kind, n)| self.put(&format!("lost_{kind}"), n))
            }
            Body::Dropped { count } => self.put("count", count),
            Body::Malformed { count, reason } => {
                self.put("count", count)?;
                self.put("reason", reason)
            }
            Body::Summary { count, reason } => {
                let Count {
                    sessions,
                    reaped,
                    kept,
                    failed,
                    signals,
                    events,
                    lost,
                } = count;
                self.put("reason", reason)?;
                self.put("sessions", sessions)?;
                self.put("reaped", reaped)?;
                self.put("kept", kept)?;
                self.put("failed", failed)?;
                self.put("signals", signals)?;
                self.put("events", events)?;
                self.put("lost", lost)
            }
        }
    }

    fn who(&mut self, who: &Who) -> Result {
        self.text("entity_id", self.clock.entity(who.key))?;
        self.put("process.pid", who.key.pid)?;
        if let Some(parent) = who.parent {
            self.put("process.parent_pid", parent.pid)?;
            self.text("parent_id", self.clock.entity(parent))?;
        }
        if let Some(birth_parent) = who.birth_parent {
            self.text("birth_parent_id", self.clock.entity(birth_parent))?;
        }
        self.text("process.creation.time", self.clock.wall(who.key.start))?;
        self.put("reaper.start_ns", who.key.start)?;
        self.put("process.command", String::from_utf8_lossy(&who.image.comm))?;
        if !who.image.exe.is_empty() {
            self.put(
                "process.executable.path",
                String::from_utf8_lossy(&who.image.exe),
            )?;
        }
        let args = redact::arguments(who.image.args());
        let args: Vec<_> = args
            .map(|arg| String::from_utf8_lossy(&arg).into_owned())
            .collect();
        self.put("process.args_count", args.len())?;
        self.put("process.command_args", args)?;
        self.put("truncated", who.image.truncated)?;
        if who.image.cgroup_id != 0 {
            self.put("process.linux.cgroup_id", who.image.cgroup_id)?;
        }
        self.put("process.user.id", who.uids.effective)?;
        self.put("process.real_user.id", who.uids.real)?;
        match &who.session {
            Some(session) => self.session(session),
            None => Ok(()),
        }
    }

    fn session(&mut self, session: &SessionRef) -> Result {
        self.text("session_id", SessionId(session))?;
        self.put("agent", &session.agent)
    }

    fn old_parent(&mut self, parent: Option<Key>) -> Result {
        let Some(parent) = parent else { return Ok(()) };
        self.text("old_parent_id", self.clock.entity(parent))?;
        self.put("old_parent_pid", parent.pid)
    }

    fn ended(&mut self, ended: Ended) -> Result {
        match ended {
            Ended::Exited(code) => self.put("process.exit.code", code),
            Ended::Signalled { signal, core } => {
                self.text("process.exit.signal", SignalName(signal))?;
                self.put("core_dumped", core)
            }
            Ended::Unknown => Ok(()),
        }
    }
}

/// Name of what happened, as it stands under `event`.
pub fn name(body: &Body) -> &'static str {
    match body {
        Body::Ready { .. } => "ready",
        Body::Lifecycle {
            what: Lifecycle::Fork,
            ..
        } => "fork",
        Body::Lifecycle {
            what: Lifecycle::Exec,
            ..
        } => "exec",
        Body::Lifecycle {
            what: Lifecycle::Exit { .. },
            ..
        } => "exit",
        Body::Orphan { .. } => "orphan",
        Body::Reparent { .. } => "reparent",
        Body::SessionOpen { .. } => "session.open",
        Body::SessionRootGone { .. } => "session.root_gone",
        Body::SessionRelaunch { .. } => "session.relaunch",
        Body::SessionClose { .. } => "session.close",
        Body::Boundary { .. } => "boundary",
        Body::Decision { .. } => "decision",
        Body::Signal { .. } => "signal",
        Body::Outcome { .. } => "outcome",
        Body::Lost { .. } => "lost",
        Body::Dropped { .. } => "dropped",
        Body::Malformed { .. } => "malformed",
        Body::Summary { .. } => "summary",
    }
}

/// The word under `outcome`.
pub fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Ended(_) => "ended",
        Outcome::Failed(_) => "failed",
        Outcome::Released(_) => "not_sent",
    }
}

/// A session's name outside: its agent, and pid and start of the process that was its root first.
struct SessionId<'a>(&'a SessionRef);

impl Display for SessionId<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SessionRef { agent, first_root } = self.0;
        write!(f, "{agent}-{}-{:x}", first_root.pid, first_root.start)
    }
}

/// A signal's name, or its number if it has none.
pub struct SignalName(pub u8);

impl Display for SignalName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match Signal::try_from(i32::from(self.0)) {
            Ok(signal) => f.write_str(signal.as_str()),
            Err(_) => write!(f, "SIG{}", self.0),
        }
    }
}

/// Why a process could not be ended, in one word.
pub struct FailureName<'a>(pub &'a Failure);

impl Display for FailureName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Failure::Stopped => f.write_str("stopped"),
            Failure::Eperm => f.write_str("eperm"),
            Failure::Errno(errno) => write!(f, "{:?}", nix::Error::from_raw(*errno)),
            Failure::Stuck('D') => f.write_str("uninterruptible"),
            Failure::Stuck(state) => write!(f, "stuck in state {state}"),
        }
    }
}
