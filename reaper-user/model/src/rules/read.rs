//! The rule language: `[[agent]]`, `[[server]]`, `[[boundary]]`, `[[keep]]` and `[[rule]]`.
//!
//! ```toml
//! [[agent]]
//! name = "my-agent"                 # 1 to 63 letters, digits, `-`, `_`, `.`; replaces a built-in rule of that name
//! comm = "my-agent"                 # glob over the name of the process in the kernel (at most 15 bytes)
//! exe = ["/opt/my/agent", "**/bin/my-agent"]   # glob over the path of the program; `*` stops at `/`, `**/` does not
//! script = "/**/bin/my-agent"       # glob over the path of the script that an interpreter runs, as given or resolved
//! arg0 = "**/my-agent"              # glob over the first argument, by which the program was called
//! args = ["chat", "*"]              # one glob per positional argument, from the first; more arguments may follow
//! options = ["--model=*", "-v"]     # globs over the options; `*` matches any characters
//! value_options = ["-m", "--model"] # options whose value is the next argument: `--model x` is read as `--model=x`
//! command_at = 2                    # the second positional argument begins another command: no option follows it
//! not_options = "--version"         # `not_` before any of the globs: none of them may match
//! any = [{ comm = "a" }, { exe = "/opt/b" }]   # one of these alternatives must match as well
//! ```
//!
//! All conditions of a rule must hold; of a list, one entry must match. Patterns match bytes, which need not be UTF-8.
//! An unknown value, such as an unreadable path, fulfils no condition, not even a `not_` one. A keep may also have a
//! `uid` condition. It applies to members of living agents too.
//!
//! A source reports the first 8 KiB of a command line. If these do not decide, the whole command line of a member is
//! read, up to 2 MiB. For other processes, the first 8 KiB count.
//!
//! An option starts with `-`, is not `-` alone and stands before `--`. All other arguments are positional. Where
//! an interpreter runs a script, only the arguments after the script count. The interpreters are node, bun, python, the
//! shells (sh, bash, dash, ash, ksh, mksh, zsh, fish), perl, ruby, php and lua, in any version.
//!
//! Keeps and rules may also match the arguments joined by single spaces. `argv` is a glob in which `*` matches any
//! characters. `argv_regex` is a regex that is not anchored, and `.` matches newlines too. Agents, servers and
//! boundaries may not use them: in the joined line a prompt can look like a subcommand or an option.
//!
//! ```toml
//! [[rule]]                          # any conditions on the program as above, and:
//! name = "my-rule"
//! action = "reap"                   # or "keep", "report", "boundary", "note"; the last two check the program only
//! after = "10min"                   # delay since the root exited, the process became an orphan, or it started
//! until_age = "60s"                 # in place of `after`: kept up to this age, then the rules below decide
//! while_used = true                 # with `after`: the delay starts again if the process was in use, or an agent follows
//! grace = "60s"                     # between SIGTERM and SIGKILL, also if another rule reaps the program
//! enabled = true                    # false: this rule, and a built-in one of its name, is off
//! agent = ["claude-code", "codex"]  # names of agents
//! session = "ok"                    # state of the root: "gone" (default), "alive", "any" (default of keeps), "exited"
//!                                   # (without a signal), "ok" (status 0), "failed" (other status), "signalled"
//! orphan = true                     # whether its parent has exited
//! inferred = true                   # whether only evidence makes it a member; to reap such members, a rule must set this
//! min_age = "10min"
//! max_age = "1h"
//! uid = "other"                     # differs from its agent's; or "other-login", "same"; or an effective uid
//! unit = "docker-*.scope"           # glob over the innermost systemd unit that it is in
//! own_unit = true                   # whether it is in a systemd unit that is not its agent's
//! tty = false                       # whether it has a controlling terminal
//! multiplexed = true                # whether it descends from tmux, screen or zellij
//! attended = true                   # whether its agent has a terminal, or runs below an editor or terminal emulator
//! detached = true                   # whether a process other than its agent started it through `nohup` or `setsid`
//! new_session = true                # whether its session id differs from its agent's
//! min_cpu = 90                      # percent of one core, measured when `after` has expired
//! listening = true                  # whether it has a listening TCP or Unix socket
//! listening_unix = true             # whether it has a listening Unix socket
//! piped = true                      # whether its standard input is a pipe or socket whose other end is open
//! window = true                     # it is connected to a display server (X11, Wayland) outside of its session
//! children = false                  # whether it has living children
//! idle = "30min"                    # it is a living root, and its tree had no work and no client for this long
//! hung_up = true                    # with `idle`: the other ends of its stdin and stdout, pipes or sockets, are closed
//! server = true                     # it is an agent's server
//! environment = ["CI=*"]            # globs over the variables of its environment
//! ```
//!
//! Keeps and rules are evaluated in the order of the file, whatever their action, before the built-in ones. The first
//! that applies decides.

use std::collections::HashSet;
use std::sync::Arc;

use reaper_common::RULE_MAX;
use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::conversation;
use crate::ruleset::{
    Action, Condition, Field, LONGEST, Matcher, Pattern, PatternError, Rule, SessionCondition,
    Syntax,
};
use crate::value::{
    self, Problem, choice, get, list, list_or_none, nanoseconds, number, text, unknown_key,
};

type Compile = fn(&str) -> Result<Pattern, PatternError>;

/// Keys of the conditions on a program, with the field that each matches and the function that compiles its patterns.
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

/// Longest grace of a rule, in milliseconds: one hour.
const GRACE_MAX: u64 = 3_600_000;

/// Keys that define the syntax of the arguments.
const SYNTAX: [&str; 2] = ["value_options", "command_at"];

/// A rule of a file.
#[derive(Clone, Debug)]
pub struct RuleEntry {
    /// Parsed rule.
    pub rule: Rule,
    /// Byte offset in the text.
    pub offset: usize,
    /// Whether the rule is on. A disabled rule still replaces a built-in one of the same name.
    pub enabled: bool,
}

/// Reads all rules of a file in their order, and adds the first problem of each to `problems`.
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
    rules.sort_by_key(|entry: &RuleEntry| entry.offset);
    let mut names = HashSet::new();
    for RuleEntry { rule, offset, .. } in &rules {
        if !names.insert(&rule.name) {
            let name = &rule.name;
            let what = format!("`{name}` is the name of two rules: rename one of them");
            problems.push((*offset, what));
        }
    }
    rules
}

/// Reads one rule. `kind` is the name of its table, `at` the byte offset of it.
fn rule(kind: &str, at: usize, table: &DeTable<'_>) -> Result<RuleEntry, Problem> {
    let action = match kind {
        "agent" => Action::Agent,
        "server" => Action::Server,
        "boundary" => Action::Boundary,
        "keep" => Action::Keep,
        _ => get(table, "action", choice)?.ok_or_else(|| {
            let actions = "`action = \"reap\"`, \"keep\", \"boundary\", \"note\" or \"report\"";
            (at, format!("this [[rule]] has no action: add {actions}"))
        })?,
    };
    let is_member_rule = !action.is_of_program();
    let own: &[&str] = match kind {
        "agent" => &["conversation"],
        "boundary" => &["attends"],
        "rule" if is_member_rule => &[
            "action",
            "after",
            "until_age",
            "while_used",
            "grace",
            "enabled",
        ],
        "rule" => &["action", "attends", "enabled"],
        _ => &[],
    };
    let known = [&["name", "any"], &program_keys()[..], own].concat();
    let place = match kind {
        "rule" if !is_member_rule => {
            let action = action.name();
            format!(" in a [[rule]] whose `action` is {action}, which checks only the program")
        }
        _ => format!(" in [[{kind}]]"),
    };
    if kind == "keep" {
        check_keys(table, &[&known[..], &["uid"]].concat(), &place)?;
    } else if !is_member_rule {
        check_keys(table, &known, &place)?;
    }
    let name = get(table, "name", |value| {
        text(value, "a string such as \"my-rule\"", name)
    })?;
    let no_name = || format!("this [[{kind}]] has no name: add `name = \"…\"`");
    let name = name.ok_or_else(|| (at, no_name()))?;
    let mut rule = Rule::new(&name, action, matchers(table, is_member_rule)?);
    rule.when = value::read(table, at, &known, &place)?;
    if action == Action::Keep && !table.contains_key("session") {
        // A process that is kept after its agent's exit must not be reaped by a later rule about living agents.
        rule.when.session = SessionCondition::Any;
    }
    let delay = get(table, "after", nanoseconds::<_, 0, LONGEST>)?;
    rule.delay_ns = delay.flatten().unwrap_or(0);
    let until_age = get(table, "until_age", nanoseconds::<_, 0, LONGEST>)?;
    rule.until_age_ns = until_age.flatten().unwrap_or(0);
    rule.while_used = get(table, "while_used", bool::deserialize)?.unwrap_or(false);
    let grace = get(table, "grace", nanoseconds::<_, 0, GRACE_MAX>)?;
    rule.grace_ns = grace.flatten().unwrap_or(0);
    rule.attends = get(table, "attends", bool::deserialize)?.unwrap_or(false);
    rule.conversation = get(table, "conversation", conversation::read)?;
    if let Some(problem) = contradiction(&rule, table) {
        return Err(problem);
    }
    let has_member_conditions = table.keys().any(|key| !known.contains(&&**key.get_ref()));
    if let Some(what) = too_broad(&rule, has_member_conditions) {
        return Err((at, format!("[[{kind}]] `{name}` {what}")));
    }
    let enabled = get(table, "enabled", bool::deserialize)?.unwrap_or(true);
    Ok(RuleEntry {
        rule,
        offset: at,
        enabled,
    })
}

/// Reads the conditions on the program, as alternatives. An empty result matches every program.
///
/// Only a member rule may use `argv`.
fn matchers(table: &DeTable<'_>, is_member_rule: bool) -> Result<Vec<Matcher>, Problem> {
    let (common, syntax) = program(table, is_member_rule)?;
    let like = "a list such as [{ comm = \"a\" }, { exe = \"**/b\" }]";
    let Some(all) = tables(table, "any", like)? else {
        let only = (!common.is_empty()).then(|| Matcher::new(common).with_syntax(syntax));
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
            let what = "this alternative of `any` is empty, so it would always match: fill it or remove it";
            return Err((at, what.into()));
        }
        let (own, own_syntax) = program(inner, is_member_rule)?;
        let value_options = [&syntax.value_options[..], &own_syntax.value_options].concat();
        let command_at = match own_syntax.command_at {
            0 => syntax.command_at,
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

/// Returns the keys for conditions on a program and for the syntax of its arguments.
pub fn program_keys() -> Vec<&'static str> {
    let conditions = CONDITIONS.iter().map(|(key, ..)| *key);
    conditions.chain(SYNTAX).collect()
}

/// Returns a problem for the first key that is not in `known`. `place` follows the key in the message.
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

/// Reads the conditions on a program and the syntax of its arguments.
fn program(table: &DeTable<'_>, is_member_rule: bool) -> Result<(Vec<Condition>, Syntax), Problem> {
    let mut conditions = Vec::new();
    for (key, field, compile) in CONDITIONS {
        let Some((place, value)) = table.get_key_value(key) else {
            continue;
        };
        let negative = key.starts_with("not_");
        if field == Field::Argv && !is_member_rule {
            // In the joined arguments, a prompt that names a subcommand looks like the subcommand.
            let not = if negative { "not_" } else { "" };
            let what = format!(
                "`{key}` matches the joined arguments, where a prompt can look like an option; agents and boundaries \
                 match single arguments: write `{not}args = [\"serve\"]` for the first argument that is no \
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
    let options = get(table, "value_options", |value| {
        list_or_none(value, option_name)
    })?;
    let command_at = get(table, "command_at", number::<_, 1, 99>)?;
    let syntax = Syntax {
        value_options: options.unwrap_or_default(),
        command_at: command_at.unwrap_or_default(),
    };
    Ok((conditions, syntax))
}

/// Compiles the pattern of a condition. One that matches everything is an error, except in `args`.
fn pattern(text: &str, key: &str, compile: Compile) -> Result<Pattern, String> {
    let kind = if key.ends_with("regex") {
        "regex"
    } else {
        "glob"
    };
    match compile(text) {
        // `args` has one pattern per argument, and some of them may match anything.
        Ok(pattern) if !key.ends_with("args") && matches_all(text, &pattern) => Err(format!(
            "{text:?} matches everything: narrow it or leave it out"
        )),
        Ok(pattern) => Ok(pattern),
        Err(error) => Err(format!("{text:?} is not a valid {kind}: {error}")),
    }
}

fn option_name(option: &str) -> Result<Box<str>, String> {
    if option.len() < 2 || !option.starts_with('-') || option.contains(['=', '*', ' ']) {
        return Err(format!(
            "{option:?} is not the name of an option: write one such as \"--config\""
        ));
    }
    Ok(option.into())
}

fn name(name: &str) -> Result<Arc<str>, String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match name.len() {
        1..RULE_MAX if name.chars().all(is_allowed) => Ok(name.into()),
        length @ RULE_MAX.. if name.chars().all(is_allowed) => Err(format!(
            "a name of {length} characters is too long: write at most {}",
            RULE_MAX - 1
        )),
        _ => Err(format!(
            "{name:?} is not a valid name: use only letters, digits, `-`, `_` and `.`"
        )),
    }
}

/// Returns a problem if a condition contradicts another one or lacks it. `table` has the offsets of the keys.
fn contradiction(rule: &Rule, table: &DeTable<'_>) -> Option<Problem> {
    let when = &rule.when;
    let wrong = [
        (
            "max_age",
            when.min_age
                .zip(when.max_age)
                .is_some_and(|(min, max)| min >= max),
            "`max_age` is not longer than `min_age`, so the rule can never apply: make it longer",
        ),
        (
            "hung_up",
            !when.hung_up || when.idle.is_none(),
            "`hung_up` cannot be false and needs `idle`: write `hung_up = true` and `idle = \"30s\"`",
        ),
        (
            "until_age",
            rule.until_age_ns > 0 && (rule.delay_ns > 0 || rule.action != Action::Reap),
            "`until_age` needs `action = \"reap\"`, and takes the place of `after`: leave one of them out",
        ),
        (
            "grace",
            rule.grace_ns > 0 && rule.action != Action::Reap,
            "`grace` needs `action = \"reap\"`: a member that is kept gets no signal",
        ),
        (
            "while_used",
            rule.while_used
                && (rule.delay_ns == 0 || rule.action != Action::Reap || when.is_of(true)),
            "`while_used` needs `action = \"reap\"` and `after`, for an agent that has exited",
        ),
        (
            "window",
            !when.window,
            "`window` cannot be false: write `window = true` or leave it out",
        ),
        (
            "server",
            !when.server,
            "`server` cannot be false: write `server = true` or leave it out",
        ),
    ];
    wrong.into_iter().find_map(|(key, is_wrong, what)| {
        let value = table.get(key).filter(|_| is_wrong)?;
        Some((value.span().start, what.into()))
    })
}

/// Returns what is wrong with a rule that is too broad; `None` for other rules. A too broad rule matches everything, or
/// would reap processes that are in use.
fn too_broad(rule: &Rule, has_member_conditions: bool) -> Option<&'static str> {
    let when = &rule.when;
    let positive = rule.matchers.iter().all(Matcher::is_positive);
    let named = positive && !rule.matchers.is_empty();
    let living = rule.action == Action::Reap && when.is_of(true);
    if rule.matchers.is_empty() && !has_member_conditions {
        Some("has no condition: add `comm`, `exe`, `script`, `args` or `options`")
    } else if !positive && !has_member_conditions {
        Some("has only `not_` conditions: add `comm`, `exe`, `script`, `args` or `options`")
    } else if when.is_of_root() && when.session != SessionCondition::Alive {
        Some("uses `idle` or `server`, which need a living root: add `session = \"alive\"`")
    } else if living && when.server && when.idle.is_none() {
        Some("would reap servers that are in use: add `idle = \"30min\"`")
    } else if living && !when.is_of_root() && !named && when.orphan != Some(true) {
        Some(
            "would reap processes that a living agent uses: add `orphan = true` or a program: `comm`, `exe`, `script`, `args` or `options`",
        )
    } else {
        None
    }
}

/// Reads a list of tables, each with its byte offset. Returns `None` if the key is missing.
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
        let what = format!("`{key}` is not a list of tables: write {like}");
        (value.span().start, what)
    })
}

/// Returns whether a pattern matches everything, so that by mistake every process would be an agent.
fn matches_all(text: &str, pattern: &Pattern) -> bool {
    pattern.is_match(b"") || (text.contains('*') && text.chars().all(|c| "*/".contains(c)))
}
