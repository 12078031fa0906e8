//! Programs that are reported some time after their exec, and what was forked in between.

use super::world::{INIT, World, image};
use crate::event::{Event, EventKind, ExitStatus, Image, ProcessKey, Provenance};
use crate::policy::{Reason, Verdict};

impl World {
    /// A process runs a program that could not be read yet. Returns the time of the exec.
    fn exec_unread(&mut self, key: ProcessKey) -> u64 {
        self.runs(key, Image::unread());
        self.now
    }

    /// What was run at a time has been read.
    fn read_late(&mut self, key: ProcessKey, time: u64, image: Image) {
        self.apply(Event {
            time,
            provenance: Provenance::Kernel,
            kind: EventKind::Exec {
                key,
                parent: None,
                uids: self.uids,
                pidfd_inode: 0,
                image: image.into(),
                membership: None,
            },
        });
    }

    fn is_read_late(&mut self, key: ProcessKey, time: u64, program: &str) {
        let image = Image::clone(&image(program, self.tty));
        self.read_late(key, time, image);
    }

    fn reason(&self, key: ProcessKey) -> (Verdict, Reason) {
        let decision = self.decide(key);
        (decision.verdict, decision.reason)
    }
}

/// A shell that has started a server, and then a program that could not be read yet.
fn shell_with_unread(w: &mut World) -> (ProcessKey, ProcessKey, u64) {
    let shell = w.spawn(INIT, "sh");
    let server = w.spawn(shell, "server");
    let time = w.exec_unread(shell);
    (shell, server, time)
}

/// An agent with a child that runs a program which could not be read yet.
fn agent_with_unread(w: &mut World) -> (ProcessKey, ProcessKey, u64) {
    let agent = w.spawn(INIT, "claude");
    let child = w.fork(agent);
    let time = w.exec_unread(child);
    (agent, child, time)
}

const REAPED: (Verdict, Reason) = (Verdict::Reap, Reason::RootExited);
const KEPT: (Verdict, Reason) = (Verdict::Keep, Reason::LineageUncertain);
const UNREADABLE: (Verdict, Reason) = (Verdict::Keep, Reason::Unreadable);
const NOT_A_MEMBER: (Verdict, Reason) = (Verdict::Keep, Reason::NotAMember);

#[test]
fn descendants_of_late_agent_are_members() {
    let mut w = World::new();
    let (agent, server, time) = shell_with_unread(&mut w);
    let tool = w.spawn(agent, "bash");
    let below = w.spawn(tool, "node");
    let copy = w.fork(agent);
    let tmux = w.spawn(tool, "tmux");
    let detached = w.spawn(tmux, "vim");
    let nested = w.spawn(tool, "codex");
    let of_nested = w.spawn(nested, "bash");
    assert!(!w.is_member(tool));
    w.is_read_late(agent, time, "claude");
    for key in [agent, tool, below, copy] {
        assert_eq!(w.root_of(key), Some(agent), "{key}");
    }
    for key in [server, tmux, detached] {
        assert!(!w.is_member(key), "{key}");
    }
    assert_eq!(w.root_of(of_nested), Some(nested));
    // What it forks from then on is a member at once, and the report may come twice.
    let later = w.spawn(agent, "sleep");
    w.repeat(3);
    w.dies_by_signal(agent);
    for key in [tool, below, nested, of_nested, later] {
        assert_eq!(w.reason(key), REAPED, "{key}");
    }
    // A copy runs the program of its parent, and is no agent of its own.
    assert_eq!(w.reason(copy), REAPED);
    assert_eq!(w.root_of(copy), Some(agent));
    assert_eq!(w.reason(server), NOT_A_MEMBER);
}

#[test]
fn child_from_before_an_exec_is_not_the_late_agents() {
    let mut w = World::new();
    let (agent, _, _) = shell_with_unread(&mut w);
    let server = w.spawn(agent, "server");
    // The unread program is never reported: the process runs another by now.
    w.exec(agent, "claude");
    assert!(!w.is_member(server));
}

#[test]
fn child_that_lost_its_parent_before_the_reading_is_kept() {
    let mut w = World::new();
    let (agent, _, time) = shell_with_unread(&mut w);
    let tool = w.spawn(agent, "bash");
    let orphan = w.spawn(tool, "node");
    w.exit(tool);
    w.is_read_late(agent, time, "claude");
    w.dies_by_signal(agent);
    assert_eq!(w.reason(orphan), NOT_A_MEMBER);

    let mut w = World::new();
    let (agent, child, time) = agent_with_unread(&mut w);
    let tool = w.spawn(child, "bash");
    let orphan = w.spawn(tool, "node");
    w.exit(tool);
    w.is_read_late(child, time, "npm");
    w.dies_by_signal(agent);
    assert_eq!((w.reason(child), w.reason(orphan)), (REAPED, KEPT));
}

#[test]
fn nothing_below_an_unread_member_is_reaped() {
    let mut w = World::new();
    let (agent, child, time) = agent_with_unread(&mut w);
    let tool = w.spawn(child, "bash");
    let below = w.spawn(tool, "node");
    let copy = w.fork(child);
    w.dies_by_signal(agent);
    assert_eq!((w.reason(child), w.reason(copy)), (UNREADABLE, UNREADABLE));
    assert_eq!((w.reason(tool), w.reason(below)), (KEPT, KEPT));
    w.is_read_late(child, time, "npm");
    for key in [child, tool, below, copy] {
        assert_eq!(w.reason(key), REAPED, "{key}");
    }
}

#[test]
fn late_boundary_takes_its_descendants_along() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.spawn(agent, "sh");
    let before = w.spawn(child, "node");
    let time = w.exec_unread(child);
    let shell = w.spawn(child, "bash");
    let nested = w.spawn(shell, "codex");
    let copy = w.fork(child);
    w.is_read_late(child, time, "tmux");
    w.dies_by_signal(agent);
    for key in [child, shell, copy] {
        assert_eq!(w.reason(key), NOT_A_MEMBER, "{key}");
    }
    assert_eq!(w.reason(nested).0, Verdict::Keep);
    assert_eq!(w.reason(before), REAPED);
}

#[test]
fn late_nested_agent_takes_its_descendants_along() {
    let mut w = World::new();
    let (agent, child, time) = agent_with_unread(&mut w);
    let tool = w.spawn(child, "bash");
    let nested = w.spawn(tool, "codex");
    w.is_read_late(child, time, "codex");
    assert_eq!(w.root_of(tool), Some(child));
    w.dies_by_signal(agent);
    for key in [child, tool, nested] {
        assert_eq!(w.reason(key), REAPED, "{key}");
    }
}

#[test]
fn each_unread_program_decides_about_what_is_below_it() {
    let mut w = World::new();
    let (agent, upper, upper_time) = agent_with_unread(&mut w);
    let lower = w.fork(upper);
    let lower_time = w.exec_unread(lower);
    let tool = w.spawn(lower, "node");
    w.dies_by_signal(agent);
    w.is_read_late(lower, lower_time, "npm");
    assert_eq!(w.reason(tool), KEPT, "the upper one may be a boundary");
    w.is_read_late(upper, upper_time, "make");
    assert_eq!(w.reason(tool), REAPED);

    let mut w = World::new();
    let (agent, upper, upper_time) = agent_with_unread(&mut w);
    let lower = w.fork(upper);
    let lower_time = w.exec_unread(lower);
    let tool = w.spawn(lower, "node");
    w.dies_by_signal(agent);
    w.is_read_late(upper, upper_time, "make");
    assert_eq!(w.reason(tool), KEPT, "the lower one may be a boundary");
    w.is_read_late(lower, lower_time, "npm");
    assert_eq!(w.reason(tool), REAPED);
}

#[test]
fn program_that_is_never_read_leaves_its_children_as_they_were() {
    let mut w = World::new();
    let (agent, child, time) = agent_with_unread(&mut w);
    let tool = w.spawn(child, "bash");
    // It has exited, or runs another program by now: no boundary is known of.
    w.read_late(child, time, Image::default());
    w.dies_by_signal(agent);
    assert_eq!(w.reason(child), UNREADABLE);
    assert_eq!(w.reason(tool), (Verdict::Keep, Reason::AncestorKept));
    w.exit(child);
    assert_eq!(w.reason(tool), REAPED);
}

#[test]
fn agent_that_is_read_after_the_exit_of_its_agent_is_kept() {
    for ended in [
        ExitStatus::Exited(0),
        ExitStatus::Signalled {
            signal: 9,
            core: false,
        },
    ] {
        let mut w = World::new();
        let (agent, child, time) = agent_with_unread(&mut w);
        let tool = w.spawn(child, "bash");
        w.end(agent, ended, Some(INIT));
        w.is_read_late(child, time, "claude");
        assert_eq!(w.root_of(tool), Some(child));
        for key in [child, tool] {
            assert_eq!(w.reason(key), (Verdict::Keep, Reason::RootAlive), "{key}");
        }
        w.dies_by_signal(child);
        assert_eq!(w.reason(tool), REAPED);
    }
}

#[test]
fn row_that_names_an_unread_agent_settles_what_it_has_forked() {
    let mut w = World::new();
    let (agent, server, _) = shell_with_unread(&mut w);
    let tool = w.spawn(agent, "bash");
    w.now += 1;
    w.row(agent, INIT.pid, "claude");
    assert_eq!(w.root_of(tool), Some(agent));
    assert!(!w.is_member(server));
}
