//! What each source promises of the stories, and the harness holds it to: no more, and no less.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Where the daemon's events come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    Ebpf,
    ProcConnector,
    Procfs,
}

/// How much of a story a source tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Everything: each decision with its reason, each adopter, how the agent ended, each end confirmed.
    Whole,
    /// Everybody who is due is ended and nobody else is touched; the stream may lack what this says.
    Ended(&'static str),
    /// Nobody is wronged. Who is due may survive, for this reason.
    Harmless(&'static str),
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

    /// What it promises of a story that has no line of its own below.
    fn usually(self) -> Promise {
        match self {
            Source::Ebpf | Source::ProcConnector => Promise::Whole,
            Source::Procfs => Promise::Ended("how and when between two looks something happened"),
        }
    }

    fn but(self) -> &'static [(&'static str, Promise)] {
        match self {
            Source::Ebpf => &[],
            Source::ProcConnector => PROC_CONNECTOR,
            Source::Procfs => PROCFS,
        }
    }

    /// What it promises of the story of this name, in which those are started in these ways.
    pub fn promises<'a>(
        self,
        story: &str,
        starts: impl Iterator<Item = &'a str> + Clone,
    ) -> Promise {
        let but = self.but().iter().find(|(name, _)| *name == story);
        let words = || starts.clone().flat_map(|how| how.split(' '));
        match but {
            Some((_, promise)) => *promise,
            None if self != Source::Procfs => self.usually(),
            None if words().any(|word| ["double", "hops"].contains(&word)) => UNSEEN,
            None if words().any(|word| word == "hydra") => TOO_FAST,
            None => self.usually(),
        }
    }
}

const PROC_CONNECTOR: &[(&str, Promise)] = &[(
    "clone-parent-of-the-agent",
    Promise::Harmless("of a child by CLONE_PARENT nobody tells who made it"),
)];

const UNSEEN_WHY: &str = "its maker was gone before anybody looked";
/// Nobody has seen who made it.
const UNSEEN: Promise = Promise::Harmless(UNSEEN_WHY);
const TOO_FAST_WHY: &str = "it forks faster than anybody can look";
pub const TOO_FAST: Promise = Promise::Harmless(TOO_FAST_WHY);

const PROCFS: &[(&str, Promise)] = &[
    (
        "clone-parent-of-the-agent",
        Promise::Harmless("its parent is no member"),
    ),
    ("chain", UNSEEN),
    ("runaway", TOO_FAST),
    ("real-ssh-agent", UNSEEN),
    (
        "namespace-init",
        Promise::Harmless("the init of a pid namespace also has what others have brought there"),
    ),
];

/// How many stories came out as each source promises, by what it promises.
static KEPT: Mutex<BTreeMap<(Source, &str), usize>> = Mutex::new(BTreeMap::new());

/// A story has come out as promised.
pub fn count(source: Source, promise: Promise) {
    let what = match promise {
        Promise::Whole => "whole",
        Promise::Ended(_) => "ended",
        Promise::Harmless(_) => "harmless",
    };
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    *kept.entry((source, what)).or_default() += 1;
}

/// The promises that were kept, as a table; nothing where only one source was tried.
pub fn matrix() -> Option<String> {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let tried = |source: &Source| kept.keys().any(|(of, _)| of == source);
    let sources: Vec<_> = Source::ALL.into_iter().filter(tried).collect();
    if sources.len() < 2 {
        return None;
    }
    let mut lines = vec![
        "| source | told whole | ended, not all of it told | harmless, may leave some |".to_owned(),
        "|---|---|---|---|".to_owned(),
    ];
    for source in sources {
        let cells = ["whole", "ended", "harmless"];
        let cells = cells.map(|what| kept.get(&(source, what)).copied().unwrap_or(0).to_string());
        lines.push(format!("| {} | {} |", source.name(), cells.join(" | ")));
    }
    lines.push(String::new());
    for (what, why) in [
        ("is forked twice", UNSEEN_WHY),
        ("forks without end", TOO_FAST_WHY),
    ] {
        lines.push(format!("procfs, what {what}: may survive: {why}"));
    }
    for source in Source::ALL {
        for (story, promise) in source.but() {
            let why = match promise {
                Promise::Whole => continue,
                Promise::Ended(why) => format!("not told: {why}"),
                Promise::Harmless(why) => format!("may survive: {why}"),
            };
            lines.push(format!("{}, {story}: {why}", source.name()));
        }
    }
    Some(lines.join("\n"))
}
