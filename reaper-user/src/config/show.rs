//! A config written out again: as TOML that means the same, or as JSON.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use bytesize::ByteSize;
use serde_json::{Map, Value, json};

use super::{Config, EventScope, KernelReap};
use reaper_model::rules::catalogue;
use reaper_model::ruleset::{Action, Condition, Pattern, Rule, SessionIs, Syntax, UidIs};

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
    json!({ "settings": settings(config), "rules": rules.collect::<Vec<_>>() })
}

/// The settings of an empty file, and the built-in rules, those that are off with `"enabled": false`.
pub fn json_defaults() -> Value {
    let rules = catalogue::entries();
    let rules = rules
        .iter()
        .map(|written| json_rule(&written.rule, written.enabled));
    json!({ "settings": settings(&Config::default()), "rules": rules.collect::<Vec<_>>() })
}

/// A rule with the keys that it has in a file.
fn json_rule(rule: &Rule, enabled: bool) -> Value {
    let mut all = Map::new();
    all.insert("action".into(), rule.action.name().into());
    all.extend(keys_of(rule));
    all.insert("enabled".into(), enabled.into());
    Value::Object(all)
}

fn settings(config: &Config) -> Map<String, Value> {
    let path = |path: &Path| Value::from(path.to_string_lossy());
    let events = match config.events {
        EventScope::Agents => "agents",
        EventScope::All => "all",
    };
    let kernel_reap = match config.kernel_reap {
        KernelReap::Auto => "auto",
        KernelReap::Off => "off",
    };
    let all = [
        ("mode", config.mode.name().into()),
        ("events", events.into()),
        ("source", config.source.name().into()),
        ("scan_min_interval", duration(config.scan.min_interval)),
        ("scan_max_interval", duration(config.scan.max_interval)),
        ("grace", duration(config.grace)),
        ("kill_timeout", duration(config.kill_timeout)),
        ("ring_size", size(config.ring_size.into())),
        ("max_members", config.max_members.into()),
        ("pin", config.pin.into()),
        ("pin_dir", path(&config.pin_dir)),
        ("kernel_reap", kernel_reap.into()),
        ("reap_leftovers", config.reap_leftovers.into()),
        ("runtime_dir", path(&config.runtime_dir)),
        ("socket", config.socket.into()),
        ("journal", config.journal.into()),
        ("journal_dir", path(&config.journal_dir)),
        ("journal_max_age", duration(config.journal_max_age)),
        ("journal_max_size", size(config.journal_max_size)),
        ("honor_keep", config.honor_keep.into()),
    ];
    all.map(|(key, value)| (key.into(), value))
        .into_iter()
        .collect()
}

fn toml_settings(config: &Config) -> String {
    let line = |(key, value): (String, Value)| format!("{key} = {}\n", toml_value(&value));
    settings(config).into_iter().map(line).collect()
}

fn duration(duration: Duration) -> Value {
    humantime::format_duration(duration).to_string().into()
}

/// Exactly: sizes are read to the byte.
fn size(bytes: u64) -> Value {
    let short = reaper_model::rules::reader::size(bytes);
    match short.parse::<ByteSize>() {
        Ok(ByteSize(read)) if read == bytes => short.into(),
        _ => format!("{bytes} B").into(),
    }
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
    let mut keys = Map::new();
    keys.insert("name".into(), (&*rule.name).into());
    if table_of(rule) == "rule" {
        keys.insert("action".into(), rule.action.name().into());
    }
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            keys.insert(key.into(), value);
        }
    };
    let nanoseconds = |time: u64| duration(Duration::from_nanos(time));
    let when = &rule.when;
    put("after", (rule.after > 0).then(|| nanoseconds(rule.after)));
    let names = |names: Vec<&str>| (!names.is_empty()).then(|| Value::from(names));
    put(
        "agent",
        names(when.agents.iter().map(|name| &**name).collect()),
    );
    put("session", session(rule).map(Value::from));
    put("orphan", when.orphan.map(Value::from));
    put("inferred", when.inferred.map(Value::from));
    put("min_age", when.min_age.map(nanoseconds));
    put("max_age", when.max_age.map(nanoseconds));
    put("uid", when.uid.map(uid));
    put(
        "unit",
        names(when.units.iter().map(Pattern::text).collect()),
    );
    put("own_unit", when.own_unit.map(Value::from));
    put("tty", when.tty.map(Value::from));
    put("multiplexed", when.multiplexed.map(Value::from));
    put("new_session", when.new_session.map(Value::from));
    put("min_cpu", when.min_cpu.map(Value::from));
    put("listening", when.listening.map(Value::from));
    put("children", when.children.map(Value::from));
    put("idle", when.idle.map(nanoseconds));
    put("hung_up", when.hung_up.then_some(Value::Bool(true)));
    put("server", when.server.then_some(Value::Bool(true)));
    put(
        "environment",
        names(when.markers.iter().map(Pattern::text).collect()),
    );
    let source = rule.conversation.as_deref();
    put(
        "conversation",
        source.map(reaper_model::rules::conversation::show),
    );
    keys.extend(program(rule));
    keys
}

fn session(rule: &Rule) -> Option<&'static str> {
    match rule.when.session {
        SessionIs::Any if rule.action == Action::Keep => None,
        SessionIs::Gone if rule.action != Action::Keep => None,
        SessionIs::Gone => Some("gone"),
        SessionIs::Alive => Some("alive"),
        SessionIs::Any => Some("any"),
        SessionIs::Exited => Some("exited"),
        SessionIs::Ok => Some("ok"),
        SessionIs::Failed => Some("failed"),
        SessionIs::Signalled => Some("signalled"),
    }
}

fn uid(uid: UidIs) -> Value {
    match uid {
        UidIs::Other => "other".into(),
        UidIs::Same => "same".into(),
        UidIs::Id(uid) => uid.into(),
    }
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
