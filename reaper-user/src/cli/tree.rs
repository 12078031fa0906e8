//! `reaper tree`: draws the process trees of the running agents.

use std::fmt::Write;
use std::io::IsTerminal;

use super::client::{BOLD, DIM, client, print};
use super::show::{
    LEAST, NAME_MAX, ProcessTags, count, fit, memory, memory_text, time, width, wrap,
};
use super::{Failure, ServiceArgs};
use crate::api::{SessionInfo, TreeGroup, TreeResponse, TreeRow, WaitInfo};
use crate::export::printable;

/// Symbols of the branches: a child with later siblings, the last child, a line past, and no line.
type Branches = [&'static str; 4];
const LINES: Branches = ["├─ ", "└─ ", "│  ", "   "];
const ASCII: Branches = ["|- ", "`- ", "|  ", "   "];

/// Characters before the command of a process.
const BEFORE: usize = 28;
/// Characters before the tags of a process that have a line of their own.
const TAGS: usize = 8;
/// Longest command, in characters.
const COMMAND_MAX: usize = 256;

/// Number of levels that are drawn. Deeper processes are drawn at the last one.
const DEPTH_MAX: usize = 40;

pub(super) fn run(agent: Option<String>, all: bool, service: &ServiceArgs) -> Result<(), Failure> {
    let mut query = form_urlencoded::Serializer::new(String::new());
    if let Some(agent) = &agent {
        query.append_pair("agent", agent);
    }
    if all {
        query.append_pair("all", "true");
    }
    let path = format!("/v1/tree?{}", query.finish());
    let branches = if std::io::stdout().is_terminal() {
        LINES
    } else {
        ASCII
    };
    let response = client(service).get(&path)?;
    print(service, &response, |tree: TreeResponse| {
        table(&tree, agent.as_deref(), branches, width())
    })
}

fn table(
    tree: &TreeResponse,
    agent: Option<&str>,
    branches: Branches,
    width: Option<usize>,
) -> String {
    let groups = tree.groups.iter();
    let groups: Vec<_> = groups.filter(|group| !group.processes.is_empty()).collect();
    let mut out = String::new();
    for line in wrap(&summary(&groups, agent), 0, width).lines() {
        let _ = writeln!(out, "{BOLD}{line}{BOLD:#}");
    }
    for group in groups {
        let name = group.session.as_ref();
        let name = name.map_or("not tracked", |session| &session.agent);
        let name = printable(name, NAME_MAX);
        let title = format!("{name}{}", printable(&title(group), 400));
        let title = wrap(&title, 0, width);
        // The name is the beginning of the first line, unless it contains spaces and was wrapped.
        let rest = title.strip_prefix(&name);
        let _ = match rest {
            Some(rest) => write!(out, "\n{BOLD}{name}{BOLD:#}{rest}"),
            None => write!(out, "\n{title}"),
        };
        if let Some(session) = &group.session {
            let waits = waits_line(session);
            for line in [Some(session_line(session)), waits].into_iter().flatten() {
                for line in wrap(&printable(&line, 400), 2, width).lines() {
                    let _ = writeln!(out, "{DIM}{line}{DIM:#}");
                }
            }
        }
        let _ = writeln!(
            out,
            "{DIM}{:>8} {:>7} {:>9}  COMMAND{DIM:#}",
            "PID", "AGE", "RSS"
        );
        draw(&mut out, group, branches, width);
    }
    out
}

/// Returns how many agents run, and how much is left of others. `agent` is the agent that the list is limited to.
fn summary(groups: &[&TreeGroup], agent: Option<&str>) -> String {
    let sessions = groups.iter().filter(|group| group.session.is_some());
    let (exited, running): (Vec<&TreeGroup>, Vec<&TreeGroup>) =
        sessions.copied().partition(|group| {
            let session = group.session.as_ref();
            session.is_some_and(|session| session.root_exit.is_some())
        });
    let mut total = Total::default();
    running.iter().for_each(|group| total.add(group));
    let yours = match nix::unistd::geteuid().is_root() {
        true => "",
        false => "of yours ",
    };
    let mut left = Total::default();
    exited.iter().for_each(|group| left.add(group));
    let kept: u64 = exited.iter().map(|group| kept(group)).sum();
    let running = match running.len() as u64 {
        0 => {
            let agent = printable(agent.unwrap_or("agent"), NAME_MAX);
            format!("No {agent} {yours}is running")
        }
        n => {
            let agents = count(n, "agent", "agents");
            format!("{agents} {yours}running with {}", total.text())
        }
    };
    let exited = match exited.len() as u64 {
        0 if total.processes == 0 => ", and none has left anything behind.".to_owned(),
        0 => String::new(),
        n => format!("; {n} exited and left {}{}", left.text(), kept_text(kept)),
    };
    running + &exited
}

fn kept(group: &TreeGroup) -> u64 {
    group.session.as_ref().map_or(0, |session| session.kept)
}

/// Number and memory of processes.
#[derive(Default)]
struct Total {
    processes: u64,
    bytes: u64,
}

impl Total {
    /// Adds the processes of a group, without zombies and without boundaries of a session.
    fn add(&mut self, group: &TreeGroup) {
        let processes = group.processes.iter().map(|row| &row.process);
        // A boundary is drawn in the tree of a session, but is not a member.
        let own = processes.filter(|process| {
            !process.zombie && (group.session.is_none() || process.boundary.is_none())
        });
        for process in own {
            self.processes += 1;
            self.bytes += process.rss.unwrap_or_default();
        }
    }

    fn text(&self) -> String {
        let processes = count(self.processes, "process", "processes");
        format!("{processes} ({})", memory_text(self.bytes, 0))
    }
}

/// Returns the title of a group after the agent's name: pid of the root, state, processes, memory, and what is kept.
fn title(group: &TreeGroup) -> String {
    let mut total = Total::default();
    total.add(group);
    let held = total.text();
    let Some(session) = &group.session else {
        return format!(": {held}");
    };
    let pid = session.root_pid;
    let kind = match &*session.kind {
        "server" => ", an agent's server,",
        _ => "",
    };
    let state = match &session.root_exit {
        None => format!("running for {}", time(session.age_s)),
        Some(how) => {
            let since = time(session.since_root_exit_s.unwrap_or_default());
            format!("exited {since} ago ({how})")
        }
    };
    let kept = kept_text(session.kept);
    format!(" {pid}{kind} {state}: {held}{kept}")
}

/// Returns `, 2 kept`; empty for none.
fn kept_text(kept: u64) -> String {
    match kept {
        0 => String::new(),
        kept => format!(", {kept} kept"),
    }
}

fn session_line(session: &SessionInfo) -> String {
    let outer = session.outer_session_id.as_ref();
    let outer = outer.map(|outer| format!(", inside {outer}"));
    format!("session {}{}", session.id, outer.unwrap_or_default())
}

/// Returns how long rules let members wait when the agent exits. `None` if no rule does, or if the agent has exited.
fn waits_line(session: &SessionInfo) -> Option<String> {
    let listed = |counts: fn(&&WaitInfo) -> bool| {
        let waits = session.waits.iter().filter(counts);
        let waits: Vec<String> = waits
            .map(|wait| format!("{} {}", time(wait.wait_s), wait.rule))
            .collect();
        match waits.is_empty() {
            true => "none".to_owned(),
            false => waits.join(", "),
        }
    };
    let text = format!(
        "waits after exit 0: {}; after any other exit: {}",
        listed(|wait| wait.after_status_0),
        listed(|wait| wait.after_others)
    );
    (!session.waits.is_empty()).then_some(text)
}

fn draw(out: &mut String, group: &TreeGroup, branches: Branches, width: Option<usize>) {
    let [branch, last, past, none] = branches;
    // Seen from below, whether a sibling follows at each level.
    let mut open: Vec<bool> = Vec::new();
    let mut is_last = vec![true; group.processes.len()];
    for (at, row) in group.processes.iter().enumerate().rev() {
        let depth = row.depth.min(DEPTH_MAX);
        open.resize(depth + 1, false);
        is_last[at] = !std::mem::replace(&mut open[depth], true);
    }
    // Whether the ancestor at each level is the last child.
    let mut above: Vec<bool> = Vec::new();
    for (row, is_last) in group.processes.iter().zip(is_last) {
        let TreeRow { depth, process } = row;
        let depth = (*depth).min(DEPTH_MAX);
        above.resize(depth + 1, true);
        above[depth] = is_last;
        let mut prefix = String::new();
        if depth > 0 {
            for is_last in &above[1..depth] {
                prefix += if *is_last { none } else { past };
            }
            prefix += if is_last { last } else { branch };
        }
        let (age, memory) = (time(process.age_s), memory(process.rss));
        let tags = ProcessTags::of(process);
        let indent = BEFORE + prefix.chars().count();
        // Tags that leave no room for the command get a line of their own.
        let least = process.command.chars().count().min(LEAST + 1);
        let (beside, below) = match width {
            Some(width) if indent + least + tags.len() > width => {
                (0, format!("{:TAGS$}{}\n", "", tags.text()))
            }
            _ => (tags.len(), String::new()),
        };
        let command = fit(&process.command, indent + beside, COMMAND_MAX, width);
        let tags = if below.is_empty() {
            tags.text()
        } else {
            String::new()
        };
        let _ = writeln!(
            out,
            "{:>8} {age:>7} {memory:>9}  {DIM}{prefix}{DIM:#}{command}{tags}",
            process.pid,
        );
        *out += &below;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ProcessInfo;

    fn row(pid: u32, depth: usize) -> TreeRow {
        let process = ProcessInfo {
            pid,
            command: format!("p{pid}"),
            ..ProcessInfo::default()
        };
        TreeRow { depth, process }
    }

    fn session() -> SessionInfo {
        SessionInfo {
            kept: 0,
            id: "claude-code-1-a".into(),
            agent: "claude-code".into(),
            kind: "agent".into(),
            root_pid: 1,
            age_s: 90,
            members: 2,
            outer_session_id: None,
            root_exit: None,
            since_root_exit_s: None,
            waits: Vec::new(),
        }
    }

    #[test]
    fn last_child_ends_the_branch() {
        let depths = [0, 1, 2, 2, 1, 0, 1];
        let processes = (1..).zip(depths).map(|(pid, depth)| row(pid, depth));
        let group = TreeGroup {
            session: None,
            processes: processes.collect(),
        };
        let mut out = String::new();
        draw(&mut out, &group, LINES, None);
        let plain = anstream::adapter::strip_str(&out).to_string();
        let drawn: Vec<&str> = plain
            .lines()
            .map(|line| line[BEFORE..].trim_end())
            .collect();
        assert_eq!(
            drawn,
            [
                "p1",
                "├─ p2",
                "│  ├─ p3",
                "│  └─ p4",
                "└─ p5",
                "p6",
                "└─ p7"
            ]
        );
    }

    #[test]
    fn title_has_state_processes_and_memory() {
        let mut processes = vec![row(1, 0), row(2, 1), row(3, 1), row(4, 1)];
        for (row, rss) in processes.iter_mut().zip([1, 2, 4, 8]) {
            row.process.rss = Some(rss * 1_000_000);
        }
        processes[2].process.zombie = true;
        processes[3].process.boundary = Some("tmux".into());
        let mut group = TreeGroup {
            session: Some(session()),
            processes,
        };
        assert_eq!(
            title(&group),
            " 1 running for 1m 30s: 2 processes (3.0 MB RSS)"
        );
        group.session.as_mut().unwrap().kind = "server".into();
        assert_eq!(
            title(&group),
            " 1, an agent's server, running for 1m 30s: 2 processes (3.0 MB RSS)"
        );
        let session = group.session.as_mut().unwrap();
        session.kind = "agent".into();
        session.root_exit = Some("SIGKILL".into());
        session.since_root_exit_s = Some(5);
        assert_eq!(
            title(&group),
            " 1 exited 5s ago (SIGKILL): 2 processes (3.0 MB RSS)"
        );
    }

    #[test]
    fn delays_after_status_0_are_named() {
        let mut session = session();
        assert_eq!(waits_line(&session), None);
        session.waits = [("asked-for-servers", 600), ("young", 60)]
            .map(|(rule, wait_s)| WaitInfo {
                rule: rule.into(),
                wait_s,
                after_status_0: true,
                after_others: false,
            })
            .into();
        assert_eq!(
            waits_line(&session).as_deref(),
            Some("waits after exit 0: 10m asked-for-servers, 1m young; after any other exit: none")
        );
        session.waits[1].after_others = true;
        let line = waits_line(&session).unwrap_or_default();
        assert!(line.ends_with("; after any other exit: 1m young"), "{line}");
    }

    #[test]
    fn first_line_counts_agents_and_leftovers() {
        let first = |groups: Vec<TreeGroup>| {
            let text = table(&TreeResponse { groups }, None, ASCII, None);
            let text = anstream::adapter::strip_str(&text).to_string();
            text.lines().next().unwrap_or_default().to_owned()
        };
        let group = |pid, exit: Option<&str>| {
            let mut process = row(pid, 0);
            process.process.rss = Some(2_000_000);
            let session = SessionInfo {
                root_exit: exit.map(str::to_owned),
                ..session()
            };
            TreeGroup {
                session: Some(session),
                processes: vec![process],
            }
        };
        let none = first(vec![TreeGroup::default()]);
        assert!(
            none.starts_with("No agent ")
                && none.ends_with("is running, and none has left anything behind."),
            "{none}"
        );
        let both = first(vec![group(1, None), group(2, Some("SIGKILL"))]);
        assert!(
            both.ends_with(
                "running with 1 process (2.0 MB RSS); 1 exited and left 1 process (2.0 MB RSS)"
            ),
            "{both}"
        );
    }

    #[test]
    fn long_tags_get_a_separate_line() {
        let text = "waits 9m 59s: a rule delays the decision (asked-for-servers)";
        let mut waiting = row(1, 0);
        waiting.process.command = "server ".repeat(20);
        waiting.process.decision = Some(crate::api::DecisionInfo {
            text: text.into(),
            ..Default::default()
        });
        let group = TreeGroup {
            session: None,
            processes: vec![waiting],
        };
        let drawn = |width| {
            let mut out = String::new();
            draw(&mut out, &group, ASCII, width);
            anstream::adapter::strip_str(&out).to_string()
        };
        assert_eq!(drawn(None).lines().count(), 1);
        let narrow = drawn(Some(80));
        assert!(
            narrow.ends_with(&format!("\n         [{text}]\n")),
            "{narrow}"
        );
        assert!(
            narrow.lines().all(|line| line.chars().count() <= 80),
            "{narrow}"
        );
    }

    #[test]
    fn command_cannot_forge_a_line() {
        let mut forged = row(1, 0);
        forged.process.command = "x\n   2 forged\u{1b}[2J".into();
        let group = TreeGroup {
            session: None,
            processes: vec![forged],
        };
        let mut out = String::new();
        draw(&mut out, &group, ASCII, None);
        assert_eq!(out.lines().count(), 1);
        assert!(!out.contains("\u{1b}[2J"));
    }
}
