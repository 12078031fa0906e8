//! What each source promises of the scenarios, and the harness holds it to: no more, and no less.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Where the daemon's events come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceKind {
    Ebpf,
    ProcConnector,
    Procfs,
}

/// How much of a scenario a source tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceSupport {
    /// Everything: each decision with its reason, each adopter, how the agent ended, each end confirmed.
    Full,
    /// Everybody who is due is ended and nobody else is touched, and all is decided as it has to be, with its reason; the stream may lack what this says.
    ReapsAll(&'static str),
    /// Nobody is wronged. Who is due may survive, for this reason.
    NoWrongKill(&'static str),
    /// It says that it cannot be used there, and does not begin.
    Unsupported(&'static str),
}

impl SourceKind {
    pub const ALL: [SourceKind; 3] = [
        SourceKind::Ebpf,
        SourceKind::ProcConnector,
        SourceKind::Procfs,
    ];

    /// As the daemon calls it.
    pub fn name(self) -> &'static str {
        match self {
            SourceKind::Ebpf => "ebpf",
            SourceKind::ProcConnector => "proc-connector",
            SourceKind::Procfs => "procfs",
        }
    }

    /// What it promises of a scenario of which nothing else is said below.
    fn usually(self) -> SourceSupport {
        match self {
            SourceKind::Ebpf | SourceKind::ProcConnector => SourceSupport::Full,
            SourceKind::Procfs => {
                SourceSupport::ReapsAll("how and when between two looks something happened")
            }
        }
    }

    /// Of whom it promises less: of those who are started in one of these ways, and of whoever is below one. The words,
    /// what they stand for.
    fn of_ways(self) -> &'static [(&'static [&'static str], &'static str, SourceSupport)] {
        match self {
            SourceKind::Ebpf => &[],
            SourceKind::ProcConnector => CONNECTORS_WAYS,
            SourceKind::Procfs => PROCFS_WAYS,
        }
    }

    /// What it promises of single scenarios.
    fn of_scenarios(self) -> &'static [(&'static str, SourceSupport)] {
        match self {
            SourceKind::Ebpf => &[],
            SourceKind::ProcConnector => CONNECTORS_SCENARIOS,
            SourceKind::Procfs => PROCFS_SCENARIOS,
        }
    }

    /// What it promises of the scenario of this name, but for those who are [excused](Source::excuse).
    pub fn support_for(self, scenario: &str) -> SourceSupport {
        let mut scenarios = self.of_scenarios().iter();
        let named = scenarios.find(|(name, _)| *name == scenario);
        named.map_or(self.usually(), |(_, promise)| *promise)
    }

    /// What it promises instead of one that is started in this way, if that is less: that one is excused.
    pub fn exemption_for(self, way: &str) -> Option<SourceSupport> {
        let mut ways = self.of_ways().iter();
        let found = ways.find(|(words, ..)| words.contains(&way));
        found.map(|(_, _, promise)| *promise)
    }
}

const NO_CREATOR: SourceSupport = SourceSupport::NoWrongKill("nobody tells who called the fork");
/// Nobody has seen who made it.
const UNSEEN: SourceSupport =
    SourceSupport::NoWrongKill("its maker was gone before anybody looked");
/// Of one that is ended as soon as it has begun nobody knows whether it was an agent.
pub const TOO_SHORT: SourceSupport =
    SourceSupport::NoWrongKill("the agent was gone before anybody had looked what it is");
pub const TOO_FAST: SourceSupport =
    SourceSupport::NoWrongKill("it forks faster than anybody can look");

const TWINS: &str = "a child that is made its maker's sibling (`CLONE_PARENT`)";

const CONNECTORS_WAYS: &[(&[&str], &str, SourceSupport)] = &[(&["twin"], TWINS, NO_CREATOR)];

const CONNECTORS_SCENARIOS: &[(&str, SourceSupport)] = &[
    ("handover", TOO_FAST),
    ("run-killed-at-once", TOO_SHORT),
    ("recycled-pid", NOT_IN_A_NAMESPACE),
    ("daemon-in-a-pid-namespace", NOT_IN_A_NAMESPACE),
];

const NOT_IN_A_NAMESPACE: SourceSupport =
    SourceSupport::Unsupported("the kernel tells only of the host's own pids");

const PROCFS_WAYS: &[(&[&str], &str, SourceSupport)] = &[
    (&["twin"], TWINS, NO_CREATOR),
    (
        &["double", "triple-fork", "daemonized"],
        "what is forked twice",
        UNSEEN,
    ),
    (&["fork-bomb-on-term"], "a fork bomb", TOO_FAST),
    (
        &["in-namespace"],
        "what is below the init of a pid namespace",
        SourceSupport::NoWrongKill("it also has what others have brought there"),
    ),
];

const PROCFS_SCENARIOS: &[(&str, SourceSupport)] = &[
    (
        "conversation-of-a-killed-agent",
        SourceSupport::NoWrongKill("how an agent ended between two looks may be unknown"),
    ),
    ("runaway", TOO_FAST),
    ("handover", TOO_FAST),
    ("run-killed-at-once", TOO_SHORT),
    ("recycled-pid", TOO_SHORT),
    ("two-threads-give-away", UNSEEN),
];

/// A part of a scenario that is excused, and what is promised of it alone.
pub type Exemption = (&'static str, SourceSupport);

/// How a scenario came out.
struct ScenarioSupport {
    promise: SourceSupport,
    excused: Vec<Exemption>,
}

/// The scenarios that came out as each source promises.
static KEPT: Mutex<BTreeMap<(&str, SourceKind), ScenarioSupport>> = Mutex::new(BTreeMap::new());

/// A scenario has come out as promised, these parts of it excused.
pub fn record(
    scenario: &'static str,
    source: SourceKind,
    promise: SourceSupport,
    excused: Vec<Exemption>,
) {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.insert((scenario, source), ScenarioSupport { promise, excused });
}

/// The promises that were kept, as tables; nothing where only one source was tried.
pub fn matrix() -> Option<String> {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let tried = |source: &SourceKind| kept.keys().any(|(_, of)| of == source);
    let sources: Vec<_> = SourceKind::ALL.into_iter().filter(tried).collect();
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
        if source.usually() != SourceSupport::Full {
            lines.push(format!(
                "| whatever is not named here | `{name}` | {} |",
                source.usually()
            ));
        }
        for (_, what, promise) in source.of_ways() {
            lines.push(format!("| {what} | `{name}` | {promise} |"));
        }
    }
    for ((scenario, source), ScenarioSupport { promise, excused }) in kept.iter() {
        let name = source.name();
        if *promise != source.usually() {
            lines.push(format!("| scenario {scenario} | `{name}` | {promise} |"));
        }
        let mut whys: Vec<SourceSupport> = excused.iter().map(|(_, promise)| *promise).collect();
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

impl ScenarioSupport {
    fn column(&self) -> usize {
        match self.promise {
            SourceSupport::NoWrongKill(_) => 3,
            SourceSupport::Unsupported(_) => 4,
            SourceSupport::Full | SourceSupport::ReapsAll(_) if !self.excused.is_empty() => 2,
            SourceSupport::Full => 0,
            SourceSupport::ReapsAll(_) => 1,
        }
    }
}

impl fmt::Display for SourceSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceSupport::Full => f.write_str("told whole"),
            SourceSupport::ReapsAll(why) => write!(f, "ended; not told: {why}"),
            SourceSupport::NoWrongKill(why) => write!(f, "may be missed: {why}"),
            SourceSupport::Unsupported(why) => write!(f, "says that it cannot be used: {why}"),
        }
    }
}
