//! The maps that outlive the service: who is followed, the sessions, the names, the counters.

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

/// `BPF_NOEXIST` of include/uapi/linux/bpf.h: only what is not there is made.
const IF_NOT_THERE: u64 = 1;
/// `BPF_EXIST`: only what is there is changed.
const IF_THERE: u64 = 2;

/// Who is followed, to be read as a whole.
pub struct MemberMap(HashMap<MapData, [u8; 16], [u8; 24]>, usize);

impl MemberMap {
    fn new(map: MapData) -> Result<MemberMap, EbpfError> {
        let room = map.info().map_err(EbpfError::map)?.max_entries();
        let map = Map::from_map_data(map).map_err(EbpfError::map)?;
        let members = HashMap::try_from(map).map_err(EbpfError::map)?;
        Ok(MemberMap(members, room as usize))
    }

    /// All who are followed, as of now: who comes or goes meanwhile may be in it or not.
    pub fn read(&self) -> std::collections::HashMap<ProcessKey, Membership> {
        // One that is removed under the reader's feet sends it back to the beginning, but not for ever.
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

/// See the module.
pub struct KernelMaps {
    members_fd: OwnedFd,
    /// Processes that can be followed at once.
    room: u32,
    members: HashMap<MapData, [u8; 16], [u8; 24]>,
    /// How many are followed of a few pids each, for the probes to ask first.
    pid_filter: Counters,
    /// Programs that are still to be loaded name it by its file descriptor.
    _pid_filter: MapData,
    sessions: HashMap<MapData, [u8; 16], [u8; SESSION_LEN]>,
    exits: HashMap<MapData, [u8; 16], [u8; 16]>,
    names: HashMap<MapData, [u8; 16], u32>,
    name_index: Array<MapData, u32>,
    control: Array<MapData, u64>,
    counters: Array<MapData, u64>,
    /// Why a map cannot be written any more, for good.
    shut: Option<i32>,
}

impl KernelMaps {
    /// Takes the maps from `take`, by name.
    pub(super) fn new(
        mut take: impl FnMut(&str) -> Result<MapData, EbpfError>,
    ) -> Result<KernelMaps, EbpfError> {
        let members = take("MEMBERS")?;
        let members_fd = members.fd().as_fd().try_clone_to_owned();
        let room = members.info().map_err(EbpfError::map)?.max_entries();
        let pid_filter = take("PID_FILTER")?;
        let counters = Counters::map(pid_filter.fd().as_fd(), PID_FILTER_SLOTS);
        let mut typed = |name: &str| Map::from_map_data(take(name)?).map_err(EbpfError::map);
        Ok(KernelMaps {
            members_fd: members_fd.map_err(|e| EbpfError::Map(e.into()))?,
            room,
            pid_filter: counters.map_err(|e| EbpfError::Map(e.into()))?,
            _pid_filter: pid_filter,
            sessions: typed("SESSIONS")?.try_into().map_err(EbpfError::map)?,
            exits: typed("ROOT_EXITS")?.try_into().map_err(EbpfError::map)?,
            names: typed("NAMES")?.try_into().map_err(EbpfError::map)?,
            name_index: typed("NAME_INDEX")?.try_into().map_err(EbpfError::map)?,
            control: typed("CONTROL")?.try_into().map_err(EbpfError::map)?,
            counters: typed("DROPS")?.try_into().map_err(EbpfError::map)?,
            shut: None,
            members: Map::from_map_data(members)
                .and_then(HashMap::try_from)
                .map_err(EbpfError::map)?,
        })
    }

    /// Why the probes cannot be told anything any more, if that is so: somebody has frozen a map that they go by.
    pub fn failure(&self) -> Option<EbpfError> {
        let shut = self.shut.map(std::io::Error::from_raw_os_error);
        shut.map(|error| EbpfError::Map(error.into()))
    }

    /// Takes note of a map that is shut for good. What else fails may go well another time.
    fn noted(&mut self, error: MapError) -> EbpfError {
        let errno = errno(&error);
        if matches!(errno, Some(libc::EPERM | libc::EBADF)) {
            self.shut = errno;
        }
        EbpfError::map(error)
    }

    /// Tells the probes which names the rules know, in place of what they knew before.
    ///
    /// # Errors
    /// The maps cannot be written, or the rules know more names than there is room for.
    pub(super) fn write_names(&mut self, table: &NameTable) -> Result<(), EbpfError> {
        self.set_control(CONTROL_ONLY_KEEP_MARKER, 0)?;
        // New ones before old ones go: a name that is in both is known all the time.
        for (name, bits) in &table.names {
            self.names.insert(name, bits, 0).map_err(EbpfError::map)?;
        }
        for (slot, flags) in (0..).zip(table.first.iter()) {
            self.name_index
                .set(slot, flags, 0)
                .map_err(EbpfError::map)?;
        }
        let known: Vec<_> = self.names.keys().filter_map(Result::ok).collect();
        for name in known.iter().filter(|name| !table.names.contains_key(*name)) {
            self.names.remove(name).map_err(EbpfError::map)?;
        }
        self.set_control(
            CONTROL_ONLY_KEEP_MARKER,
            table.needs_only_keep_marker.into(),
        )
    }

    /// Withdraws what an earlier service wanted of the probes: this one need not want the same.
    pub(super) fn withdraw(&mut self) -> Result<(), EbpfError> {
        [
            CONTROL_KILL_ON_FORK,
            CONTROL_KERNEL_REAP,
            CONTROL_ESCALATIONS,
        ]
        .into_iter()
        .try_for_each(|slot| self.set_control(slot, 0))
    }

    /// Says by which pid namespace processes are numbered (inode, 0 for the first one); false if the maps
    /// were made for another.
    pub(super) fn set_namespace(&mut self, inode: u32) -> Result<bool, EbpfError> {
        let wanted = u64::from(inode) + 1;
        let found = self.control.get(&CONTROL_NAMESPACE, 0).unwrap_or(0);
        self.set_control(CONTROL_NAMESPACE, if found == 0 { wanted } else { found })?;
        Ok(found == 0 || found == wanted)
    }

    /// A reader of the map of members, for another thread.
    ///
    /// # Errors
    /// The file descriptor cannot be doubled.
    pub fn member_map(&self) -> Result<MemberMap, EbpfError> {
        let fd = self.members_fd.as_fd().try_clone_to_owned();
        let map = MapData::from_fd(fd.map_err(|e| EbpfError::Map(e.into()))?);
        MemberMap::new(map.map_err(EbpfError::map)?)
    }

    /// Writes a setting of the probes, one of `CONTROL_*`.
    ///
    /// # Errors
    /// The map cannot be written.
    pub(super) fn set_control(&mut self, slot: u32, value: u64) -> Result<(), EbpfError> {
        let said = self.control.set(slot, value, 0);
        said.map_err(|error| self.noted(error))
    }

    /// Returns whether an entry was changed or removed. One that has gone meanwhile is no error.
    fn was_there(&mut self, changed: Result<(), MapError>) -> Result<bool, EbpfError> {
        match changed {
            Ok(()) => Ok(true),
            Err(error) if errno(&error) == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(self.noted(error)),
        }
    }

    /// Records lost so far.
    pub fn lost(&self) -> Lost {
        Lost {
            total: self.count(0),
            by_kind: RecordKind::ALL.map(|kind| self.count(kind as u32)),
        }
    }

    /// How many those are in all.
    pub fn lost_total(&self) -> u64 {
        self.count(0)
    }

    /// Processes for which there was no room in the map so far.
    pub fn untracked_members(&self) -> u64 {
        self.count(COUNTER_UNTRACKED)
    }

    fn count(&self, slot: u32) -> u64 {
        self.counters.get(&slot, 0).unwrap_or(0)
    }
}

impl ProbeMaps for KernelMaps {
    fn capacity(&self) -> u32 {
        self.room
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
        let at = key.to_bytes();
        let mut execs = 0;
        if let Some(known) = known {
            let Ok(bytes) = self.members.get(&at, 0) else {
                return Ok(true);
            };
            execs = Member::from_bytes(&bytes).flags & MEMBER_GENERATION_MASK;
            let told = known.flags & MEMBER_GENERATION_MASK;
            // It runs another program by now, which will be told. The other way round an exec came in between when
            // this was written last: then what is known here is newer.
            if (execs.wrapping_sub(told)).cast_signed() > 0 {
                return Ok(true);
            }
            execs = told;
        }
        let Some(mark) = wanted else {
            return self.remove(of).map(|()| true);
        };
        let member = Member {
            session: mark.session.map_or(RawKey::NONE, raw),
            flags: mark.flags & !MEMBER_GENERATION_MASK | execs,
            check: key.check(),
        };
        let bytes = member.to_bytes();
        if known.is_none() {
            // Before it is there: a probe that finds nobody in the crowd asks no further.
            self.pid_filter.add(slot, 1);
            let made = self.members.insert(at, bytes, IF_NOT_THERE);
            if made.is_err() {
                self.pid_filter.add(slot, -1);
            }
            match made {
                Ok(()) => return Ok(true),
                Err(error) if errno(&error) == Some(libc::E2BIG) => return Ok(false),
                Err(error) if errno(&error) == Some(libc::EEXIST) => {}
                Err(error) => return Err(self.noted(error).into()),
            }
        }
        let written = self.members.insert(at, bytes, IF_THERE);
        self.was_there(written)?;
        Ok(true)
    }

    fn remove(&mut self, of: ProcessKey) -> Result<(), SourceError> {
        let removed = self.members.remove(&raw(of).to_bytes());
        if self.was_there(removed)? {
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
        let at = raw(first_root).to_bytes();
        match state {
            Some(state) => self
                .sessions
                .insert(at, state.to_bytes(), 0)
                .map_err(|error| self.noted(error).into()),
            None => {
                for removed in [self.sessions.remove(&at), self.exits.remove(&at)] {
                    self.was_there(removed)?;
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
