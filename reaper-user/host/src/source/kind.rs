//! The kinds of sources, by priority, and the user's choice among them.

use std::fmt;
use std::str::FromStr;

/// A kind of source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// Kernel probes.
    #[cfg(target_os = "linux")]
    Ebpf,
    /// The kernel's proc connector, a netlink socket.
    #[cfg(target_os = "linux")]
    ProcConnector,
    /// Scans of the process table.
    Scan,
}

impl SourceKind {
    /// All kinds that this operating system has, highest priority first.
    #[cfg(target_os = "linux")]
    pub const ALL: [SourceKind; 3] = [
        SourceKind::Ebpf,
        SourceKind::ProcConnector,
        SourceKind::Scan,
    ];
    /// All kinds that this operating system has.
    #[cfg(target_os = "macos")]
    pub const ALL: [SourceKind; 1] = [SourceKind::Scan];

    /// Returns its name in configs, on command lines and in the stream. The scan is `procfs` on Linux and `darwin` on
    /// macOS.
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

    /// Returns a text for users about the events that it misses even without overload; `None` for the probes, which
    /// miss none.
    pub fn limitation(self) -> Option<&'static str> {
        match self {
            #[cfg(target_os = "linux")]
            SourceKind::Ebpf => None,
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => Some(
                "programs are looked up after they start, so a process that exits before its lookup is not recognised; \
                 no process is tracked while the service is down",
            ),
            SourceKind::Scan if cfg!(target_os = "macos") => Some(MACOS_LIMITATION),
            SourceKind::Scan => Some(
                "processes are found by scanning /proc, so a process that loses its parent between two scans is only \
                 inferred to belong to an agent, and not reaped unless a rule says so; no process is tracked while the \
                 service is down",
            ),
        }
    }
}

/// The source to use: a given kind, or the first usable one of [`SourceKind::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceChoice(Option<SourceKind>);

/// A source that could not be used, or that failed, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RejectedSource {
    /// Name of the source.
    pub source: &'static str,
    /// Error message.
    pub reason: String,
}

impl SourceChoice {
    /// The first usable source.
    pub const AUTO: SourceChoice = SourceChoice(None);

    /// Returns the choice of this kind only.
    pub fn of(kind: SourceKind) -> SourceChoice {
        SourceChoice(Some(kind))
    }

    /// Returns all choices by their names in configs and on command lines.
    pub fn all() -> Vec<(&'static str, SourceChoice)> {
        let auto = ("auto", SourceChoice::AUTO);
        let named = SourceKind::ALL.map(|kind| (kind.name(), SourceChoice::of(kind)));
        [auto].into_iter().chain(named).collect()
    }

    /// Returns the name in configs and on command lines.
    pub fn name(self) -> &'static str {
        self.0.map_or("auto", SourceKind::name)
    }

    /// Returns the kinds to try, in order.
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
                Err(format!("known sources: {}", names.join(", ")))
            }
        }
    }
}

/// On macOS the kernel reports forks and exits, but not which process was forked, and has no pidfds.
const MACOS_LIMITATION: &str = "the kernel reports forks and exits, but new processes are found by scanning: a process \
    that starts and exits between two scans stays unknown, and its children are only inferred to belong to an agent, and \
    not reaped unless a rule says so; the identity of a process is checked right before each signal, but its pid could be \
    reused in the microseconds in between; no process is tracked while the service is down";

impl fmt::Display for RejectedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be used: {}", self.source, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_choice_parses_from_its_name() {
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
        assert!(unknown.is_err_and(|known| known.starts_with("known sources: auto, ")));
    }

    #[test]
    fn each_source_but_the_probes_has_a_limitation() {
        for kind in SourceKind::ALL {
            assert_eq!(kind.limitation().is_none(), kind == SourceKind::Ebpf);
        }
        assert!(MACOS_LIMITATION.contains("right before each signal"));
        let of_macos = SourceKind::Scan.limitation() == Some(MACOS_LIMITATION);
        assert_eq!(of_macos, cfg!(target_os = "macos"));
    }
}
