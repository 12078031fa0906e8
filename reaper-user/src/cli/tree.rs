//! `reaper tree`

use std::fmt::Write;
use std::io::IsTerminal;

use bytesize::ByteSize;

use super::client::{BOLD, DIM, age, client, memory, print, span};
use super::show::{NAME_MAX, ProcessTags, count, fit, width};
use super::{Failure, ServiceArgs};
use crate::api::{SessionInfo, TreeGroup, TreeResponse, TreeRow};
use crate::export::printable;

/// How branches are drawn: one that goes on, the last one, what goes past, and nothing.
type Twigs = [&'static str; 4];
const LINES: Twigs = ["├─ ", "└─ ", "│  ", "   "];
const ASCII: Twigs = ["|- ", "`- ", "|  ", "   "];

/// Characters before the command of a process, and of that where there is room.
const BEFORE: usize = 28;
const COMMAND_MAX: usize = 256;

/// Levels that are drawn; what is deeper stands at the last of them.
const DEPTH_MAX: usize = 40;

pub(super) fn run(agent: Option<String>, all: bool, asking: &ServiceArgs) -> Result<(), Failure> {
    let mut query = form_urlencoded::Serializer::new(String::new());
    if let Some(agent) = &agent {
        query.append_pair("agent", agent);
    }
    if all {
        query.append_pair("all", "true");
    }
    let path = format!("/v1/tree?{}", query.finish());
    let twigs = if std::io::stdout().is_terminal() {
        LINES
    } else {
        ASCII
    };
    let said = client(asking).get(&path)?;
    print(asking, &said, |tree: TreeResponse| {
        table(&tree, twigs, width())
    })
}

fn table(tree: &TreeResponse, twigs: Twigs, width: Option<usize>) -> String {
    let mut out = String::new();
    let groups = tree.groups.iter();
    for group in groups.filter(|group| !group.processes.is_empty()) {
        if !out.is_empty() {
            out.push('\n');
        }
        let name = group.session.as_ref().map_or("of no agent", |s| &s.agent);
        let title = title(group);
        let _ = writeln!(
            out,
            "{BOLD}{}{BOLD:#}{}",
            printable(name, NAME_MAX),
            printable(&title, 400)
        );
        let _ = writeln!(
            out,
            "{DIM}{:>8} {:>5} {:>11}  COMMAND{DIM:#}",
            "PID", "AGE", "MEMORY"
        );
        draw(&mut out, group, twigs, width);
    }
    if out.is_empty() {
        let seen = match nix::unistd::geteuid().is_root() {
            true => "",
            false => " of yours",
        };
        return format!("no agent{seen} is running, and none has left anything behind\n");
    }
    out
}

/// What stands after the name: how many there are, what they hold, and how the agent is.
fn title(group: &TreeGroup) -> String {
    let processes = group.processes.iter().map(|leaf| &leaf.process);
    // A boundary that is drawn is none of them.
    let own = processes.filter(|process| {
        !process.zombie && (group.session.is_none() || process.boundary.is_none())
    });
    let bytes: u64 = own.clone().filter_map(|process| process.rss).sum();
    let number = count(own.count() as u64, "process", "processes");
    let held = format!("{number}, {}", ByteSize::b(bytes));
    let Some(session) = &group.session else {
        return format!(": {held}");
    };
    let SessionInfo { id, root_pid, .. } = session;
    let kind = match &*session.kind {
        "server" => " (agent's server)",
        _ => "",
    };
    let mut title = match &session.root_exit {
        None => format!(" {root_pid}{kind}, for {}", span(session.age_s)),
        Some(how) => {
            let since = span(session.since_root_exit_s.unwrap_or_default());
            format!(" {root_pid}{kind}, gone for {since} ({how})")
        }
    };
    let _ = write!(title, ": {held}");
    if session.kept > 0 {
        let _ = write!(title, ", {} kept", session.kept);
    }
    let _ = write!(title, "; session {id}");
    if let Some(outer) = &session.outer_session_id {
        let _ = write!(title, ", inside {outer}");
    }
    title
}

fn draw(out: &mut String, group: &TreeGroup, twigs: Twigs, width: Option<usize>) {
    let [branch, last, past, none] = twigs;
    // From below it is known at each level whether one more follows.
    let mut open: Vec<bool> = Vec::new();
    let mut is_last = vec![true; group.processes.len()];
    for (at, leaf) in group.processes.iter().enumerate().rev() {
        let depth = leaf.depth.min(DEPTH_MAX);
        open.resize(depth + 1, false);
        is_last[at] = !std::mem::replace(&mut open[depth], true);
    }
    // What stands before a line: for each level above whether one more follows there.
    let mut above: Vec<bool> = Vec::new();
    for (leaf, is_last) in group.processes.iter().zip(is_last) {
        let TreeRow { depth, process } = leaf;
        let depth = (*depth).min(DEPTH_MAX);
        above.resize(depth + 1, true);
        above[depth] = is_last;
        let mut twig = String::new();
        if depth > 0 {
            for is_last in &above[1..depth] {
                twig += if *is_last { none } else { past };
            }
            twig += if is_last { last } else { branch };
        }
        let (age, memory, marks) = (
            age(process.age_s),
            memory(process.rss),
            ProcessTags::of(process),
        );
        let taken = BEFORE + twig.chars().count() + marks.len();
        let command = fit(&process.command, taken, COMMAND_MAX, width);
        let _ = writeln!(
            out,
            "{:>8} {age:>5} {memory:>11}  {DIM}{twig}{DIM:#}{command}{}",
            process.pid,
            marks.text()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ProcessInfo;

    fn leaf(pid: u32, depth: usize) -> TreeRow {
        let process = ProcessInfo {
            pid,
            command: format!("p{pid}"),
            ..ProcessInfo::default()
        };
        TreeRow { depth, process }
    }

    #[test]
    fn branches_end_where_the_last_child_is() {
        let depths = [0, 1, 2, 2, 1, 0, 1];
        let processes = (1..).zip(depths).map(|(pid, depth)| leaf(pid, depth));
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
    fn a_session_is_summed_up_in_its_title() {
        let mut processes = vec![leaf(1, 0), leaf(2, 1), leaf(3, 1), leaf(4, 1)];
        for (leaf, rss) in processes.iter_mut().zip([1, 2, 4, 8]) {
            leaf.process.rss = Some(rss << 20);
        }
        processes[2].process.zombie = true;
        processes[3].process.boundary = Some("tmux".into());
        let session = SessionInfo {
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
        };
        let mut group = TreeGroup {
            session: Some(session),
            processes,
        };
        assert_eq!(
            title(&group),
            " 1, for 1m 30s: 2 processes, 3.0 MiB; session claude-code-1-a"
        );
        group.session.as_mut().unwrap().kind = "server".into();
        assert_eq!(
            title(&group),
            " 1 (agent's server), for 1m 30s: 2 processes, 3.0 MiB; session claude-code-1-a"
        );
        let session = group.session.as_mut().unwrap();
        session.kind = "agent".into();
        session.root_exit = Some("SIGKILL".into());
        session.since_root_exit_s = Some(5);
        assert_eq!(
            title(&group),
            " 1, gone for 5s (SIGKILL): 2 processes, 3.0 MiB; session claude-code-1-a"
        );
        let none = TreeResponse {
            groups: vec![TreeGroup::default()],
        };
        assert!(table(&none, ASCII, None).ends_with("none has left anything behind\n"));
    }

    #[test]
    fn a_command_cannot_forge_a_line() {
        let mut forged = leaf(1, 0);
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
