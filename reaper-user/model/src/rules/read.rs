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
use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::conversation;
use crate::ruleset::{
    Action, Condition, Field, LONGEST, Matcher, Pattern, PatternError, Rule, SessionIs, Syntax,
};
use crate::value::{self, Problem, choice, get, list, nanoseconds, number, text, unknown_key};

type Compile = fn(&str) -> Result<Pattern, PatternError>;

/// Keys of the conditions on a program: what each looks at, and how its text is compiled.
const CONDITIONS: [(&str, Field, Compile); 16] = [
    ("comm", Field::Comm, Pattern::comm),
    ("exe", Field::Exe, Pattern::exe),
    ("script", Field::Script, Pattern::script),
    ("arg0", Field::Arg0, Pattern::script),
    ("args", Field::Args, Pattern::argv),
    ("options", Field::Options, Pattern::option),
    ("not_comm", Field::Comm, Pattern::comm),
    ("not_exe", Field::Exe, Pattern::exe),
    ("not_script", Field::Script, Pattern::script),
    ("not_arg0", Field::Arg0, Pattern::script),
    ("not_args", Field::Args, Pattern::argv),
    ("not_options", Field::Options, Pattern::option),
    ("argv", Field::Argv, Pattern::argv),
    ("argv_regex", Field::Argv, Pattern::argv_regex),
    ("not_argv", Field::Argv, Pattern::argv),
    ("not_argv_regex", Field::Argv, Pattern::argv_regex),
];

/// Keys that say how arguments are read.
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

/// Reads all rules of a file, in its order. Notes the first problem of each.
pub(super) fn read(root: &DeTable<'_>, problems: &mut Vec<Problem>) -> Vec<RuleEntry> {
    let mut rules = Vec::new();
    for kind in ["agent", "server", "boundary", "keep", "rule"] {
        let like = format!("[[{kind}]] with its keys in the lines below");
        match tables(root, kind, &like) {
            Ok(all) => {
                for (at, table) in all.unwrap_or_default() {
                    match rule(kind, at, table) {
                        Ok(rule) => rules.push(rule),
                        Err(problem) => problems.push(problem),
                    }
                }
            }
            Err(problem) => problems.push(problem),
        }
    }
    rules.sort_by_key(|written: &RuleEntry| written.at);
    let mut names = HashSet::new();
    for RuleEntry { rule, at, .. } in &rules {
        if !names.insert(&rule.name) {
            let name = &rule.name;
            let what = format!("`{name}` is the name of another rule too: rename one of them");
            problems.push((*at, what));
        }
    }
    rules
}

fn rule(kind: &str, at: usize, table: &DeTable<'_>) -> Result<RuleEntry, Problem> {
    let action = match kind {
        "agent" => Action::Agent,
        "server" => Action::Server,
        "boundary" => Action::Boundary,
        "keep" => Action::Keep,
        _ => get(table, "action", choice)?.ok_or_else(|| {
            let actions = "`action = \"reap\"`, \"keep\", \"boundary\" or \"report\"";
            (at, format!("this [[rule]] has no action: add {actions}"))
        })?,
    };
    let judging = !action.is_of_program();
    let own: &[&str] = match kind {
        "agent" => &["conversation"],
        "rule" if judging => &["action", "after", "enabled"],
        "rule" => &["action", "enabled"],
        _ => &[],
    };
    let known = [&["name", "any"], &program_keys()[..], own].concat();
    let place = match kind {
        "rule" if !judging => {
            " in a [[rule]] whose `action` is boundary, which looks at the program alone".into()
        }
        _ => format!(" in [[{kind}]]"),
    };
    if kind == "keep" {
        check_keys(table, &[&known[..], &["uid"]].concat(), &place)?;
    } else if !judging {
        check_keys(table, &known, &place)?;
    }
    let name = get(table, "name", |value| {
        text(value, "a string such as \"my-rule\"", name)
    })?;
    let no_name = || format!("this [[{kind}]] has no name: add `name = \"…\"`");
    let name = name.ok_or_else(|| (at, no_name()))?;
    let mut rule = Rule::new(&name, action, matchers(table, judging)?);
    rule.when = value::read(table, at, &known, &place)?;
    if action == Action::Keep && !table.contains_key("session") {
        // It would be odd if what is kept from the end of its agent had to fear the rules about living ones.
        rule.when.session = SessionIs::Any;
    }
    let after = get(table, "after", nanoseconds::<_, 0, LONGEST>)?;
    rule.after = after.flatten().unwrap_or(0);
    rule.conversation = get(table, "conversation", conversation::read)?;
    if let Some(problem) = contradiction(&rule, table) {
        return Err(problem);
    }
    let asks = table.keys().any(|key| !known.contains(&&**key.get_ref()));
    if let Some(what) = too_little(&rule, asks) {
        return Err((at, format!("[[{kind}]] `{name}` {what}")));
    }
    let enabled = get(table, "enabled", bool::deserialize)?.unwrap_or(true);
    Ok(RuleEntry { rule, at, enabled })
}

/// Reads what a rule asks of the program, as alternatives.
fn matchers(table: &DeTable<'_>, judging: bool) -> Result<Vec<Matcher>, Problem> {
    let (common, how) = program(table, judging)?;
    let like = "a list such as [{ comm = \"a\" }, { exe = \"**/b\" }]";
    let Some(all) = tables(table, "any", like)? else {
        let only = (!common.is_empty()).then(|| Matcher::new(common).with_syntax(how));
        return Ok(only.into_iter().collect());
    };
    if let Some(value) = table.get("any").filter(|_| all.is_empty()) {
        let what = "`any` has no alternative: fill it or leave it out";
        return Err((value.span().start, what.into()));
    }
    let mut matchers = Vec::new();
    for (at, inner) in all {
        check_keys(inner, &program_keys(), " in `any`")?;
        if inner.is_empty() {
            let what =
                "this alternative of `any` is empty, so it would always hold: fill it or remove it";
            return Err((at, what.into()));
        }
        let (own, own_how) = program(inner, judging)?;
        let value_options = [&how.value_options[..], &own_how.value_options].concat();
        let command_at = match own_how.command_at {
            0 => how.command_at,
            own => own,
        };
        matchers.push(
            Matcher::new([&common[..], &own].concat()).with_syntax(Syntax {
                value_options,
                command_at,
            }),
        );
    }
    Ok(matchers)
}

fn program_keys() -> Vec<&'static str> {
    let conditions = CONDITIONS.iter().map(|(key, ..)| *key);
    conditions.chain(SYNTAX).collect()
}

fn check_keys(table: &DeTable<'_>, known: &[&str], place: &str) -> Result<(), Problem> {
    let mut keys = table.keys();
    match keys.find(|key| !known.contains(&&**key.get_ref())) {
        Some(key) => {
            let what = unknown_key(key.get_ref(), known, place);
            Err((key.span().start, what))
        }
        None => Ok(()),
    }
}

/// Reads the conditions on a program, and how it reads arguments.
fn program(table: &DeTable<'_>, judging: bool) -> Result<(Vec<Condition>, Syntax), Problem> {
    let mut conditions = Vec::new();
    for (key, field, compile) in CONDITIONS {
        let Some((place, value)) = table.get_key_value(key) else {
            continue;
        };
        let negative = key.starts_with("not_");
        if field == Field::Argv && !judging {
            // The joined arguments do not tell a prompt that names a sub-command from the sub-command.
            let not = if negative { "not_" } else { "" };
            let what = format!(
                "`{key}` matches the joined arguments, where a prompt reads like a sub-command or an option; agents and \
                 boundaries match them one by one: write `{not}args = [\"serve\"]` for the first argument that is no \
                 option, `{not}options = [\"--type=*\"]` or `{not}arg0`"
            );
            return Err((place.span().start, what));
        }
        let any_of = get(table, key, |value| {
            list(value, |text| pattern(text, key, compile))
        })?;
        let any_of = any_of.unwrap_or_default();
        let all = |pattern: &Pattern| matches_all(pattern.text(), pattern);
        if any_of.iter().all(all) {
            let what = format!("`{key}` matches any arguments: narrow it or leave it out");
            return Err((value.span().start, what));
        }
        conditions.push(Condition {
            field,
            any_of,
            negative,
        });
    }
    let options = get(table, "value_options", |value| list(value, option_name))?;
    let command_at = get(table, "command_at", number::<_, 1, 99>)?;
    let syntax = Syntax {
        value_options: options.unwrap_or_default(),
        command_at: command_at.unwrap_or_default(),
    };
    Ok((conditions, syntax))
}

fn pattern(text: &str, key: &str, compile: Compile) -> Result<Pattern, String> {
    let kind = if key.ends_with("regex") {
        "regex"
    } else {
        "glob"
    };
    match compile(text) {
        // One argument of several may be any.
        Ok(pattern) if !key.ends_with("args") && matches_all(text, &pattern) => Err(format!(
            "{text:?} matches everything: narrow it or leave it out"
        )),
        Ok(pattern) => Ok(pattern),
        Err(error) => Err(format!("{text:?} is no good {kind}: {error}")),
    }
}

fn option_name(option: &str) -> Result<Box<str>, String> {
    if option.len() < 2 || !option.starts_with('-') || option.contains(['=', '*', ' ']) {
        return Err(format!(
            "{option:?} is no option: write the name of one such as \"--config\""
        ));
    }
    Ok(option.into())
}

fn name(name: &str) -> Result<Arc<str>, String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match name.len() {
        1..RULE_MAX if name.chars().all(is_allowed) => Ok(name.into()),
        length @ RULE_MAX.. if name.chars().all(is_allowed) => Err(format!(
            "it has {length} letters, and the kernel keeps it with a session: write at most {}",
            RULE_MAX - 1
        )),
        _ => Err(format!(
            "{name:?} is no name: write letters, digits, `-`, `_` and `.`"
        )),
    }
}

/// Returns what is wrong with conditions that only make sense beside others. `table` has their places.
fn contradiction(rule: &Rule, table: &DeTable<'_>) -> Option<Problem> {
    let asked = &rule.when;
    let wrong = [
        (
            "max_age",
            asked
                .min_age
                .zip(asked.max_age)
                .is_some_and(|(min, max)| min >= max),
            "`max_age` is not more than `min_age`, so this can never hold: make it longer",
        ),
        (
            "hung_up",
            !asked.hung_up || asked.idle.is_none(),
            "`hung_up` is true or left out, and needs `idle`: write `hung_up = true` and `idle = \"30s\"`",
        ),
        ("server", !asked.server, "`server` is true or left out"),
    ];
    wrong.into_iter().find_map(|(key, is_wrong, what)| {
        let value = table.get(key).filter(|_| is_wrong)?;
        Some((value.span().start, what.into()))
    })
}

/// Returns what is wrong with a rule that would hold for everything, or for what is in use. `asks` is whether it has
/// conditions besides the program.
fn too_little(rule: &Rule, asks: bool) -> Option<&'static str> {
    let when = &rule.when;
    let positive = rule.matchers.iter().all(Matcher::is_positive);
    let named = positive && !rule.matchers.is_empty();
    let living = rule.action == Action::Reap && when.is_of(true);
    if rule.matchers.is_empty() && !asks {
        Some("has no condition: add `comm`, `exe`, `script`, `args` or `options`")
    } else if !positive && !asks {
        Some("says only what it is not: add `comm`, `exe`, `script`, `args` or `options`")
    } else if when.is_of_root() && when.session != SessionIs::Alive {
        Some(
            "asks for `idle` or `server`, which only an agent that lives can be: add `session = \"alive\"`",
        )
    } else if living && when.server && when.idle.is_none() {
        Some("would reap servers that are in use: add `idle = \"30min\"`")
    } else if living && !when.is_of_root() && !named && when.orphan != Some(true) {
        Some(
            "would reap whatever a living agent uses: add `orphan = true`, or a program by `comm`, `exe`, `script`, `args` or `options`",
        )
    } else {
        None
    }
}

/// Reads a list of tables, each with its place, if the key is there.
fn tables<'a, 't>(
    table: &'a DeTable<'t>,
    key: &str,
    like: &str,
) -> Result<Option<Vec<(usize, &'a DeTable<'t>)>>, Problem> {
    let Some(value) = table.get(key) else {
        return Ok(None);
    };
    let one =
        |item: &'a Spanned<DeValue<'t>>| Some((item.span().start, item.get_ref().as_table()?));
    let items = value.get_ref().as_array();
    let all = items.and_then(|items| items.iter().map(one).collect::<Option<Vec<_>>>());
    all.map(Some).ok_or_else(|| {
        let what = format!("`{key}` is no list of tables: write {like}");
        (value.span().start, what)
    })
}

/// Whether a pattern would tell nothing apart, as a slip that makes an agent of every process.
fn matches_all(text: &str, pattern: &Pattern) -> bool {
    pattern.is_match(b"") || (text.contains('*') && text.chars().all(|c| "*/".contains(c)))
}
