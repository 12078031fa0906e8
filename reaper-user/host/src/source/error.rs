//! Errors of sources.

#[cfg(target_os = "linux")]
use super::ebpf::error::{EbpfError, PinError};
#[cfg(target_os = "linux")]
use super::proc_connector::error::ConnectorError;
use super::scan::error::ScanError;

/// Reason why a source cannot be used, or has stopped delivering events.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Error of the kernel probes.
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    Ebpf(#[from] EbpfError),
    /// Error of the proc connector.
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    ProcConnector(#[from] ConnectorError),
    /// Error of the scan of the process table.
    #[error(transparent)]
    Scan(#[from] ScanError),
}

#[cfg(target_os = "linux")]
impl SourceError {
    /// Returns whether the error must be reported, because falling back to another source would only hide it.
    ///
    /// True for a wrong or unreadable object file of the probes, for unusable pins, and for pins of another pid
    /// namespace. False if the host lacks support for the source.
    pub fn is_final(&self) -> bool {
        use EbpfError::{Abi, InvalidObject, Object, OtherNamespace, Pin};
        matches!(
            self,
            SourceError::Ebpf(
                Abi { .. } | InvalidObject { .. } | Object { .. } | OtherNamespace | Pin(_)
            )
        )
    }

    /// Returns whether the cause is that another service holds the lock on the pins.
    pub fn is_held(&self) -> bool {
        matches!(
            self,
            SourceError::Ebpf(EbpfError::Pin(PinError::Locked { .. }))
        )
    }
}

#[cfg(target_os = "macos")]
impl SourceError {
    /// Returns true: there is no other source.
    pub fn is_final(&self) -> bool {
        true
    }

    /// Returns false: nothing is pinned.
    pub fn is_held(&self) -> bool {
        false
    }
}
