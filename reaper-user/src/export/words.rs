//! Reasons and evidence in words for people.

use super::record::EvidenceRef;
use super::text::printable;

/// Describes the evidence by which a process was inferred to be a member.
pub fn evidence_text(evidence: &str, variable: Option<&str>, directory: Option<&str>) -> String {
    let variable =
        variable.map(|name| format!("the mark {} in its environment", printable(name, 64)));
    let directory = directory.map(|path| format!("its cwd in {}", printable(path, 128)));
    let what = match evidence {
        "process_group" => "its process group",
        "kernel_session" => "its session in the kernel",
        "cgroup" => "its cgroup",
        "cwd" => "its cwd",
        other => other,
    };
    variable
        .or(directory)
        .unwrap_or_else(|| printable(what, 64))
}

/// Describes the evidence that a record carries.
pub fn evidence_ref_text(by: &EvidenceRef) -> String {
    evidence_text(by.evidence, by.variable, by.directory.as_deref())
}

/// Describes the reason of a decision, given by its name in the stream.
pub fn reason_text(reason: &str) -> &str {
    match reason {
        "root_exited" => "its agent is gone",
        "forked_after_root_exit" => "born after its agent was gone",
        "detached" => "orphaned, and its agent lives",
        "root_alive" => "its agent lives",
        "keep_marker" => "REAPER_KEEP=1",
        "kept_by_user" => "a user keeps it",
        "rule_delay" => "a rule gives it time",
        "successor_awaited" => "its agent exited and may continue in another process",
        "successor_unknown" => "its agent may continue in another process: that could not be read",
        "report_rule" => "a rule reports it",
        "reap_rule" => "a rule says so",
        "keep_rule" => "a rule keeps it",
        "other_uid" => "it runs as another user",
        "ancestor_kept" => "below one that is kept",
        "descendant_kept" => "above one that is kept",
        "unreadable" => "it could not be read",
        "lineage_uncertain" => "it may not be the agent's",
        "inferred" => "only evidence says that it is the agent's",
        other => other,
    }
}
