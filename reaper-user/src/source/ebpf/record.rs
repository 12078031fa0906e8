//! A record of the probes as an event of the model.

use std::sync::{Arc, LazyLock};

use reaper_common::{Defect, ExecRecord, FORK_NAMESPACE_INIT, RawKey, Record, decode};

use crate::model::event::{Ended, Event, EventKind, Image, Key, Provenance, Uids};

static PAGE_SIZE: LazyLock<u64> = LazyLock::new(crate::sys::page_size);

/// Decodes bytes of the ring; with the event comes the number of records lost before it.
pub fn event(bytes: &[u8]) -> Result<(Event, u64), Defect> {
    let (header, kind) = match decode(bytes)? {
        Record::Fork(r) => (
            r.header,
            EventKind::Fork {
                child: key(r.child),
                parent: visible(r.parent),
                creator: visible(r.creator),
                uids: Uids {
                    real: r.uid,
                    effective: r.euid,
                },
                pidfd_inode: r.pidfd_inode,
                namespace_init: r.flags & FORK_NAMESPACE_INIT != 0,
            },
        ),
        Record::Exec {
            fixed: r,
            filename,
            exe,
            argv,
        } => (
            r.header,
            EventKind::Exec {
                key: key(r.process),
                parent: visible(r.parent),
                uids: Uids {
                    real: r.uid,
                    effective: r.euid,
                },
                pidfd_inode: r.pidfd_inode,
                image: Arc::new(image(&r, filename, exe, argv)),
            },
        ),
        Record::Exit(r) => (
            r.header,
            EventKind::Exit {
                key: key(r.process),
                parent: visible(r.parent),
                ended: Ended::from_wait_status(r.status),
                peak_rss: r.peak_rss_pages * *PAGE_SIZE,
            },
        ),
        Record::Reparent(r) => (
            r.header,
            EventKind::Reparent {
                child: key(r.child),
                old_parent: visible(r.old_parent),
                adopter: visible(r.adopter),
            },
        ),
    };
    Ok((
        Event {
            time: header.time_ns,
            provenance: Provenance::Kernel,
            kind,
        },
        header.lost,
    ))
}

fn key(raw: RawKey) -> Key {
    Key {
        pid: raw.pid,
        start: raw.start_ns,
    }
}

fn visible(raw: RawKey) -> Option<Key> {
    (raw.pid != 0).then(|| key(raw))
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
        cgroup_id: fixed.cgroup_id,
        pgid: fixed.pgid,
        sid: fixed.sid,
        tty: fixed.tty,
    }
}

/// Components from the last to the first, each with a NUL, as a path. One that was cut short begins
/// with `…`, so that it is not taken for a whole one.
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
