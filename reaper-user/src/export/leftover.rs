//! Explains decisions about leftovers to people.

use super::text::duration;
use super::words::Judgement;
use reaper_model::leftover::{
    KeepReason, Leftover, LeftoverEvidence, LeftoverVerdict, Uncertainty,
};

/// Returns why a leftover is reaped or not, with the evidence that it is one and the remaining delay.
pub fn leftover_text(leftover: &Leftover) -> String {
    let more = remaining_ns(leftover).map(|ns| format!(", {} more", duration(ns)));
    reason_and_evidence(leftover, &more.unwrap_or_default())
}

/// Returns the verdict about a leftover with its reason and evidence, in the words of every command.
pub fn leftover_judgement(leftover: &Leftover, observes: bool) -> String {
    let judgement = Judgement {
        decision: leftover.verdict.name(),
        reason: leftover.reason(),
        rule: None,
        remaining_s: remaining_ns(leftover).map(|ns| ns.div_ceil(1_000_000_000)),
        observes,
    };
    let reason = reason_and_evidence(leftover, "");
    format!("{}: {reason}", judgement.verdict())
}

/// Returns the time until the delay of a rule ends, `None` if the leftover does not wait.
fn remaining_ns(leftover: &Leftover) -> Option<u64> {
    match leftover.verdict {
        LeftoverVerdict::Wait { remaining_ns, .. } => Some(remaining_ns),
        _ => None,
    }
}

/// Returns the reason of the verdict with the evidence. `more` follows the reason if the leftover waits.
fn reason_and_evidence(leftover: &Leftover, more: &str) -> String {
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
        LeftoverVerdict::Wait { rule, relative, .. } => {
            let waits = format!("a rule delays the decision ({rule}){more}");
            with_relative(*relative, waits)
        }
        LeftoverVerdict::Keep {
            reason,
            rule,
            relative,
        } => {
            let rule = rule.as_deref().unwrap_or_default();
            let kept = match reason {
                KeepReason::NeverSelf => "it is reaper itself or one of its ancestors".into(),
                KeepReason::KeepMarker => "REAPER_KEEP=1".into(),
                KeepReason::KeptByUser => "a user keeps it".into(),
                KeepReason::KeepRule => format!("a rule keeps it ({rule})"),
                KeepReason::OtherUid => {
                    format!("it runs as another user than its ancestors ({rule})")
                }
                KeepReason::Boundary => format!("it is a boundary ({rule})"),
                KeepReason::Terminal => "it is a terminal".into(),
                KeepReason::OwnUnit => format!("it runs in its own systemd unit ({rule})"),
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
        Some(pid) => format!("because of {pid}: {reason}"),
        None => reason,
    }
}
