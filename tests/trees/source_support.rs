//! Support of each event source for the scenarios. The tests check exactly this.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Event source of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceKind {
    Ebpf,
    ProcConnector,
    Procfs,
}

/// Degree to which a source supports a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceSupport {
    /// Every due process is reaped, and every decision, adopter, exit status and outcome is reported.
    Full,
    /// Every due process is reaped and every decision is right. The stream may lack what the text names.
    ReapsAll(&'static str),
    /// No process is killed wrongly. A due process may survive, for this reason.
    NoWrongKill(&'static str),
    /// The source refuses to start, for this reason.
    Unsupported(&'static str),
}

impl SourceKind {
    pub const ALL: [SourceKind; 3] = [
        SourceKind::Ebpf,
        SourceKind::ProcConnector,
        SourceKind::Procfs,
    ];

    /// Returns the name for `--source`.
    pub fn name(self) -> &'static str {
        match self {
            SourceKind::Ebpf => "ebpf",
            SourceKind::ProcConnector => "proc-connector",
            SourceKind::Procfs => "procfs",
        }
    }

    /// Returns the support for scenarios without an entry below.
    fn default_support(self) -> SourceSupport {
        match self {
            SourceKind::Ebpf | SourceKind::ProcConnector => SourceSupport::Full,
            SourceKind::Procfs => {
                SourceSupport::ReapsAll("what happened between two scans, and when")
            }
        }
    }

    /// Returns the start methods with less support: keywords, description, and the support for such a process and its
    /// descendants.
    fn start_methods(self) -> &'static [(&'static [&'static str], &'static str, SourceSupport)] {
        match self {
            SourceKind::Ebpf => &[],
            SourceKind::ProcConnector => CONNECTORS_WAYS,
            SourceKind::Procfs => PROCFS_WAYS,
        }
    }

    /// Returns the scenarios with another support than the default.
    fn scenarios(self) -> &'static [(&'static str, SourceSupport)] {
        match self {
            SourceKind::Ebpf => &[],
            SourceKind::ProcConnector => CONNECTORS_SCENARIOS,
            SourceKind::Procfs => PROCFS_SCENARIOS,
        }
    }

    /// Returns the support for a scenario, except for its [exempted](Self::exemption_for) processes.
    pub fn support_for(self, scenario: &str) -> SourceSupport {
        let mut scenarios = self.scenarios().iter();
        let named = scenarios.find(|(name, _)| *name == scenario);
        named.map_or(self.default_support(), |(_, support)| *support)
    }

    /// Returns the lower support for a process with this start method, if it is exempted from the scenario's support.
    pub fn exemption_for(self, method: &str) -> Option<SourceSupport> {
        let mut methods = self.start_methods().iter();
        let found = methods.find(|(words, ..)| words.contains(&method));
        found.map(|(_, _, support)| *support)
    }
}

const NO_CREATOR: SourceSupport =
    SourceSupport::NoWrongKill("the source does not report which process called fork");
/// The process that called fork was never seen.
const UNSEEN: SourceSupport = SourceSupport::NoWrongKill("its creator exited before the next scan");
/// The agent exited before its program was read.
pub const TOO_SHORT: SourceSupport =
    SourceSupport::NoWrongKill("the agent exited before its program could be read");
pub const TOO_FAST: SourceSupport =
    SourceSupport::NoWrongKill("it forks faster than the source can read");

const TWINS: &str = "a child created as its creator's sibling (`CLONE_PARENT`)";

const CONNECTORS_WAYS: &[(&[&str], &str, SourceSupport)] = &[(&["twin"], TWINS, NO_CREATOR)];

const CONNECTORS_SCENARIOS: &[(&str, SourceSupport)] = &[
    ("handover", TOO_FAST),
    ("run-killed-at-once", TOO_SHORT),
    ("recycled-pid", NOT_IN_A_NAMESPACE),
    ("daemon-in-a-pid-namespace", NOT_IN_A_NAMESPACE),
];

const NOT_IN_A_NAMESPACE: SourceSupport =
    SourceSupport::Unsupported("the kernel reports pids of the initial PID namespace only");

const PROCFS_WAYS: &[(&[&str], &str, SourceSupport)] = &[
    (&["twin"], TWINS, NO_CREATOR),
    (
        &["double", "triple-fork", "daemonized"],
        "a double-forked process",
        UNSEEN,
    ),
    (&["fork-bomb-on-term"], "a fork bomb", TOO_FAST),
    (
        &["in-namespace"],
        "a descendant of the init of a PID namespace",
        SourceSupport::NoWrongKill("that init also adopts processes from outside the tree"),
    ),
];

const PROCFS_SCENARIOS: &[(&str, SourceSupport)] = &[
    (
        "conversation-of-a-killed-agent",
        SourceSupport::NoWrongKill("the exit status of an agent between two scans may be unknown"),
    ),
    ("runaway", TOO_FAST),
    ("handover", TOO_FAST),
    ("run-killed-at-once", TOO_SHORT),
    ("recycled-pid", TOO_SHORT),
    ("two-threads-give-away", UNSEEN),
];

/// Role in a scenario that is exempted, and the support for it.
pub type Exemption = (&'static str, SourceSupport);

/// Verified support for a scenario.
struct ScenarioSupport {
    support: SourceSupport,
    exempted: Vec<Exemption>,
}

/// Passed scenarios of each source.
static PASSED: Mutex<BTreeMap<(&str, SourceKind), ScenarioSupport>> = Mutex::new(BTreeMap::new());

/// Records that a scenario has passed with this support and these exemptions.
pub fn record(
    scenario: &'static str,
    source: SourceKind,
    support: SourceSupport,
    exempted: Vec<Exemption>,
) {
    let mut passed = PASSED.lock().unwrap_or_else(PoisonError::into_inner);
    passed.insert((scenario, source), ScenarioSupport { support, exempted });
}

/// Returns the verified support as Markdown tables; `None` if fewer than two sources were tested.
pub fn matrix() -> Option<String> {
    let passed = PASSED.lock().unwrap_or_else(PoisonError::into_inner);
    let tried = |source: &SourceKind| passed.keys().any(|(_, of)| of == source);
    let sources: Vec<_> = SourceKind::ALL.into_iter().filter(tried).collect();
    if sources.len() < 2 {
        return None;
    }
    let mut lines = vec![
        "| source | fully supported | reaped, events incomplete | reaped, with exemptions below | no wrong kill, survivors possible | unsupported |".into(),
        "|---|---|---|---|---|---|".into(),
    ];
    for source in &sources {
        let of_it = || passed.iter().filter(|((_, of), _)| of == source);
        let cells = [0, 1, 2, 3, 4].map(|column| {
            let counted = of_it().filter(|(_, result)| result.column() == column);
            counted.count().to_string()
        });
        lines.push(format!("| `{}` | {} |", source.name(), cells.join(" | ")));
    }
    lines.extend(
        [
            "",
            "| what | source | support and reason |",
            "|---|---|---|",
        ]
        .map(String::from),
    );
    for source in &sources {
        let name = source.name();
        if source.default_support() != SourceSupport::Full {
            lines.push(format!(
                "| everything not listed here | `{name}` | {} |",
                source.default_support()
            ));
        }
        for (_, what, support) in source.start_methods() {
            lines.push(format!("| {what} | `{name}` | {support} |"));
        }
    }
    for ((scenario, source), ScenarioSupport { support, exempted }) in passed.iter() {
        let name = source.name();
        if *support != source.default_support() {
            lines.push(format!("| scenario {scenario} | `{name}` | {support} |"));
        }
        let mut reasons: Vec<SourceSupport> =
            exempted.iter().map(|(_, support)| *support).collect();
        reasons.dedup();
        for reason in reasons {
            let roles = exempted.iter().filter(|(_, support)| *support == reason);
            let roles: Vec<&str> = roles.map(|(role, _)| *role).collect();
            let roles = roles.join(", ");
            lines.push(format!(
                "| {roles} in scenario {scenario} | `{name}` | {reason} |"
            ));
        }
    }
    Some(lines.join("\n"))
}

impl ScenarioSupport {
    fn column(&self) -> usize {
        match self.support {
            SourceSupport::NoWrongKill(_) => 3,
            SourceSupport::Unsupported(_) => 4,
            SourceSupport::Full | SourceSupport::ReapsAll(_) if !self.exempted.is_empty() => 2,
            SourceSupport::Full => 0,
            SourceSupport::ReapsAll(_) => 1,
        }
    }
}

impl fmt::Display for SourceSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceSupport::Full => f.write_str("fully supported"),
            SourceSupport::ReapsAll(why) => write!(f, "reaped; not reported: {why}"),
            SourceSupport::NoWrongKill(why) => write!(f, "may survive: {why}"),
            SourceSupport::Unsupported(why) => write!(f, "unsupported: {why}"),
        }
    }
}
