//! Programs that are reported some time after their exec, and the children forked in between.

use super::world::{INIT, World, image};
use crate::event::{Event, EventKind, ExitStatus, Image, ProcessKey, Provenance};
use crate::policy::{Reason, Verdict};

impl World {
    /// Reports the exec of a program that could not be read yet. Returns the time of the exec.
    fn exec_unread(&mut self, key: ProcessKey) -> u64 {
        self.exec_image(key, Image::unread());
        self.now
    }

    /// Reports the program of an earlier exec at `time`.
    fn report_image_late(&mut self, key: ProcessKey, time: u64, image: Image) {
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

    fn report_program_late(&mut self, key: ProcessKey, time: u64, program: &str) {
        let image = Image::clone(&image(program, self.tty));
        self.report_image_late(key, time, image);
    }

    fn reason(&self, key: ProcessKey) -> (Verdict, Reason) {
        let decision = self.decide(key);
        (decision.verdict, decision.reason)
    }
}

/// Returns a shell that has started a server and then executed a program that could not be read yet.
fn shell_with_unread(w: &mut World) -> (ProcessKey, ProcessKey, u64) {
    let shell = w.spawn(INIT, "sh");
    let server = w.spawn(shell, "server");
    let time = w.exec_unread(shell);
    (shell, server, time)
}

/// Returns an agent with a child that has executed a program that could not be read yet.
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
    w.report_program_late(agent, time, "claude");
    for key in [agent, tool, below, copy] {
        assert_eq!(w.root_of(key), Some(agent), "{key}");
    }
    for key in [server, tmux, detached] {
        assert!(!w.is_member(key), "{key}");
    }
    assert_eq!(w.root_of(of_nested), Some(nested));
    // Later children are members at once. The report may come twice.
    let later = w.spawn(agent, "sleep");
    w.repeat(3);
    w.kill(agent);
    for key in [tool, below, nested, of_nested, later] {
        assert_eq!(w.reason(key), REAPED, "{key}");
    }
    // A fork without an exec runs its parent's program, but is no root.
    assert_eq!(w.reason(copy), REAPED);
    assert_eq!(w.root_of(copy), Some(agent));
    assert_eq!(w.reason(server), NOT_A_MEMBER);
}

#[test]
fn child_forked_before_the_exec_is_no_member_of_late_agent() {
    let mut w = World::new();
    let (agent, _, _) = shell_with_unread(&mut w);
    let server = w.spawn(agent, "server");
    // The unread program is never reported, because the process has executed another one.
    w.exec(agent, "claude");
    assert!(!w.is_member(server));
}

#[test]
fn orphan_from_before_the_late_program_report_is_kept() {
    let mut w = World::new();
    let (agent, _, time) = shell_with_unread(&mut w);
    let tool = w.spawn(agent, "bash");
    let orphan = w.spawn(tool, "node");
    w.exit(tool);
    w.report_program_late(agent, time, "claude");
    w.kill(agent);
    assert_eq!(w.reason(orphan), NOT_A_MEMBER);

    let mut w = World::new();
    let (agent, child, time) = agent_with_unread(&mut w);
    let tool = w.spawn(child, "bash");
    let orphan = w.spawn(tool, "node");
    w.exit(tool);
    w.report_program_late(child, time, "npm");
    w.kill(agent);
    assert_eq!((w.reason(child), w.reason(orphan)), (REAPED, KEPT));
}

#[test]
fn nothing_below_an_unread_member_is_reaped() {
    let mut w = World::new();
    let (agent, child, time) = agent_with_unread(&mut w);
    let tool = w.spawn(child, "bash");
    let below = w.spawn(tool, "node");
    let copy = w.fork(child);
    w.kill(agent);
    assert_eq!((w.reason(child), w.reason(copy)), (UNREADABLE, UNREADABLE));
    assert_eq!((w.reason(tool), w.reason(below)), (KEPT, KEPT));
    w.report_program_late(child, time, "npm");
    for key in [child, tool, below, copy] {
        assert_eq!(w.reason(key), REAPED, "{key}");
    }
}

#[test]
fn late_boundary_releases_its_descendants() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.spawn(agent, "sh");
    let before = w.spawn(child, "node");
    let time = w.exec_unread(child);
    let shell = w.spawn(child, "bash");
    let nested = w.spawn(shell, "codex");
    let copy = w.fork(child);
    w.report_program_late(child, time, "tmux");
    w.kill(agent);
    for key in [child, shell, copy] {
        assert_eq!(w.reason(key), NOT_A_MEMBER, "{key}");
    }
    assert_eq!(w.reason(nested).0, Verdict::Keep);
    assert_eq!(w.reason(before), REAPED);
}

#[test]
fn late_nested_agent_takes_its_descendants() {
    let mut w = World::new();
    let (agent, child, time) = agent_with_unread(&mut w);
    let tool = w.spawn(child, "bash");
    let nested = w.spawn(tool, "codex");
    w.report_program_late(child, time, "codex");
    assert_eq!(w.root_of(tool), Some(child));
    w.kill(agent);
    for key in [child, tool, nested] {
        assert_eq!(w.reason(key), REAPED, "{key}");
    }
}

#[test]
fn descendant_waits_for_each_unread_program_above_it() {
    let mut w = World::new();
    let (agent, upper, upper_time) = agent_with_unread(&mut w);
    let lower = w.fork(upper);
    let lower_time = w.exec_unread(lower);
    let tool = w.spawn(lower, "node");
    w.kill(agent);
    w.report_program_late(lower, lower_time, "npm");
    assert_eq!(w.reason(tool), KEPT, "`upper` may be a boundary");
    w.report_program_late(upper, upper_time, "make");
    assert_eq!(w.reason(tool), REAPED);

    let mut w = World::new();
    let (agent, upper, upper_time) = agent_with_unread(&mut w);
    let lower = w.fork(upper);
    let lower_time = w.exec_unread(lower);
    let tool = w.spawn(lower, "node");
    w.kill(agent);
    w.report_program_late(upper, upper_time, "make");
    assert_eq!(w.reason(tool), KEPT, "`lower` may be a boundary");
    w.report_program_late(lower, lower_time, "npm");
    assert_eq!(w.reason(tool), REAPED);
}

#[test]
fn unreadable_program_does_not_change_its_children() {
    let mut w = World::new();
    let (agent, child, time) = agent_with_unread(&mut w);
    let tool = w.spawn(child, "bash");
    // The process has exited or executed another program, so the program stays unknown.
    w.report_image_late(child, time, Image::default());
    w.kill(agent);
    assert_eq!(w.reason(child), UNREADABLE);
    assert_eq!(w.reason(tool), (Verdict::Keep, Reason::AncestorKept));
    w.exit(child);
    assert_eq!(w.reason(tool), REAPED);
}

#[test]
fn late_nested_agent_is_kept_after_exit_of_outer_root() {
    for status in [
        ExitStatus::Exited(0),
        ExitStatus::Signalled {
            signal: 9,
            core: false,
        },
    ] {
        let mut w = World::new();
        let (agent, child, time) = agent_with_unread(&mut w);
        let tool = w.spawn(child, "bash");
        w.exit_with(agent, status, Some(INIT));
        w.report_program_late(child, time, "claude");
        assert_eq!(w.root_of(tool), Some(child));
        for key in [child, tool] {
            assert_eq!(w.reason(key), (Verdict::Keep, Reason::RootAlive), "{key}");
        }
        w.kill(child);
        assert_eq!(w.reason(tool), REAPED);
    }
}

#[test]
fn scan_row_of_an_unread_agent_classifies_its_children() {
    let mut w = World::new();
    let (agent, server, _) = shell_with_unread(&mut w);
    let tool = w.spawn(agent, "bash");
    w.now += 1;
    w.row(agent, INIT.pid, "claude");
    assert_eq!(w.root_of(tool), Some(agent));
    assert!(!w.is_member(server));
}
