//! Explanations of leftovers from before the service started.

use super::text::duration;
use reaper_model::leftover::{Doubt, Evidence, Leftover, Spare, Verdict};

/// Explains why a leftover is reaped or not, and by which evidence it was found.
pub fn leftover_text(stray: &Leftover) -> String {
    let evidence = match stray.evidence {
        Evidence::DeadOwner { variable, pid } => {
            format!("{variable}={pid}, and that process is gone")
        }
        Evidence::ToolShell => "the shell of a tool, orphaned".into(),
        Evidence::Recorded { root: 0 } => "born while others of it were ended".into(),
        Evidence::Recorded { root } => format!("of the recorded session of {root}, which is gone"),
        Evidence::Mark { variable } => format!("{variable} in its environment"),
    };
    let why = match &stray.verdict {
        Verdict::Reap => return evidence,
        Verdict::Report(doubt) => match doubt {
            Doubt::OwnerAlive(pid) => return format!("detached; its agent {pid} lives"),
            Doubt::OwnerUnsure(pid) => {
                format!("whether its agent {pid} lives cannot be told from here")
            }
            Doubt::NoOwner => "nothing tells which agent that was".into(),
            Doubt::OwnerUnknown(pid) => format!(
                "nobody knows who {pid} was, since no session of it is recorded: only by `reaper scan --reap`"
            ),
            Doubt::AgentAlive(pid) => format!("agent {pid} lives and may own it"),
            Doubt::AgentUnsure(pid) => {
                format!("process {pid} cannot be read: it may be its agent, or carry the same marker")
            }
            Doubt::SharedMark(pid) => format!(
                "process {pid}, a living agent or an ancestor of one, carries the same marker"
            ),
            Doubt::ChangedUid => {
                "it may run under another user than its agent: sudo, su and the like hand marks on".into()
            }
            Doubt::NotOrphan => "it is no orphan: its parent lives, or cannot be read".into(),
            Doubt::Young => "too young to be told from one that is at work".into(),
            Doubt::Multiplexed => {
                "a terminal multiplexer, a terminal or what else it was started from may have handed that on"
                    .into()
            },
            Doubt::TerminalSession(pid) => {
                format!("the shell of its terminal, {pid}, has that too and is no leftover")
            }
            Doubt::AgentUnknown => "no rule knows its agent any more, which may live".into(),
            Doubt::Agent => "it is an agent itself, or one that lives is below it".into(),
        },
        Verdict::Wait { rule, rest, kin } => {
            let rest = duration(*rest);
            let waits = format!("rule {rule} gives it time from when it was found, {rest} more");
            with(*kin, waits)
        }
        Verdict::Keep { spare, rule, kin } => {
            let rule = rule.as_deref().unwrap_or_default();
            let kept = match spare {
                Spare::NeverSelf => "this program runs below it".into(),
                Spare::KeepMark => "REAPER_KEEP=1".into(),
                Spare::KeptByUser => "a user has asked for it".into(),
                Spare::KeepRule => format!("kept by rule {rule}"),
                Spare::OtherUid => format!("another user's than what it descends from ({rule})"),
                Spare::Boundary => format!("boundary {rule}"),
                Spare::Terminal => "a terminal".into(),
                Spare::OwnUnit => format!("runs in {rule}"),
                Spare::Unreadable => "what might keep it cannot be read".into(),
            };
            with(*kin, kept)
        }
    };
    format!("{why} ({evidence})")
}

/// Puts the process that a verdict was taken over from first, if there is one.
fn with(kin: Option<u32>, why: String) -> String {
    match kin {
        Some(pid) => format!("with {pid}: {why}"),
        None => why,
    }
}
