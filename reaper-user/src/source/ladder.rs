//! Which source is used: the best one that can be, or the one that was asked for.

use std::fmt;
use std::str::FromStr;

#[cfg(target_os = "linux")]
use super::proc_connector::{self, ProcConnector};
use super::{Scan, Source, SourceError, ebpf, scan};
use reaper_model::agent::NameTable;

/// What is to be used: a source, or the first of [`Rung::ALL`] that can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice(Option<Rung>);

/// A source by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    Ebpf,
    #[cfg(target_os = "linux")]
    ProcConnector,
    /// What the process table shows: each system's own.
    Scan,
}

/// A source that could not be used, and why.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Passed {
    pub source: &'static str,
    pub reason: String,
}

/// What each source is told to be.
pub struct Wanted<'a> {
    pub choice: Choice,
    pub probes: &'a ebpf::Options,
    pub names: &'a NameTable,
    pub scan: scan::Options,
}

impl Choice {
    pub const AUTO: Choice = Choice(None);

    pub fn of(rung: Rung) -> Choice {
        Choice(Some(rung))
    }

    /// All that can be asked for, by the names by which that is done.
    pub fn all() -> Vec<(&'static str, Choice)> {
        let auto = ("auto", Choice::AUTO);
        let named = Rung::ALL.map(|rung| (rung.name(), Choice::of(rung)));
        [auto].into_iter().chain(named).collect()
    }

    pub fn name(self) -> &'static str {
        self.0.map_or("auto", Rung::name)
    }

    /// What is tried, in order.
    pub fn rungs(&self) -> &[Rung] {
        match &self.0 {
            None => &Rung::ALL,
            Some(rung) => std::slice::from_ref(rung),
        }
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(name: &str) -> Result<Choice, String> {
        let all = Choice::all();
        match all.iter().find(|(known, _)| *known == name) {
            Some((_, choice)) => Ok(*choice),
            None => {
                let names: Vec<_> = all.iter().map(|(known, _)| *known).collect();
                Err(format!("known are {}", names.join(", ")))
            }
        }
    }
}

impl Rung {
    /// All that this system has, the best first.
    #[cfg(target_os = "linux")]
    pub const ALL: [Rung; 3] = [Rung::Ebpf, Rung::ProcConnector, Rung::Scan];
    #[cfg(target_os = "macos")]
    pub const ALL: [Rung; 1] = [Rung::Scan];

    pub const fn name(self) -> &'static str {
        match self {
            Rung::Ebpf => "ebpf",
            #[cfg(target_os = "linux")]
            Rung::ProcConnector => "proc-connector",
            Rung::Scan if cfg!(target_os = "macos") => "darwin",
            Rung::Scan => "procfs",
        }
    }

    /// What it cannot tell, in words for a person; `None` for the probes, which tell all.
    pub fn lacks(self) -> Option<&'static str> {
        match self {
            Rung::Ebpf => None,
            #[cfg(target_os = "linux")]
            Rung::ProcConnector => Some(
                "programs are looked up after they have started, so what lives shorter than that look is not recognised; \
                 nothing is followed while this service is down",
            ),
            Rung::Scan if cfg!(target_os = "macos") => Some(MACOS_LACKS),
            Rung::Scan => Some(
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
            Rung::Ebpf => Ok(ebpf::probe()?),
            #[cfg(target_os = "linux")]
            Rung::ProcConnector => Ok(proc_connector::probe()?),
            Rung::Scan => Ok(Scan::open(&scan::Options::default()).map(drop)?),
        }
    }

    fn open(self, wanted: &Wanted<'_>) -> Result<Source, SourceError> {
        Ok(match self {
            Rung::Ebpf => Source::Ebpf(Box::new(ebpf::Source::open(wanted.probes, wanted.names)?)),
            #[cfg(target_os = "linux")]
            Rung::ProcConnector => connector(wanted.probes.ring_size)?,
            Rung::Scan => scan(&wanted.scan)?,
        })
    }
}

/// There the kernel sends word of forks and exits, but not of who was born, and gives no pidfds.
const MACOS_LACKS: &str = "the kernel tells of forks and exits, but who was born is found by looking: of what has come and \
    gone by then nothing is known, and what it has left is only inferred to be an agent's, and not reaped unless a rule \
    says so; who has a pid is asked right before each signal, and in the microseconds after that it could become another's; \
    nothing is followed while this service is down";

impl fmt::Display for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be used: {}", self.source, self.reason)
    }
}

/// Opens the first that can be used, and tells which could not.
///
/// # Errors
/// None can, and why the last of them cannot; or what no other source would be better for: another service is at
/// work, or the object that was named is none.
pub fn open(wanted: &Wanted<'_>) -> Result<(Source, Vec<Passed>), SourceError> {
    let mut passed = Vec::new();
    let (last, before) = wanted
        .choice
        .rungs()
        .split_last()
        .unwrap_or((&Rung::Scan, &[]));
    for rung in before {
        match rung.open(wanted) {
            Ok(source) => return Ok((source, passed)),
            Err(error) if error.is_final() => return Err(error),
            Err(error) => passed.push(Passed {
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
    failed: Rung,
    room: u32,
    options: &scan::Options,
) -> Result<(Source, Vec<Passed>), SourceError> {
    let mut passed = Vec::new();
    #[cfg(target_os = "linux")]
    if failed == Rung::Ebpf {
        match connector(room) {
            Ok(source) => return Ok((source, passed)),
            Err(error) => passed.push(Passed {
                source: Rung::ProcConnector.name(),
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
        for (name, choice) in Choice::all() {
            assert_eq!(choice.name(), name);
            assert_eq!(name.parse(), Ok(choice));
        }
        assert_eq!(Choice::default().rungs(), Rung::ALL);
        assert_eq!(Choice::of(Rung::Scan).rungs(), [Rung::Scan]);
        let unknown = "bpf".parse::<Choice>();
        assert!(unknown.is_err_and(|known| known.starts_with("known are auto, ")));
    }

    #[test]
    fn below_each_there_is_one_that_anybody_can_use() {
        let options = scan::Options::default();
        for failed in Rung::ALL {
            let (source, passed) = below(failed, 1 << 20, &options).expect("a scan");
            let between = Rung::ALL
                .into_iter()
                .skip_while(|rung| *rung != failed)
                .skip(1)
                .take_while(|rung| *rung != source.rung())
                .map(Rung::name);
            assert!(passed.iter().map(|passed| passed.source).eq(between));
            assert!(source.rung() != failed || failed == Rung::Scan);
        }
    }

    #[test]
    fn what_each_lacks_is_said() {
        for rung in Rung::ALL {
            assert_eq!(rung.lacks().is_none(), rung == Rung::Ebpf);
        }
        assert!(MACOS_LACKS.contains("right before each signal"));
        let of_macos = Rung::Scan.lacks() == Some(MACOS_LACKS);
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
