//! Writes a config as equivalent TOML, or as JSON, for `reaper config show`.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Config;
use reaper_model::rules::{catalogue, conversation};
use reaper_model::ruleset::{Action, Condition, Pattern, Rule, SessionCondition, Syntax};
use reaper_model::value::show_duration;

/// Returns the settings, and the rules in force in the order of their evaluation, as TOML.
pub fn toml(config: &Config) -> String {
    let mut out = toml_settings(config);
    out.push_str("# All rules in force follow, so the built-in ones are switched off here.\n");
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

/// Returns the default settings as TOML, with the text of the built-in rules.
pub fn toml_defaults() -> String {
    format!("{}\n{}", toml_settings(&Config::default()), catalogue::TEXT)
}

/// Returns the same as [`toml`], as JSON.
pub fn json(config: &Config) -> Value {
    let rules = config
        .rules
        .rules()
        .iter()
        .map(|rule| json_rule(rule, true));
    json!({ "settings": fields(config), "rules": rules.collect::<Vec<_>>() })
}

/// Returns the default settings and all built-in rules. Those that are off by default have `"enabled": false`.
pub fn json_defaults() -> Value {
    let rules = catalogue::entries();
    let rules = rules
        .iter()
        .map(|entry| json_rule(&entry.rule, entry.enabled));
    json!({ "settings": fields(Config::default()), "rules": rules.collect::<Vec<_>>() })
}

/// Returns a rule with the keys that it has in a file.
fn json_rule(rule: &Rule, enabled: bool) -> Value {
    let mut all = Map::new();
    all.insert("action".into(), rule.action.name().into());
    all.extend(keys_of(rule));
    all.insert("enabled".into(), enabled.into());
    Value::Object(all)
}

/// Returns the serialized fields of a struct, without null values and empty arrays.
pub(super) fn fields(value: impl Serialize) -> Map<String, Value> {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(value) else {
        unreachable!("a struct of strings, numbers and booleans serializes to an object");
    };
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.retain(|_, value| !value.is_null() && !is_empty(value));
    fields
}

fn toml_settings(config: &Config) -> String {
    let line = |(key, value): (String, Value)| format!("{key} = {}\n", toml_value(&value));
    fields(config).into_iter().map(line).collect()
}

/// Returns whether a rule can be written as `[[keep]]`.
fn is_plain_keep(rule: &Rule) -> bool {
    let when = &rule.when;
    rule.action == Action::Keep
        && rule.delay_ns == 0
        && when.session == SessionCondition::Any
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

/// Returns the keys in the table of a rule, without those that have their default value.
fn keys_of(rule: &Rule) -> Map<String, Value> {
    let mut keys = fields(&rule.when);
    let default = match rule.action {
        Action::Keep => SessionCondition::Any,
        _ => SessionCondition::Gone,
    };
    if rule.when.session == default {
        keys.remove("session");
    }
    keys.insert("name".into(), (&*rule.name).into());
    if table_of(rule) == "rule" {
        keys.insert("action".into(), rule.action.name().into());
    }
    if rule.delay_ns > 0 {
        let after = show_duration(Duration::from_nanos(rule.delay_ns));
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

/// Returns the conditions on the program: those that all alternatives share, and the rest as `any`.
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
        let pair = (key.clone(), value.clone());
        if all.iter().all(|one| one.contains(&pair)) {
            common.entry(key).or_insert(pair.1);
        }
    }
    let rest = |common: &Map<String, Value>| -> Vec<Map<String, Value>> {
        let is_own = |(key, value): &&(String, Value)| common.get(key) != Some(value);
        let one = |one: &Vec<(String, Value)>| one.iter().filter(is_own).cloned().collect();
        all.iter().map(one).collect()
    };
    let mut any = rest(&common);
    if any.iter().all(Map::is_empty) {
        return common;
    }
    if any.iter().any(Map::is_empty) {
        // One alternative has only the shared conditions. An empty alternative is not allowed, so nothing is shared.
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

/// Returns the keys `value_options` and `command_at`, if they are set.
fn syntax(syntax: &Syntax) -> impl Iterator<Item = (String, Value)> {
    let options: Vec<&str> = syntax.value_options.iter().map(|o| &**o).collect();
    let options = (!options.is_empty()).then(|| ("value_options".to_owned(), options.into()));
    let command =
        (syntax.command_at > 0).then(|| ("command_at".to_owned(), syntax.command_at.into()));
    options.into_iter().chain(command)
}

/// Returns a value as TOML. A JSON string is a TOML string, except that TOML requires DEL to be escaped.
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
