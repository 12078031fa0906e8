//! Remembers what was decided about the last processes and how they ended, for `reaper explain`.
//!
//! The journal has the same decisions and outcomes for longer, but a service can run without a journal.

use std::collections::VecDeque;
use std::hash::Hash;
use std::sync::Arc;

use hashbrown::HashMap;

use super::record::{DecisionNames, EventBody, EventRecord, Lifecycle, ProcessRef, SessionRef};
use crate::reap::ReapOutcome;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::leftover::{Leftover, LeftoverVerdict};

/// Number of processes that are remembered of each kind: those to be reaped, and others. Also that of sessions.
const MAX: usize = 1024;

/// Process that was to be reaped, or a member that has exited. Times are in nanoseconds since boot.
#[derive(Clone, Debug)]
pub struct RecentProcess {
    pub process: ProcessRef,
    /// Last decision, with its time. `None` for a member that exited while its agent was alive.
    pub decision: Option<(u64, DecisionNames)>,
    /// Leftover that it is, if that was decided about.
    pub leftover: Option<Leftover>,
    /// Last signal that it was sent, with its time.
    pub signal: Option<(u64, &'static str)>,
    /// Outcome of the signals, with its time.
    pub outcome: Option<(u64, RecentOutcome)>,
    /// Exit status, with the time of the exit.
    pub exit: Option<(u64, ExitStatus)>,
}

/// Outcome of the signals to a process, as in [`EventBody::Outcome`].
#[derive(Clone, Copy, Debug)]
pub struct RecentOutcome {
    pub outcome: ReapOutcome,
    pub signal: Option<&'static str>,
    pub memory: Option<ProcessMemory>,
    pub duration: Option<u64>,
}

/// Session of a remembered process.
#[derive(Clone, Debug, Default)]
pub struct RecentSession {
    /// Session that contains it, if that is known.
    pub outer: Option<SessionRef>,
    pub root_exit: Option<RootExit>,
}

/// Exit of the root of a session.
#[derive(Clone, Copy, Debug)]
pub struct RootExit {
    pub root: ProcessKey,
    /// Time in nanoseconds since boot.
    pub at: u64,
    pub exit_status: ExitStatus,
}

/// Last processes and root exits, from the records of the stream.
#[derive(Default)]
pub struct Recent {
    /// Processes to be reaped, and leftovers, by pid. Other exits do not evict them.
    reaped: Last<u32, RecentProcess>,
    /// Other members that have exited, by pid.
    exited: Last<u32, RecentProcess>,
    /// Sessions by their first root.
    sessions: Last<ProcessKey, RecentSession>,
}

impl Recent {
    /// Remembers a record if it reports a decision to reap, a signal, an outcome or an exit of a member, or the opening or
    /// root exit of a session. A later decision replaces one to reap.
    pub fn on_record(&mut self, record: &EventRecord) {
        let at = record.boot_ns;
        match &record.body {
            EventBody::Decision { process, decision } if decision.verdict == "reap" => {
                self.reaped_mut(process).decision = Some((at, decision.clone()));
            }
            // Revokes a decision to reap.
            EventBody::Decision { process, decision } => {
                if let Some(known) = self.known_reaped(process.key) {
                    known.decision = Some((at, decision.clone()));
                }
            }
            EventBody::Leftover {
                process, leftover, ..
            } if leftover.verdict == LeftoverVerdict::Reap => {
                self.reaped_mut(process).leftover = Some(leftover.clone());
            }
            EventBody::Signal { process, sent } => {
                self.reaped_mut(process).signal = Some((at, sent.signal.as_str()));
            }
            EventBody::Outcome {
                process,
                outcome,
                signal,
                memory,
                duration,
            } => {
                let outcome = RecentOutcome {
                    outcome: *outcome,
                    signal: *signal,
                    memory: *memory,
                    duration: *duration,
                };
                self.reaped_mut(process).outcome = Some((at, outcome));
            }
            EventBody::Lifecycle {
                process,
                event: Lifecycle::Exit { exit_status, .. },
                ..
            } if process.session.is_some() => self.on_exit(process, (at, *exit_status)),
            EventBody::SessionRootExit {
                session,
                root,
                exit_status,
                ..
            } => {
                let exit = RootExit {
                    root: *root,
                    at,
                    exit_status: *exit_status,
                };
                self.session_mut(session).root_exit = Some(exit);
            }
            EventBody::SessionOpen {
                process:
                    ProcessRef {
                        session: Some(session),
                        ..
                    },
                outer: Some(outer),
                ..
            } => self.session_mut(session).outer = Some(outer.clone()),
            _ => {}
        }
    }

    /// Returns the youngest remembered process with this pid, and what is remembered of its session.
    pub fn find(&self, pid: u32) -> Option<(RecentProcess, RecentSession)> {
        let found = [self.reaped.get(&pid), self.exited.get(&pid)];
        let found = found.into_iter().flatten();
        let recent = found.max_by_key(|recent| recent.process.key.start)?;
        let session = recent.process.session.as_ref();
        let session = session.and_then(|session| self.sessions.get(&session.first_root));
        Some((recent.clone(), session.cloned().unwrap_or_default()))
    }

    fn session_mut(&mut self, session: &SessionRef) -> &mut RecentSession {
        self.sessions
            .get_or_insert(session.first_root, RecentSession::default)
    }

    fn on_exit(&mut self, process: &ProcessRef, exit: (u64, ExitStatus)) {
        match self.known_reaped(process.key) {
            Some(known) => known.exit = Some(exit),
            None => {
                let exited = RecentProcess {
                    exit: Some(exit),
                    ..RecentProcess::new(process)
                };
                self.exited.insert(process.key.pid, exited);
            }
        }
    }

    fn known_reaped(&mut self, key: ProcessKey) -> Option<&mut RecentProcess> {
        let known = self.reaped.get_mut(&key.pid)?;
        (known.process.key == key).then_some(known)
    }

    /// Returns the process among those to be reaped, with its current program. Adds it if it is new.
    fn reaped_mut(&mut self, process: &ProcessRef) -> &mut RecentProcess {
        let new = || RecentProcess::new(process);
        let known = self.reaped.get_or_insert(process.key.pid, new);
        if known.process.key != process.key {
            *known = new();
        }
        known.process.image = Arc::clone(&process.image);
        known
    }
}

impl RecentProcess {
    fn new(process: &ProcessRef) -> RecentProcess {
        RecentProcess {
            process: process.clone(),
            decision: None,
            leftover: None,
            signal: None,
            outcome: None,
            exit: None,
        }
    }
}

/// Map of the last [`MAX`] new keys.
struct Last<K, V> {
    by_key: HashMap<K, V>,
    /// Oldest first.
    order: VecDeque<K>,
}

impl<K, V> Default for Last<K, V> {
    fn default() -> Last<K, V> {
        Last {
            by_key: HashMap::new(),
            order: VecDeque::new(),
        }
    }
}

impl<K: Copy + Eq + Hash, V> Last<K, V> {
    fn get(&self, key: &K) -> Option<&V> {
        self.by_key.get(key)
    }

    fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.by_key.get_mut(key)
    }

    /// Adds or replaces a value.
    fn insert(&mut self, key: K, value: V) {
        self.make_room(key);
        self.by_key.insert(key, value);
    }

    /// Returns the value of a key, and adds it if the key is new.
    fn get_or_insert(&mut self, key: K, new: impl FnOnce() -> V) -> &mut V {
        self.make_room(key);
        self.by_key.entry(key).or_insert_with(new)
    }

    /// Drops the oldest key if a key is new and would exceed the limit.
    fn make_room(&mut self, key: K) {
        if self.by_key.contains_key(&key) {
            return;
        }
        self.order.push_back(key);
        if self.order.len() > MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_key.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;

    use super::*;
    use crate::reap::{SentBy, SentSignal};
    use reaper_model::event::{Image, Provenance, Uids};
    use reaper_model::ruleset::SessionKind;

    const ROOT: ProcessKey = ProcessKey { pid: 10, start: 1 };

    fn process(pid: u32, start: u64) -> ProcessRef {
        ProcessRef {
            key: ProcessKey { pid, start },
            parent: None,
            birth_parent: None,
            image: Arc::new(Image::default()),
            uids: Uids::default(),
            session: Some(SessionRef {
                agent: "claude".into(),
                first_root: ROOT,
            }),
            provenance: Provenance::Kernel,
            evidence: None,
        }
    }

    fn decided(process: ProcessRef, verdict: &'static str) -> EventBody {
        let decision = DecisionNames {
            verdict,
            reason: "root_exited",
            rule: None,
            memory: None,
            mode: "enforce",
            wait: None,
            ancestors: Arc::default(),
        };
        EventBody::Decision { process, decision }
    }

    fn exited(process: ProcessRef) -> EventBody {
        EventBody::Lifecycle {
            process,
            provenance: Provenance::Kernel,
            event: Lifecycle::Exit {
                exit_status: ExitStatus::Exited(3),
                peak_rss: 0,
            },
        }
    }

    fn recent(bodies: impl IntoIterator<Item = EventBody>) -> Recent {
        let mut recent = Recent::default();
        for (body, boot_ns) in bodies.into_iter().zip(1..) {
            recent.on_record(&EventRecord { boot_ns, body });
        }
        recent
    }

    #[test]
    fn reaped_process_is_remembered_with_its_cause() {
        let signal = SentSignal {
            key: process(20, 2).key,
            signal: Signal::SIGTERM,
            by: SentBy::Service,
            latency: None,
        };
        let root_exit = EventBody::SessionRootExit {
            session: process(20, 2).session.unwrap(),
            kind: SessionKind::Agent,
            root: ROOT,
            members: 1,
            exit_status: ExitStatus::Exited(1),
        };
        let outcome = EventBody::Outcome {
            process: process(20, 2),
            outcome: ReapOutcome::Exited(ExitStatus::Exited(3)),
            signal: Some("SIGTERM"),
            memory: None,
            duration: Some(5),
        };
        let sent = EventBody::Signal {
            process: process(20, 2),
            sent: signal,
        };
        let records = [
            root_exit,
            decided(process(20, 2), "reap"),
            sent,
            exited(process(20, 2)),
            outcome,
        ];
        let (found, session) = recent(records).find(20).unwrap();
        assert_eq!(
            found.decision.map(|(at, names)| (at, names.verdict)),
            Some((2, "reap"))
        );
        assert_eq!(found.signal, Some((3, "SIGTERM")));
        assert_eq!(found.exit, Some((4, ExitStatus::Exited(3))));
        assert_eq!(found.outcome.map(|(at, _)| at), Some(5));
        let root_exit = session.root_exit.map(|exit| (exit.root, exit.at));
        assert_eq!(root_exit, Some((ROOT, 1)));
    }

    #[test]
    fn later_process_with_the_same_pid_is_found() {
        let reaped = decided(process(20, 2), "reap");
        let found = |records: Vec<EventBody>| {
            let (found, _) = recent(records).find(20)?;
            Some((
                found.process.key.start,
                found.decision.is_some(),
                found.exit.is_some(),
            ))
        };
        assert_eq!(found(vec![reaped.clone()]), Some((2, true, false)));
        assert_eq!(
            found(vec![reaped.clone(), exited(process(20, 9))]),
            Some((9, false, true))
        );
        let later = decided(process(20, 9), "reap");
        assert_eq!(found(vec![reaped, later]), Some((9, true, false)));
        // A decision to keep alone is not remembered.
        assert_eq!(found(vec![decided(process(20, 2), "keep")]), None);
    }

    #[test]
    fn exits_do_not_evict_reaped_processes() {
        let reaped = decided(process(20, 2), "reap");
        let exits = (0..3 * MAX as u32).map(|n| exited(process(100 + n, 3)));
        let recent = recent(std::iter::once(reaped).chain(exits));
        assert!(recent.find(20).is_some() && recent.find(100).is_none());
        assert_eq!(recent.exited.by_key.len(), MAX);
        assert_eq!(recent.exited.order.len(), MAX);
    }
}
