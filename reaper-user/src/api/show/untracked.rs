//! Explains a living process that the engine does not know, from /proc. Below a boundary or outside of the scope, the
//! probes report no events.

use std::sync::Arc;
use std::time::Duration;

use crate::api::ProblemDetails;
use crate::api::messages::{
    Ancestor, ExplainSnapshot, ProcessName, ProcessSnapshot, ScanContext, UntrackedReason,
};
use crate::api::peer::Peer;
use crate::api::recognition::{first_match, read_process};
use reaper_host::facts::{ScriptPaths, scan_pids};
use reaper_host::source::procfs::Procfs;
use reaper_model::Scope;
use reaper_model::event::ProcEntry;
use reaper_model::facts::Facts;
use reaper_model::ruleset::{Action, Rule};

/// Limit of ancestors.
const LINEAGE_MAX: usize = 64;

/// Returns the state of a process and its living ancestors.
///
/// # Errors
/// There is no such process, or it cannot be read or belongs to another user.
pub(in crate::api) fn snapshot(
    pid: u32,
    peer: Peer,
    context: &ScanContext,
) -> Result<ExplainSnapshot, ProblemDetails> {
    let scripts = peer.script_paths();
    let process = read_process(pid, scripts)?;
    if !peer.may_see(process.uids) {
        return Err(ProblemDetails::not_visible(pid));
    }
    let above = ancestors(&process, scripts);
    let rules = context.rules.shared_rules();
    let rule_of = |entry: &ProcEntry| first_match(&rules, &entry.image).cloned();
    let (own, above_rules) = (
        rule_of(&process),
        above.iter().map(rule_of).collect::<Vec<_>>(),
    );
    let reason = reason(&process, own.as_ref(), &above, &above_rules, &context.scope);
    let with_rules = above.iter().zip(&above_rules);
    Ok(ExplainSnapshot {
        row: row(&process, above.first(), boundary(own.as_ref())),
        lineage: with_rules
            .map(|(entry, rule)| ancestor(entry, rule.as_ref(), peer))
            .collect(),
        adopter: None,
        session: None,
        exited_root: None,
        if_killed: None,
        if_succeeded: None,
        untracked_reason: Some(reason),
        honors_keep: context.rules.honors_keep(),
        signalled: None,
        rules,
        facts: Facts::default(),
        enforce: context.enforce,
        mode_reason: None,
        grace: Duration::ZERO,
        gap: context.gap,
        predates_service: process.key.start < context.started_ns,
        leftover: None,
    })
}

/// Returns why a process is a member of no session. `own` is the rule that matches it, `above_rules` those of its
/// ancestors.
fn reason(
    process: &ProcEntry,
    own: Option<&Rule>,
    above: &[ProcEntry],
    above_rules: &[Option<Rule>],
    scope: &Scope,
) -> UntrackedReason {
    if process.kernel_thread {
        return UntrackedReason::Never("never_kernel_thread");
    }
    if process.key.pid <= 1 {
        return UntrackedReason::Never("never_pid1");
    }
    if let Some(rule) = boundary(own) {
        return UntrackedReason::Boundary(rule);
    }
    let mut boundaries = above_rules.iter().map(|rule| boundary(rule.as_ref()));
    let Some(at) = boundaries.position(|rule| rule.is_some()) else {
        // A boundary may have left the scope with its descendants, so this is certain only without one.
        return match is_in(scope, process, above) {
            true => UntrackedReason::NoAgent(None),
            false => UntrackedReason::OutOfScope,
        };
    };
    let name = ProcessName {
        pid: above[at].key.pid,
        comm: above[at].image.comm.clone(),
    };
    let mut agents = above_rules[at..].iter().flatten();
    let is_below_agent = agents.any(|rule| rule.action.opens_session());
    match boundary(above_rules[at].as_ref()).filter(|_| is_below_agent) {
        Some(rule) => UntrackedReason::BelowBoundary(name, rule),
        None => UntrackedReason::NoAgent(Some(name)),
    }
}

/// Returns the name of a rule that makes a process a boundary.
fn boundary(rule: Option<&Rule>) -> Option<Arc<str>> {
    let rule = rule.filter(|rule| rule.action == Action::Boundary)?;
    Some(Arc::clone(&rule.name))
}

fn row(
    process: &ProcEntry,
    parent: Option<&ProcEntry>,
    boundary: Option<Arc<str>>,
) -> ProcessSnapshot {
    ProcessSnapshot {
        key: process.key,
        parent: parent.map(|parent| parent.key),
        image: Arc::clone(&process.image),
        uids: process.uids,
        session: None,
        root: false,
        orphan: false,
        due: false,
        boundary,
        decision: None,
        evidence: None,
    }
}

fn ancestor(entry: &ProcEntry, rule: Option<&Rule>, peer: Peer) -> Ancestor {
    Ancestor {
        key: entry.key,
        image: Some(Arc::clone(&entry.image)),
        visible: peer.may_see(entry.uids),
        alive: true,
        exit_status: None,
        agent: None,
        boundary: boundary(rule),
        adopter: None,
    }
}

/// Returns the living ancestors of a process, nearest first. Reads them in one scan.
fn ancestors(process: &ProcEntry, scripts: ScriptPaths) -> Vec<ProcEntry> {
    let procfs = Procfs::default();
    let above = |pid: u32| Some(pid).filter(|pid| *pid != 0);
    let parent = |child: &u32| above(procfs.parent(*child).ok()??);
    let pids: Vec<u32> = std::iter::successors(above(process.parent), parent)
        .take(LINEAGE_MAX)
        .collect();
    let mut rows = match scan_pids(&procfs, pids.clone(), scripts) {
        Ok(table) => table.rows,
        Err(_) => return Vec::new(),
    };
    let mut ancestors: Vec<ProcEntry> = Vec::new();
    for pid in pids {
        let child = ancestors.last().unwrap_or(process);
        let parent = rows.remove(&pid).map(|row| row.entry);
        // Otherwise the parent has exited, and its pid may be in use again.
        let is_parent =
            |entry: &ProcEntry| child.parent == pid && entry.key.start <= child.key.start;
        match parent.filter(is_parent) {
            Some(parent) => ancestors.push(parent),
            None => break,
        }
    }
    ancestors
}

/// Returns whether the scope contains the process or one of its ancestors.
fn is_in(scope: &Scope, process: &ProcEntry, above: &[ProcEntry]) -> bool {
    let named = |entry: &ProcEntry| {
        scope.roots.iter().any(|root| root.has_same_tick(entry.key))
            || scope.cgroups.contains(&entry.image.cgroup_id)
    };
    scope.is_unlimited() || named(process) || above.iter().any(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_are_the_parents_of_each_other() {
        let own = read_process(std::process::id(), ScriptPaths::Given).unwrap();
        let above = ancestors(&own, ScriptPaths::Given);
        assert_eq!(above[0].key.pid, std::os::unix::process::parent_id());
        let chain: Vec<&ProcEntry> = std::iter::once(&own).chain(&above).collect();
        for pair in chain.windows(2) {
            assert_eq!(pair[0].parent, pair[1].key.pid);
            assert!(pair[1].key.start <= pair[0].key.start);
        }
        let last = chain.last().unwrap().parent;
        assert!(last == 0 || above.len() == LINEAGE_MAX, "it ends at {last}");
    }
}
