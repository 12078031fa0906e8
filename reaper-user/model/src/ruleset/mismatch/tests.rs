use std::sync::{Arc, LazyLock};

use super::*;
use crate::rules;

static RULES: LazyLock<Arc<[Rule]>> = LazyLock::new(|| rules::built_in().shared_rules());

/// Returns an image with this path and these arguments, separated by spaces.
fn image(exe: &str, args: &str) -> Image {
    let name = exe.rsplit('/').next().unwrap();
    Image {
        comm: name.as_bytes()[..name.len().min(15)].into(),
        exe: exe.into(),
        argv: args
            .split(' ')
            .flat_map(|arg| [arg, "\0"])
            .collect::<String>()
            .into(),
        ..Image::default()
    }
}

#[test]
fn nearest_rule_names_the_condition_that_failed() {
    for (exe, args, expected) in [
        (
            "/usr/bin/node",
            "node bin/claude",
            "claude-code: `script` needs an absolute path, not bin/claude",
        ),
        (
            "/usr/bin/node",
            "node /x/claude",
            "claude-code: `script` does not match /x/claude",
        ),
        (
            "/home/me/claude",
            "claude",
            "claude-code: `exe` does not match /home/me/claude",
        ),
        (
            "/usr/bin/perl",
            "perl /usr/bin/gemini",
            "gemini-cli: `exe` does not match /usr/bin/perl",
        ),
        (
            "/opt/x/bin/claude",
            "claude --version",
            "claude-code: `not_options` excludes --version",
        ),
        (
            "/opt/x/bin/codex",
            "codex app-server",
            "codex-app-server matches",
        ),
        (
            "/opt/x/bin/amp",
            "amp --flag",
            "amp: `exe` does not match /opt/x/bin/amp",
        ),
        ("/usr/bin/python3.12", "python3 -m aiders", ""),
        // Programs and scripts that only have a common name.
        ("/usr/bin/node", "node /x/dist/index.js", ""),
        ("/usr/bin/node", "node", ""),
        ("/bin/bash", "bash", ""),
        ("/usr/bin/vim", "vim claude", ""),
    ] {
        let found = nearest(&RULES, &[&image(exe, args)]);
        let text = found.map_or_else(String::new, |(_, rule, mismatch)| match mismatch {
            Some(mismatch) => format!("{}: {mismatch}", rule.name),
            None => format!("{} matches", rule.name),
        });
        assert_eq!(text, expected, "{exe} {args}");
    }
}

#[test]
fn nearest_of_several_programs_is_the_first_of_equals() {
    let near = image("/x/claude", "claude");
    let (shell, other) = (image("/bin/bash", "bash"), image("/x/codex", "codex"));
    let found = |images: &[&Image]| {
        nearest(&RULES, images).map(|(at, rule, _)| (at, rule.name.to_string()))
    };
    assert_eq!(found(&[&shell, &near]), Some((1, "claude-code".into())));
    let codex = found(&[&other, &near]).map(|(at, _)| at);
    assert_eq!(codex, Some(0));
    assert_eq!(found(&[&shell]), None);
}

#[test]
fn each_rule_matches_or_names_a_condition() {
    let server = image("/usr/bin/node", "node server.js");
    for rule in RULES.iter().filter(|rule| rule.action.is_of_program()) {
        let matches = rule
            .matchers
            .iter()
            .any(|m| m.is_match(&Subject::new(&server)));
        let mismatch = rule.mismatch(&server);
        assert_eq!(mismatch.is_none(), matches, "{}", rule.name);
        let is_named = |mismatch: &Mismatch| !mismatch.patterns.is_empty();
        assert!(mismatch.as_ref().is_none_or(is_named), "{}", rule.name);
    }
    let claude = RULES.iter().find(|rule| &*rule.name == "claude-code");
    let text = claude
        .and_then(|rule| rule.mismatch(&server))
        .map(|m| m.to_string());
    assert_eq!(text.as_deref(), Some("`script` does not match server.js"));
}
