//! Explanations of leftovers from before the service started.

use super::text::duration;
use reaper_model::leftover::{
    KeepReason, Leftover, LeftoverEvidence, LeftoverVerdict, Uncertainty,
};

/// Explains why a leftover is reaped or not, and by which evidence it was found.
pub fn leftover_text(stray: &Leftover) -> String {
    let evidence = match stray.evidence {
        LeftoverEvidence::DeadOwner { variable, pid } => {
            format!("{variable}={pid}, and that process is gone")
        }
        LeftoverEvidence::ToolShell => "the shell of a tool, orphaned".into(),
        LeftoverEvidence::Recorded { root: 0 } => "born while others of it were ended".into(),
        LeftoverEvidence::Recorded { root } => {
            format!("of the recorded session of {root}, which is gone")
        }
        LeftoverEvidence::Mark { variable } => format!("{variable} in its environment"),
    };
    let why = match &stray.verdict {
        LeftoverVerdict::Reap => return evidence,
        LeftoverVerdict::Report(doubt) => match doubt {
            Uncertainty::OwnerAlive(pid) => return format!("detached; its agent {pid} lives"),
            Uncertainty::OwnerUncertain(pid) => {
                format!("whether its agent {pid} lives cannot be told from here")
            }
            Uncertainty::NoOwner => "nothing tells which agent that was".into(),
            Uncertainty::OwnerUnknown(pid) => format!(
                "nobody knows who {pid} was, since no session of it is recorded: only by `reaper scan --reap`"
            ),
            Uncertainty::AgentAlive(pid) => format!("agent {pid} lives and may own it"),
            Uncertainty::AgentUncertain(pid) => {
                format!("process {pid} cannot be read: it may be its agent, or carry the same marker")
            }
            Uncertainty::SharedMarker(pid) => format!(
                "process {pid}, a living agent or an ancestor of one, carries the same marker"
            ),
            Uncertainty::ChangedUid => {
                "it may run under another user than its agent: sudo, su and the like hand marks on".into()
            }
            Uncertainty::NotOrphan => "it is no orphan: its parent lives, or cannot be read".into(),
            Uncertainty::Young => "too young to be told from one that is at work".into(),
            Uncertainty::Multiplexed => {
                "a terminal multiplexer, a terminal or what else it was started from may have handed that on"
                    .into()
            },
            Uncertainty::TerminalSession(pid) => {
                format!("the shell of its terminal, {pid}, has that too and is no leftover")
            }
            Uncertainty::AgentUnknown => "no rule knows its agent any more, which may live".into(),
            Uncertainty::Agent => "it is an agent itself, or one that lives is below it".into(),
        },
        LeftoverVerdict::Wait { rule, rest, kin } => {
            let rest = duration(*rest);
            let waits = format!("rule {rule} gives it time from when it was found, {rest} more");
            with(*kin, waits)
        }
        LeftoverVerdict::Keep { spare, rule, kin } => {
            let rule = rule.as_deref().unwrap_or_default();
            let kept = match spare {
                KeepReason::NeverSelf => "this program runs below it".into(),
                KeepReason::KeepMarker => "REAPER_KEEP=1".into(),
                KeepReason::KeptByUser => "a user has asked for it".into(),
                KeepReason::KeepRule => format!("kept by rule {rule}"),
                KeepReason::OtherUid => format!("another user's than what it descends from ({rule})"),
                KeepReason::Boundary => format!("boundary {rule}"),
                KeepReason::Terminal => "a terminal".into(),
                KeepReason::OwnUnit => format!("runs in {rule}"),
                KeepReason::Unreadable => "what might keep it cannot be read".into(),
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
