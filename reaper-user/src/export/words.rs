//! Describes reasons and evidence to people.

use super::record::EvidenceRef;
use super::text::printable;

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

/// Describes the reason of a decision, given by its name in the stream. Returns an unknown name unchanged.
pub fn reason_text(reason: &str) -> &str {
    match reason {
        "root_exited" => "its agent exited",
        "forked_after_root_exit" => "forked after its agent exited",
        "detached" => "orphaned, and its agent lives",
        "root_alive" => "its agent lives",
        "keep_marker" => "REAPER_KEEP=1",
        "kept_by_user" => "a user keeps it",
        "rule_delay" => "a rule delays the decision",
        "successor_awaited" => "its agent exited and may continue in another process",
        "successor_unknown" => "cannot read whether its agent continues in another process",
        "report_rule" => "a rule reports it",
        "reap_rule" => "a rule reaps it",
        "keep_rule" => "a rule keeps it",
        "other_uid" => "it runs as another user",
        "ancestor_kept" => "an ancestor is kept",
        "descendant_kept" => "a descendant is kept",
        "unreadable" => "its facts could not be read",
        "lineage_uncertain" => "it may not belong to the agent",
        "inferred" => "it is only inferred to belong to the agent",
        other => other,
    }
}

/// Describes the reason why a process was not ended or not signalled, given by its name in the stream. Returns an
/// unknown name unchanged.
pub fn failure_text(reason: &str) -> &str {
    match reason {
        "reaper_stopped" => "the service stopped first",
        "EPERM" => "the service may not signal it",
        "uninterruptible_sleep" => "it waits in the kernel (state D) and cannot be killed",
        "uid_unreadable" => "its user could not be read",
        "observe_mode" => "the service only observes",
        "already_exited" => "it exited before a signal was sent",
        "pid_reused" => "its pid belongs to another process now",
        other if other.starts_with("not_exiting_state_") => "it does not exit after SIGKILL",
        other => reason_text(other),
    }
}
