//! Rules that are hardly meant as they are written: that can never hold, or that another keeps from being asked.

use super::catalogue;
use super::read::RuleEntry;
use crate::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, When};

/// Offsets into the file, each with what is to be said. `all` are the rules in force, in the order in which
/// they are asked.
pub fn of(own: &[RuleEntry], all: &[Rule]) -> Vec<(usize, String)> {
    let built_in = catalogue::entries();
    let mut found = Vec::new();
    for RuleEntry { rule, at, .. } in own.iter().filter(|written| written.enabled) {
        let name = &rule.name;
        let mut say = |what: String| found.push((*at, what));
        if let Some(other) = built_in.iter().find(|other| other.rule.name == *name)
            && kind(other.rule.action) != kind(rule.action)
        {
            let (this, that) = (kind(rule.action), kind(other.rule.action));
            say(format!(
                "`{name}` is a {this} and takes the place of a built-in {that}: give it another name if both are meant"
            ));
        }
        let agents = all.iter().filter(|other| other.action.opens_session());
        let is_agent = |name: &str| agents.clone().any(|agent| *agent.name == *name);
        let asked = &rule.when.agents;
        if !asked.is_empty() && !asked.iter().any(|agent| is_agent(agent)) {
            say(format!(
                "`{name}` can never hold: `agent` names none that is in force"
            ));
        }
        if !rule.matchers.is_empty() && rule.matchers.iter().all(Matcher::is_impossible) {
            say(format!(
                "`{name}` can never hold: it denies what it asks for, or wants a script of a program that runs none"
            ));
        }
        let changing = [
            ("listening", rule.when.listening.is_some()),
            ("min_cpu", rule.when.min_cpu.is_some()),
            ("children", rule.when.children.is_some()),
        ];
        let changing = changing.into_iter().find(|(_, asked)| *asked);
        if let Some((key, _)) = changing
            && rule.action != Action::Keep
            && rule.after == 0
            && rule.when.is_of(true)
        {
            say(format!(
                "`{name}` asks for `{key}` once, when something happens to a process, and below an agent that lives nothing may for \
                 long: give it an `after`, and it is asked when that is over"
            ));
        }
        let before = all.iter().take_while(|other| other.name != *name);
        let mut before = before.filter(|other| is_asked_before(other, rule));
        if let Some(other) = before.find(|other| covers(other, rule)) {
            say(format!(
                "`{name}` is never asked: {} `{}` holds wherever it does, and comes first",
                other.action.name(),
                other.name
            ));
        }
    }
    found
}

fn kind(action: Action) -> &'static str {
    match action {
        Action::Agent => "agent",
        Action::Server => "server",
        Action::Boundary => "boundary",
        Action::Keep | Action::Reap | Action::Report => "rule",
    }
}

/// Whether a rule that holds decides for the other one too. Agents are members, so rules about members hold for them.
fn is_asked_before(one: &Rule, other: &Rule) -> bool {
    let leaves = matches!(one.action, Action::Boundary | Action::Server);
    leaves || kind(one.action) == kind(other.action)
}

/// Whether a rule holds wherever the other does, as far as that can be told from how they are written.
fn covers(one: &Rule, other: &Rule) -> bool {
    let covered = |matcher: &Matcher| one.matchers.iter().any(|own| covers_program(own, matcher));
    let program =
        one.matchers.is_empty() || !other.matchers.is_empty() && other.matchers.iter().all(covered);
    let whole = one.action.is_of_program();
    program && (whole || covers_rest(&one.when, &other.when) && may_reap_as_many(one, other))
}

/// Whether, of members by evidence alone, one is for all that the other is for: what reaps has to ask for them.
fn may_reap_as_many(one: &Rule, other: &Rule) -> bool {
    let asked = other.when.inferred;
    match one.when.inferred {
        None if one.action == Action::Reap => {
            asked == Some(false) || asked.is_none() && other.action == Action::Reap
        }
        own => own.is_none() || own == asked,
    }
}

fn covers_program(one: &Matcher, other: &Matcher) -> bool {
    let mut conditions = one.conditions().iter();
    let reads = |c: &Condition| matches!(c.field, Field::Args | Field::Options);
    if one.syntax() != other.syntax() && conditions.clone().any(reads) {
        return false;
    }
    conditions.all(|own| other.conditions().iter().any(|theirs| follows(own, theirs)))
}

/// Whether a condition holds wherever the other does.
fn follows(own: &Condition, theirs: &Condition) -> bool {
    if (own.field, own.negative) != (theirs.field, theirs.negative) {
        return false;
    }
    let (few, many) = match own.negative {
        false => (&theirs.any_of, &own.any_of),
        true => (&own.any_of, &theirs.any_of),
    };
    if own.field == Field::Args {
        // One pattern per argument: the one that asks for more arguments matches less.
        let mut pairs = few.iter().zip(many);
        return few.len() >= many.len() && pairs.all(|(pattern, other)| is_covered(pattern, other));
    }
    few.iter()
        .all(|pattern| many.iter().any(|other| is_covered(pattern, other)))
}

/// Whether what a pattern matches is matched by another one, as far as their texts say.
fn is_covered(pattern: &Pattern, other: &Pattern) -> bool {
    let same = (other.text(), other.is_regex()) == (pattern.text(), pattern.is_regex());
    same || pattern.is_exact() && other.is_match(pattern.text().as_bytes())
}

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
        && wider(&one.new_session, &other.new_session)
        && wider(&one.listening, &other.listening)
        && wider(&one.children, &other.children)
        && (!one.server || other.server)
        && (!one.hung_up || other.hung_up)
        && one
            .idle
            .is_none_or(|least| other.idle.is_some_and(|idle| idle >= least))
}
