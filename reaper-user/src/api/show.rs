//! Turns the engine's copies into responses: adds text and memory, removes secrets.

pub(super) mod exited;
mod sentence;
#[cfg(test)]
mod tests;
pub(super) mod untracked;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde_json::Value;

use super::messages::{
    AgentSnapshot, Ancestor, DecisionSnapshot, ExplainSnapshot, KeepSnapshot, ProcessName,
    ProcessSnapshot, RefusedReload, SessionSnapshot, TreeSnapshot, UntrackedReason, WaitSnapshot,
};
use super::{
    AgentInfo, AgentsResponse, AncestorInfo, DecisionInfo, Explanation, Finding, KeepInfo,
    KeepResult, KeepsResponse, NamedProcess, ProcessInfo, RefusedConfig, RuleTest, ScanReport,
    SessionInfo, Status, TreeResponse, TreeRow, WaitInfo, recognition,
};
use crate::config::Mode;
use crate::export::{
    Judgement, KeepAdvice, SessionIdText, SessionRef, command_line, exit_status_text, keep_rule,
    wall_time,
};
use reaper_host::facts::ScriptPaths;
use reaper_host::source::procfs::{Procfs, Zombie};
use reaper_host::sys;
use reaper_host::sys::host::Host;
use reaper_host::sys::privileges::{self, Privilege};
use reaper_model::activity::Activity;
use reaper_model::conversation::Conversations;
use reaper_model::facts::{Fact, Facts, InheritedFacts, LocalSockets, Stdio};

/// Largest size of a command line in bytes: in a list, and of the process that is explained.
const SHORT: usize = 256;
const LONG: usize = 8192;

/// Adds the start time, the uptime, the capabilities, the number of zombies whose parent is in `members`, and a refused
/// config. `began` is in ns since boot.
pub(super) fn status(
    status: Status,
    began: u64,
    members: &[u32],
    refused: Option<RefusedReload>,
) -> Status {
    // The status is useful without zombies too.
    let zombies = Procfs::default().zombies().unwrap_or_default();
    let members: HashSet<&u32> = members.iter().collect();
    let left = zombies
        .iter()
        .filter(|zombie| members.contains(&zombie.parent));
    // Before the drop at the start, the service had those that it no longer needs.
    let held = Host::read().capabilities;
    let missing = privileges::missing(held).filter(|privilege| privilege.is_kept);
    let missing = missing.map(|Privilege { name, loss, .. }| format!("{name}: {loss}"));
    Status {
        capabilities: held.names().map(str::to_owned).collect(),
        missing_capabilities: missing.collect(),
        zombies: left.count() as u64,
        since: date(began),
        uptime_s: seconds_since(began),
        config_refused: refused.map(|refused| RefusedConfig {
            since: date(refused.since),
            age_s: seconds_since(refused.since),
            error: refused.error.lines().next().map(str::to_owned),
        }),
        ..status
    }
}

/// Returns a time in ns since boot to the second, as RFC 3339.
fn date(boot_ns: u64) -> String {
    let time = wall_time(boot_ns);
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns the sessions, and with `leftovers` the decision about each untracked process that a scan has found.
pub(super) fn tree(snapshot: TreeSnapshot, leftovers: &ScanReport) -> TreeResponse {
    let procfs = Procfs::default();
    let mut zombies: HashMap<u32, Vec<Zombie>> = HashMap::new();
    // The tree is useful without zombies too.
    for zombie in procfs.zombies().unwrap_or_default() {
        zombies.entry(zombie.parent).or_default().push(zombie);
    }
    let group =
        |(session, rows): (Option<SessionSnapshot>, Vec<ProcessSnapshot>)| super::TreeGroup {
            session: session.map(|group| self::session(&group)),
            processes: tree_rows(rows, &mut zombies, &procfs),
        };
    let mut groups: Vec<_> = snapshot.groups.into_iter().map(group).collect();
    let untracked = groups.iter_mut().filter(|group| group.session.is_none());
    for row in untracked.flat_map(|group| &mut group.processes) {
        let found = leftovers.finding(row.process.pid);
        row.process.decision = found.map(|found| leftover_decision(found, leftovers.observes));
    }
    TreeResponse { groups }
}

/// Returns the rows in tree order, with zombies below their parents.
fn tree_rows(
    mut rows: Vec<ProcessSnapshot>,
    zombies: &mut HashMap<u32, Vec<Zombie>>,
    procfs: &Procfs,
) -> Vec<TreeRow> {
    rows.sort_unstable_by_key(|row| (row.key.start, row.key.pid));
    let listed: HashSet<_> = rows.iter().map(|row| row.key).collect();
    let mut children: HashMap<_, Vec<usize>> = HashMap::new();
    for (at, row) in rows.iter().enumerate() {
        let parent = row.parent.filter(|parent| listed.contains(parent));
        children.entry(parent).or_default().push(at);
    }
    let mut tree_rows = Vec::with_capacity(rows.len());
    // Used as a stack: the last entry is next.
    let mut stack: Vec<(usize, usize)> = Vec::new();
    let push = |stack: &mut Vec<_>, below: Option<Vec<usize>>, depth| {
        stack.extend(below.into_iter().flatten().rev().map(|at| (at, depth)));
    };
    push(&mut stack, children.remove(&None), 0);
    while let Some((at, depth)) = stack.pop() {
        let row = &rows[at];
        tree_rows.push(TreeRow {
            depth,
            process: process(row, SHORT, procfs),
        });
        let dead = zombies.remove(&row.key.pid).unwrap_or_default();
        tree_rows.extend(dead.into_iter().map(|zombie| TreeRow {
            depth: depth + 1,
            process: zombie_info(zombie),
        }));
        push(&mut stack, children.remove(&Some(row.key)), depth + 1);
    }
    tree_rows
}

fn zombie_info(zombie: Zombie) -> ProcessInfo {
    ProcessInfo {
        pid: zombie.key.pid,
        start_ns: zombie.key.start,
        parent_pid: Some(zombie.parent),
        command: format!("[{}]", String::from_utf8_lossy(&zombie.comm)),
        uid: zombie.uid,
        age_s: seconds_since(zombie.key.start),
        zombie: true,
        ..ProcessInfo::default()
    }
}

/// Returns the judgement on a process that belongs to no session, as the end of a sentence.
pub(super) fn untracked_judgement(snapshot: &ExplainSnapshot) -> String {
    sentence::judgement(snapshot)
}

/// Returns the explanation of a living process. Reads /proc for the rule that comes nearest, with these script paths.
pub(super) fn explanation(snapshot: ExplainSnapshot, scripts: ScriptPaths) -> Explanation {
    let image = &snapshot.row.image;
    let advice = || {
        let pid = Some(snapshot.row.key.pid).filter(|_| snapshot.signalled.is_none());
        KeepAdvice::new(pid, snapshot.honors_keep, keep_rule(image))
    };
    let nearest = nearest_rule(&snapshot, scripts);
    let mut process = process(&snapshot.row, LONG, &Procfs::default());
    if let Some(found) = &snapshot.leftover {
        process.decision = Some(leftover_decision(found, !snapshot.enforce));
    }
    Explanation {
        exited: false,
        outcome: None,
        keep_with: may_be_reaped(&snapshot).then(advice),
        why: sentence::why(&snapshot, nearest.as_ref()),
        next: sentence::next(&snapshot, nearest.as_ref()),
        nearest,
        process,
        lineage: snapshot.lineage.iter().map(ancestor_info).collect(),
        adopter: snapshot.adopter.as_ref().map(named_process),
        session: snapshot.session.as_ref().map(session),
        facts: facts(&snapshot),
    }
}

/// Returns whether a process is to be reaped now or after a delay, or would be if its agent were killed. Not for an
/// untracked process.
fn may_be_reaped(snapshot: &ExplainSnapshot) -> bool {
    let Some(decision) = &snapshot.row.decision else {
        return false;
    };
    let is_due = |decision: &DecisionSnapshot| matches!(decision.decision, "reap" | "wait");
    let if_killed = snapshot.if_killed.as_ref().filter(|_| !snapshot.row.root);
    snapshot.untracked_reason.is_none() && (is_due(decision) || if_killed.is_some_and(is_due))
}

/// Returns the agent rule that comes nearest to the process or to an ancestor below the boundary, if no agent is
/// recognised.
fn nearest_rule(snapshot: &ExplainSnapshot, scripts: ScriptPaths) -> Option<RuleTest> {
    let Some(UntrackedReason::NoAgent(_)) = snapshot.untracked_reason else {
        return None;
    };
    let below = snapshot.lineage.iter().take_while(|a| a.boundary.is_none());
    let above = below.filter(|ancestor| ancestor.visible);
    let above = above.filter_map(|ancestor| Some((ancestor.key, ancestor.image.clone()?)));
    let own = (snapshot.row.key, Arc::clone(&snapshot.row.image));
    let processes = std::iter::once(own).chain(above).collect();
    recognition::nearest(&snapshot.rules, processes, scripts)
}

/// Returns the decision about a leftover that a scan has found.
fn leftover_decision(found: &Finding, observes: bool) -> DecisionInfo {
    let mode = if observes {
        Mode::Observe
    } else {
        Mode::Enforce
    };
    DecisionInfo {
        decision: found.decision.clone(),
        mode: mode.name().into(),
        reason: found.reason.clone(),
        rule: found.rule.clone(),
        remaining_s: None,
        text: found.why.clone(),
    }
}

fn ancestor_info(ancestor: &Ancestor) -> AncestorInfo {
    let command = match &ancestor.image {
        Some(image) if ancestor.visible => command_line(image, SHORT),
        Some(image) => format!("[{}]", String::from_utf8_lossy(&image.comm)),
        None => String::new(),
    };
    AncestorInfo {
        pid: ancestor.key.pid,
        start_ns: ancestor.key.start,
        command,
        alive: ancestor.alive,
        ended: ancestor.exit_status.map(exit_status_text),
        agent: ancestor.agent.as_deref().map(str::to_owned),
        boundary: ancestor.boundary.as_deref().map(str::to_owned),
        adopter: ancestor.adopter.as_ref().map(named_process),
    }
}

fn named_process(name: &ProcessName) -> NamedProcess {
    NamedProcess {
        pid: name.pid,
        name: String::from_utf8_lossy(&name.comm).into_owned(),
    }
}

/// Returns the facts that are known so far, by their name in the response. Rules decide which facts are read. Leaves out
/// unread facts, the arguments and the script. `terminal` is always included.
fn facts(snapshot: &ExplainSnapshot) -> BTreeMap<String, Value> {
    let Facts {
        markers,
        unit,
        listening,
        cpu,
        kernel_session: session,
        stdin_is_terminal: input,
        inherited,
        conversations,
        activity,
        stdio,
        // The decision shows what the rules make of them.
        arguments: _,
        script: _,
        local_sockets,
    } = &snapshot.facts;
    let mut facts = BTreeMap::new();
    let mut put = |name: &str, known: Fact<Value>| {
        let value = match known {
            Fact::Unread => return,
            Fact::Unreadable => "unreadable".into(),
            Fact::Known(value) => value,
        };
        facts.insert(name.to_owned(), value);
    };
    put(
        "keep_marker",
        map(markers, |markers| (markers & 1 != 0).into()),
    );
    put("unit", map(unit, |unit| (**unit).into()));
    put("listening", map(listening, |is| (*is).into()));
    let names = |local: &Arc<LocalSockets>| {
        let displays = local.displays.iter();
        displays.map(|name| String::from_utf8_lossy(name)).collect()
    };
    put("displays", map(local_sockets, names));
    put("cpu_percent", map(cpu, |cpu| (*cpu).into()));
    put("sid", map(session, |now| now.sid.into()));
    let tty = match session {
        Fact::Known(now) => now.tty,
        _ => snapshot.row.image.tty,
    };
    put("terminal", Fact::Known((tty != 0).into()));
    put("terminal_input", map(input, |is| (*is).into()));
    let place = |all: &Arc<InheritedFacts>| match &all.directory {
        Some(directory) => directory.to_string_lossy().into(),
        None => Value::Null,
    };
    put("cwd", map(inherited, place));
    let variables = |all: &Arc<InheritedFacts>| {
        let markers = all.env_markers.markers.iter();
        markers.map(|marker| Value::from(marker.variable)).collect()
    };
    put("agent_markers", map(inherited, variables));
    let ids = |all: &Arc<Conversations>| {
        let ids = all.inherited.iter().chain(all.registered.iter());
        ids.map(Value::from).collect()
    };
    put("conversations", map(conversations, ids));
    let clients = |activity: &Arc<Activity>| activity.clients.len().into();
    put("clients", map(activity, clients));
    let name = |stdio: &Stdio| match stdio {
        Stdio::Connected(_) => "connected".into(),
        Stdio::HungUp => "hung up".into(),
        Stdio::Other => "no pipe".into(),
    };
    put("stdio", map(stdio, name));
    facts
}

/// Converts the value of a known fact. Other states stay as they are.
fn map<T>(known: &Fact<T>, value: impl FnOnce(&T) -> Value) -> Fact<Value> {
    match known {
        Fact::Unread => Fact::Unread,
        Fact::Unreadable => Fact::Unreadable,
        Fact::Known(known) => Fact::Known(value(known)),
    }
}

pub(super) fn agents(agents: Vec<AgentSnapshot>) -> AgentsResponse {
    let living = |session: &&SessionSnapshot| session.root_exit.is_none();
    let agent = |recognised: AgentSnapshot| AgentInfo {
        running: recognised
            .sessions
            .iter()
            .filter(living)
            .map(|session| session.root.pid)
            .collect(),
        name: recognised.name.to_string(),
        kind: recognised.kind.name().into(),
        matches: recognised.matches,
        sessions: recognised.sessions.iter().map(session).collect(),
    };
    let agents = agents.into_iter().map(agent).collect();
    AgentsResponse { agents }
}

pub(super) fn keeps(mut keeps: Vec<KeepSnapshot>) -> KeepsResponse {
    keeps.sort_unstable_by_key(|kept| (kept.row.key.start, kept.row.key.pid));
    let procfs = Procfs::default();
    let keep = |kept: KeepSnapshot| KeepInfo {
        process: process(&kept.row, SHORT, &procfs),
        by_uid: kept.by,
        remaining_s: kept.until.map(seconds_until),
        tree: kept.tree,
    };
    let keeps = keeps.into_iter().map(keep).collect();
    KeepsResponse { keeps }
}

/// Adds what happens now to a process that is no longer kept.
pub(super) fn released(done: KeepResult, snapshot: &ExplainSnapshot) -> KeepResult {
    KeepResult {
        why: Some(sentence::why(snapshot, None)),
        next: Some(sentence::next(snapshot, None)),
        ..done
    }
}

/// Creates a report of the members that have a decision. Leaves out those with the reason `root_alive`.
pub(super) fn scan(mut rows: Vec<ProcessSnapshot>) -> ScanReport {
    rows.sort_unstable_by_key(|row| (row.key.start, row.key.pid));
    let procfs = Procfs::default();
    let mut report = ScanReport::new("service");
    for row in &rows {
        let (Some(decision), Some(session)) = (&row.decision, &row.session) else {
            continue;
        };
        // Nothing to report: the agent is alive.
        if decision.reason == "root_alive" {
            continue;
        }
        let finding = finding(row, session, &procfs);
        if finding.decision == "reap" {
            report.reapable.push(finding);
        } else {
            report.kept.push(finding);
        }
    }
    report
}

fn finding(row: &ProcessSnapshot, session: &SessionRef, procfs: &Procfs) -> Finding {
    let process = process(row, SHORT, procfs);
    let decision = process.decision.unwrap_or_default();
    Finding {
        pid: process.pid,
        start_ns: process.start_ns,
        parent_pid: process.parent_pid,
        subtree_root_pid: session.first_root.pid,
        uid: process.uid,
        command: process.command,
        agent: session.agent.to_string(),
        session_id: process.session_id,
        why: decision.text,
        decision: decision.decision,
        reason: decision.reason,
        rule: decision.rule,
        evidence: process.evidence,
        evidence_variable: process.evidence_variable,
        evidence_directory: process.evidence_directory,
        age_s: process.age_s,
        rss: process.rss,
        ..Finding::default()
    }
}

/// Converts a process. Reads its memory from /proc, and truncates its command line to about `longest` bytes.
fn process(row: &ProcessSnapshot, longest: usize, procfs: &Procfs) -> ProcessInfo {
    let decision = row.decision.as_ref().map(|decision| {
        let judgement = judgement(decision);
        DecisionInfo {
            decision: judgement.decision.into(),
            mode: decision.mode.into(),
            reason: judgement.reason.into(),
            rule: judgement.rule.map(str::to_owned),
            remaining_s: judgement.remaining_s,
            text: judgement.text(),
        }
    });
    let (session, by) = (row.session.as_ref(), row.evidence.as_ref());
    ProcessInfo {
        pid: row.key.pid,
        start_ns: row.key.start,
        parent_pid: row.parent.map(|parent| parent.pid),
        command: command_line(&row.image, longest),
        uid: row.uids.effective,
        age_s: seconds_since(row.key.start),
        rss: procfs.rss_of(row.key),
        session_id: session.map(|session| SessionIdText(session).to_string()),
        agent: session.map(|session| session.agent.to_string()),
        session_root: row.root,
        detached: session.is_some() && row.orphan && !row.due,
        due: row.due,
        zombie: false,
        boundary: row.boundary.as_deref().map(str::to_owned),
        evidence: by.map(|by| by.evidence.to_owned()),
        evidence_variable: by.and_then(|by| by.variable).map(str::to_owned),
        evidence_directory: by.and_then(|by| by.directory.clone()),
        decision,
    }
}

fn judgement(decision: &DecisionSnapshot) -> Judgement<'_> {
    Judgement {
        decision: decision.decision,
        reason: decision.reason,
        rule: decision.rule.as_deref(),
        remaining_s: decision.until.map(seconds_until),
        observes: decision.mode == Mode::Observe.name(),
    }
}

fn session(group: &SessionSnapshot) -> SessionInfo {
    SessionInfo {
        id: SessionIdText(&group.name).to_string(),
        agent: group.name.agent.to_string(),
        kind: group.kind.name().into(),
        root_pid: group.root.pid,
        age_s: seconds_since(group.opened),
        members: group.members as u64,
        kept: group.kept as u64,
        outer_session_id: group
            .outer
            .as_ref()
            .map(|outer| SessionIdText(outer).to_string()),
        root_exit: group.root_exit.map(|(_, how)| exit_status_text(how)),
        since_root_exit_s: group.root_exit.map(|(at, _)| seconds_since(at)),
        waits: group.waits.iter().map(wait).collect(),
    }
}

fn wait(of: &WaitSnapshot) -> WaitInfo {
    WaitInfo {
        rule: of.rule.to_string(),
        wait_s: of.wait / 1_000_000_000,
        after_status_0: of.after_status_0,
        after_others: of.after_others,
    }
}

/// Returns the whole seconds since `boot_ns` (ns since boot).
fn seconds_since(boot_ns: u64) -> u64 {
    sys::boot_time().saturating_sub(boot_ns) / 1_000_000_000
}

/// Returns the seconds until `ns` (CLOCK_MONOTONIC), rounded up.
fn seconds_until(ns: u64) -> u64 {
    ns.saturating_sub(sys::monotonic()).div_ceil(1_000_000_000)
}
