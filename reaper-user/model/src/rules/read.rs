//! The language of rules: `[[agent]]`, `[[server]]`, `[[boundary]]`, `[[keep]]` and `[[rule]]`.
//!
//! ```toml
//! [[agent]]
//! name = "my-agent"                 # letters, digits, `-`, `_`, `.`, at most 63; replaces a built-in rule of that name
//! comm = "my-agent"                 # glob over the kernel's name of the process, at most 15 bytes
//! exe = ["/opt/my/agent", "**/bin/my-agent"]   # glob over the whole path; `*` stops at `/`, `**/` does not
//! script = "/**/bin/my-agent"       # glob over the path of the script that node, bun or python runs, as given
//! arg0 = "**/my-agent"              # glob over the name that the program was called by
//! args = ["chat", "*"]              # one glob per positional argument, from the first; more may follow
//! options = ["--model=*", "-v"]     # globs over the options; `*` crosses everything
//! value_options = ["-m", "--model"] # options whose value is the next argument: `--model x` reads like `--model=x`
//! command_at = 2                    # the second positional argument begins another command: no option follows it
//! not_options = "--version"         # `not_` before any of the globs: none of them may match
//! any = [{ comm = "a" }, { exe = "/opt/b" }]   # and one of these alternatives must hold as well
//! ```
//!
//! All that a rule says must hold; in a list, one entry is enough. Everything is matched as bytes. What
//! is unknown of a process (an unreadable path) fulfils no condition, not even a `not_` one. A keep may
//! also ask for a `uid`; it holds under living agents too.
//!
//! Where the first 8 KiB of a command line do not decide, the whole of it is read of members, up to 2 MiB. Of
//! other processes, the first 8 KiB count.
//!
//! An option starts with `-`, is not `-` alone and stands before `--`; all other arguments are positional. Where
//! node, bun or python runs a script, only the arguments after the script count. `args` holds if each of its globs
//! matches the positional argument at its place.
//!
//! Keeps and rules, which judge members, may also match the arguments joined by single spaces: `argv` is a glob
//! in which `*` crosses everything, `argv_regex` a regex that is not anchored and whose `.` takes newlines too. Agents
//! and boundaries may not: in the joined line a prompt looks like a sub-command or an option.
//!
//! ```toml
//! [[rule]]                          # asks for a program as above, or for none, and besides:
//! name = "my-rule"
//! action = "reap"                   # or "keep", "report", "boundary"; a boundary looks at the program alone
//! after = "10min"                   # from when it became due (or was orphaned, or began) until then it waits
//! enabled = true                    # false: it, or the built-in one of this name, is off
//! agent = ["claude-code", "codex"]  # names of agents
//! session = "ok"                    # "gone" (what is said by none, but for keeps: "any"), "alive", "any", "exited"
//!                                   # (by itself), "ok" (with status 0), "failed" (with another), "signalled"
//! orphan = true                     # its parent has exited
//! inferred = true                   # only evidence makes it a member; what reaps such has to say so
//! min_age = "10min"
//! max_age = "1h"
//! uid = "other"                     # than its agent's; or "same", or a number: its effective uid
//! unit = "docker-*.scope"           # glob over the innermost systemd unit it is in
//! own_unit = true                   # it is in one, and its agent is not
//! tty = false                       # it has a controlling terminal
//! multiplexed = true                # it is below tmux, screen or zellij
//! new_session = true                # its session id is not its agent's
//! min_cpu = 90                      # percent of one core, looked at when `after` is over
//! listening = true                  # it has a socket that listens
//! children = false                  # it has living children
//! idle = "30min"                    # it is an agent or a server; its tree has not worked and had no client for so long
//! hung_up = true                    # ... and its standard input and output are pipes or sockets that nothing reads or writes
//! server = true                     # it is an agent's server
//! environment = ["CI=*"]            # globs over the variables of its environment
//! ```
//!
//! Keeps and rules are asked in the order in which they stand in the file, whatever they do, and before
//! those that are built in; the first that holds decides.

use std::collections::HashSet;
use std::sync::Arc;

use reaper_common::RULE_MAX;
use toml::de::DeTable;

use super::reader::{Reader, Value};
use super::{conversation, when};
use crate::ruleset::{
    Action, Condition, Field, Matcher, Pattern, PatternError, Rule, SessionIs, Syntax,
};

const NOT: &str = "not_";

type Compile = fn(&str) -> Result<Pattern, PatternError>;

/// The kinds of condition: key, what it looks at, and how its text is compiled.
const KINDS: [(&str, Field, Compile); 8] = [
    ("comm", Field::Comm, Pattern::comm),
    ("exe", Field::Exe, Pattern::exe),
    ("script", Field::Script, Pattern::script),
    ("arg0", Field::Arg0, Pattern::script),
    ("args", Field::Args, Pattern::argv),
    ("options", Field::Options, Pattern::option),
    ("argv", Field::Argv, Pattern::argv),
    ("argv_regex", Field::Argv, Pattern::argv_regex),
];

/// The keys of conditions on the joined arguments come last.
const CONDITIONS: [&str; 16] = [
    "comm",
    "exe",
    "script",
    "arg0",
    "args",
    "options",
    "not_comm",
    "not_exe",
    "not_script",
    "not_arg0",
    "not_args",
    "not_options",
    "argv",
    "argv_regex",
    "not_argv",
    "not_argv_regex",
];

const JOINED: [&str; 4] = ["argv", "argv_regex", "not_argv", "not_argv_regex"];

/// The keys that say how arguments are read.
const SYNTAX: [&str; 2] = ["value_options", "command_at"];

/// A rule as it stands in a file.
#[derive(Clone, Debug)]
pub struct RuleEntry {
    pub rule: Rule,
    /// Where, in bytes from the beginning.
    pub at: usize,
    /// Whether it is in force, and no mere name for one that is not.
    pub enabled: bool,
}

/// All rules of a file, in its order. Problems are noted in `r`.
pub(super) fn read(r: &mut Reader, root: &DeTable<'_>) -> Vec<RuleEntry> {
    let mut rules = Vec::new();
    let mut names = HashSet::new();
    for key in ["agent", "server", "boundary", "keep", "rule"] {
        for (at, table) in r.tables(
            root,
            key,
            &format!("[[{key}]] with its keys in the lines below"),
        ) {
            let Some(written) = rule(r, key, at, table) else {
                continue;
            };
            let name = &written.rule.name;
            if !names.insert(name.clone()) {
                r.problem(
                    at,
                    format!("`{name}` is the name of another rule too: rename one of them"),
                );
            }
            rules.push(written);
        }
    }
    rules.sort_by_key(|written: &RuleEntry| written.at);
    rules
}

/// One rule; `None` only where it has no usable name.
fn rule(r: &mut Reader, key: &str, at: usize, table: &DeTable<'_>) -> Option<RuleEntry> {
    let program = CONDITIONS.into_iter().chain(SYNTAX);
    let mut known: Vec<&str> = ["name", "any"].into_iter().chain(program).collect();
    let before = r.count();
    let action = match key {
        "agent" => Some(Action::Agent),
        "server" => Some(Action::Server),
        "boundary" => Some(Action::Boundary),
        "keep" => Some(Action::Keep),
        _ => when::action(r, table, at),
    };
    let judging = !action.is_some_and(Action::is_of_program);
    match key {
        "rule" if judging => known.extend(when::KEYS),
        "rule" => known.extend(["action", "enabled"]),
        "keep" => known.push("uid"),
        "agent" => known.push("conversation"),
        _ => {}
    }
    let place = match (key, &action) {
        ("rule", Some(Action::Boundary)) => {
            " in a [[rule]] whose `action` is boundary, which looks at the program alone".to_owned()
        }
        _ => format!(" in [[{key}]]"),
    };
    r.known_keys(table, &known, &place);
    let name = name(r, key, at, table);
    if !judging {
        no_joined_line(r, table);
    }
    let matchers = matchers(r, table);
    let mut enabled = true;
    r.flag(table, "enabled", &mut enabled);
    let mut rule = Rule::new(name.as_deref().unwrap_or("…"), action?, matchers);
    if judging {
        when::read(r, table, &mut rule);
    }
    if key == "agent" {
        rule.conversation = conversation::read(r, table);
    }
    // Whether it says enough can be told only where all that it says has been understood.
    if r.count() == before {
        enough(r, key, at, table, &rule);
    }
    name?;
    Some(RuleEntry { rule, at, enabled })
}

/// The joined arguments do not tell a prompt that names a sub-command from the sub-command.
fn no_joined_line(r: &mut Reader, table: &DeTable<'_>) {
    for (key, value) in table {
        let name = &**key.get_ref();
        if JOINED.contains(&name) {
            let not = if name.starts_with(NOT) { NOT } else { "" };
            r.problem(
                key.span().start,
                format!(
                    "`{name}` matches the joined arguments, where a prompt reads like a sub-command or an option; agents and \
                     boundaries match them one by one: write `{not}args = [\"serve\"]` for the first argument that is no \
                     option, `{not}options = [\"--type=*\"]` or `{not}arg0`"
                ),
            );
        }
        let alternatives = value.get_ref().as_array().filter(|_| name == "any");
        for inner in alternatives.into_iter().flat_map(|all| all.iter()) {
            if let Some(inner) = inner.get_ref().as_table() {
                no_joined_line(r, inner);
            }
        }
    }
}

fn matchers(r: &mut Reader, table: &DeTable<'_>) -> Vec<Matcher> {
    let (common, how) = (conditions(r, table), syntax(r, table));
    let Some(all) = alternatives(r, table) else {
        let has_conditions = !common.is_empty();
        let only = has_conditions.then(|| Matcher::new(common).with_syntax(how));
        return only.into_iter().collect();
    };
    let with_common = |(own, own_syntax): (Vec<Condition>, Syntax)| {
        let value_options = [&how.value_options[..], &own_syntax.value_options].concat();
        let command_at = match own_syntax.command_at {
            0 => how.command_at,
            own => own,
        };
        Matcher::new([common.clone(), own].concat()).with_syntax(Syntax {
            value_options,
            command_at,
        })
    };
    all.into_iter().map(with_common).collect()
}

/// A rule that says too little would hold for everything.
fn enough(r: &mut Reader, key: &str, at: usize, table: &DeTable<'_>, rule: &Rule) {
    const PROGRAM: &str = "add `comm`, `exe`, `script`, `args` or `options`";
    let (this, matchers) = (&rule.name, &rule.matchers);
    let asks = table
        .iter()
        .any(|(name, _)| when::CONDITIONS.contains(&&**name.get_ref()));
    let positive = matchers.iter().all(Matcher::is_positive);
    if matchers.is_empty() && !asks {
        r.problem(
            at,
            format!("[[{key}]] `{this}` has no condition: {PROGRAM}"),
        );
    } else if !positive && !asks {
        r.problem(
            at,
            format!("[[{key}]] `{this}` says only what it is not: {PROGRAM}"),
        );
    }
    let named = positive && !matchers.is_empty();
    let of_root = rule.when.is_of_root();
    if of_root && rule.when.session != SessionIs::Alive {
        r.problem(
            at,
            format!(
                "[[{key}]] `{this}` asks for `idle` or `server`, which only an agent that lives can be: add `session = \"alive\"`"
            ),
        );
    }
    let living = rule.action == Action::Reap && rule.when.is_of(true);
    if living && rule.when.server && rule.when.idle.is_none() {
        r.problem(
            at,
            format!(
                "[[{key}]] `{this}` would reap servers that are in use: add `idle = \"30min\"`"
            ),
        );
    }
    if living && !of_root && !named && rule.when.orphan != Some(true) {
        r.problem(
            at,
            format!(
                "[[{key}]] `{this}` would reap whatever a living agent uses: add `orphan = true`, or a program by `comm`, `exe`, `script`, `args` or `options`"
            ),
        );
    }
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
    if name.len() >= RULE_MAX {
        r.problem(
            at,
            format!(
                "`name` has {} letters, and the kernel keeps it with a session: write at most {}",
                name.len(),
                RULE_MAX - 1
            ),
        );
        return None;
    }
    Some(name.into())
}

/// The entries of `any`.
fn alternatives(r: &mut Reader, table: &DeTable<'_>) -> Option<Vec<(Vec<Condition>, Syntax)>> {
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
    let known: Vec<&str> = CONDITIONS.into_iter().chain(SYNTAX).collect();
    let mut all = Vec::new();
    for (at, inner) in tables {
        r.known_keys(inner, &known, " in `any`");
        if inner.is_empty() {
            r.problem(
                at,
                "this alternative of `any` is empty, so it would always hold: fill it or remove it",
            );
        }
        all.push((conditions(r, inner), syntax(r, inner)));
    }
    Some(all)
}

fn syntax(r: &mut Reader, table: &DeTable<'_>) -> Syntax {
    let mut syntax = Syntax::default();
    let options = table.get("value_options");
    for (at, option) in options.map_or_else(Vec::new, |value| r.strings("value_options", value)) {
        if option.len() < 2 || !option.starts_with('-') || option.contains(['=', '*', ' ']) {
            r.problem(
                at,
                format!("`value_options` holds {option:?}: write the name of an option such as \"--config\""),
            );
        }
        syntax.value_options.push(option.into());
    }
    let command_at = r.maybe_number(table, "command_at", 1..=99);
    syntax.command_at = command_at.unwrap_or_default();
    syntax
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
            // One argument of several may be any.
            Ok(pattern) if key.ends_with("args") => found.push(pattern),
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
    let all = |pattern: &Pattern| matches_all(pattern.text(), pattern);
    if key.ends_with("args") && !found.is_empty() && found.iter().all(all) {
        r.problem(
            value.span().start,
            format!("`{key}` matches any arguments: narrow it or leave it out"),
        );
    }
    found
}

/// Whether a pattern would tell nothing apart, as a slip that makes an agent of every process.
fn matches_all(text: &str, pattern: &Pattern) -> bool {
    pattern.is_match(b"") || (text.contains('*') && text.chars().all(|c| "*/".contains(c)))
}
