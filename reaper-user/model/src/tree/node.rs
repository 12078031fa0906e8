//! What is known of one process, and what can change about it.

use std::sync::Arc;

use reaper_common::{
    MEMBER_EXEC, MEMBER_EXECS, MEMBER_KILL, MEMBER_SCOPE, MEMBER_TERM, MEMBER_WATCHED,
};

use crate::asked::Read;
use crate::end_order::EndOrder;
use crate::event::{Ended, Image, Key, Mark, Provenance, Seen, Uids};
use crate::facts::Known;
use crate::policy::Weighed;
use crate::session::{Evidence, SessionId};
use crate::user_keep::UserKeep;

/// When and from whom a process was orphaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphaned {
    pub old_parent: Key,
    /// Nanoseconds since boot.
    pub at: u64,
    /// Whether the old parent is the init of its PID namespace: the kernel kills all processes in that, and none of
    /// them gets another parent.
    pub namespace_ending: bool,
}

/// A living process. A zombie is none: it has exited.
#[derive(Clone, Debug)]
pub struct Node {
    pub key: Key,
    /// Start time to the ns, known once a probe has told of it.
    pub(super) exact_start: Option<u64>,
    /// Who has it now; `None` while that is unknown.
    pub parent: Option<Key>,
    /// Who had it first; never changes.
    pub birth_parent: Option<Key>,
    pub uids: Uids,
    pub image: Arc<Image>,
    /// When that was told or looked at last, nanoseconds since boot; 0 for what it was born with.
    pub(super) image_at: u64,
    /// Whether `REAPER_KEEP=1` is in the environment that it was started with, if a probe has told: as its image has it,
    /// and as it was born with that; unasked where that may have changed unseen.
    pub(crate) keep_mark: Known<bool>,
    /// When it went to another cgroup last, nanoseconds since boot; 0: since it is known it never did.
    pub(crate) moved_at: u64,
    /// Inode number of its pidfds, 0 while unknown.
    pub pidfd_inode: u64,
    /// What the kernel's map has for it as far as is known; `None` too where it is not in there.
    pub mark: Option<Mark>,
    /// `MEMBER_TERM` and `MEMBER_KILL` of `reaper-common`: what it has been sent.
    pub signalled: u32,
    /// Its exit matters to sessions, though it is a member of none.
    pub watched: bool,
    /// The innermost session it is a member of.
    pub session: Option<SessionId>,
    /// It may be below a boundary for all that is known: its makers are gone, and nobody told of them. It
    /// is kept.
    pub unsure: bool,
    /// That it is a member is concluded from this, or its makers' was: see `Sessions::infer`. It is reported, and reaped
    /// only where a rule says that this is enough.
    pub inferred: Option<Evidence>,
    /// Membership stopped here, by the rule of this name.
    pub boundary: Option<Arc<str>>,
    pub orphaned: Option<Orphaned>,
    /// Untracked process, itself or one that it comes from by births, whose script is to be read. See `Model::awaited`.
    pub(crate) awaited: Option<Key>,
    /// What the rules say of its program, once somebody had to know.
    pub(crate) weighed: Option<Weighed>,
    /// What rules have asked for that no event tells.
    pub(crate) read: Option<Box<Read>>,
    /// What users have asked for that is for it, also what is over.
    pub(crate) user_keeps: Vec<UserKeep>,
    /// It, or one that it descends from, is to be ended by this.
    pub(crate) end_order: Option<Arc<EndOrder>>,
    pub provenance: Provenance,
    pub kernel_thread: bool,
    pub namespace_init: bool,
    /// Within what this program was told to consider.
    pub in_scope: bool,
    /// It is, or has been, the root of a session.
    pub root: bool,
    /// Whose it is is known for sure: its maker was known here, or is to the kernel.
    pub(crate) settled: bool,
    /// A probe has told of it.
    pub(crate) told: bool,
    /// Its fork was told: its birth parent is no adopter.
    pub(crate) forked: bool,
    /// All that is known of it is that it was the root of a session when the service before this one ended.
    pub(super) placeholder: bool,
    /// Its image is its own, not the one it was born with.
    pub(crate) execed: bool,
    pub(super) children: Vec<u32>,
    /// Where it stands among its parent's children.
    pub(super) slot: u32,
    /// Living and kept processes that have it for a birth parent.
    pub(super) born: u32,
}

impl Node {
    /// Pids of the living children, in no order.
    pub fn children(&self) -> &[u32] {
        &self.children
    }

    /// Whether it is the server, or a client, of tmux, screen or zellij: by the names that these give themselves.
    pub(crate) fn is_multiplexer(&self) -> bool {
        let comm = &self.image.comm[..];
        let names: [&[u8]; 7] = [
            b"tmux",
            b"tmux: server",
            b"tmux: client",
            b"tmate",
            b"screen",
            b"SCREEN",
            b"zellij",
        ];
        names.contains(&comm)
    }

    /// Its key with the start to the ns, if that is known: what the kernel calls it.
    pub fn exact_key(&self) -> Option<Key> {
        let start = self.exact_start?;
        Some(Key { start, ..self.key })
    }

    pub(crate) fn lineage(&self) -> Lineage {
        Lineage {
            session: self.session,
            unsure: self.unsure,
            inferred: self.inferred,
        }
    }

    pub(crate) fn is(&self, key: Key) -> bool {
        match self.exact_start {
            Some(start) => start == key.start || self.key == key,
            None => self.key.same_tick(key),
        }
    }

    /// Its start as well as it is known.
    pub(super) fn start(&self) -> u64 {
        self.exact_start.unwrap_or(self.key.start)
    }

    /// Whether a row of the process table is about it.
    pub(super) fn is_row(&self, row: &Seen) -> bool {
        let start = self.start();
        match self.exact_start {
            Some(_) if row.exact => self.key.pid == row.key.pid && start == row.key.start,
            _ => Key { start, ..self.key }.same_tick(row.key),
        }
    }

    /// Whether what is from this time tells nothing older than what is known of its program, its uids and
    /// what the kernel's map has for it.
    pub(crate) fn is_news(&self, time: u64) -> bool {
        time >= self.image_at
    }

    /// Whether its child has the mark in its environment that was born at that time.
    pub(super) fn keep_mark_at_birth(&self, born: u64) -> Known<bool> {
        if self.is_news(born) {
            self.keep_mark
        } else {
            Known::Unasked
        }
    }

    /// Takes note of what the kernel's map had for it at a time, after so many changes of its program or its cgroup
    /// that are being told of.
    pub(super) fn note(&mut self, mark: Option<Mark>, time: u64, changes: u32) {
        let Some(mark) = mark else { return };
        if self.is_news(time) {
            let execs = |flags: u32| flags & MEMBER_EXECS;
            let known = self.mark.map(|known| known.flags);
            let expected = known.map(|known| known.wrapping_add(changes * MEMBER_EXEC));
            if expected.is_some_and(|flags| execs(flags) != execs(mark.flags)) {
                self.has_changed_unseen();
            }
            self.mark = Some(mark).filter(|mark| mark.flags != 0);
        }
        // These it never loses.
        self.signalled |= mark.flags & (MEMBER_TERM | MEMBER_KILL);
        self.watched |= mark.has(MEMBER_WATCHED);
        self.in_scope |= mark.has(MEMBER_SCOPE);
    }

    /// Whether it runs another program by now than it was known to: an exec went unseen.
    pub(super) fn is_another_program(&self, found: &Image) -> bool {
        let differs = |a: &[u8], b: &[u8]| !a.is_empty() && !b.is_empty() && a != b;
        let whole = !self.image.exe.starts_with("…".as_bytes());
        self.image.comm.is_empty()
            || whole && differs(&self.image.exe, &found.exe)
            // Programs rewrite their arguments, but hardly before they run.
            || !self.execed && differs(&self.image.argv, &found.argv)
    }
}

/// From whom an event says that a process comes.
#[derive(Clone, Copy, Default)]
pub(super) struct Birth {
    /// Who has it.
    pub(super) parent: Option<Key>,
    /// Who had it first.
    pub(super) birth_parent: Option<Key>,
    pub(super) creator: Option<Key>,
}

/// What is remembered of a process that has exited lately.
pub(super) struct Gone {
    pub(super) start: u64,
    pub(super) image: Arc<Image>,
    pub(super) lineage: Lineage,
    pub(super) user_keeps: Vec<UserKeep>,
}

/// Whose a process is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lineage {
    pub(crate) session: Option<SessionId>,
    /// See [`Node::unsure`].
    pub(crate) unsure: bool,
    /// See [`Node::inferred`].
    pub(crate) inferred: Option<Evidence>,
}

/// What is kept of a process that has exited.
#[derive(Clone, Debug)]
pub struct Exited {
    pub key: Key,
    pub birth_parent: Option<Key>,
    pub image: Arc<Image>,
    pub uids: Uids,
    pub(crate) lineage: Lineage,
    pub(super) user_keeps: Vec<UserKeep>,
    pub ended: Ended,
    pub(super) born: u32,
}

/// What an event has changed.
#[derive(Clone, Debug)]
pub enum Change {
    /// A process is new to the tree.
    Born {
        key: Key,
        creator: Option<Key>,
        provenance: Provenance,
    },
    /// It runs another program.
    Execed { key: Key },
    /// It is in another cgroup.
    Moved { key: Key },
    /// It is gone. Its children were orphaned by that, just now.
    Exited {
        node: Box<Node>,
        ended: Ended,
        peak_rss: u64,
        provenance: Provenance,
        orphans: Vec<Key>,
    },
    /// It has another parent.
    Reparented {
        key: Key,
        old_parent: Option<Key>,
        adopter: Option<Key>,
        /// That made it an orphan: nobody has told of its parent's exit.
        orphaned: bool,
    },
    /// A probe has sent it a signal, of this number.
    Signalled { key: Key, signal: u8 },
}
