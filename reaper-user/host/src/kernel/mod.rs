//! What the engine uses of the kernel beside its source of events, as traits.
//!
//! [`Kernel::open`] gives the real one. A simulated one implements the same traits, so that the engine runs on it unchanged:
//!
//! | trait | the real one |
//! |---|---|
//! | [`Clock`] | `clock_gettime(2)` |
//! | [`ProcessTable`] | [`Procfs`] |
//! | [`Signals`] and [`ProcessHandle`] | pidfds, and epoll for their exits |
//! | [`FactReader`] | [`FactPool`], threads that read /proc |
//! | [`Source`] | the sources in [`source`](crate::source) |

mod clock;
mod signals;

use std::sync::Arc;

pub use clock::{Clock, Sleep, SystemClock};
pub use signals::{Signals, WatchedHandle};

pub use crate::source::ProcessTable;
pub use crate::sys::process_handle::ProcessHandle;

use crate::facts::{FactPool, FactReader};
use crate::source::kind::{RejectedSource, SourceKind};
use crate::source::procfs::Procfs;
use crate::source::scan::interval::ScanOptions;
use crate::source::{Source, SourceError, selection};
use crate::sys::exit_poll::ExitPoll;
use reaper_model::ruleset::Ruleset;

/// Returns a reader of the facts that these rules need.
pub type StartFacts = Box<dyn Fn(&Ruleset) -> Box<dyn FactReader>>;

/// Opens the best source below one that has failed at work. Also returns which better ones could not be opened.
///
/// # Errors
/// None can be opened, and why the last one cannot.
pub type OpenFallback =
    Box<dyn Fn(SourceKind) -> Result<(Box<dyn Source>, Vec<RejectedSource>), SourceError>>;

/// See the module.
pub struct Kernel {
    pub clock: Arc<dyn Clock>,
    pub processes: Arc<dyn ProcessTable>,
    pub signals: Arc<dyn Signals>,
    pub start_facts: StartFacts,
    pub open_fallback: OpenFallback,
}

impl Kernel {
    /// Returns the real kernel. `ring_size`, in bytes, and `scan` are for a source that has to replace a failed one.
    ///
    /// # Errors
    /// As `epoll_create1(2)`.
    pub fn open(ring_size: u32, scan: ScanOptions) -> nix::Result<Kernel> {
        Ok(Kernel {
            clock: Arc::new(SystemClock),
            processes: Arc::new(Procfs::default()),
            signals: Arc::new(ExitPoll::new()?),
            start_facts: Box::new(|rules| Box::new(FactPool::new("/proc", rules.clone()))),
            open_fallback: Box::new(move |failed| {
                let (source, rejected) = selection::open_fallback(failed, ring_size, scan)?;
                Ok((source as Box<dyn Source>, rejected))
            }),
        })
    }
}
