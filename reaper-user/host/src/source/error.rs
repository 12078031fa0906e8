//! Why a source cannot be used, or delivers no events any more.

#[cfg(target_os = "linux")]
use super::ebpf::error::{EbpfError, PinError};
#[cfg(target_os = "linux")]
use super::proc_connector::error::ConnectorError;
use super::scan::error::ScanError;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    Ebpf(#[from] EbpfError),
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    ProcConnector(#[from] ConnectorError),
    #[error(transparent)]
    Scan(#[from] ScanError),
}

#[cfg(target_os = "linux")]
impl SourceError {
    /// Whether the error says nothing about what the host supports, so that another source is no way out.
    pub fn is_final(&self) -> bool {
        use EbpfError::{Abi, InvalidObject, Object, OtherNamespace, Pin};
        matches!(
            self,
            SourceError::Ebpf(
                Abi { .. } | InvalidObject { .. } | Object { .. } | OtherNamespace | Pin(_)
            )
        )
    }

    /// Whether another service holds the pins.
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
