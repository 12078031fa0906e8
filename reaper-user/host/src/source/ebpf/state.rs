//! Access to the maps that outlive the service: tracked processes, sessions, names and counters.

use std::os::fd::{AsFd, OwnedFd};

use aya::maps::{Array, HashMap, Map, MapData, MapError};
use reaper_common::{
    CONTROL_ESCALATIONS, CONTROL_KERNEL_REAP, CONTROL_KILL_ON_FORK, CONTROL_LOST_REPORTED,
    CONTROL_NAMESPACE, CONTROL_ONLY_KEEP_MARKER, CONTROL_SEEDED, COUNTER_UNTRACKED,
    MEMBER_GENERATION_MASK, MapValue, Member, PID_FILTER_SLOTS, RawKey, RecordKind, RootExit,
    SESSION_LEN, SessionState, pid_filter_slot,
};

use super::error::EbpfError;
use super::record::{key, membership};
use crate::source::drained::Lost;
use crate::source::error::SourceError;
use crate::source::probes::{ProbeMaps, raw_key as raw};
use crate::sys::{self, Counters};
use reaper_model::event::{Membership, ProcessKey};
use reaper_model::ruleset::NameTable;

/// `BPF_NOEXIST` of include/uapi/linux/bpf.h: only inserts.
const NO_EXIST: u64 = 1;
/// `BPF_EXIST`: only updates.
const EXIST: u64 = 2;

/// Map of members, with its capacity, for reading as a whole.
pub struct MemberMap(HashMap<MapData, [u8; 16], [u8; 24]>, usize);

impl MemberMap {
    fn new(map: MapData) -> Result<MemberMap, EbpfError> {
        let capacity = map.info().map_err(EbpfError::map("MEMBERS"))?.max_entries();
        let map = Map::from_map_data(map).map_err(EbpfError::map("MEMBERS"))?;
        let members = HashMap::try_from(map).map_err(EbpfError::map("MEMBERS"))?;
        Ok(MemberMap(members, capacity as usize))
    }

    /// Returns all entries. One that is added or removed during the call may be included or not.
    pub fn read(&self) -> std::collections::HashMap<ProcessKey, Membership> {
        // If the current entry is removed, the kernel restarts the iteration. The bound ends repeated restarts.
        let rows = self.0.iter().filter_map(Result::ok).take(4 * self.1);
        let row = |(k, v)| {
            (
                key(RawKey::from_bytes(&k)),
                membership(Member::from_bytes(&v)),
            )
        };
        rows.map(row).collect()
    }
}

/// The maps of the probes.
pub struct KernelMaps {
    members_fd: OwnedFd,
    /// Number of processes that can be tracked at once.
    capacity: u32,
    members: HashMap<MapData, [u8; 16], [u8; 24]>,
    /// Number of tracked processes by slot of pids. Probes check it before they look into `members`.
    pid_filter: Counters,
    /// Keeps the file descriptor open by which programs that are loaded later refer to the map.
    _pid_filter: MapData,
    sessions: HashMap<MapData, [u8; 16], [u8; SESSION_LEN]>,
    exits: HashMap<MapData, [u8; 16], [u8; 16]>,
    names: HashMap<MapData, [u8; 16], u32>,
    name_index: Array<MapData, u32>,
    control: Array<MapData, u64>,
    counters: Array<MapData, u64>,
    /// Name and errno of a map that is permanently read-only.
    write_error: Option<(&'static str, i32)>,
}

impl KernelMaps {
    /// Creates an instance from the maps that `take` returns by name.
    pub(super) fn new(
        mut take: impl FnMut(&str) -> Result<MapData, EbpfError>,
    ) -> Result<KernelMaps, EbpfError> {
        let members = take("MEMBERS")?;
        let members_fd = members.fd().as_fd().try_clone_to_owned();
        let capacity = members
            .info()
            .map_err(EbpfError::map("MEMBERS"))?
            .max_entries();
        let pid_filter = take("PID_FILTER")?;
        let counters = Counters::map(pid_filter.fd().as_fd(), PID_FILTER_SLOTS);
        let mut typed = |name: &str| Map::from_map_data(take(name)?).map_err(EbpfError::map(name));
        Ok(KernelMaps {
            members_fd: members_fd.map_err(EbpfError::map("MEMBERS"))?,
            capacity,
            pid_filter: counters.map_err(EbpfError::map("PID_FILTER"))?,
            _pid_filter: pid_filter,
            sessions: typed("SESSIONS")?
                .try_into()
                .map_err(EbpfError::map("SESSIONS"))?,
            exits: typed("ROOT_EXITS")?
                .try_into()
                .map_err(EbpfError::map("ROOT_EXITS"))?,
            names: typed("NAMES")?
                .try_into()
                .map_err(EbpfError::map("NAMES"))?,
            name_index: typed("NAME_INDEX")?
                .try_into()
                .map_err(EbpfError::map("NAME_INDEX"))?,
            control: typed("CONTROL")?
                .try_into()
                .map_err(EbpfError::map("CONTROL"))?,
            counters: typed("DROPS")?
                .try_into()
                .map_err(EbpfError::map("DROPS"))?,
            write_error: None,
            members: Map::from_map_data(members)
                .and_then(HashMap::try_from)
                .map_err(EbpfError::map("MEMBERS"))?,
        })
    }

    /// Returns why the maps cannot be written any more, if so: for example, a user has frozen one of them.
    pub fn failure(&self) -> Option<EbpfError> {
        let (name, errno) = self.write_error?;
        Some(EbpfError::map(name)(std::io::Error::from_raw_os_error(
            errno,
        )))
    }

    /// Converts an error of writing a map. If it shows a permanently read-only map, records it for
    /// [`KernelMaps::failure`]. Other errors may be temporary.
    fn note_error(&mut self, name: &'static str, error: MapError) -> EbpfError {
        if let Some(errno @ (libc::EPERM | libc::EBADF)) = errno(&error) {
            self.write_error = Some((name, errno));
        }
        EbpfError::map(name)(error)
    }

    /// Replaces the program names that the rules use.
    ///
    /// # Errors
    /// The maps cannot be written, or have no room for all names.
    pub(super) fn write_names(&mut self, table: &NameTable) -> Result<(), EbpfError> {
        self.set_control(CONTROL_ONLY_KEEP_MARKER, 0)?;
        // Insert before removing, so that a name in both tables is never missing.
        for (name, bits) in &table.names {
            self.names
                .insert(name, bits, 0)
                .map_err(EbpfError::map("NAMES"))?;
        }
        for (slot, flags) in (0..).zip(table.first.iter()) {
            self.name_index
                .set(slot, flags, 0)
                .map_err(EbpfError::map("NAME_INDEX"))?;
        }
        let known: Vec<_> = self.names.keys().filter_map(Result::ok).collect();
        for name in known.iter().filter(|name| !table.names.contains_key(*name)) {
            self.names.remove(name).map_err(EbpfError::map("NAMES"))?;
        }
        self.set_control(
            CONTROL_ONLY_KEEP_MARKER,
            table.needs_only_keep_marker.into(),
        )
    }

    /// Resets settings of an earlier service to 0, as they may differ from those of this one: kills on fork, signals
    /// from the kernel, and open escalations.
    pub(super) fn reset_controls(&mut self) -> Result<(), EbpfError> {
        [
            CONTROL_KILL_ON_FORK,
            CONTROL_KERNEL_REAP,
            CONTROL_ESCALATIONS,
        ]
        .into_iter()
        .try_for_each(|slot| self.set_control(slot, 0))
    }

    /// Writes the pid namespace of the pids in the maps (its inode, 0 for the initial one), unless one is recorded.
    /// Returns false if that is another one.
    pub(super) fn set_namespace(&mut self, inode: u32) -> Result<bool, EbpfError> {
        let wanted = u64::from(inode) + 1;
        let found = self.control.get(&CONTROL_NAMESPACE, 0).unwrap_or(0);
        self.set_control(CONTROL_NAMESPACE, if found == 0 { wanted } else { found })?;
        Ok(found == 0 || found == wanted)
    }

    /// Returns a reader of the map of members, for use on another thread.
    ///
    /// # Errors
    /// The file descriptor cannot be duplicated.
    pub fn member_map(&self) -> Result<MemberMap, EbpfError> {
        let fd = self.members_fd.as_fd().try_clone_to_owned();
        let map = MapData::from_fd(fd.map_err(EbpfError::map("MEMBERS"))?);
        MemberMap::new(map.map_err(EbpfError::map("MEMBERS"))?)
    }

    /// Writes a setting of the probes, one of `CONTROL_*`.
    ///
    /// # Errors
    /// The map cannot be written.
    pub(super) fn set_control(&mut self, slot: u32, value: u64) -> Result<(), EbpfError> {
        let result = self.control.set(slot, value, 0);
        result.map_err(|error| self.note_error("CONTROL", error))
    }

    /// Returns whether the entry existed, from the result of changing or removing it. A missing entry is not an error.
    fn existed(
        &mut self,
        name: &'static str,
        changed: Result<(), MapError>,
    ) -> Result<bool, EbpfError> {
        match changed {
            Ok(()) => Ok(true),
            Err(error) if errno(&error) == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(self.note_error(name, error)),
        }
    }

    /// Returns the number of lost records since the maps were created, in total and by kind.
    pub fn lost(&self) -> Lost {
        Lost {
            total: self.count(0),
            by_kind: RecordKind::ALL.map(|kind| self.count(kind as u32)),
        }
    }

    /// Returns the total number of lost records.
    pub fn lost_total(&self) -> u64 {
        self.count(0)
    }

    /// Returns how often a process could not be tracked because the map of members was full.
    pub fn untracked_members(&self) -> u64 {
        self.count(COUNTER_UNTRACKED)
    }

    /// Returns a counter of the probes, 0 if it cannot be read.
    fn count(&self, slot: u32) -> u64 {
        self.counters.get(&slot, 0).unwrap_or(0)
    }
}

impl ProbeMaps for KernelMaps {
    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn is_complete(&self) -> bool {
        self.control.get(&CONTROL_SEEDED, 0).is_ok_and(|n| n != 0) && self.untracked_members() == 0
    }

    fn set_membership(
        &mut self,
        of: ProcessKey,
        wanted: Option<Membership>,
        known: Option<Membership>,
    ) -> Result<bool, SourceError> {
        let (key, slot) = (raw(of), pid_filter_slot(of.pid));
        let key_bytes = key.to_bytes();
        let mut execs = 0;
        if let Some(known) = known {
            let Ok(bytes) = self.members.get(&key_bytes, 0) else {
                return Ok(true);
            };
            execs = Member::from_bytes(&bytes).flags & MEMBER_GENERATION_MASK;
            let known_execs = known.flags & MEMBER_GENERATION_MASK;
            // The map counts more execs than the caller knows: the process runs another program, and its exec record
            // follows. If the caller knows more, an exec coincided with the last write, and the caller's is newer.
            if (execs.wrapping_sub(known_execs)).cast_signed() > 0 {
                return Ok(true);
            }
            execs = known_execs;
        }
        let Some(wanted) = wanted else {
            return self.remove(of).map(|()| true);
        };
        let member = Member {
            session: wanted.session.map_or(RawKey::NONE, raw),
            flags: wanted.flags & !MEMBER_GENERATION_MASK | execs,
            check: key.check(),
        };
        let bytes = member.to_bytes();
        if known.is_none() {
            // Before the insertion, because a probe that finds 0 in the filter does not look into the map.
            self.pid_filter.add(slot, 1);
            let inserted = self.members.insert(key_bytes, bytes, NO_EXIST);
            if inserted.is_err() {
                self.pid_filter.add(slot, -1);
            }
            match inserted {
                Ok(()) => return Ok(true),
                Err(error) if errno(&error) == Some(libc::E2BIG) => return Ok(false),
                Err(error) if errno(&error) == Some(libc::EEXIST) => {}
                Err(error) => return Err(self.note_error("MEMBERS", error).into()),
            }
        }
        let written = self.members.insert(key_bytes, bytes, EXIST);
        self.existed("MEMBERS", written)?;
        Ok(true)
    }

    fn remove(&mut self, of: ProcessKey) -> Result<(), SourceError> {
        let removed = self.members.remove(&raw(of).to_bytes());
        if self.existed("MEMBERS", removed)? {
            self.pid_filter.add(pid_filter_slot(of.pid), -1);
        }
        Ok(())
    }

    fn sessions(&self) -> Vec<(ProcessKey, SessionState)> {
        let rows = self.sessions.iter().filter_map(Result::ok);
        rows.map(|(k, v)| (key(RawKey::from_bytes(&k)), SessionState::from_bytes(&v)))
            .collect()
    }

    fn root_exit(&self, first_root: ProcessKey) -> Option<RootExit> {
        let bytes = self.exits.get(&raw(first_root).to_bytes(), 0).ok()?;
        Some(RootExit::from_bytes(&bytes))
    }

    fn set_session(
        &mut self,
        first_root: ProcessKey,
        state: Option<&SessionState>,
    ) -> Result<(), SourceError> {
        let key_bytes = raw(first_root).to_bytes();
        match state {
            Some(state) => self
                .sessions
                .insert(key_bytes, state.to_bytes(), 0)
                .map_err(|error| self.note_error("SESSIONS", error).into()),
            None => {
                for (name, removed) in [
                    ("SESSIONS", self.sessions.remove(&key_bytes)),
                    ("ROOT_EXITS", self.exits.remove(&key_bytes)),
                ] {
                    self.existed(name, removed)?;
                }
                Ok(())
            }
        }
    }

    fn set_names(&mut self, names: &NameTable) -> Result<(), SourceError> {
        Ok(self.write_names(names)?)
    }

    fn set_kill_on_fork(&mut self, sessions: u64) -> Result<(), SourceError> {
        Ok(self.set_control(CONTROL_KILL_ON_FORK, sessions)?)
    }

    fn set_kernel_reap(&mut self, reaps: bool) -> Result<(), SourceError> {
        Ok(self.set_control(CONTROL_KERNEL_REAP, reaps.into())?)
    }

    fn await_probes(&self) {
        sys::await_probes();
    }

    fn set_seeded(&mut self, seeded: bool) -> Result<(), SourceError> {
        Ok(self.set_control(CONTROL_SEEDED, seeded.into())?)
    }

    fn lost_reported(&self) -> u64 {
        self.control.get(&CONTROL_LOST_REPORTED, 0).unwrap_or(0)
    }

    fn set_lost_reported(&mut self, records: u64) -> Result<(), SourceError> {
        Ok(self.set_control(CONTROL_LOST_REPORTED, records)?)
    }
}

fn errno(error: &MapError) -> Option<i32> {
    match error {
        MapError::SyscallError(error) => error.io_error.raw_os_error(),
        _ => None,
    }
}
