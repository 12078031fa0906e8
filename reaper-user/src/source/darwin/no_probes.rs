//! What stands in the place of the kernel's probes where there is no BPF: types of which there are no values.
//!
//! The engine asks its source for what only probes have, and is told that there is none; so that it needs to know no
//! system from another, what it would then do with them has names here too.

use std::collections::HashMap;
use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use reaper_common::{RawKey, RootExit, SessionState};

use crate::source::{Drained, Lost};
use reaper_model::agent::NameTable;
use reaper_model::event::{Event, Membership, ProcessKey};

/// Why they cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("there is no BPF on this system")]
    Absent,
    #[error(transparent)]
    Pin(pins::PinError),
}

type Done = Result<(), SourceError>;

/// What a config says for them; none of it does anything here.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub ring_size: u32,
    pub max_members: u32,
    pub filter: bool,
    pub scoped: bool,
    pub kernel_reap: bool,
    pub pin: Option<pins::PinOptions>,
    pub log: bool,
    pub object: Option<PathBuf>,
}

/// What would outlive the service.
pub mod pins {
    use super::{Infallible, PathBuf};

    #[derive(Clone, Debug)]
    pub struct PinOptions {
        pub dir: PathBuf,
        pub name: String,
    }

    #[derive(Debug, thiserror::Error)]
    pub enum PinError {
        #[error("{by}")]
        Held { by: Infallible },
    }
}

/// # Errors
/// Always.
pub fn probe() -> Done {
    Err(SourceError::Absent)
}

/// Methods that nobody can call, as there is no value to call them on.
macro_rules! uncallable {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        $(pub fn $name(&self, $(_: $argument),*) $(-> $result)? {
            self.never()
        })*
    };
}

pub struct Source {
    pub state: State,
}

impl Source {
    /// # Errors
    /// Always.
    pub fn open(_: &Options, _: &NameTable) -> Result<Source, SourceError> {
        Err(SourceError::Absent)
    }

    fn never(&self) -> ! {
        match self.state {}
    }

    uncallable! {
        ring() -> &Ring;
        is_taken_up() -> bool;
        replaced_other_abi() -> bool;
        can_signal() -> bool;
        is_filtered() -> bool;
        reports_moves() -> bool;
        skipped() -> u64;
        pinned_at() -> Option<&Path>;
        drain(impl FnMut(Event)) -> Drained;
        table() -> &Table;
        logger() -> Result<Logger, SourceError>;
    }

    pub fn keep_pinned(&mut self) {
        self.never()
    }

    /// # Errors
    /// None.
    pub fn disarm(&mut self) -> Done {
        self.never()
    }
}

pub enum State {}

impl State {
    fn never(&self) -> ! {
        match *self {}
    }

    uncallable! {
        failure() -> Option<SourceError>;
        room() -> u32;
        roster() -> Result<MemberMap, SourceError>;
        set_membership(ProcessKey, Option<Membership>, Option<Membership>) -> Result<bool, SourceError>;
        remove(ProcessKey) -> Done;
        sessions() -> Vec<(ProcessKey, SessionState)>;
        root_exit(ProcessKey) -> Option<RootExit>;
        set_session(ProcessKey, Option<&SessionState>) -> Done;
        set_names(&NameTable) -> Done;
        set_idle(bool) -> Done;
        announce_escalations(bool) -> Done;
        set_kill_on_fork(u64) -> Done;
        enable_kernel_reap(bool) -> Done;
        await_probes();
        set_seeded(bool) -> Done;
        set_lost_told(u64) -> Done;
        lost_told() -> u64;
        is_complete() -> bool;
        lost() -> Lost;
        lost_total() -> u64;
        unfollowed() -> u64;
    }
}

pub enum Ring {}

impl Ring {
    fn never(&self) -> ! {
        match *self {}
    }

    uncallable! {
        size() -> u64;
        position() -> u64;
        behind() -> u64;
        held() -> u64;
        waiting() -> u64;
        release() -> Release;
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.never()
    }
}

// What is handed out by value has to be something, or the compiler tells that what follows is never reached.

#[derive(Clone, Copy)]
pub struct Release;

impl Release {
    pub fn up_to(self, _: u64) {}
}

pub struct MemberMap;

impl MemberMap {
    pub fn read(&self) -> HashMap<ProcessKey, Membership> {
        HashMap::new()
    }
}

#[derive(Clone)]
pub struct Table;

impl Table {
    /// # Errors
    /// None.
    pub fn read(&self) -> Result<Vec<Row>, SourceError> {
        Ok(Vec::new())
    }
}

pub struct Row {
    pub key: ProcessKey,
    pub pidfd_inode: u64,
}

pub struct Logger(Ring);

impl Logger {
    pub fn flush(&mut self) {}
}

impl AsFd for Logger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A key as maps in the kernel would have it.
pub fn raw_key(key: ProcessKey) -> RawKey {
    RawKey {
        pid: key.pid,
        _pad: 0,
        start_ns: key.start,
    }
}

/// The same the other way; `None` for nobody.
pub fn model_key(key: RawKey) -> Option<ProcessKey> {
    (key.pid != 0).then_some(ProcessKey {
        pid: key.pid,
        start: key.start_ns,
    })
}
