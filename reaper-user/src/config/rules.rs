//! The language of rules: `[[agent]]`, `[[boundary]]` and `[[keep]]`.
//!
//! ```toml
//! [[agent]]
//! name = "my-agent"                 # letters, digits, `-`, `_`, `.`; replaces a built-in rule of that name
//! comm = "my-agent"                 # glob over the kernel's name of the process, at most 15 bytes
//! exe = ["/opt/my/agent", "**/bin/my-agent"]   # glob over the whole path; `*` stops at `/`, `**/` does not
//! script = "/**/bin/my-agent"       # glob over the path of the script that node, bun or python runs, as given
//! argv = "* --interactive*"         # glob over the arguments joined by single spaces; `*` crosses everything
//! argv_regex = "^[^ ]+ chat( |$)"   # regex over the same line, not anchored; `.` takes newlines too
//! not_argv = "* --version*"         # `not_` before any of these: none of them may match
//! any = [{ comm = "a" }, { exe = "/opt/b" }]   # and one of these alternatives must hold as well
//! ```
//!
//! All that a rule says must hold; in a list, one entry is enough. Everything is matched as bytes. What
//! is unknown of a process (an unreadable path) fulfils no condition, not even a `not_` one. A keep may
//! also say `uid = "other"`: another uid than that of the session's root.

use std::collections::HashSet;
use std::sync::Arc;

use toml::de::DeTable;

use super::reader::{Reader, Value};
use crate::model::agent::{Action, Condition, Field, Matcher, Pattern, PatternError, Rule};

const NOT: &str = "not_";

type Compile = fn(&str) -> Result<Pattern, PatternError>;

/// The kinds of condition: key, what it looks at, and how its text is compiled.
const KINDS: [(&str, Field, Compile); 5] = [
    ("comm", Field::Comm, Pattern::comm),
    ("exe", Field::Exe, Pattern::exe),
    ("script", Field::Script, Pattern::script),
    ("argv", Field::Argv, Pattern::argv),
    ("argv_regex", Field::Argv, Pattern::argv_regex),
];

const CONDITIONS: [&str; 10] = [
    "comm",
    "exe",
    "script",
    "argv",
    "argv_regex",
    "not_comm",
    "not_exe",
    "not_script",
    "not_argv",
    "not_argv_regex",
];

/// All rules of a file, in its order within each kind. Problems are noted in `r`.
pub(super) fn read(r: &mut Reader, root: &DeTable<'_>) -> Vec<Rule> {
    let mut rules = Vec::new();
    let mut names = HashSet::new();
    for (key, action) in [
        ("agent", Action::Agent),
        ("boundary", Action::Boundary),
        ("keep", Action::Keep),
    ] {
        for (at, table) in r.tables(
            root,
            key,
            &format!("[[{key}]] with its keys in the lines below"),
        ) {
            let Some(rule) = rule(r, key, action, at, table) else {
                continue;
            };
            if !names.insert(rule.name.clone()) {
                r.problem(
                    at,
                    format!(
                        "`{}` is the name of another rule too: rename one of them",
                        rule.name
                    ),
                );
            }
            rules.push(rule);
        }
    }
    rules
}

/// One rule; `None` only where it has no usable name.
fn rule(r: &mut Reader, key: &str, action: Action, at: usize, table: &DeTable<'_>) -> Option<Rule> {
    let mut known: Vec<&str> = ["name", "any"].into_iter().chain(CONDITIONS).collect();
    let mut other_uid = false;
    let before = r.count();
    if action == Action::Keep {
        known.push("uid");
        r.choice(table, "uid", &[("other", true)], &mut other_uid);
    }
    r.known_keys(table, &known, &format!(" in [[{key}]]"));
    let name = name(r, key, at, table);
    let common = conditions(r, table);
    let matchers: Vec<Matcher> = match alternatives(r, table) {
        None if common.is_empty() => Vec::new(),
        None => vec![Matcher::new(common)],
        Some(all) => all
            .into_iter()
            .map(|own| Matcher::new([common.clone(), own].concat()))
            .collect(),
    };
    let this = name.as_deref().unwrap_or("…");
    // Whether it says enough can be told only where all that it says has been understood.
    if r.count() == before && !other_uid {
        if matchers.is_empty() {
            r.problem(at, format!("[[{key}]] `{this}` has no condition: add `comm`, `exe`, `script`, `argv` or `argv_regex`"));
        } else if !matchers.iter().all(Matcher::is_positive) {
            r.problem(
                at,
                format!("[[{key}]] `{this}` says only what it is not: add `comm`, `exe`, `script`, `argv` or `argv_regex`"),
            );
        }
    }
    Some(Rule {
        name: name?,
        action,
        matchers,
        other_uid,
    })
}

fn name(r: &mut Reader, key: &str, at: usize, table: &DeTable<'_>) -> Option<Arc<str>> {
    let Some(value) = table.get("name") else {
        r.problem(
            at,
            format!("this [[{key}]] has no name: add `name = \"…\"`"),
        );
        return None;
    };
    let (at, name) = r.string("name", value, "my-rule")?;
    if name.is_empty()
        || !name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    {
        r.problem(
            at,
            format!("`name` is {name:?}: write letters, digits, `-`, `_` and `.`"),
        );
        return None;
    }
    Some(name.into())
}

/// The entries of `any`.
fn alternatives(r: &mut Reader, table: &DeTable<'_>) -> Option<Vec<Vec<Condition>>> {
    let value = table.get("any")?;
    let like = "a list such as [{ comm = \"a\" }, { exe = \"**/b\" }]";
    let tables = r.tables(table, "any", like);
    if value
        .get_ref()
        .as_array()
        .is_some_and(|list| list.is_empty())
    {
        r.problem(
            value.span().start,
            "`any` has no alternative: fill it or leave it out",
        );
    }
    let mut all = Vec::new();
    for (at, inner) in tables {
        r.known_keys(inner, &CONDITIONS, " in `any`");
        if inner.is_empty() {
            r.problem(
                at,
                "this alternative of `any` is empty, so it would always hold: fill it or remove it",
            );
        }
        all.push(conditions(r, inner));
    }
    Some(all)
}

fn conditions(r: &mut Reader, table: &DeTable<'_>) -> Vec<Condition> {
    let mut found = Vec::new();
    for key in CONDITIONS {
        let Some(value) = table.get(key) else {
            continue;
        };
        let positive = key.strip_prefix(NOT);
        let (_, field, compile) = *KINDS
            .iter()
            .find(|k| k.0 == positive.unwrap_or(key))
            .expect("each is of a kind");
        let any_of = patterns(r, key, value, compile);
        found.push(Condition {
            field,
            any_of,
            negative: positive.is_some(),
        });
    }
    found
}

fn patterns(r: &mut Reader, key: &str, value: &Value<'_>, compile: Compile) -> Vec<Pattern> {
    let what = if key.ends_with("regex") {
        "regex"
    } else {
        "glob"
    };
    let mut found = Vec::new();
    for (at, text) in r.strings(key, value) {
        match compile(text) {
            Ok(pattern) if matches_all(text, &pattern) => {
                r.problem(
                    at,
                    format!("`{key}` {text:?} matches everything: narrow it or leave it out"),
                );
            }
            Ok(pattern) => found.push(pattern),
            Err(error) => r.problem(at, format!("`{key}` {text:?} is no good {what}: {error}")),
        }
    }
    found
}

/// Whether a pattern would tell nothing apart, as a slip that makes an agent of every process.
fn matches_all(text: &str, pattern: &Pattern) -> bool {
    pattern.is_match(b"") || (text.contains('*') && text.chars().all(|c| "*/".contains(c)))
}
