//! Converts records of the probes to events of the model.

use std::sync::{Arc, LazyLock};

use reaper_common::{
    DecodeError, ENVIRONMENT_KEEP, ENVIRONMENT_UNMARKED, ExecRecord, ForkRecord, Header, Member,
    PROCESS_CHILD_SIGNALLED, PROCESS_NAMESPACE_INIT, PROCESS_OTHER_CGROUP, RawKey, Record, decode,
};

use crate::source::probes::model_key;
use crate::sys::cgroup::has_systemd_units;
use reaper_model::event::{
    Event, EventKind, ExitStatus, Image, Membership, ProcessKey, Provenance, Uids,
};
use reaper_model::facts::Fact;

static PAGE_SIZE: LazyLock<u64> = LazyLock::new(crate::sys::page_size);

/// Decodes a record of the ring and passes its events to `sink`. Returns the total number of records that were lost
/// when it was written.
pub fn events(bytes: &[u8], sink: &mut impl FnMut(Event)) -> Result<u64, DecodeError> {
    let mut emit = |header: &Header, kind| {
        sink(Event {
            time: header.time_ns,
            provenance: Provenance::Kernel,
            kind,
        });
    };
    let header = match decode(bytes)? {
        Record::Fork(r) => {
            emit(&r.header, fork(&r));
            if r.flags & PROCESS_OTHER_CGROUP != 0 {
                // The record does not say to which cgroup.
                emit(&r.header, moved(r.child, 0, r.member));
            }
            if r.signal != 0 {
                emit(&r.header, signalled(r.creator, r.signal));
                if r.flags & PROCESS_CHILD_SIGNALLED != 0 {
                    emit(&r.header, signalled(r.child, r.signal));
                }
            }
            r.header
        }
        Record::Exec {
            fixed: r,
            filename,
            exe,
            argv,
        } => {
            let kind = EventKind::Exec {
                key: key(r.process),
                parent: model_key(r.parent),
                uids: Uids {
                    real: r.uid,
                    effective: r.euid,
                },
                pidfd_inode: r.pidfd_inode,
                image: Arc::new(image(&r, filename, exe, argv)),
                membership: Some(membership(r.member)),
            };
            emit(&r.header, kind);
            if r.signal != 0 {
                emit(&r.header, signalled(r.process, r.signal));
            }
            r.header
        }
        Record::Exit(r) => {
            let kind = EventKind::Exit {
                key: key(r.process),
                parent: model_key(r.parent),
                exit_status: ExitStatus::from_wait_status(r.status),
                peak_rss: r.peak_rss_pages * *PAGE_SIZE,
                membership: Some(membership(r.member)),
            };
            emit(&r.header, kind);
            r.header
        }
        Record::Reparent(r) => {
            let kind = EventKind::Reparent {
                child: key(r.child),
                old_parent: model_key(r.old_parent),
                adopter: model_key(r.adopter),
                membership: Some(membership(r.member)),
            };
            emit(&r.header, kind);
            if r.signal != 0 {
                emit(&r.header, signalled(r.child, r.signal));
            }
            r.header
        }
        Record::Move(r) => {
            emit(
                &r.header,
                moved(r.process, usable_cgroup_id(r.cgroup_id), r.member),
            );
            r.header
        }
    };
    Ok(header.lost)
}

fn fork(r: &ForkRecord) -> EventKind {
    EventKind::Fork {
        child: key(r.child),
        parent: model_key(r.parent),
        creator: model_key(r.creator),
        uids: Uids {
            real: r.uid,
            effective: r.euid,
        },
        pidfd_inode: r.pidfd_inode,
        namespace_init: r.flags & PROCESS_NAMESPACE_INIT != 0,
        membership: Some(membership(r.member)),
    }
}

fn moved(process: RawKey, cgroup_id: u64, member: Member) -> EventKind {
    EventKind::Move {
        key: key(process),
        cgroup_id,
        membership: Some(membership(member)),
    }
}

fn signalled(process: RawKey, signal: u32) -> EventKind {
    EventKind::SignalSent {
        key: key(process),
        // Signal numbers fit in a byte.
        signal: signal as u8,
    }
}

pub(super) fn key(raw: RawKey) -> ProcessKey {
    ProcessKey {
        pid: raw.pid,
        start: raw.start_ns,
    }
}

/// Converts an entry of the map of members.
pub(super) fn membership(member: Member) -> Membership {
    Membership {
        session: model_key(member.session),
        flags: member.flags,
    }
}

fn image(fixed: &ExecRecord, filename: &[u8], exe: &[u8], argv: &[u8]) -> Image {
    let comm = fixed
        .comm
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    Image {
        comm: comm.into(),
        exe: if exe.is_empty() {
            Vec::new()
        } else {
            path(exe, fixed.exe_cut != 0)
        },
        filename: filename.into(),
        argv: argv.into(),
        argv_full_len: fixed.argv_full_len,
        truncated: fixed.argv_len < fixed.argv_full_len,
        script: Vec::new(),
        keep_marker: match fixed.environment {
            ENVIRONMENT_UNMARKED => Fact::Known(false),
            ENVIRONMENT_KEEP => Fact::Known(true),
            _ => Fact::Unread,
        },
        cgroup_id: usable_cgroup_id(fixed.cgroup_id),
        pgid: fixed.pgid,
        sid: fixed.sid,
        tty: fixed.tty,
    }
}

/// Returns a cgroup id, or 0 if the host's cgroups do not identify systemd units.
fn usable_cgroup_id(cgroup_id: u64) -> u64 {
    if has_systemd_units() { cgroup_id } else { 0 }
}

/// Builds a path from its components, which are given from last to first, each with a NUL. A truncated path begins with
/// `…`, so that it is not taken for a complete one.
fn path(components: &[u8], cut: bool) -> Vec<u8> {
    let mut path = Vec::with_capacity(components.len() + 4);
    if cut {
        path.extend_from_slice("…".as_bytes());
    }
    let whole = components.strip_suffix(&[0]).unwrap_or(components);
    for component in whole.rsplit(|byte| *byte == 0) {
        path.push(b'/');
        path.extend_from_slice(component);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::path;

    #[test]
    fn components_become_a_path() {
        assert_eq!(
            path(b"claude.exe\0bin\0usr\0", false),
            b"/usr/bin/claude.exe"
        );
        assert_eq!(path(b"sh\0", false), b"/sh");
        assert_eq!(path(b"c\0b\0", true), "…/b/c".as_bytes());
    }
}
