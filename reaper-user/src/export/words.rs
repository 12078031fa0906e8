//! Describes reasons and evidence to people.

use super::record::{EvidenceRef, Listener, WaitInfo};
use super::text::{printable, process_label, time};

/// Describes the evidence by which a process was inferred to be a member: by its variable or directory, if given, or
/// else by its kind.
pub fn evidence_text(evidence: &str, variable: Option<&str>, directory: Option<&str>) -> String {
    let variable = variable.map(|name| format!("the environment marker {}", printable(name, 64)));
    let directory = directory.map(|path| format!("its cwd in {}", printable(path, 128)));
    let evidence = match evidence {
        "process_group" => "its process group",
        "kernel_session" => "its POSIX session",
        "cgroup" => "its cgroup",
        "cwd" => "its cwd",
        other => other,
    };
    variable
        .or(directory)
        .unwrap_or_else(|| printable(evidence, 64))
}

/// Describes the evidence in a record.
pub fn evidence_ref_text(evidence: &EvidenceRef) -> String {
    evidence_text(
        evidence.evidence,
        evidence.variable,
        evidence.directory.as_deref(),
    )
}

/// Reason of a report of a process that has exited: what it started runs on. The policy does not decide this.
pub const LEFT_RUNNING: &str = "left_running";

/// Describes the reason of a decision, given by its name in the stream. Returns an unknown name unchanged.
pub fn reason_text(reason: &str) -> &str {
    match reason {
        "root_exited" => "its agent exited",
        "forked_after_root_exit" => "forked after its agent exited",
        "detached" => "orphaned, and its agent lives",
        "root_alive" => "the agent lives",
        "keep_marker" => "REAPER_KEEP=1",
        "kept_by_user" => "a user keeps it",
        "rule_delay" => "a rule delays the decision",
        "successor_awaited" => "its agent exited and may continue in another process",
        "successor_unknown" => "cannot read whether its agent continues in another process",
        "report_rule" => "a rule reports it",
        LEFT_RUNNING => "it exited, and what it started may still run",
        "reap_rule" => "a rule reaps it",
        "keep_rule" => "a rule keeps it",
        "other_uid" => "it runs as another user",
        "ancestor_kept" => "an ancestor is kept",
        "descendant_kept" => "a descendant is kept",
        "unreadable" => "its facts could not be read",
        "unread" => "a rule needs facts that are being read",
        "lineage_uncertain" => "it may not belong to the agent",
        "inferred" => "it is only inferred to belong to the agent",
        "not_a_member" => "it belongs to no agent",
        "never_pid1" => "it is the init process",
        "never_kernel_thread" => "it is a kernel thread",
        "never_self" => "it is reaper itself or one of its ancestors",
        other => other,
    }
}

/// Describes why a process was not ended or not signalled, given by the reason of its outcome in the stream.
pub fn outcome_reason_text(reason: &str) -> String {
    match reason {
        "EPERM" => "it may not be signalled by this user; end it as root".into(),
        "uninterruptible_sleep" => {
            "it did not exit after SIGKILL: it waits in the kernel (state D)".into()
        }
        "reaper_stopped" => "reaper was stopped before it exited".into(),
        "uid_unreadable" => "its user cannot be read".into(),
        "observe_mode" => "the service only observes".into(),
        "already_exited" => "it exited before a signal was sent".into(),
        "pid_reused" => "its pid belongs to another process now".into(),
        other => match other.strip_prefix("not_exiting_state_") {
            Some(state) => format!("it did not exit after SIGKILL (state {state})"),
            None if reason_text(other) != other => reason_text(other).into(),
            None => format!("it cannot be signalled: {other}"),
        },
    }
}

/// Describes why events are missing, given by the reason of the gap in the stream.
pub fn gap_text(reason: &str) -> &str {
    match reason {
        "restart" => "no service was running",
        "records_lost" => "events were lost",
        "member_map_full" => "the kernel map of members is full",
        "probes_missed" => "the probes missed events",
        "record_malformed" => "events could not be read",
        "source_failed" => "the event source failed",
        other => other,
    }
}

/// Decision about a process, in the terms of the stream.
#[derive(Clone, Copy, Debug)]
pub struct Judgement<'a> {
    /// `reap`, `keep`, `report` or `wait`.
    pub decision: &'a str,
    pub reason: &'a str,
    /// Name of the deciding rule.
    pub rule: Option<&'a str>,
    /// Seconds until it is evaluated again.
    pub remaining_s: Option<u64>,
    /// Whether the service only observes.
    pub observes: bool,
}

impl Judgement<'_> {
    /// Returns the decision and its reason, such as `kept: a rule keeps it (gradle)`. All commands use these words.
    pub fn text(&self) -> String {
        let rule = self.rule.map(|rule| format!(" ({rule})"));
        let reason = reason_text(self.reason);
        format!("{}: {reason}{}", self.verdict(), rule.unwrap_or_default())
    }

    /// Returns the decision without its reason, such as `kept for 2h`.
    pub fn verdict(&self) -> String {
        let remaining = self.remaining_s.map(time);
        match (self.decision, self.reason, remaining) {
            ("reap", ..) if self.observes => "would be reaped".into(),
            ("reap", ..) => "to be reaped".into(),
            ("wait", "unread", _) | ("wait", _, None) => "not decided yet".into(),
            ("wait", _, Some(time)) => format!("waits {time}"),
            ("report", LEFT_RUNNING, _) => "reported".into(),
            ("report", ..) => "kept and reported".into(),
            (_, reason, _) if reason.starts_with("never_") => "never signalled".into(),
            (_, "kept_by_user", Some(time)) => format!("kept for {time}"),
            _ => "kept".into(),
        }
    }
}

/// Describes the scope of a service by its names: pids and paths of cgroups, of which one is enough, then `uid:N`, which
/// limits them.
pub fn scope_text(names: &[String]) -> String {
    let mut text = String::new();
    for name in names {
        let (gap, only) = match text.is_empty() {
            true => ("", ""),
            false => (", ", "only "),
        };
        text += &match name.strip_prefix("uid:") {
            Some(uid) => format!("{gap}{only}processes of uid {uid}"),
            None if name.starts_with('/') => format!("{gap}cgroup {name}"),
            None if name.bytes().all(|byte| byte.is_ascii_digit()) => {
                format!("{gap}process {name} with its descendants")
            }
            None => format!("{gap}{name}"),
        };
    }
    text
}

/// Returns the time from `now` to `until`, rounded up to a second. Both are in ns since boot.
pub(super) fn remaining(until: u64, now: u64) -> String {
    time(until.saturating_sub(now).div_ceil(1_000_000_000))
}

/// Describes the wait of a process: `10m: it listens on 5173, and its agent exited with status 0`. `now` is in ns since
/// boot.
pub(super) fn wait_text(wait: &WaitInfo, reason: &str, now: u64) -> String {
    let remaining = remaining(wait.until, now);
    let conditions = wait.conditions.iter();
    let conditions: Vec<String> = conditions.map(|name| condition_text(name, wait)).collect();
    let why = match conditions.as_slice() {
        [] => reason_text(reason).to_owned(),
        conditions => conditions.join(", and "),
    };
    format!("{remaining}: {why}")
}

/// Describes a condition of a rule, given by its name in the stream.
fn condition_text(condition: &str, wait: &WaitInfo) -> String {
    match condition {
        "listening" => {
            let listener = match &wait.listener {
                None => "it".to_owned(),
                Some(Listener {
                    key,
                    comm,
                    is_below,
                }) => {
                    let place = if *is_below { "below" } else { "above" };
                    format!("{} {place} it", process_label(Some(*key), comm))
                }
            };
            let ports: Vec<String> = wait.ports.iter().map(u16::to_string).collect();
            match ports.as_slice() {
                [] => format!("{listener} listens"),
                ports => format!("{listener} listens on {}", ports.join(", ")),
            }
        }
        "orphan" => "its parent has exited".into(),
        "childless" => "it has no children".into(),
        "detached" => "nohup or setsid started it".into(),
        "piped" => "its input may still be written".into(),
        "root_exited" => "its agent has exited".into(),
        "root_not_killed" => "no signal ended its agent".into(),
        "root_succeeded" => "its agent exited with status 0".into(),
        "root_failed" => "its agent failed".into(),
        "root_killed" => "its agent was killed".into(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reaper_model::event::ProcessKey;

    #[test]
    fn uid_limits_the_processes_of_a_scope() {
        let text = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            scope_text(&names)
        };
        assert_eq!(text(&["uid:1000"]), "processes of uid 1000");
        assert_eq!(
            text(&["7", "/sys/fs/cgroup/x", "uid:1000"]),
            "process 7 with its descendants, cgroup /sys/fs/cgroup/x, only processes of uid 1000"
        );
    }

    #[test]
    fn judgement_has_verdict_reason_rule_and_time() {
        let judge = |decision, reason, rule, remaining_s, observes| {
            let judgement = Judgement {
                decision,
                reason,
                rule,
                remaining_s,
                observes,
            };
            judgement.text()
        };
        for (actual, expected) in [
            (
                judge("reap", "root_exited", None, None, false),
                "to be reaped: its agent exited",
            ),
            (
                judge("reap", "root_exited", None, None, true),
                "would be reaped: its agent exited",
            ),
            (
                judge("keep", "keep_rule", Some("gradle"), None, false),
                "kept: a rule keeps it (gradle)",
            ),
            (
                judge("wait", "rule_delay", Some("slow"), Some(599), true),
                "waits 9m 59s: a rule delays the decision (slow)",
            ),
            (
                judge("wait", "unread", Some("slow"), None, false),
                "not decided yet: a rule needs facts that are being read (slow)",
            ),
            (
                judge("keep", "kept_by_user", None, Some(7200), false),
                "kept for 2h: a user keeps it",
            ),
            (
                judge("keep", "never_pid1", None, None, false),
                "never signalled: it is the init process",
            ),
            (
                judge("report", "report_rule", Some("big"), Some(5), false),
                "kept and reported: a rule reports it (big)",
            ),
        ] {
            assert_eq!(actual, expected);
        }
    }

    #[test]
    fn outcome_reasons_have_words() {
        for reason in [
            "EPERM",
            "EAGAIN",
            "uninterruptible_sleep",
            "not_exiting_state_R",
            "reaper_stopped",
            "uid_unreadable",
            "observe_mode",
            "already_exited",
            "pid_reused",
            "kept_by_user",
        ] {
            let text = outcome_reason_text(reason);
            assert!(text.contains(' ') && !text.contains('_'), "{text}");
        }
    }

    #[test]
    fn each_reason_has_words() {
        let source = include_str!("../../model/src/policy.rs");
        let names = source.lines().filter(|line| line.contains("Reason::"));
        let names: Vec<&str> = names.filter_map(|line| line.split('"').nth(1)).collect();
        assert!(names.len() > 20, "{names:?}");
        for name in names {
            assert!(
                reason_text(name).contains(' ') || name == "keep_marker",
                "{name}"
            );
        }
    }

    #[test]
    fn wait_has_time_and_reason() {
        let vite = |is_below| {
            Some(Listener {
                key: ProcessKey { pid: 7, start: 1 },
                comm: b"vite".into(),
                is_below,
            })
        };
        let server = vec!["listening", "root_succeeded"];
        for (conditions, listener, ports, expected) in [
            (
                server.clone(),
                None,
                vec![5173],
                "10m: it listens on 5173, and its agent exited with status 0",
            ),
            (
                server.clone(),
                vite(true),
                vec![80, 443],
                "10m: vite (7) below it listens on 80, 443, and its agent exited with status 0",
            ),
            (
                server,
                vite(false),
                vec![],
                "10m: vite (7) above it listens, and its agent exited with status 0",
            ),
            (
                vec!["detached", "root_succeeded"],
                None,
                vec![],
                "10m: nohup or setsid started it, and its agent exited with status 0",
            ),
            (
                vec!["piped", "root_exited"],
                None,
                vec![],
                "10m: its input may still be written, and its agent has exited",
            ),
            (vec![], None, vec![], "10m: a rule delays the decision"),
        ] {
            let wait = WaitInfo {
                until: 600_000_000_000,
                conditions,
                listener,
                ports,
            };
            assert_eq!(wait_text(&wait, "rule_delay", 1_000_000), expected);
        }
    }
}
