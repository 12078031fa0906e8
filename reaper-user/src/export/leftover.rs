//! Explains decisions about leftovers to people.

use super::text::duration;
use reaper_model::leftover::{
    KeepReason, Leftover, LeftoverEvidence, LeftoverVerdict, Uncertainty,
};

/// Returns why a leftover is reaped or not, with the evidence that it is one.
pub fn leftover_text(leftover: &Leftover) -> String {
    let evidence = match leftover.evidence {
        LeftoverEvidence::ExitedAgent { variable, pid } => {
            format!("{variable}={pid}, and that process has exited")
        }
        LeftoverEvidence::ToolShell => "orphaned shell of a tool".into(),
        LeftoverEvidence::Recorded { root: 0 } => "forked while its session was being ended".into(),
        LeftoverEvidence::Recorded { root } => {
            format!("recorded member of the session of {root}, which has exited")
        }
        LeftoverEvidence::Marker { variable } => format!("{variable} in its environment"),
    };
    let reason = match &leftover.verdict {
        LeftoverVerdict::Reap => return evidence,
        LeftoverVerdict::Report(uncertainty) => match uncertainty {
            Uncertainty::OwnerAlive(pid) => return format!("detached; its agent {pid} lives"),
            Uncertainty::OwnerUncertain(pid) => {
                format!("cannot determine whether its agent {pid} lives")
            }
            Uncertainty::NoOwner => "its agent cannot be identified".into(),
            Uncertainty::OwnerUnknown(pid) => {
                format!("no session with root {pid} is recorded; only `reaper scan --reap` ends it")
            }
            Uncertainty::AgentAlive(pid) => format!("agent {pid} lives and may own it"),
            Uncertainty::AgentUncertain(pid) => {
                format!(
                    "process {pid} cannot be read; that may be its agent, or carry the same marker"
                )
            }
            Uncertainty::SharedMarker(pid) => format!(
                "process {pid}, a living agent or an ancestor of one, carries the same marker"
            ),
            Uncertainty::ChangedUid => {
                "it may run as another user than its agent: sudo and su pass the environment on"
                    .into()
            }
            Uncertainty::NotOrphan => "it is not an orphan, or its parent cannot be read".into(),
            Uncertainty::Young => "too young to be distinguished from a shell in use".into(),
            Uncertainty::Multiplexed => {
                "it may have the marker from a terminal multiplexer, a terminal or another launcher"
                    .into()
            }
            Uncertainty::TerminalSession(pid) => {
                format!(
                    "the shell of its terminal, {pid}, has the same marker and is not a leftover"
                )
            }
            Uncertainty::AgentUnknown => {
                "the rule of its agent no longer exists, so the agent may live".into()
            }
            Uncertainty::Agent => "it is an agent, or a living agent descends from it".into(),
        },
        LeftoverVerdict::Wait {
            rule,
            remaining_ns,
            relative,
        } => {
            let remaining = duration(*remaining_ns);
            let waits = format!("rule {rule} delays the decision, {remaining} more");
            with_relative(*relative, waits)
        }
        LeftoverVerdict::Keep {
            reason,
            rule,
            relative,
        } => {
            let rule = rule.as_deref().unwrap_or_default();
            let kept = match reason {
                KeepReason::NeverSelf => "this program descends from it".into(),
                KeepReason::KeepMarker => "REAPER_KEEP=1".into(),
                KeepReason::KeptByUser => "a user keeps it".into(),
                KeepReason::KeepRule => format!("kept by rule {rule}"),
                KeepReason::OtherUid => {
                    format!("it runs as another user than its ancestors ({rule})")
                }
                KeepReason::Boundary => format!("boundary {rule}"),
                KeepReason::Terminal => "a terminal".into(),
                KeepReason::OwnUnit => format!("runs in its own unit {rule}"),
                KeepReason::Unreadable => "facts that might keep it cannot be read".into(),
            };
            with_relative(*relative, kept)
        }
    };
    format!("{reason} ({evidence})")
}

/// Prefixes a reason with the ancestor or descendant to which it applies, if that is not the process itself.
fn with_relative(relative: Option<u32>, reason: String) -> String {
    match relative {
        Some(pid) => format!("with {pid}: {reason}"),
        None => reason,
    }
}
