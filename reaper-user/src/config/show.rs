//! A config written out again: as TOML that means the same, or as JSON.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Config;
use reaper_model::rules::{catalogue, conversation};
use reaper_model::ruleset::{Action, Condition, Pattern, Rule, SessionIs, Syntax};
use reaper_model::value::show_duration;

/// The settings, and the rules in force in the order in which they are asked.
pub fn toml(config: &Config) -> String {
    let mut out = toml_settings(config);
    out.push_str("# All that is in force is below.\n");
    out.push_str("defaults = { agents = false, boundaries = false, keeps = false }\n");
    for rule in config.rules.rules() {
        let (table, keys) = (table_of(rule), keys_of(rule));
        let _ = write!(out, "\n[[{table}]]\n");
        for (key, value) in keys {
            let _ = writeln!(out, "{key} = {}", toml_value(&value));
        }
    }
    out
}

/// The settings of an empty file, and the built-in rules as they are written.
pub fn toml_defaults() -> String {
    format!("{}\n{}", toml_settings(&Config::default()), catalogue::TEXT)
}

/// The same as [`toml`].
pub fn json(config: &Config) -> Value {
    let rules = config
        .rules
        .rules()
        .iter()
        .map(|rule| json_rule(rule, true));
    json!({ "settings": fields(config), "rules": rules.collect::<Vec<_>>() })
}

/// The settings of an empty file, and the built-in rules, those that are off with `"enabled": false`.
pub fn json_defaults() -> Value {
    let rules = catalogue::entries();
    let rules = rules
        .iter()
        .map(|written| json_rule(&written.rule, written.enabled));
    json!({ "settings": fields(Config::default()), "rules": rules.collect::<Vec<_>>() })
}

/// A rule with the keys that it has in a file.
fn json_rule(rule: &Rule, enabled: bool) -> Value {
    let mut all = Map::new();
    all.insert("action".into(), rule.action.name().into());
    all.extend(keys_of(rule));
    all.insert("enabled".into(), enabled.into());
    Value::Object(all)
}

/// The fields of a struct that are set.
pub(super) fn fields(of: impl Serialize) -> Map<String, Value> {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(of) else {
        unreachable!("a struct of texts, numbers and flags is an object");
    };
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.retain(|_, value| !value.is_null() && !is_empty(value));
    fields
}

fn toml_settings(config: &Config) -> String {
    let line = |(key, value): (String, Value)| format!("{key} = {}\n", toml_value(&value));
    fields(config).into_iter().map(line).collect()
}

/// Whether it asks for nothing that a `[[keep]]` could not say.
fn is_plain_keep(rule: &Rule) -> bool {
    let when = &rule.when;
    rule.action == Action::Keep
        && rule.after == 0
        && when.session == SessionIs::Any
        && when.agents.is_empty()
        && when.inferred.is_none()
        && when.is_lasting()
}

fn table_of(rule: &Rule) -> &'static str {
    match rule.action {
        Action::Agent => "agent",
        Action::Server => "server",
        Action::Boundary => "boundary",
        Action::Keep if is_plain_keep(rule) => "keep",
        Action::Keep | Action::Reap | Action::Report => "rule",
    }
}

/// What stands in the table of a rule.
fn keys_of(rule: &Rule) -> Map<String, Value> {
    let mut keys = fields(&rule.when);
    let usual = match rule.action {
        Action::Keep => SessionIs::Any,
        _ => SessionIs::Gone,
    };
    if rule.when.session == usual {
        keys.remove("session");
    }
    keys.insert("name".into(), (&*rule.name).into());
    if table_of(rule) == "rule" {
        keys.insert("action".into(), rule.action.name().into());
    }
    if rule.after > 0 {
        let after = show_duration(Duration::from_nanos(rule.after));
        keys.insert("after".into(), after.into());
    }
    if let Some(source) = &rule.conversation {
        keys.insert(
            "conversation".into(),
            fields(conversation::show(source)).into(),
        );
    }
    keys.extend(program(rule));
    keys
}

/// What all alternatives ask for, and the alternatives.
fn program(rule: &Rule) -> Map<String, Value> {
    let all: Vec<Vec<(String, Value)>> = rule
        .matchers
        .iter()
        .map(|matcher| {
            let conditions = matcher.conditions().iter().map(condition);
            conditions.chain(syntax(matcher.syntax())).collect()
        })
        .collect();
    let mut common = Map::new();
    for (key, value) in all.first().into_iter().flatten() {
        let asked = (key.clone(), value.clone());
        if all.iter().all(|one| one.contains(&asked)) {
            common.entry(key).or_insert(asked.1);
        }
    }
    let rest = |common: &Map<String, Value>| -> Vec<Map<String, Value>> {
        let asked = |(key, value): &&(String, Value)| common.get(key) != Some(value);
        let one = |one: &Vec<(String, Value)>| one.iter().filter(asked).cloned().collect();
        all.iter().map(one).collect()
    };
    let mut any = rest(&common);
    if any.iter().all(Map::is_empty) {
        return common;
    }
    if any.iter().any(Map::is_empty) {
        // One asks for no more than all do.
        common.clear();
        any = rest(&common);
    }
    common.insert("any".into(), any.into_iter().map(Value::Object).collect());
    common
}

fn condition(condition: &Condition) -> (String, Value) {
    let is_regex = condition.any_of.iter().any(Pattern::is_regex);
    let regex = if is_regex { "_regex" } else { "" };
    let name = condition.field.name();
    let not = if condition.negative { "not_" } else { "" };
    let texts: Vec<&str> = condition.any_of.iter().map(Pattern::text).collect();
    (format!("{not}{name}{regex}"), texts.into())
}

/// How a rule reads arguments, as far as it says so.
fn syntax(syntax: &Syntax) -> impl Iterator<Item = (String, Value)> {
    let options: Vec<&str> = syntax.value_options.iter().map(|o| &**o).collect();
    let options = (!options.is_empty()).then(|| ("value_options".to_owned(), options.into()));
    let command =
        (syntax.command_at > 0).then(|| ("command_at".to_owned(), syntax.command_at.into()));
    options.into_iter().chain(command)
}

/// A string of JSON is one of TOML, but for one character.
fn toml_value(value: &Value) -> String {
    match value {
        Value::Array(all) => {
            let all: Vec<String> = all.iter().map(toml_value).collect();
            format!("[{}]", all.join(", "))
        }
        Value::Object(all) => {
            let all: Vec<String> = all
                .iter()
                .map(|(key, value)| format!("{key} = {}", toml_value(value)))
                .collect();
            format!("{{ {} }}", all.join(", "))
        }
        other => other.to_string().replace('\u{7f}', "\\u007F"),
    }
}
