//! What each source promises of the scenarios, and the harness holds it to: no more, and no less.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Where the daemon's events come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    Ebpf,
    ProcConnector,
    Procfs,
}

/// How much of a scenario a source tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Everything: each decision with its reason, each adopter, how the agent ended, each end confirmed.
    Whole,
    /// Everybody who is due is ended and nobody else is touched, and all is decided as it has to be, with its reason; the stream may lack what this says.
    Ended(&'static str),
    /// Nobody is wronged. Who is due may survive, for this reason.
    Harmless(&'static str),
    /// It says that it cannot be used there, and does not begin.
    Refused(&'static str),
}

impl Source {
    pub const ALL: [Source; 3] = [Source::Ebpf, Source::ProcConnector, Source::Procfs];

    /// As the daemon calls it.
    pub fn name(self) -> &'static str {
        match self {
            Source::Ebpf => "ebpf",
            Source::ProcConnector => "proc-connector",
            Source::Procfs => "procfs",
        }
    }

    /// What it promises of a scenario of which nothing else is said below.
    fn usually(self) -> Promise {
        match self {
            Source::Ebpf | Source::ProcConnector => Promise::Whole,
            Source::Procfs => Promise::Ended("how and when between two looks something happened"),
        }
    }

    /// Of whom it promises less: of those who are started in one of these ways, and of whoever is below one. The words,
    /// what they stand for.
    fn of_ways(self) -> &'static [(&'static [&'static str], &'static str, Promise)] {
        match self {
            Source::Ebpf => &[],
            Source::ProcConnector => CONNECTORS_WAYS,
            Source::Procfs => PROCFS_WAYS,
        }
    }

    /// What it promises of single scenarios.
    fn of_scenarios(self) -> &'static [(&'static str, Promise)] {
        match self {
            Source::Ebpf => &[],
            Source::ProcConnector => CONNECTORS_SCENARIOS,
            Source::Procfs => PROCFS_SCENARIOS,
        }
    }

    /// What it promises of the scenario of this name, but for those who are [excused](Source::excuse).
    pub fn promises(self, scenario: &str) -> Promise {
        let mut scenarios = self.of_scenarios().iter();
        let named = scenarios.find(|(name, _)| *name == scenario);
        named.map_or(self.usually(), |(_, promise)| *promise)
    }

    /// What it promises instead of one that is started in this way, if that is less: that one is excused.
    pub fn excuse(self, way: &str) -> Option<Promise> {
        let mut ways = self.of_ways().iter();
        let found = ways.find(|(words, ..)| words.contains(&way));
        found.map(|(_, _, promise)| *promise)
    }
}

const NO_CREATOR: Promise = Promise::Harmless("nobody tells who called the fork");
/// Nobody has seen who made it.
const UNSEEN: Promise = Promise::Harmless("its maker was gone before anybody looked");
/// Of one that is ended as soon as it has begun nobody knows whether it was an agent.
pub const TOO_SHORT: Promise =
    Promise::Harmless("the agent was gone before anybody had looked what it is");
pub const TOO_FAST: Promise = Promise::Harmless("it forks faster than anybody can look");

const TWINS: &str = "a child that is made its maker's sibling (`CLONE_PARENT`)";

const CONNECTORS_WAYS: &[(&[&str], &str, Promise)] = &[(&["twin"], TWINS, NO_CREATOR)];

const CONNECTORS_SCENARIOS: &[(&str, Promise)] = &[
    ("handover", TOO_FAST),
    ("run-killed-at-once", TOO_SHORT),
    ("recycled-pid", NOT_IN_A_NAMESPACE),
    ("daemon-in-a-pid-namespace", NOT_IN_A_NAMESPACE),
];

const NOT_IN_A_NAMESPACE: Promise =
    Promise::Refused("the kernel tells only of the host's own pids");

const PROCFS_WAYS: &[(&[&str], &str, Promise)] = &[
    (&["twin"], TWINS, NO_CREATOR),
    (
        &["double", "hops", "daemonized"],
        "what is forked twice",
        UNSEEN,
    ),
    (&["hydra"], "a fork bomb", TOO_FAST),
    (
        &["in-namespace"],
        "what is below the init of a pid namespace",
        Promise::Harmless("it also has what others have brought there"),
    ),
];

const PROCFS_SCENARIOS: &[(&str, Promise)] = &[
    (
        "conversation-of-a-killed-agent",
        Promise::Harmless("how an agent ended between two looks may be unknown"),
    ),
    ("runaway", TOO_FAST),
    ("handover", TOO_FAST),
    ("run-killed-at-once", TOO_SHORT),
    ("recycled-pid", TOO_SHORT),
    ("two-threads-give-away", UNSEEN),
];

/// A part of a scenario that is excused, and what is promised of it alone.
pub type Excused = (&'static str, Promise);

/// How a scenario came out.
struct Kept {
    promise: Promise,
    excused: Vec<Excused>,
}

/// The scenarios that came out as each source promises.
static KEPT: Mutex<BTreeMap<(&str, Source), Kept>> = Mutex::new(BTreeMap::new());

/// A scenario has come out as promised, these parts of it excused.
pub fn count(scenario: &'static str, source: Source, promise: Promise, excused: Vec<Excused>) {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.insert((scenario, source), Kept { promise, excused });
}

/// The promises that were kept, as tables; nothing where only one source was tried.
pub fn matrix() -> Option<String> {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let tried = |source: &Source| kept.keys().any(|(_, of)| of == source);
    let sources: Vec<_> = Source::ALL.into_iter().filter(tried).collect();
    if sources.len() < 2 {
        return None;
    }
    let mut lines = vec![
        "| source | told whole | ended, not all of it told | ended, but for those named below | harmless, may leave some | says that it cannot |".into(),
        "|---|---|---|---|---|---|".into(),
    ];
    for source in &sources {
        let of_it = || kept.iter().filter(|((_, of), _)| of == source);
        let cells = [0, 1, 2, 3, 4].map(|column| {
            let counted = of_it().filter(|(_, kept)| kept.column() == column);
            counted.count().to_string()
        });
        lines.push(format!("| `{}` | {} |", source.name(), cells.join(" | ")));
    }
    lines.extend(
        [
            "",
            "| what | through | promised, and why |",
            "|---|---|---|",
        ]
        .map(String::from),
    );
    for source in &sources {
        let name = source.name();
        if source.usually() != Promise::Whole {
            lines.push(format!(
                "| whatever is not named here | `{name}` | {} |",
                source.usually()
            ));
        }
        for (_, what, promise) in source.of_ways() {
            lines.push(format!("| {what} | `{name}` | {promise} |"));
        }
    }
    for ((scenario, source), Kept { promise, excused }) in kept.iter() {
        let name = source.name();
        if *promise != source.usually() {
            lines.push(format!("| scenario {scenario} | `{name}` | {promise} |"));
        }
        let mut whys: Vec<Promise> = excused.iter().map(|(_, promise)| *promise).collect();
        whys.dedup();
        for why in whys {
            let roles = excused.iter().filter(|(_, promise)| *promise == why);
            let roles: Vec<&str> = roles.map(|(role, _)| *role).collect();
            let who = roles.join(", ");
            lines.push(format!(
                "| {who} in scenario {scenario} | `{name}` | {why} |"
            ));
        }
    }
    Some(lines.join("\n"))
}

impl Kept {
    fn column(&self) -> usize {
        match self.promise {
            Promise::Harmless(_) => 3,
            Promise::Refused(_) => 4,
            Promise::Whole | Promise::Ended(_) if !self.excused.is_empty() => 2,
            Promise::Whole => 0,
            Promise::Ended(_) => 1,
        }
    }
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Promise::Whole => f.write_str("told whole"),
            Promise::Ended(why) => write!(f, "ended; not told: {why}"),
            Promise::Harmless(why) => write!(f, "may be missed: {why}"),
            Promise::Refused(why) => write!(f, "says that it cannot be used: {why}"),
        }
    }
}
