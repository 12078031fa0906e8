//! Facts from earlier lines that later lines refer to.

use std::collections::BTreeSet;
use std::sync::Arc;

use hashbrown::HashMap;

use super::observed::Observed;
use crate::export::command::short_command;
use crate::export::record::{EventBody, ProcessRef, ResumedRoot};
use crate::export::words::LEFT_RUNNING;
use reaper_model::event::{ExitStatus, ProcessKey};

/// Limit of remembered processes, in case their exits are not reported.
const PROCESSES_MAX: usize = 100_000;
/// Limit of command lines in [`OpenSession::left_running`].
const LEFT_MAX: usize = 16;

#[derive(Default)]
pub(super) struct Memory {
    /// Names of the agents, by the roots of open sessions.
    agents: HashMap<ProcessKey, Arc<str>>,
    /// Open sessions by their first root.
    sessions: HashMap<ProcessKey, OpenSession>,
    /// Processes that lines were written about.
    processes: HashMap<ProcessKey, Mentioned>,
    /// Processes that would have been reaped.
    pub observed: Observed,
}

/// Session whose end has not been shown.
#[derive(Default)]
pub(super) struct OpenSession {
    /// Command line of the root.
    pub command: String,
    /// Exit status of the root, once it has exited.
    pub exit_status: Option<ExitStatus>,
    /// Process that started the root, with its name.
    parent: Option<(ProcessKey, Vec<u8>)>,
    /// All roots that it had.
    roots: Vec<ProcessKey>,
    /// Command lines that left something running, each once.
    pub left_running: BTreeSet<String>,
}

/// Process that a line was written about.
#[derive(Default)]
struct Mentioned {
    /// Agent of a leftover, which is no member of a session.
    agent: Option<Arc<str>>,
    /// Command line in the last line; empty if there was none.
    command: String,
    /// Whether an outcome follows after its exit. `None` if no decision was shown.
    is_claimed: Option<bool>,
    /// Whether it counts as one that would have been reaped.
    is_observed: bool,
}

impl Memory {
    /// Notes the agents and the sessions of a record.
    pub(super) fn on_record(&mut self, body: &EventBody) {
        match body {
            EventBody::SessionOpen { process, .. } => self.add_root(process),
            EventBody::SessionResume { root, session, .. } => match root {
                ResumedRoot::Alive(process) => self.add_root(process),
                ResumedRoot::Exited { key, .. } => {
                    self.agents.insert(*key, Arc::clone(&session.agent));
                    let open = self.sessions.entry(session.first_root).or_default();
                    open.roots.push(*key);
                }
            },
            EventBody::SessionRelaunch { process, .. } => self.add_root(process),
            EventBody::SessionRootExit {
                session,
                exit_status,
                ..
            } => {
                let open = self.sessions.entry(session.first_root).or_default();
                open.exit_status = Some(*exit_status);
            }
            EventBody::Decision { process, decision } if decision.reason == LEFT_RUNNING => {
                let session = process.session.as_ref();
                let open = session.and_then(|it| self.sessions.get_mut(&it.first_root));
                if let Some(open) = open.filter(|open| open.left_running.len() < LEFT_MAX) {
                    open.left_running.insert(short_command(&process.image));
                }
            }
            _ => {}
        }
    }

    fn add_root(&mut self, root: &ProcessRef) {
        let Some(session) = &root.session else {
            return;
        };
        self.agents.insert(root.key, Arc::clone(&session.agent));
        let open = self.sessions.entry(session.first_root).or_default();
        open.command = short_command(&root.image);
        open.exit_status = None;
        open.roots.push(root.key);
    }

    /// Notes the name of the process that has started an agent.
    pub(super) fn name_parent(&mut self, root: &ProcessRef, parent: ProcessKey, comm: Vec<u8>) {
        let session = root.session.as_ref();
        let open = session.and_then(|session| self.sessions.get_mut(&session.first_root));
        if let Some(open) = open {
            open.parent = Some((parent, comm));
        }
    }

    /// Returns the noted name of the process that has started the agent of `process`, if that is `key`.
    pub(super) fn parent_comm(&self, process: &ProcessRef, key: ProcessKey) -> Option<&[u8]> {
        let open = self.sessions.get(&process.session.as_ref()?.first_root)?;
        let (parent, comm) = open.parent.as_ref()?;
        (*parent == key).then_some(comm)
    }

    /// Forgets a session and returns what was known of it.
    pub(super) fn close(&mut self, first_root: ProcessKey) -> OpenSession {
        let open = self.sessions.remove(&first_root).unwrap_or_default();
        for root in &open.roots {
            self.agents.remove(root);
        }
        open
    }

    /// Returns the name of the agent whose root, or whose leftover, this process is.
    pub(super) fn agent_of(&self, key: ProcessKey) -> Option<&str> {
        let mentioned = self.processes.get(&key);
        let leftover = mentioned.and_then(|mentioned| mentioned.agent.as_deref());
        self.agents.get(&key).map(|agent| &**agent).or(leftover)
    }

    /// Notes that a line is written about a process. Returns the command line of the last such line, if another
    /// program runs now. `is_claimed`: whether an outcome follows after the exit of the process; `None` leaves that as
    /// it was.
    pub(super) fn mention(
        &mut self,
        process: &ProcessRef,
        is_claimed: Option<bool>,
    ) -> Option<String> {
        if self.processes.len() >= PROCESSES_MAX {
            self.processes.clear();
        }
        let command = short_command(&process.image);
        let mentioned = self.processes.entry(process.key).or_default();
        mentioned.is_claimed = is_claimed.or(mentioned.is_claimed);
        let before = std::mem::replace(&mut mentioned.command, command);
        (!before.is_empty() && before != mentioned.command).then_some(before)
    }

    /// Notes that an outcome follows after the exit of a process.
    pub(super) fn claim(&mut self, key: ProcessKey) {
        self.processes.entry(key).or_default().is_claimed = Some(true);
    }

    /// Notes the agent of a leftover.
    pub(super) fn mention_leftover(&mut self, process: &ProcessRef, agent: &Arc<str>) {
        let mentioned = self.processes.entry(process.key).or_default();
        mentioned.agent = Some(Arc::clone(agent));
    }

    /// Notes a process that would have been reaped.
    pub(super) fn observe(&mut self, process: &ProcessRef) {
        let Some(session) = &process.session else {
            return;
        };
        let mentioned = self.processes.entry(process.key).or_default();
        if std::mem::replace(&mut mentioned.is_observed, true) {
            return;
        }
        let root = self.sessions.get(&session.first_root);
        let root = root.map(|open| &*open.command);
        self.observed.add(process, &session.agent, root);
    }

    /// Returns whether a line has shown a decision about this process, after which the service has not signalled it.
    pub(super) fn is_announced(&self, key: ProcessKey) -> bool {
        let mentioned = self.processes.get(&key);
        mentioned.is_some_and(|mentioned| mentioned.is_claimed == Some(false))
    }

    /// Forgets a process that has exited, unless an outcome follows.
    pub(super) fn forget_exited(&mut self, key: ProcessKey) {
        let claimed = self.processes.get(&key).and_then(|it| it.is_claimed);
        if claimed != Some(true) {
            self.processes.remove(&key);
        }
    }

    /// Forgets a process after its outcome.
    pub(super) fn forget(&mut self, key: ProcessKey) {
        self.processes.remove(&key);
    }
}
