//! Membership: handed on at fork, taken away at exit, begun at exec where a name says that it may be.
//!
//! The service has the last word on all of it and writes into the same map; what is here holds until it
//! has spoken, and where it is not there to speak.

use aya_ebpf::bindings::BPF_EXIST;
use reaper_common::{
    CONTROL_ONLY_KEEP_MARKER, COUNTER_UNTRACKED, ENVIRONMENT_UNMARKED, ENVIRONMENT_UNREAD,
    MEMBER_CANDIDATE, MEMBER_GENERATION_MASK, MEMBER_GENERATION_STEP, MEMBER_INHERITED,
    MEMBER_KERNEL_KILLABLE, MEMBER_NAME_MATCHED, MEMBER_ROOT, MEMBER_SCOPE, MEMBER_TRACKED,
    MEMBER_UNCERTAIN, Member, NAME_AGENT, NAME_BOUNDARY, NAME_INDEX_EXACT, NAME_INDEX_PREFIX,
    NAME_KEEP, NAME_LEN, PREFIX_LEN, RawKey, second_bit,
};

use crate::environment;
use crate::maps::{
    MEMBERS, NAME_INDEX, NAMES, constant, count, filters, follow, is_set, may_be_followed, unfollow,
};
use crate::task::{Task, offset, read};

const NAME_BITS: u32 = NAME_AGENT | NAME_BOUNDARY | NAME_KEEP;
/// Of a process that nobody follows.
pub const FOREIGN: Member = Member {
    session: RawKey::NONE,
    flags: 0,
    check: 0,
};

/// A name, padded with NUL and with one at its end, as words: what is compared and looked up.
type Name = [u64; NAME_LEN / 8];

/// What the map says of a process.
#[inline(always)]
pub fn of(key: &RawKey) -> Option<Member> {
    if !may_be_followed(key.pid) {
        return None;
    }
    for _ in 0..2 {
        let found = MEMBERS.get_ptr(key)?;
        // The service may replace the value at this very moment, and the kernel give its memory to another
        // process: whose it is stands beside the flags, and is read before and after the rest.
        // SAFETY: it points into the map, which outlives the program.
        let (before, session, after) = unsafe {
            let last: *const u64 = (&raw const (*found).flags).cast();
            (
                core::ptr::read_volatile(last),
                core::ptr::read_volatile(&raw const (*found).session),
                core::ptr::read_volatile(last),
            )
        };
        if before == after && (before >> 32) as u32 == key.check() {
            return Some(Member {
                session,
                flags: before as u32,
                check: key.check(),
            });
        }
    }
    // Followed, and more cannot be said now.
    Some(Member {
        session: RawKey::NONE,
        flags: MEMBER_TRACKED | MEMBER_UNCERTAIN,
        check: key.check(),
    })
}

/// Whether what the map says could not be read, and is not to be written over.
#[inline(always)]
fn is_doubtful(member: &Member) -> bool {
    !has_session(member) && member.flags & MEMBER_UNCERTAIN != 0
}

/// Whether a session is what it is followed for.
#[inline(always)]
pub fn has_session(member: &Member) -> bool {
    member.session.pid != 0
}

/// Whether children are followed too.
#[inline(always)]
pub fn is_handed_on(member: &Member) -> bool {
    has_session(member) || member.flags & MEMBER_SCOPE != 0
}

/// Makes a new process what its creator is; `together`: it is in the same cgroups.
#[inline(always)]
pub fn inherit(creator: &Member, child: &RawKey, together: bool) -> Member {
    if !is_handed_on(creator) {
        return FOREIGN;
    }
    let mut flags = creator.flags & MEMBER_INHERITED;
    if !together {
        flags &= !MEMBER_KERNEL_KILLABLE;
    }
    if creator.flags & MEMBER_NAME_MATCHED != 0 && has_session(creator) {
        flags |= MEMBER_UNCERTAIN;
    }
    let member = Member {
        session: creator.session,
        flags,
        check: child.check(),
    };
    if !follow(child, &member) {
        count(COUNTER_UNTRACKED);
        return FOREIGN;
    }
    member
}

/// What a process is that runs another program from now on, and what its environment says; `None` if it is nothing
/// to tell of. `name` is the kernel's string with the name of the program's file; for `all` see
/// [`environment::of`].
#[inline(always)]
pub fn execed(task: Task, key: &RawKey, name: *const u8, all: bool) -> Option<(Member, u32)> {
    let Some(found) = of(key) else {
        let scoped: u32 = constant!(SETTINGS: Settings.scoped);
        if scoped == 0 && bits_of_current(task, name) & NAME_AGENT != 0 {
            let member = candidate(key, MEMBER_TRACKED);
            if follow(key, &member) {
                return Some((member, environment::of(task, all)));
            }
            count(COUNTER_UNTRACKED);
            return Some((FOREIGN, ENVIRONMENT_UNREAD));
        }
        return (!filters()).then_some((FOREIGN, ENVIRONMENT_UNREAD));
    };
    let mut environment = ENVIRONMENT_UNREAD;
    if has_session(&found) && !is_doubtful(&found) {
        environment = environment::of(task, all);
    }
    let bits = bits_of_current(task, name);
    // As it is by now: that took its time, and the service may have written meanwhile.
    let mut member = of(key).unwrap_or(found);
    if is_doubtful(&member) {
        return Some((member, ENVIRONMENT_UNREAD));
    }
    let before = member.flags;
    if has_session(&member) {
        if before & MEMBER_NAME_MATCHED != 0 {
            member.flags |= MEMBER_UNCERTAIN;
        }
        member.flags &= !(MEMBER_NAME_MATCHED | MEMBER_KERNEL_KILLABLE);
        if bits != 0 {
            member.flags |= MEMBER_NAME_MATCHED;
        }
        // What runs for another is kept, and with it what it begets.
        let (uid, euid) = task.uids();
        if uid != euid {
            member.flags |= MEMBER_UNCERTAIN;
        }
        // All that could spare it beyond its name has not changed.
        if bits == 0 && environment == ENVIRONMENT_UNMARKED && is_set(CONTROL_ONLY_KEEP_MARKER) {
            member.flags |= before & MEMBER_KERNEL_KILLABLE;
        }
    } else if bits & NAME_AGENT != 0 {
        environment = environment::of(task, all);
        member = candidate(key, before);
    }
    member.flags = later(before, member.flags);
    change(key, &member);
    Some((member, environment))
}

/// Takes note of a process's move to another cgroup.
#[inline(always)]
pub fn moved(key: &RawKey, member: &mut Member) {
    if has_session(member) {
        member.flags = later(member.flags, member.flags & !MEMBER_KERNEL_KILLABLE);
        change(key, member);
    }
}

/// Flags as of now, of a process that had those before: what the service knew then says nothing of them.
#[inline(always)]
fn later(before: u32, flags: u32) -> u32 {
    flags & !MEMBER_GENERATION_MASK
        | before.wrapping_add(MEMBER_GENERATION_STEP) & MEMBER_GENERATION_MASK
}

/// The root of a session of its own, unless the service says that it is not.
#[inline(always)]
fn candidate(key: &RawKey, flags: u32) -> Member {
    Member {
        session: *key,
        flags: flags | MEMBER_ROOT | MEMBER_CANDIDATE,
        check: key.check(),
    }
}

/// Changes what the map says of a process that is in it. Never through a pointer to its value: as soon as the
/// service writes a new one, the kernel uses the old one's memory for another process.
#[inline(always)]
pub fn change(key: &RawKey, member: &Member) {
    // It was there a moment ago; if the service has taken it out meanwhile, that is its last word.
    let _ = MEMBERS.insert(key, member, u64::from(BPF_EXIST));
}

/// Takes a process that has exited out of the map.
#[inline(always)]
pub fn forget(key: &RawKey) {
    // It was there a moment ago; if the service has taken it out meanwhile, so much the better.
    unfollow(key);
}

/// Which rules may know the program that a task runs, which the verifier has typed; the name of its file is
/// given.
#[inline(always)]
fn bits_of_current(task: Task, name: *const u8) -> u32 {
    let at = offset!(task_comm);
    either([task.load(at), task.load(at + 8)], name)
}

/// Which rules may know the program of a task that is reached by copying.
#[inline(always)]
pub fn bits_of(task: *const u8) -> u32 {
    let comm: Name = read(task, offset!(task_comm));
    let mm: *const u8 = read(task, offset!(task_mm));
    let file: *const u8 = read(mm, offset!(mm_exe_file));
    if file.is_null() {
        // On its way out, or in the middle of an exec: what it is cannot be told.
        return NAME_BITS;
    }
    let dentry: *const u8 = read(file, offset!(file_path) + offset!(path_dentry));
    either(comm, read(dentry, offset!(dentry_name)))
}

/// What is known of either name: that of the process, that of its file.
#[inline(always)]
fn either(comm: Name, string: *const u8) -> u32 {
    // As a block, which is cheaper than as a string: a name in a directory entry is never in less room.
    let name = padded(read(string, 0));
    if name[0] == 0 {
        return NAME_BITS;
    }
    let comm = padded(comm);
    let bits = bits(&name);
    // Mostly the same.
    if comm[0] == name[0] && comm[1] == name[1] {
        bits
    } else {
        bits | self::bits(&comm)
    }
}

/// A name without what is behind its NUL, where some kernels leave what was there before.
#[inline(always)]
fn padded(name: Name) -> Name {
    /// Of a word, what is before its first byte that is 0.
    #[inline(always)]
    fn begun(word: u64) -> (u64, bool) {
        let zero = word.wrapping_sub(0x0101_0101_0101_0101) & !word & 0x8080_8080_8080_8080;
        // Bits above the lowest may be wrong, and do not count. Without any, all of the word is.
        let before = zero.wrapping_sub(1) & !zero;
        let mask = if zero == 0 { u64::MAX } else { before >> 7 };
        (word & mask, zero != 0)
    }
    let (first, ended) = begun(name[0]);
    let second = if ended {
        0
    } else {
        begun(name[1] & (u64::MAX >> 8)).0
    };
    [first, second]
}

/// Which rules may know a program of this name.
#[inline(always)]
fn bits(name: &Name) -> u32 {
    let Some(first) = NAME_INDEX.get(name[0] as u32 & 0xff).copied() else {
        return NAME_BITS;
    };
    let mut bits = first & NAME_BITS;
    if first & second_bit((name[0] >> 8) as u8) == 0 {
        return bits;
    }
    if first & NAME_INDEX_EXACT != 0 {
        bits |= look_up(name);
    }
    if first & NAME_INDEX_PREFIX != 0 {
        let prefix = u64::MAX >> (64 - 8 * PREFIX_LEN);
        bits |= look_up(&[name[0] & prefix, 0]);
    }
    bits
}

#[inline(always)]
fn look_up(name: &Name) -> u32 {
    // SAFETY: a number, copied at once.
    unsafe { NAMES.get(name) }.map_or(0, |bits| *bits)
}
