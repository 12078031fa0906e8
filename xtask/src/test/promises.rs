//! Maps each sentence of the README about what is killed to the tests that fail if it is no longer true.

use anyhow::{Result, ensure};

/// Each sentence of the section, in order and without its period, with names of its tests.
const PROMISES: &[(&str, &[&str])] = &[
    (
        "It kills members of an agent's **session**: everything that descends from the agent, once the agent has exited",
        &[
            "tests::promises::descendants_are_reaped_once_the_agent_has_exited",
            "enforce::plain",
        ],
    ),
    (
        "`setsid`, double forks, a cleared environment or another name do not change descent",
        &[
            "tests::promises::double_fork_and_another_name_do_not_change_descent",
            "enforce::setsid",
            "enforce::double-fork",
        ],
    ),
    (
        "SIGTERM first, SIGKILL after 5 s (1 min for databases etc.), and again until none is left",
        &[
            "config::tests::empty_file_has_the_defaults",
            "reap::escalation::tests::grace_starts_at_opening_and_ends_in_sigkill",
            "rules::catalogue::tests::programs_with_state_have_time_to_exit",
            "enforce::grace-of-a-rule",
            "engine::tests::process_that_ignores_sigterm_is_killed_after_the_grace",
            "enforce::fork-bomb",
        ],
    ),
    (
        "The service signals through verified pidfds; probes signal only members that it has cleared",
        &[
            "engine::tests::process_with_a_reused_pid_is_not_signalled",
            "tests::rules::member_is_kernel_killable_only_if_no_rule_may_keep_it",
            "enforce::recycled-pid",
        ],
    ),
    (
        "An orphan below a *living* agent stays: `npm run dev &` is what you asked for",
        &["tests::promises::orphan_of_a_living_agent_stays_without_a_time_limit"],
    ),
    (
        "Exceptions: an idle agent whose client is gone, and an idle server that Codex itself started",
        &[
            "tests::promises::only_two_rules_reap_while_the_agent_lives",
            "tests::promises::idle_agent_is_reaped_only_if_its_client_is_gone",
            "tests::promises::idle_server_is_reaped_only_if_codex_started_it",
        ],
    ),
    (
        "After a status other than 0, or death by a signal: at once",
        &["tests::promises::exit_with_another_status_or_a_signal_has_no_patience"],
    ),
    (
        "After status 0, a server that listens has 10 minutes, again and again while in use (1 min if the agent had \
         no terminal), and any process has until it is a minute old",
        &[
            "tests::promises::server_that_listens_has_10_minutes_after_status_0",
            "tests::promises::server_in_use_has_10_minutes_again_and_again",
            "tests::promises::process_has_until_it_is_a_minute_old_after_status_0",
        ],
    ),
    (
        "Never: what does not descend from an agent, PID 1, kernel threads, `reaper` itself and its ancestors",
        &[
            "tests::promises::never_list_holds_after_the_agent_has_exited",
            "enforce::own-tree",
        ],
    ),
    (
        "Never: a tmux, container, editor, terminal or a person's browser that an agent opened, and what runs in it (*boundaries*)",
        &[
            "tests::promises::boundary_and_what_runs_in_it_is_never_reaped_with_the_agent",
            "corpus::real-podman-detached-under-a-killed-agent",
        ],
    ),
    (
        "An agent that runs there has its own session",
        &["tests::promises::boundary_and_what_runs_in_it_is_never_reaped_with_the_agent"],
    ),
    (
        "Kept by rules: other users' processes, windows, ssh-agent, build servers, package managers, systemd units",
        &[
            "tests::promises::program_with_a_window_is_kept_with_its_tree",
            "tests::promises::probes_signal_no_member_where_a_display_server_runs",
            "tests::promises::programs_that_the_readme_names_are_kept_by_rules",
            "tests::promises::other_users_process_and_systemd_unit_are_kept",
        ],
    ),
    (
        "Kept by you: `REAPER_KEEP=1 npm run dev`, `reaper keep PID`, or a rule \
         ([FAQ](reaper-user/docs/operations.md#faq-why-was-my-process-killed))",
        &["tests::promises::marker_request_and_rule_of_a_user_keep_a_process"],
    ),
    (
        "Unknown facts and lost events keep a process",
        &["tests::promises::unknown_facts_and_lost_events_keep_a_process"],
    ),
    (
        "It recognises Claude Code, Codex, Gemini CLI, Copilot CLI, opencode and \
         [27 more](reaper-user/docs/rules.md#the-built-in-catalogue)",
        &["tests::promises::readme_counts_the_recognised_agents"],
    ),
];

/// Checks that the tests of each sentence exist.
///
/// # Errors
/// Lists the sentences and tests for which this is not so.
pub fn check(tests: &[String]) -> Result<()> {
    let named = PROMISES.iter().flat_map(|(_, tests)| *tests);
    let absent: Vec<&&str> = named
        .filter(|name| !tests.iter().any(|test| test == **name))
        .collect();
    ensure!(
        absent.is_empty(),
        "xtask/src/test/promises.rs: no such tests: {absent:?}; each sentence of the README's section needs tests that fail \
         if it is no longer true"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = include_str!("../../../README.md");
    const HEADING: &str = "## What it kills, and what it never kills\n";

    /// Returns the sentences of the section, without list markers and periods.
    fn sentences(readme: &str) -> Vec<String> {
        let section = readme.split_once(HEADING).map_or("", |(_, after)| after);
        let section = section.split("\n## ").next().unwrap_or_default();
        let text = section.replace("\n- ", "\n\n").replace("\n  ", " ");
        let paragraphs = text
            .split("\n\n")
            .map(str::trim)
            .map(|it| it.trim_end_matches('.'));
        let sentences = paragraphs.flat_map(|paragraph| paragraph.split(". "));
        let sentences = sentences.filter(|sentence| !sentence.is_empty());
        sentences
            .map(|sentence| sentence.replace('\n', " "))
            .collect()
    }

    #[test]
    fn each_sentence_of_the_readme_has_its_tests() {
        let known: Vec<&str> = PROMISES.iter().map(|(sentence, _)| *sentence).collect();
        assert_eq!(sentences(README), known);
        assert!(PROMISES.iter().all(|(_, tests)| !tests.is_empty()));
    }

    #[test]
    fn promise_without_a_test_is_an_error() {
        let named = PROMISES.iter().flat_map(|(_, tests)| *tests);
        let mut all: Vec<String> = named.map(|name| (*name).to_owned()).collect();
        assert!(check(&all).is_ok());
        let last = all.pop();
        all.retain(|name| Some(name) != last.as_ref());
        assert!(check(&all).is_err());
    }
}
