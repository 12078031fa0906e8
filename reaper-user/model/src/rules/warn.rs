//! Finds rules that may not do what was meant: they can never apply, are covered by an earlier rule, replace a
//! built-in rule, miss the script of an interpreter, or are checked too rarely.

use super::Rules;
use super::read::RuleEntry;
use crate::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, When};
use crate::value::did_you_mean;

/// Returns warnings about a file's rules, each with its byte offset.
pub fn warnings(rules: &Rules) -> Vec<(usize, String)> {
    let all = rules.in_force.rules();
    let mut warnings = Vec::new();
    let agents = rules.in_force.agent_names();
    let enabled = rules.user_rules.iter().filter(|entry| entry.enabled);
    for RuleEntry { rule, offset, .. } in enabled {
        let name = &rule.name;
        let mut warn = |message: String| warnings.push((*offset, message));
        if let Some(other) = rules.built_in.iter().find(|other| other.name == *name) {
            let that = kind(other.action);
            warn(format!(
                "`{name}` replaces the built-in {that} of the same name: rename it to keep both"
            ));
        }
        let wanted = &rule.when.agents;
        let unknown = wanted.iter().filter(|agent| !agents.contains(&&***agent));
        let unknown: Vec<&str> = unknown.map(|agent| &**agent).collect();
        let mut hints = unknown
            .iter()
            .filter_map(|agent| Some((*agent, did_you_mean(agent, &agents)?)));
        if !wanted.is_empty() && unknown.len() == wanted.len() {
            let hint = hints.next().map(|(_, hint)| format!(": {hint}"));
            let hint = hint.unwrap_or_default();
            warn(format!(
                "`{name}` can never apply: `agent` names no agent that is enabled{hint}"
            ));
        } else {
            for (agent, hint) in hints {
                warn(format!(
                    "`agent` of `{name}` has {agent:?}, and no agent of that name is enabled: {hint}"
                ));
            }
        }
        let impossible = rule.matchers.iter().map(Matcher::impossible);
        if let Some([why, ..]) = impossible.collect::<Option<Vec<_>>>().as_deref() {
            warn(format!("`{name}` can never apply: {why}"));
        }
        if let Some((field, program)) = rule.matchers.iter().find_map(Matcher::misread) {
            let field = field.name();
            warn(format!(
                "`{name}` may not match: if {program} runs a script, `{field}` counts only the arguments after the script; \
                 match the script with `script`"
            ));
        }
        let changing = [
            ("listening", rule.when.listening.is_some()),
            ("min_cpu", rule.when.min_cpu.is_some()),
            ("children", rule.when.children.is_some()),
        ];
        let changing = changing.into_iter().find(|(_, is_used)| *is_used);
        if let Some((key, _)) = changing
            && rule.action != Action::Keep
            && !rule.has_delay()
            && rule.when.is_of(true)
        {
            warn(format!(
                "`{name}` checks `{key}` only when the process has an event, which may take long below a living agent: add \
                 `after` to check again when that delay expires"
            ));
        }
        let before = all.iter().take_while(|other| other.name != *name);
        let mut before = before.filter(|other| preempts(other, rule));
        if let Some(other) = before.find(|other| covers(other, rule)) {
            warn(format!(
                "`{name}` never applies: {} `{}` comes first and covers every case",
                other.action.name(),
                other.name
            ));
        }
    }
    warnings
}

fn kind(action: Action) -> &'static str {
    match action {
        Action::Agent => "agent",
        Action::Server => "server",
        Action::Boundary => "boundary",
        Action::Keep | Action::Reap | Action::Report => "rule",
        Action::Note => "note",
    }
}

/// Returns whether `other` is not evaluated for a process once `one` has matched it.
///
/// An agent is a member, so keeps and rules are evaluated for agents too.
fn preempts(one: &Rule, other: &Rule) -> bool {
    let leaves_session = matches!(one.action, Action::Boundary | Action::Server);
    leaves_session || kind(one.action) == kind(other.action)
}

/// Returns whether `one` certainly applies wherever `other` does, judged by the texts of their conditions.
fn covers(one: &Rule, other: &Rule) -> bool {
    let covered = |matcher: &Matcher| one.matchers.iter().any(|own| covers_program(own, matcher));
    let program =
        one.matchers.is_empty() || !other.matchers.is_empty() && other.matchers.iter().all(covered);
    let is_of_program = one.action.is_of_program();
    program && (is_of_program || covers_rest(&one.when, &other.when) && covers_inferred(one, other))
}

/// Returns whether the condition `inferred` of `one` holds wherever that of `other` does. A rule that reaps applies to
/// inferred members only with `inferred = true`.
fn covers_inferred(one: &Rule, other: &Rule) -> bool {
    let inferred = other.when.inferred;
    match one.when.inferred {
        None if one.action == Action::Reap => {
            inferred == Some(false) || inferred.is_none() && other.action == Action::Reap
        }
        own => own.is_none() || own == inferred,
    }
}

/// Returns whether the matcher `one` matches wherever `other` does, judged by the texts of their conditions.
fn covers_program(one: &Matcher, other: &Matcher) -> bool {
    let mut conditions = one.conditions().iter();
    let uses_syntax = |c: &Condition| matches!(c.field, Field::Args | Field::Options);
    if one.syntax() != other.syntax() && conditions.clone().any(uses_syntax) {
        return false;
    }
    let others = other.conditions();
    conditions.all(|one| others.iter().any(|other| covers_condition(one, other)))
}

/// Returns whether condition `one` holds wherever `other` does.
fn covers_condition(one: &Condition, other: &Condition) -> bool {
    if (one.field, one.negative) != (other.field, other.negative) {
        return false;
    }
    let (few, many) = match one.negative {
        false => (&other.any_of, &one.any_of),
        true => (&one.any_of, &other.any_of),
    };
    if one.field == Field::Args {
        // `args` has one pattern per argument: the longer list matches less.
        let mut pairs = few.iter().zip(many);
        return few.len() >= many.len() && pairs.all(|(pattern, other)| is_covered(pattern, other));
    }
    few.iter()
        .all(|pattern| many.iter().any(|other| is_covered(pattern, other)))
}

/// Returns whether `other` certainly matches everything that `pattern` does, judged by their texts.
fn is_covered(pattern: &Pattern, other: &Pattern) -> bool {
    let same = (other.text(), other.is_regex()) == (pattern.text(), pattern.is_regex());
    same || pattern.is_exact() && other.is_match(pattern.text().as_bytes())
}

/// Returns whether the conditions `one` hold wherever `other` do, apart from `inferred`.
fn covers_rest(one: &When, other: &When) -> bool {
    fn wider<T: PartialEq>(one: &Option<T>, other: &Option<T>) -> bool {
        one.is_none() || one == other
    }
    let subset = |few: &[_], many: &[_]| few.iter().all(|name| many.contains(name));
    let texts = |patterns: &[Pattern]| -> Vec<String> {
        patterns
            .iter()
            .map(|pattern| pattern.text().into())
            .collect()
    };
    let listed = |one: Vec<String>, other: Vec<String>| {
        one.is_empty() || !other.is_empty() && other.iter().all(|text| one.contains(text))
    };
    one.session.covers(other.session)
        && (one.agents.is_empty() || !other.agents.is_empty() && subset(&other.agents, &one.agents))
        && listed(texts(&one.units), texts(&other.units))
        && listed(texts(&one.markers), texts(&other.markers))
        && one
            .min_age
            .is_none_or(|least| other.min_age.is_some_and(|age| age >= least))
        && one
            .max_age
            .is_none_or(|most| other.max_age.is_some_and(|age| age <= most))
        && one
            .min_cpu
            .is_none_or(|least| other.min_cpu.is_some_and(|cpu| cpu >= least))
        && wider(&one.orphan, &other.orphan)
        && wider(&one.uid, &other.uid)
        && wider(&one.own_unit, &other.own_unit)
        && wider(&one.tty, &other.tty)
        && wider(&one.multiplexed, &other.multiplexed)
        && wider(&one.attended, &other.attended)
        && wider(&one.detached, &other.detached)
        && wider(&one.new_session, &other.new_session)
        && wider(&one.listening, &other.listening)
        && wider(&one.listening_unix, &other.listening_unix)
        && wider(&one.piped, &other.piped)
        && (!one.window || other.window)
        && wider(&one.children, &other.children)
        && (!one.server || other.server)
        && (!one.hung_up || other.hung_up)
        && one
            .idle
            .is_none_or(|least| other.idle.is_some_and(|idle| idle >= least))
}
