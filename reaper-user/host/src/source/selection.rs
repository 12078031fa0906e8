//! Opens the usable source of the highest priority, or the requested one.

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

/// A source, and the sources of higher priority that could not be used.
pub type Opened = (Box<dyn Source + Send>, Vec<RejectedSource>);

/// Settings of the sources.
pub struct SourceOptions<'a> {
    /// Settings of the kernel probes. The size of their ring is also that of the proc connector's receive buffer.
    pub probes: &'a probes::ProbeOptions,
    /// Program names that rules can match, for the probes.
    pub names: &'a NameTable,
    /// Intervals of the scan.
    pub scan: interval::ScanOptions,
}

impl SourceKind {
    /// Checks that the source can be used on this host. Opens it briefly.
    ///
    /// # Errors
    /// The source cannot be used.
    pub fn probe(self) -> Result<(), SourceError> {
        match self {
            #[cfg(target_os = "linux")]
            SourceKind::Ebpf => Ok(ebpf::probe()?),
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => Ok(proc_connector::probe()?),
            SourceKind::Scan => Ok(Scan::open(&interval::ScanOptions::default()).map(drop)?),
        }
    }

    fn open(self, options: &SourceOptions<'_>) -> Result<Box<dyn Source + Send>, SourceError> {
        Ok(match self {
            #[cfg(target_os = "linux")]
            SourceKind::Ebpf => Box::new(EbpfSource::open(options.probes, options.names)?),
            #[cfg(target_os = "linux")]
            SourceKind::ProcConnector => Box::new(ProcConnector::open(options.probes.ring_size)?),
            SourceKind::Scan => Box::new(Scan::open(&options.scan)?),
        })
    }
}

/// Opens the first usable source of the choice.
///
/// # Errors
/// Returns the error of the last source if none can be used. Stops at an error that another source would only hide
/// ([`SourceError::is_final`]): another service is running, or the given object file is unusable.
pub fn open(choice: SourceChoice, options: &SourceOptions<'_>) -> Result<Opened, SourceError> {
    open_first(choice.kinds(), options)
}

/// Opens the first usable source of lower priority than the one that has failed. If that was the last one, opens it
/// again.
///
/// `buffer_size` is the size in bytes of the proc connector's receive buffer.
///
/// # Errors
/// Returns the error of the last source if none can be used.
pub fn open_fallback(
    failed: SourceKind,
    buffer_size: u32,
    scan: interval::ScanOptions,
) -> Result<Opened, SourceError> {
    let below = SourceKind::ALL.iter().position(|kind| *kind == failed);
    let below = below.map_or(&[][..], |at| &SourceKind::ALL[at + 1..]);
    let probes = probes::ProbeOptions {
        ring_size: buffer_size,
        ..probes::ProbeOptions::default()
    };
    let options = SourceOptions {
        probes: &probes,
        names: &Ruleset::default().names(),
        scan,
    };
    open_first(below, &options)
}

/// Opens the first usable of these kinds, or the scan if none exist.
fn open_first(kinds: &[SourceKind], options: &SourceOptions<'_>) -> Result<Opened, SourceError> {
    let mut rejected = Vec::new();
    let (last, before) = kinds.split_last().unwrap_or((&SourceKind::Scan, &[]));
    for kind in before {
        match kind.open(options) {
            Ok(source) => return Ok((source, rejected)),
            Err(error) if error.is_final() => return Err(error),
            Err(error) => rejected.push(RejectedSource {
                source: kind.name(),
                reason: error.to_string(),
            }),
        }
    }
    Ok((last.open(options)?, rejected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::ebpf::EbpfError;

    #[test]
    fn fallback_of_each_source_is_the_next_usable_one() {
        let options = interval::ScanOptions::default();
        for failed in SourceKind::ALL {
            let (source, rejected) = open_fallback(failed, 1 << 20, options).expect("a scan");
            let between = SourceKind::ALL
                .into_iter()
                .skip_while(|kind| *kind != failed)
                .skip(1)
                .take_while(|kind| *kind != source.kind())
                .map(SourceKind::name);
            assert!(rejected.iter().map(|rejected| rejected.source).eq(between));
            assert!(source.kind() != failed || failed == SourceKind::Scan);
        }
    }

    #[test]
    fn unusable_object_is_final_and_missing_permission_is_not() {
        let abi = SourceError::Ebpf(EbpfError::Abi { found: 1 });
        assert!(abi.is_final());
        let proc = std::io::Error::other("no").into();
        assert!(!SourceError::Ebpf(EbpfError::NotPermitted(proc)).is_final());
    }
}
