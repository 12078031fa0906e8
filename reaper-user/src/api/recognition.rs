//! Tests rules against a process: which one recognises it, and which condition of each other rule failed.
//!
//! The commands use it too, when no service answers.

use std::cmp::Reverse;
use std::sync::Arc;

use super::peer::Peer;
use super::{ProblemDetails, RuleTest, RuleTestResponse, StatusCode};
use crate::export::command_line;
use reaper_host::facts::{ScriptPaths, scan_pids};
use reaper_host::source::procfs::Procfs;
use reaper_model::event::{Image, ProcEntry, ProcessKey};
use reaper_model::ruleset::{self, Action, Mismatch, Nearness, Rule};
use reaper_model::value::did_you_mean;

/// Longest command line in the response, in bytes.
const COMMAND_MAX: usize = 8192;

impl Peer {
    /// Returns the script paths that the client may see: resolved ones only with the rights of the service.
    pub(super) fn script_paths(self) -> ScriptPaths {
        match self.is_privileged() {
            true => ScriptPaths::Resolved,
            false => ScriptPaths::Given,
        }
    }
}

/// Reads a process, with its whole command line and the path of its script.
///
/// # Errors
/// There is no such process, or it cannot be read.
pub fn read_process(pid: u32, scripts: ScriptPaths) -> Result<ProcEntry, ProblemDetails> {
    let table = scan_pids(&Procfs::default(), vec![pid], scripts);
    let mut table = table.map_err(|error| {
        ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    })?;
    match table.rows.remove(&pid) {
        Some(row) => Ok(row.entry),
        None if table.unread.contains_key(&pid) => {
            let what = format!("process {pid} cannot be read; try again as root");
            Err(ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, what))
        }
        None => {
            let what = format!(
                "there is no process {pid}: it has exited, or the pid is wrong; name a running one"
            );
            Err(ProblemDetails::new(StatusCode::NOT_FOUND, what))
        }
    }
}

/// Returns the error for a name that no agent has.
pub fn unknown_agent(name: &str, known: &[&str]) -> String {
    let hint = did_you_mean(name, known);
    let hint = hint.unwrap_or_else(|| "`reaper agents` lists all agents".into());
    format!("no agent is named {name:?}: {hint}")
}

/// Returns the first boundary, server or agent rule that matches a program.
pub(super) fn first_match<'r>(rules: &'r [Rule], image: &Image) -> Option<&'r Rule> {
    of_program(rules).find(|rule| rule.mismatch(image).is_none())
}

/// Returns the rules that decide about the membership of a program.
fn of_program(rules: &[Rule]) -> impl Iterator<Item = &Rule> {
    let is_one = |action: Action| action.is_of_program() && action != Action::Note;
    rules.iter().filter(move |rule| is_one(rule.action))
}

/// Tests the rules for agents and servers against a process, and the boundaries, which come before them. `peer` is the
/// client of a service; `None` tests with the rights of this program.
///
/// # Errors
/// There is no such process, or it cannot be read, or may not be seen.
pub fn test(
    pid: u32,
    rules: &[Rule],
    peer: Option<Peer>,
) -> Result<RuleTestResponse, ProblemDetails> {
    let scripts = peer.map_or(ScriptPaths::Resolved, Peer::script_paths);
    let process = read_process(pid, scripts)?;
    if peer.is_some_and(|peer| !peer.may_see(process.uids)) {
        return Err(ProblemDetails::not_visible(pid));
    }
    let image = &*process.image;
    let tests = of_program(rules).map(|rule| (rule, rule.mismatch(image)));
    // A boundary that does not match says nothing about agents.
    let tests = tests.filter(|(rule, mismatch)| mismatch.is_none() || rule.action.opens_session());
    let mut tests: Vec<_> = tests.collect();
    tests.sort_by_key(|(rule, mismatch)| match mismatch {
        None => (0, Reverse(Nearness::default()), false),
        Some(mismatch) => {
            let is_agent = rule.action == Action::Agent;
            (1, Reverse(mismatch.nearness), !is_agent)
        }
    });
    let tests = tests.into_iter();
    let tests = tests.map(|(rule, mismatch)| rule_test(pid, rule, mismatch));
    let tests: Vec<RuleTest> = tests.collect();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(RuleTestResponse {
        pid,
        command: command_line(image, COMMAND_MAX),
        comm: text(&image.comm),
        exe: text(&image.exe),
        script: Some(text(&image.script)).filter(|script| !script.is_empty()),
        rule: tests
            .iter()
            .find(|test| test.matches)
            .map(|test| test.name.clone()),
        nearest: ruleset::nearest(rules, &[image])
            .map(|(_, rule, mismatch)| rule_test(pid, rule, mismatch)),
        rules: tests,
    })
}

/// Returns the agent rule that comes nearest to one of the processes, which are given with the images that the model has.
pub(super) fn nearest(
    rules: &[Rule],
    mut processes: Vec<(ProcessKey, Arc<Image>)>,
    scripts: ScriptPaths,
) -> Option<RuleTest> {
    let pids = processes.iter().map(|(key, _)| key.pid).collect();
    // Only the images in the table have whole command lines, and the resolved paths of scripts.
    let table = scan_pids(&Procfs::default(), pids, scripts).unwrap_or_default();
    for (key, image) in &mut processes {
        if let Some(row) = table.rows.get(&key.pid)
            && row.entry.key.has_same_tick(*key)
        {
            *image = Arc::clone(&row.entry.image);
        }
    }
    let images: Vec<&Image> = processes.iter().map(|(_, image)| &**image).collect();
    let (at, rule, mismatch) = ruleset::nearest(rules, &images)?;
    Some(rule_test(processes[at].0.pid, rule, mismatch))
}

fn rule_test(pid: u32, rule: &Rule, mismatch: Option<Mismatch>) -> RuleTest {
    let text = mismatch.as_ref().map(ToString::to_string);
    let (condition, patterns) = match mismatch {
        Some(mismatch) => (Some(mismatch.key), mismatch.patterns),
        None => (None, Vec::new()),
    };
    RuleTest {
        pid,
        name: rule.name.to_string(),
        kind: rule.action.name().into(),
        matches: condition.is_none(),
        condition,
        patterns,
        failed: text,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    #[test]
    fn rules_are_tested_nearest_first() {
        let own = std::env::current_exe().unwrap();
        let (exe, name) = (own.display(), own.file_name().unwrap().display());
        let rule =
            |name: &str, conditions: &str| format!("[[agent]]\nname = '{name}'\n{conditions}\n");
        let text = [
            "defaults.agents = false\n".to_owned(),
            rule("unrelated", "exe = '/no/such'"),
            rule("same-name", &format!("exe = '/no/such/{name}'")),
            rule(
                "other-arguments",
                &format!("exe = '{exe}'\nargs = ['never']"),
            ),
            rule("matching", &format!("exe = '{exe}'")),
        ];
        let config = Config::parse(&text.concat(), Path::new("test")).unwrap();
        let test = test(std::process::id(), config.rules.rules(), None).unwrap();
        let names: Vec<&str> = test.rules.iter().map(|rule| &*rule.name).collect();
        assert_eq!(
            names,
            ["matching", "other-arguments", "same-name", "unrelated"]
        );
        assert_eq!(test.rule.as_deref(), Some("matching"));
    }
}
