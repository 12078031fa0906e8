//! Which source is used: the best one that can be, or the one that was asked for.

use std::fmt;
use std::str::FromStr;

#[cfg(target_os = "linux")]
use super::proc_connector::{self, ProcConnector};
use super::{Scan, Source, SourceError, ebpf, scan};
use reaper_model::agent::NameTable;

/// What is to be used: a source, or the first of [`SourceKind::ALL`] that can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceChoice(Option<SourceKind>);

/// A source by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    Ebpf,
    #[cfg(target_os = "linux")]
    ProcConnector,
    /// What the process table shows: each system's own.
    Scan,
}

/// A source that could not be used, and why.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RejectedSource {
    pub source: &'static str,
    pub reason: String,
}

/// What each source is told to be.
pub struct SourceSelection<'a> {
    pub choice: SourceChoice,
    pub probes: &'a ebpf::Options,
    pub names: &'a NameTable,
    pub scan: scan::Options,
}

impl SourceChoice {
    pub const AUTO: SourceChoice = SourceChoice(None);

    pub fn of(rung: SourceKind) -> SourceChoice {
        SourceChoice(Some(rung))
    }

    /// All that can be asked for, by the names by which that is done.
    pub fn all() -> Vec<(&'static str, SourceChoice)> {
        let auto = ("auto", SourceChoice::AUTO);
        let named = SourceKind::ALL.map(|rung| (rung.name(), SourceChoice::of(rung)));
        [auto].into_iter().chain(named).collect()
    }

    pub fn name(self) -> &'static str {
        self.0.map_or("auto", SourceKind::name)
    }

    /// What is tried, in order.
    pub fn rungs(&self) -> &[SourceKind] {
        match &self.0 {
            None => &SourceKind::ALL,
            Some(rung) => std::slice::from_ref(rung),
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

    pub const fn name(self) -> &'static str {
        match self {
            SourceKind::Ebpf => "ebpf",
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => "proc-connector",
            SourceKind::Scan if cfg!(target_os = "macos") => "darwin",
            SourceKind::Scan => "procfs",
        }
    }

    /// What it cannot tell, in words for a person; `None` for the probes, which tell all.
    pub fn limitation(self) -> Option<&'static str> {
        match self {
            SourceKind::Ebpf => None,
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => Some(
                "programs are looked up after they have started, so what lives shorter than that look is not recognised; \
                 nothing is followed while this service is down",
            ),
            SourceKind::Scan if cfg!(target_os = "macos") => Some(MACOS_LACKS),
            SourceKind::Scan => Some(
                "processes are found by looking, so what leaves its parent between two looks is only inferred to be an \
                 agent's, and not reaped unless a rule says so; nothing is followed while this service is down",
            ),
        }
    }

    /// Whether it can be used here; it is let go again.
    ///
    /// # Errors
    /// Why not.
    pub fn probe(self) -> Result<(), SourceError> {
        match self {
            SourceKind::Ebpf => Ok(ebpf::probe()?),
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => Ok(proc_connector::probe()?),
            SourceKind::Scan => Ok(Scan::open(&scan::Options::default()).map(drop)?),
        }
    }

    fn open(self, wanted: &SourceSelection<'_>) -> Result<Source, SourceError> {
        Ok(match self {
            SourceKind::Ebpf => {
                Source::Ebpf(Box::new(ebpf::Source::open(wanted.probes, wanted.names)?))
            }
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => connector(wanted.probes.ring_size)?,
            SourceKind::Scan => scan(&wanted.scan)?,
        })
    }
}

/// There the kernel sends word of forks and exits, but not of who was born, and gives no pidfds.
const MACOS_LACKS: &str = "the kernel tells of forks and exits, but who was born is found by looking: of what has come and \
    gone by then nothing is known, and what it has left is only inferred to be an agent's, and not reaped unless a rule \
    says so; who has a pid is asked right before each signal, and in the microseconds after that it could become another's; \
    nothing is followed while this service is down";

impl fmt::Display for RejectedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be used: {}", self.source, self.reason)
    }
}

/// Opens the first that can be used, and tells which could not.
///
/// # Errors
/// None can, and why the last of them cannot; or what no other source would be better for: another service is at
/// work, or the object that was named is none.
pub fn open(wanted: &SourceSelection<'_>) -> Result<(Source, Vec<RejectedSource>), SourceError> {
    let mut passed = Vec::new();
    let (last, before) = wanted
        .choice
        .rungs()
        .split_last()
        .unwrap_or((&SourceKind::Scan, &[]));
    for rung in before {
        match rung.open(wanted) {
            Ok(source) => return Ok((source, passed)),
            Err(error) if error.is_final() => return Err(error),
            Err(error) => passed.push(RejectedSource {
                source: rung.name(),
                reason: error.to_string(),
            }),
        }
    }
    Ok((last.open(wanted)?, passed))
}

/// Opens the best that can be used of those below one that has failed at work, and tells which could not; where that was
/// the last, it is tried once more. `room` is for what the kernel tells and is still to be read, in bytes.
///
/// # Errors
/// None can, and why the last of them cannot.
#[cfg_attr(
    target_os = "macos",
    expect(unused_variables, unused_mut, reason = "there is but one source")
)]
pub fn below(
    failed: SourceKind,
    room: u32,
    options: &scan::Options,
) -> Result<(Source, Vec<RejectedSource>), SourceError> {
    let mut passed = Vec::new();
    #[cfg(target_os = "linux")]
    if failed == SourceKind::Ebpf {
        match connector(room) {
            Ok(source) => return Ok((source, passed)),
            Err(error) => passed.push(RejectedSource {
                source: SourceKind::ProcConnector.name(),
                reason: error.to_string(),
            }),
        }
    }
    Ok((scan(options)?, passed))
}

#[cfg(target_os = "linux")]
fn connector(room: u32) -> Result<Source, SourceError> {
    Ok(Source::ProcConnector(Box::new(ProcConnector::open(room)?)))
}

fn scan(options: &scan::Options) -> Result<Source, SourceError> {
    Ok(Source::Scan(Box::new(Scan::open(options)?)))
}

#[cfg(target_os = "linux")]
impl SourceError {
    /// Whether it says nothing about what the host can do: another source is no way out.
    fn is_final(&self) -> bool {
        use ebpf::SourceError::{Abi, Foreign, Object, OtherNamespace, Pin};
        matches!(
            self,
            SourceError::Ebpf(
                Abi { .. } | Foreign { .. } | Object { .. } | OtherNamespace | Pin(_)
            )
        )
    }
}

#[cfg(target_os = "macos")]
impl SourceError {
    /// There is no other source.
    fn is_final(&self) -> bool {
        true
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
        assert_eq!(SourceChoice::default().rungs(), SourceKind::ALL);
        assert_eq!(
            SourceChoice::of(SourceKind::Scan).rungs(),
            [SourceKind::Scan]
        );
        let unknown = "bpf".parse::<SourceChoice>();
        assert!(unknown.is_err_and(|known| known.starts_with("known are auto, ")));
    }

    #[test]
    fn below_each_there_is_one_that_anybody_can_use() {
        let options = scan::Options::default();
        for failed in SourceKind::ALL {
            let (source, passed) = below(failed, 1 << 20, &options).expect("a scan");
            let between = SourceKind::ALL
                .into_iter()
                .skip_while(|rung| *rung != failed)
                .skip(1)
                .take_while(|rung| *rung != source.kind())
                .map(SourceKind::name);
            assert!(passed.iter().map(|passed| passed.source).eq(between));
            assert!(source.kind() != failed || failed == SourceKind::Scan);
        }
    }

    #[test]
    fn what_each_lacks_is_said() {
        for rung in SourceKind::ALL {
            assert_eq!(rung.limitation().is_none(), rung == SourceKind::Ebpf);
        }
        assert!(MACOS_LACKS.contains("right before each signal"));
        let of_macos = SourceKind::Scan.limitation() == Some(MACOS_LACKS);
        assert_eq!(of_macos, cfg!(target_os = "macos"));
    }

    #[test]
    fn what_was_named_wrongly_is_no_reason_for_another_source() {
        let abi = SourceError::Ebpf(ebpf::SourceError::Abi { found: 1 });
        assert!(abi.is_final());
        let proc = std::io::Error::other("no").into();
        assert!(!SourceError::Ebpf(ebpf::SourceError::NotPermitted(proc)).is_final());
    }
}
