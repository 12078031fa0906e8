//! Checks the docs against the program: commands, settings, rules, events and reasons.

#[path = "../../../tests/snippets.rs"]
mod snippets;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::error::ErrorKind;
use serde::Deserialize as _;
use serde_json::Value;

use crate::api::{ProblemDetails, StatusCode};
use crate::config::Config;
use crate::config::show::ShownConfig;
use snippets::{blocks, calls, page};

/// Events of the stream, one sample of each.
const SAMPLES: &str = include_str!("../export/tests/golden.jsonl");

#[test]
fn docs_commands_have_valid_arguments() {
    let calls = calls(&["reaper"], true);
    assert!(calls.len() > 60, "{} commands found", calls.len());
    let wrong = calls.iter().filter_map(|(place, arguments)| {
        let words = std::iter::once("reaper").chain(arguments.iter().map(String::as_str));
        let error = crate::cli::command().try_get_matches_from(words).err()?;
        let is_mention = matches!(
            error.kind(),
            ErrorKind::DisplayHelp
                | ErrorKind::DisplayVersion
                | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                // `reaper keep` without its argument, in a sentence.
                | ErrorKind::MissingRequiredArgument
        );
        (!is_mention).then(|| format!("{place}: reaper {}: {error}", arguments.join(" ")))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn docs_shell_blocks_are_valid_shell() {
    for block in blocks().iter().filter(|block| block.language == "sh") {
        let mut shell = Command::new("sh")
            .arg("-n")
            .stdin(Stdio::piped())
            .spawn()
            .expect("start a shell");
        let mut input = shell.stdin.take().expect("a pipe");
        input
            .write_all(block.text.as_bytes())
            .expect("write to the shell");
        drop(input);
        let status = shell.wait().expect("wait for the shell");
        assert!(status.success(), "{}: {}", block.place, block.text);
    }
    assert_eq!(snippets::unknown_programs(), []);
}

#[test]
fn docs_blocks_have_a_known_language() {
    for block in blocks() {
        let known = ["sh", "toml", "json", "ini", "text"];
        assert!(
            known.contains(&block.language.as_str()),
            "{}: {:?}",
            block.place,
            block.language
        );
    }
}

#[test]
fn docs_config_snippets_are_valid() {
    let snippets = blocks();
    let mut count = 0;
    for block in snippets.iter().filter(|block| block.language == "toml") {
        let config = Config::parse(&block.text, Path::new(&block.place));
        let config = config.unwrap_or_else(|error| panic!("{error}"));
        // contributing.md shows a rule of the catalogue, which as a user's rule would replace it.
        let is_own = !block.place.contains("contributing.md");
        assert!(
            !is_own || config.warnings.is_empty(),
            "{}: {:?}",
            block.place,
            config.warnings
        );
        count += 1;
    }
    assert!(count > 10, "{count} config snippets found");
}

#[test]
fn docs_settings_are_complete_with_defaults() {
    let text = page("reaper-user/docs/configuration.md");
    let all = blocks();
    let all = all
        .iter()
        .find(|block| block.text.contains("\nscan_min_interval"));
    let all = &all.expect("a block with all settings").text;
    let settings = ShownConfig::new(&Config::default()).settings;
    let shown = Config::parse(all, Path::new("configuration.md")).expect("valid settings");
    assert_eq!(ShownConfig::new(&shown).settings, settings);
    for key in settings.keys() {
        let (line, row) = (format!("\n{key} = "), format!("\n| `{key}` |"));
        assert!(format!("\n{all}").contains(&line), "no default of {key}");
        assert!(text.contains(&row), "no row for {key}");
    }
}

#[test]
fn docs_list_each_builtin_rule_with_its_times() {
    let text = page("reaper-user/docs/rules.md");
    for rule in ShownConfig::defaults().rules {
        let name = format!("`{}`", rule["name"].as_str().expect("a name"));
        let row = text.lines().find(|line| line.contains(&name));
        let row = row.unwrap_or_else(|| panic!("rules.md lacks {name}"));
        for time in ["after", "idle"]
            .iter()
            .filter_map(|key| rule.get(*key)?.as_str())
        {
            let words = in_words(time);
            // `15 min` is not `5 min`.
            let mut found = row.match_indices(&words).map(|(at, _)| &row[..at]);
            let is_there = found.any(|before| !before.ends_with(|c: char| c.is_ascii_digit()));
            assert!(is_there, "rules.md: {name}: no {words:?}");
        }
    }
}

/// Returns a duration of a config as the docs write it: `10 min` for `10m`.
fn in_words(time: &str) -> String {
    let time = reaper_model::value::parse_time(time).expect("a duration");
    let (count, unit) = match time.as_secs() {
        seconds if seconds % 3600 == 0 => (seconds / 3600, "h"),
        seconds if seconds % 60 == 0 => (seconds / 60, "min"),
        seconds => (seconds, "s"),
    };
    format!("{count} {unit}")
}

fn samples() -> impl Iterator<Item = Value> {
    let lines = SAMPLES.lines();
    lines.map(|line| serde_json::from_str(line).expect("an event"))
}

#[test]
fn docs_list_each_event_and_key() {
    let text = page("reaper-user/docs/events.md");
    for event in samples() {
        let event = event.as_object().expect("an object");
        let name = event["event"].as_str().expect("a name");
        assert!(text.contains(&format!("`{name}`")), "no event {name}");
        for key in event.keys().filter(|key| !key.starts_with("lost_")) {
            assert!(text.contains(&format!("`{key}`")), "{name}: no key {key}");
        }
    }
}

#[test]
fn docs_list_each_reason_of_a_decision() {
    let text = page("reaper-user/docs/concepts.md");
    let source = include_str!("../../model/src/policy.rs");
    let names = source.lines().filter(|line| line.contains("Reason::"));
    let names: Vec<&str> = names.filter_map(|line| line.split('"').nth(1)).collect();
    assert!(names.len() > 20, "{names:?}");
    // `unread` is never reported.
    for name in names.into_iter().filter(|name| *name != "unread") {
        assert!(text.contains(&format!("`{name}`")), "no reason {name}");
    }
}

#[test]
fn docs_list_each_exit_status_of_the_help() {
    let text = page("reaper-user/docs/operations.md");
    let (_, table) = text.split_once("## Exit status").expect("a heading");
    let (table, _) = table.split_once("\n## ").expect("the next heading");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| "));
    let rows: Vec<u8> = rows
        .filter_map(|row| row.split(' ').next()?.parse().ok())
        .collect();
    let help = crate::cli::command().render_long_help().to_string();
    let (_, listed) = help.split_once("Exit status:").expect("a heading");
    let listed: Vec<u8> = listed
        .lines()
        .filter_map(|line| line.split_whitespace().next()?.parse().ok())
        .collect();
    assert!(listed.len() > 8, "{listed:?}");
    assert_eq!(rows, listed);
}

#[test]
fn docs_json_is_an_event_or_a_problem() {
    for block in blocks().iter().filter(|block| block.language == "json") {
        for line in block.text.lines() {
            let event: Value = serde_json::from_str(line).expect("JSON");
            if let Ok(problem) = ProblemDetails::deserialize(&event) {
                let status = StatusCode::from_u16(problem.status).expect("a status");
                assert_eq!(problem, ProblemDetails::new(status, &*problem.detail));
                continue;
            }
            let sample = samples().find(|sample| sample["event"] == event["event"]);
            let sample = sample.unwrap_or_else(|| panic!("{}: no such event", block.place));
            assert_eq!(event["schema"], sample["schema"], "{}", block.place);
        }
    }
}

#[test]
fn docs_links_lead_to_files_and_headings() {
    for (path, text) in snippets::pages() {
        let targets = text.split("](").skip(1);
        for target in targets.filter_map(|rest| rest.split(')').next()) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            if target.contains("://") {
                continue;
            }
            let directory = Path::new(&path).parent().expect("a directory");
            let linked = match file {
                "" => path.clone(),
                file => directory.join(file).to_string_lossy().into_owned(),
            };
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
            assert!(root.join(&linked).exists(), "{path}: {target}");
            let linked = if heading.is_empty() {
                String::new()
            } else {
                page(&linked)
            };
            let headings = linked.lines().filter(|line| line.starts_with('#'));
            let mut anchors = headings.map(anchor);
            assert!(
                heading.is_empty() || anchors.any(|anchor| anchor == heading),
                "{path}: {target}"
            );
        }
    }
}

/// Returns the anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
