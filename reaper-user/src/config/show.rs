//! Writes a config as JSON, and that as equivalent TOML, for `reaper config show`.

use std::fmt::Write;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Config;
use crate::export::ConfigFile;
use reaper_model::rules::read::program_keys;
use reaper_model::rules::{catalogue, conversation};
use reaper_model::ruleset::{Action, Condition, Pattern, Rule, SessionCondition, Syntax};
use reaper_model::value::show_duration;

/// Settings and rules of a config.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ShownConfig {
    /// Config file.
    #[serde(flatten)]
    pub file: ConfigFile,
    /// Settings by key, with values as in a config file.
    pub settings: Map<String, Value>,
    /// Rules in the order of their evaluation, each with its action and the keys that it has in a config file.
    pub rules: Vec<Map<String, Value>>,
}

impl ShownConfig {
    /// Returns the settings, and the rules in force.
    pub fn new(config: &Config) -> ShownConfig {
        let rules = config.rules.rules().iter();
        ShownConfig {
            file: config.file.clone(),
            settings: fields(config),
            rules: rules.map(|rule| shown_rule(rule, true)).collect(),
        }
    }

    /// Returns the default settings and all built-in rules. Those that are off by default have `"enabled": false`.
    pub fn defaults() -> ShownConfig {
        let rules = catalogue::entries();
        let rules = rules
            .iter()
            .map(|entry| shown_rule(&entry.rule, entry.enabled));
        ShownConfig {
            settings: fields(Config::default()),
            rules: rules.collect(),
            ..ShownConfig::default()
        }
    }

    /// Returns the same as an equivalent config file.
    pub fn toml(&self) -> String {
        let mut out = toml_settings(&self.settings);
        out.push_str("# All rules in force follow, so the built-in ones are switched off here.\n");
        out.push_str("defaults = { agents = false, boundaries = false, keeps = false }\n");
        for rule in &self.rules {
            let table = table_of(rule);
            let _ = write!(out, "\n[[{table}]]\n");
            let has_action = table == "rule";
            let keys = rule.iter();
            for (key, value) in keys.filter(|(key, _)| has_action || *key != "action") {
                if key != "enabled" {
                    let _ = writeln!(out, "{key} = {}", toml_value(value));
                }
            }
        }
        out
    }
}

/// Returns the default settings as TOML, with the text of the built-in rules.
pub fn toml_defaults() -> String {
    let settings = toml_settings(&fields(Config::default()));
    format!("{settings}\n{}", catalogue::TEXT)
}

/// Returns a rule with the keys that it has in a file.
fn shown_rule(rule: &Rule, enabled: bool) -> Map<String, Value> {
    let mut all = Map::new();
    all.insert("action".into(), rule.action.name().into());
    all.extend(keys_of(rule));
    all.insert("enabled".into(), enabled.into());
    all
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

fn toml_settings(settings: &Map<String, Value>) -> String {
    let line = |(key, value): (&String, &Value)| format!("{key} = {}\n", toml_value(value));
    settings.iter().map(line).collect()
}

/// Returns the name of the TOML table for a rule.
fn table_of(rule: &Map<String, Value>) -> &str {
    let others = ["action", "enabled", "name", "any", "uid"];
    let program = program_keys();
    let is_keep_key = |key: &String| others.contains(&&**key) || program.contains(&&**key);
    match rule.get("action").and_then(Value::as_str) {
        Some(table @ ("agent" | "server" | "boundary")) => table,
        Some("keep") if rule.keys().all(is_keep_key) => "keep",
        _ => "rule",
    }
}

/// Returns the keys of a rule besides its action, without those that have their default value.
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
    if rule.delay_ns > 0 {
        let after = show_duration(Duration::from_nanos(rule.delay_ns));
        keys.insert("after".into(), after.into());
    }
    for (key, ns) in [("until_age", rule.until_age_ns), ("grace", rule.grace_ns)] {
        if ns > 0 {
            let time = show_duration(Duration::from_nanos(ns));
            keys.insert(key.into(), time.into());
        }
    }
    for (key, is_set) in [("while_used", rule.while_used), ("attends", rule.attends)] {
        if is_set {
            keys.insert(key.into(), true.into());
        }
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
pub(super) fn toml_value(value: &Value) -> String {
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
