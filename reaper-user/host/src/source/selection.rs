//! Opens the best source that can be used, or the one that was requested.

#[cfg(target_os = "macos")]
use super::darwin::kernel::Scan;
#[cfg(target_os = "linux")]
use super::ebpf::{self, EbpfSource};
use super::error::SourceError;
use super::event_source::Source;
use super::kind::{RejectedSource, SourceChoice, SourceKind};
use super::probes;
#[cfg(target_os = "linux")]
use super::proc_connector::{self, ProcConnector};
#[cfg(target_os = "linux")]
use super::scan::Scan;
use super::scan::interval;
use reaper_model::ruleset::{NameTable, Ruleset};

/// A source, and those before it that could not be used.
pub type Opened = (Box<dyn Source + Send>, Vec<RejectedSource>);

/// What each source is told to be.
pub struct SourceOptions<'a> {
    pub probes: &'a probes::ProbeOptions,
    pub names: &'a NameTable,
    pub scan: interval::ScanOptions,
}

impl SourceKind {
    /// Whether it can be used here; it is let go again.
    ///
    /// # Errors
    /// Why not.
    pub fn probe(self) -> Result<(), SourceError> {
        match self {
            #[cfg(target_os = "linux")]
            SourceKind::Ebpf => Ok(ebpf::probe()?),
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => Ok(proc_connector::probe()?),
            SourceKind::Scan => Ok(Scan::open(&interval::ScanOptions::default()).map(drop)?),
        }
    }

    fn open(self, wanted: &SourceOptions<'_>) -> Result<Box<dyn Source + Send>, SourceError> {
        Ok(match self {
            #[cfg(target_os = "linux")]
            SourceKind::Ebpf => Box::new(EbpfSource::open(wanted.probes, wanted.names)?),
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => Box::new(ProcConnector::open(wanted.probes.ring_size)?),
            SourceKind::Scan => Box::new(Scan::open(&wanted.scan)?),
        })
    }
}

/// Opens the first that can be used, and tells which could not.
///
/// # Errors
/// None can, and why the last of them cannot; or what no other source would be better for: another service is at
/// work, or the object that was named is none.
pub fn open(choice: SourceChoice, wanted: &SourceOptions<'_>) -> Result<Opened, SourceError> {
    open_first(choice.kinds(), wanted)
}

/// Opens the best that can be used of those below one that has failed at work, and tells which could not; where that was
/// the last, it is tried once more. `room` is for what the kernel tells and is still to be read, in bytes.
///
/// # Errors
/// None can, and why the last of them cannot.
pub fn open_fallback(
    failed: SourceKind,
    room: u32,
    scan: interval::ScanOptions,
) -> Result<Opened, SourceError> {
    let below = SourceKind::ALL.iter().position(|kind| *kind == failed);
    let below = below.map_or(&[][..], |at| &SourceKind::ALL[at + 1..]);
    let probes = probes::ProbeOptions {
        ring_size: room,
        ..probes::ProbeOptions::default()
    };
    let wanted = SourceOptions {
        probes: &probes,
        names: &Ruleset::default().names(),
        scan,
    };
    open_first(below, &wanted)
}

fn open_first(kinds: &[SourceKind], wanted: &SourceOptions<'_>) -> Result<Opened, SourceError> {
    let mut passed = Vec::new();
    let (last, before) = kinds.split_last().unwrap_or((&SourceKind::Scan, &[]));
    for kind in before {
        match kind.open(wanted) {
            Ok(source) => return Ok((source, passed)),
            Err(error) if error.is_final() => return Err(error),
            Err(error) => passed.push(RejectedSource {
                source: kind.name(),
                reason: error.to_string(),
            }),
        }
    }
    Ok((last.open(wanted)?, passed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::ebpf::EbpfError;

    #[test]
    fn below_each_there_is_one_that_anybody_can_use() {
        let options = interval::ScanOptions::default();
        for failed in SourceKind::ALL {
            let (source, passed) = open_fallback(failed, 1 << 20, options).expect("a scan");
            let between = SourceKind::ALL
                .into_iter()
                .skip_while(|kind| *kind != failed)
                .skip(1)
                .take_while(|kind| *kind != source.kind())
                .map(SourceKind::name);
            assert!(passed.iter().map(|passed| passed.source).eq(between));
            assert!(source.kind() != failed || failed == SourceKind::Scan);
        }
    }

    #[test]
    fn what_was_named_wrongly_is_no_reason_for_another_source() {
        let abi = SourceError::Ebpf(EbpfError::Abi { found: 1 });
        assert!(abi.is_final());
        let proc = std::io::Error::other("no").into();
        assert!(!SourceError::Ebpf(EbpfError::NotPermitted(proc)).is_final());
    }
}
