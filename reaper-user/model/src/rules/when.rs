//! What a `[[rule]]` asks for besides the program, and what it does.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::reader::Reader;
use crate::ruleset::{Action, MARKERS_MAX, Pattern, PatternError, Rule, SessionIs, UidIs, When};

/// Longest delay and age that a rule may name.
const LONGEST: Duration = Duration::from_secs(3650 * 24 * 3600);

/// Shortest time that a rule may name for `idle`.
const IDLE_MIN: Duration = Duration::from_secs(1);

/// All keys that a `[[rule]]` has, and other kinds of rules have not.
pub(super) const KEYS: [&str; 22] = [
    "action",
    "after",
    "enabled",
    "agent",
    "session",
    "orphan",
    "inferred",
    "min_age",
    "max_age",
    "uid",
    "unit",
    "own_unit",
    "tty",
    "multiplexed",
    "new_session",
    "min_cpu",
    "listening",
    "children",
    "idle",
    "hung_up",
    "server",
    "environment",
];

/// Those of them that are conditions: all but the first three.
pub(super) const CONDITIONS: &[&str] = KEYS.as_slice().split_at(3).1;

const ACTIONS: [(&str, Action); 4] = [
    ("reap", Action::Reap),
    ("keep", Action::Keep),
    ("boundary", Action::Boundary),
    ("report", Action::Report),
];

const SESSIONS: [(&str, SessionIs); 7] = [
    ("gone", SessionIs::Gone),
    ("alive", SessionIs::Alive),
    ("any", SessionIs::Any),
    ("exited", SessionIs::Exited),
    ("ok", SessionIs::Ok),
    ("failed", SessionIs::Failed),
    ("signalled", SessionIs::Signalled),
];

/// What it does; `None` where that is not said.
pub(super) fn action(r: &mut Reader, table: &DeTable<'_>, at: usize) -> Option<Action> {
    let mut action = None;
    let all = ACTIONS.map(|(name, action)| (name, Some(action)));
    let before = r.count();
    r.choice(table, "action", &all, &mut action);
    if action.is_none() && r.count() == before {
        r.problem(
            at,
            "this [[rule]] has no action: add `action = \"reap\"`, \"keep\", \"boundary\" or \"report\"",
        );
    }
    action
}

/// Reads what there is into a rule that is asked about members.
pub(super) fn read(r: &mut Reader, table: &DeTable<'_>, rule: &mut Rule) {
    let mut session = match rule.action {
        // It would be odd if what is kept from the end of its agent had to fear the rules about living ones.
        Action::Keep => SessionIs::Any,
        _ => SessionIs::Gone,
    };
    r.choice(table, "session", &SESSIONS, &mut session);
    rule.after = nanoseconds(r, table, "after", Duration::ZERO..=LONGEST).unwrap_or(0);
    let age = Duration::from_millis(1)..=LONGEST;
    let min_age = nanoseconds(r, table, "min_age", age.clone());
    let max_age = nanoseconds(r, table, "max_age", age);
    if let (Some(min), Some(max), Some(value)) = (min_age, max_age, table.get("max_age"))
        && min >= max
    {
        r.problem(
            value.span().start,
            "`max_age` is not more than `min_age`, so this can never hold: make it longer",
        );
    }
    let agents = strings(r, table, "agent");
    rule.when = When {
        session,
        agents: agents
            .into_iter()
            .map(|(_, name)| Arc::from(name))
            .collect(),
        orphan: r.maybe_flag(table, "orphan"),
        inferred: r.maybe_flag(table, "inferred"),
        min_age,
        max_age,
        uid: uid(r, table),
        units: patterns(r, table, "unit", Pattern::unit),
        own_unit: r.maybe_flag(table, "own_unit"),
        tty: r.maybe_flag(table, "tty"),
        multiplexed: r.maybe_flag(table, "multiplexed"),
        new_session: r.maybe_flag(table, "new_session"),
        min_cpu: r.maybe_number(table, "min_cpu", 1..=1_000_000),
        listening: r.maybe_flag(table, "listening"),
        children: r.maybe_flag(table, "children"),
        idle: nanoseconds(r, table, "idle", IDLE_MIN..=LONGEST),
        hung_up: hung_up(r, table),
        server: server(r, table),
        markers: patterns(r, table, "environment", Pattern::marker),
        ..When::default()
    };
}

/// Reads `hung_up`, which only makes sense as true and beside `idle`.
fn hung_up(r: &mut Reader, table: &DeTable<'_>) -> bool {
    let Some(value) = table.get("hung_up") else {
        return false;
    };
    let hung_up = r.maybe_flag(table, "hung_up").unwrap_or(true);
    if !hung_up || !table.contains_key("idle") {
        r.problem(
            value.span().start,
            "`hung_up` is true or left out, and needs `idle`: write `hung_up = true` and `idle = \"30s\"`",
        );
    }
    hung_up
}

/// Reads `server`, which only makes sense as true: what it says holds of the roots of sessions alone.
fn server(r: &mut Reader, table: &DeTable<'_>) -> bool {
    let server = r.maybe_flag(table, "server");
    if let (Some(false), Some(value)) = (server, table.get("server")) {
        r.problem(value.span().start, "`server` is true or left out");
    }
    server == Some(true)
}

fn nanoseconds(
    r: &mut Reader,
    table: &DeTable<'_>,
    key: &str,
    within: RangeInclusive<Duration>,
) -> Option<u64> {
    table.get(key)?;
    let mut found = Duration::ZERO;
    r.duration(table, key, within, &mut found);
    u64::try_from(found.as_nanos()).ok()
}

fn uid(r: &mut Reader, table: &DeTable<'_>) -> Option<UidIs> {
    let value = table.get("uid")?;
    if let DeValue::Integer(_) = value.get_ref() {
        return r.maybe_number(table, "uid", 0..=u32::MAX).map(UidIs::Id);
    }
    match r.string("uid", value, "other")? {
        (_, "other") => Some(UidIs::Other),
        (_, "same") => Some(UidIs::Same),
        (at, text) => {
            r.problem(
                at,
                format!("`uid` is {text:?}: write \"other\", \"same\" or a number"),
            );
            None
        }
    }
}

fn strings<'a>(r: &mut Reader, table: &'a DeTable<'_>, key: &str) -> Vec<(usize, &'a str)> {
    let value = table.get(key);
    value.map_or(Vec::new(), |value| r.strings(key, value))
}

fn patterns(
    r: &mut Reader,
    table: &DeTable<'_>,
    key: &str,
    compile: fn(&str) -> Result<Pattern, PatternError>,
) -> Vec<Pattern> {
    let texts = strings(r, table, key);
    let mut found = Vec::new();
    for (at, text) in texts {
        match compile(text) {
            Ok(_) if text.chars().all(|c| c == '*') => r.problem(
                at,
                format!("`{key}` {text:?} matches everything: narrow it or leave it out"),
            ),
            Ok(pattern) => found.push(pattern),
            Err(error) => r.problem(at, format!("`{key}` {text:?} is no good glob: {error}")),
        }
    }
    found
}

/// Notes it where all rules together ask for more marks than there are bits. `rules` are all that are in force.
pub(super) fn check_marker_count(r: &mut Reader, rules: &[Rule]) {
    let mut texts: Vec<&str> = rules
        .iter()
        .flat_map(|rule| rule.when.markers.iter().map(Pattern::text))
        .collect();
    texts.sort_unstable();
    texts.dedup();
    // One is `REAPER_KEEP=1`, and three tell of multiplexers.
    let most = MARKERS_MAX - 4;
    if texts.len() > most {
        r.problem(
            0,
            format!(
                "the rules ask for {} different `environment` globs: write at most {most}",
                texts.len()
            ),
        );
    }
}
