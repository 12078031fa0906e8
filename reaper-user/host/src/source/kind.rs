//! The kinds of sources, the best first, and the choice among them.

use std::fmt;
use std::str::FromStr;

/// A source by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    #[cfg(target_os = "linux")]
    Ebpf,
    #[cfg(target_os = "linux")]
    ProcConnector,
    /// Polls of the process table: each system's own.
    Scan,
}

impl SourceKind {
    /// All that this system has, the best first.
    #[cfg(target_os = "linux")]
    pub const ALL: [SourceKind; 3] = [
        SourceKind::Ebpf,
        SourceKind::ProcConnector,
        SourceKind::Scan,
    ];
    #[cfg(target_os = "macos")]
    pub const ALL: [SourceKind; 1] = [SourceKind::Scan];

    /// Returns its name in configs, on command lines and in the stream.
    pub const fn name(self) -> &'static str {
        match self {
            #[cfg(target_os = "linux")]
            SourceKind::Ebpf => "ebpf",
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => "proc-connector",
            SourceKind::Scan if cfg!(target_os = "macos") => "darwin",
            SourceKind::Scan => "procfs",
        }
    }

    /// Returns what it cannot report, in words for a person; `None` for the probes, which report all.
    pub fn limitation(self) -> Option<&'static str> {
        match self {
            #[cfg(target_os = "linux")]
            SourceKind::Ebpf => None,
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => Some(
                "programs are looked up after they have started, so what lives shorter than that look is not recognised; \
                 nothing is followed while this service is down",
            ),
            SourceKind::Scan if cfg!(target_os = "macos") => Some(MACOS_LIMITATION),
            SourceKind::Scan => Some(
                "processes are found by looking, so what leaves its parent between two looks is only inferred to be an \
                 agent's, and not reaped unless a rule says so; nothing is followed while this service is down",
            ),
        }
    }
}

/// What is to be used: a source, or the first of [`SourceKind::ALL`] that can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceChoice(Option<SourceKind>);

/// A source that could not be used, and why.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RejectedSource {
    pub source: &'static str,
    pub reason: String,
}

impl SourceChoice {
    pub const AUTO: SourceChoice = SourceChoice(None);

    pub fn of(kind: SourceKind) -> SourceChoice {
        SourceChoice(Some(kind))
    }

    /// All that can be asked for, by the names by which that is done.
    pub fn all() -> Vec<(&'static str, SourceChoice)> {
        let auto = ("auto", SourceChoice::AUTO);
        let named = SourceKind::ALL.map(|kind| (kind.name(), SourceChoice::of(kind)));
        [auto].into_iter().chain(named).collect()
    }

    pub fn name(self) -> &'static str {
        self.0.map_or("auto", SourceKind::name)
    }

    /// What is tried, in order.
    pub fn kinds(&self) -> &[SourceKind] {
        match &self.0 {
            None => &SourceKind::ALL,
            Some(kind) => std::slice::from_ref(kind),
        }
    }
}

impl FromStr for SourceChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<SourceChoice, String> {
        let all = SourceChoice::all();
        match all.iter().find(|(known, _)| *known == name) {
            Some((_, choice)) => Ok(*choice),
            None => {
                let names: Vec<_> = all.iter().map(|(known, _)| *known).collect();
                Err(format!("known are {}", names.join(", ")))
            }
        }
    }
}

/// On macOS the kernel reports forks and exits, but not which process was born, and has no pidfds.
const MACOS_LIMITATION: &str = "the kernel tells of forks and exits, but who was born is found by looking: of what has come and \
    gone by then nothing is known, and what it has left is only inferred to be an agent's, and not reaped unless a rule \
    says so; who has a pid is asked right before each signal, and in the microseconds after that it could become another's; \
    nothing is followed while this service is down";

impl fmt::Display for RejectedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be used: {}", self.source, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_choice_has_the_name_of_what_it_asks_for() {
        for (name, choice) in SourceChoice::all() {
            assert_eq!(choice.name(), name);
            assert_eq!(name.parse(), Ok(choice));
        }
        assert_eq!(SourceChoice::default().kinds(), SourceKind::ALL);
        assert_eq!(
            SourceChoice::of(SourceKind::Scan).kinds(),
            [SourceKind::Scan]
        );
        let unknown = "bpf".parse::<SourceChoice>();
        assert!(unknown.is_err_and(|known| known.starts_with("known are auto, ")));
    }

    #[test]
    fn what_each_lacks_is_said() {
        for kind in SourceKind::ALL {
            assert_eq!(kind.limitation().is_none(), kind == SourceKind::Ebpf);
        }
        assert!(MACOS_LIMITATION.contains("right before each signal"));
        let of_macos = SourceKind::Scan.limitation() == Some(MACOS_LIMITATION);
        assert_eq!(of_macos, cfg!(target_os = "macos"));
    }
}
