//! Membership: inherited at fork, removed at exit, and started at exec of a program whose name can be an agent's.
//!
//! The service writes to the same map and overrides all of this. The probes' entries hold until it has done so, and while
//! it does not run.

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
    MEMBERS, NAME_INDEX, NAMES, constant, count, filters, is_set, may_be_tracked, track, untrack,
};
use crate::task::{Task, offset, read};

const NAME_BITS: u32 = NAME_AGENT | NAME_BOUNDARY | NAME_KEEP;
/// Membership of an untracked process.
pub const UNTRACKED: Member = Member {
    session: RawKey::NONE,
    flags: 0,
    check: 0,
};

/// A name as words for comparison and lookup, padded with NUL and with at least one NUL at the end.
type Name = [u64; NAME_LEN / 8];

/// Returns the entry of a process in [`MEMBERS`]; `None` if it has none. An entry that is replaced during the read
/// gives no session and [`MEMBER_UNCERTAIN`].
#[inline(always)]
pub fn of(key: &RawKey) -> Option<Member> {
    if !may_be_tracked(key.pid) {
        return None;
    }
    for _ in 0..2 {
        let found = MEMBERS.get_ptr(key)?;
        // The service can replace the value during the read, and the kernel can reuse its memory for another process. The
        // check value next to the flags is therefore compared before and after the read.
        // SAFETY: a pointer into the map, which outlives the program.
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
    // Tracked, but nothing else can be read now.
    Some(Member {
        session: RawKey::NONE,
        flags: MEMBER_TRACKED | MEMBER_UNCERTAIN,
        check: key.check(),
    })
}

/// Returns whether the membership could not be read. It must then not be overwritten.
#[inline(always)]
fn is_doubtful(member: &Member) -> bool {
    !has_session(member) && member.flags & MEMBER_UNCERTAIN != 0
}

/// Returns whether the process is a member of a session.
#[inline(always)]
pub fn has_session(member: &Member) -> bool {
    member.session.pid != 0
}

/// Returns whether children are tracked too.
#[inline(always)]
pub fn is_inherited(member: &Member) -> bool {
    has_session(member) || member.flags & MEMBER_SCOPE != 0
}

/// Writes the membership that a new process inherits from its creator, and returns it. Returns [`UNTRACKED`] if the
/// creator is not tracked, or the map is full. A process in other cgroups than its creator (`together` is false) is not
/// killable by the probes. The child of a process that the service has not classified yet is uncertain.
#[inline(always)]
pub fn inherit(creator: &Member, child: &RawKey, together: bool) -> Member {
    if !is_inherited(creator) {
        return UNTRACKED;
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
    if !track(child, &member) {
        count(COUNTER_UNTRACKED);
        return UNTRACKED;
    }
    member
}

/// Updates the membership of a process at exec. Returns it, and `ENVIRONMENT_*`; `None` if the exec must not be reported.
///
/// A program whose name can be an agent's becomes a candidate. `name` is the kernel's string with the name of the program's
/// file, and `has_bpf_loop` as in [`environment::of`].
#[inline(always)]
pub fn on_exec(
    task: Task,
    key: &RawKey,
    name: *const u8,
    has_bpf_loop: bool,
) -> Option<(Member, u32)> {
    let Some(found) = of(key) else {
        let scoped: u32 = constant!(SETTINGS: Settings.scoped);
        if scoped == 0 && bits_of_current(task, name) & NAME_AGENT != 0 {
            let member = candidate(key, MEMBER_TRACKED);
            if track(key, &member) {
                return Some((member, environment::of(task, has_bpf_loop)));
            }
            count(COUNTER_UNTRACKED);
            return Some((UNTRACKED, ENVIRONMENT_UNREAD));
        }
        return (!filters()).then_some((UNTRACKED, ENVIRONMENT_UNREAD));
    };
    let mut environment = ENVIRONMENT_UNREAD;
    if has_session(&found) && !is_doubtful(&found) {
        environment = environment::of(task, has_bpf_loop);
    }
    let bits = bits_of_current(task, name);
    // Read again: reading the environment took time, in which the service can have written.
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
        // A set-user-ID program is kept, and so are its children.
        let (uid, euid) = task.uids();
        if uid != euid {
            member.flags |= MEMBER_UNCERTAIN;
        }
        // Nothing has changed that could keep it, apart from its name.
        if bits == 0 && environment == ENVIRONMENT_UNMARKED && is_set(CONTROL_ONLY_KEEP_MARKER) {
            member.flags |= before & MEMBER_KERNEL_KILLABLE;
        }
    } else if bits & NAME_AGENT != 0 {
        environment = environment::of(task, has_bpf_loop);
        member = candidate(key, before);
    }
    member.flags = with_next_generation(before, member.flags);
    change(key, &member);
    Some((member, environment))
}

/// Updates the membership of a process after a move to another cgroup: the probes may not signal it any more.
#[inline(always)]
pub fn on_move(key: &RawKey, member: &mut Member) {
    if has_session(member) {
        member.flags = with_next_generation(member.flags, member.flags & !MEMBER_KERNEL_KILLABLE);
        change(key, member);
    }
}

/// Returns `flags` with the generation after that of `before`.
///
/// The service then drops a membership that it computed before this exec or cgroup move.
#[inline(always)]
fn with_next_generation(before: u32, flags: u32) -> u32 {
    flags & !MEMBER_GENERATION_MASK
        | before.wrapping_add(MEMBER_GENERATION_STEP) & MEMBER_GENERATION_MASK
}

/// Returns the membership of a process as the root of a new session, which the service confirms or rejects.
#[inline(always)]
fn candidate(key: &RawKey, flags: u32) -> Member {
    Member {
        session: *key,
        flags: flags | MEMBER_ROOT | MEMBER_CANDIDATE,
        check: key.check(),
    }
}

/// Changes the membership of a process in the map. Not through a pointer to the value: when the service replaces the
/// value, the kernel reuses its memory for another process.
#[inline(always)]
pub fn change(key: &RawKey, member: &Member) {
    // Fails if the service has removed it meanwhile, which is final.
    let _ = MEMBERS.insert(key, member, u64::from(BPF_EXIST));
}

/// Removes an exited process from the map.
#[inline(always)]
pub fn forget(key: &RawKey) {
    // The service can have removed it already.
    untrack(key);
}

/// Returns the kinds of rules (`NAME_*`) that can match a typed task by its name or the name of its file.
#[inline(always)]
fn bits_of_current(task: Task, name: *const u8) -> u32 {
    let at = offset!(task_comm);
    either([task.load(at), task.load(at + 8)], name)
}

/// Returns the kinds of rules (`NAME_*`) that can match the program of an untyped task; all kinds if it is unknown.
#[inline(always)]
pub fn bits_of(task: *const u8) -> u32 {
    let comm: Name = read(task, offset!(task_comm));
    let mm: *const u8 = read(task, offset!(task_mm));
    let file: *const u8 = read(mm, offset!(mm_exe_file));
    if file.is_null() {
        // Exiting, or within an exec: the program is unknown.
        return NAME_BITS;
    }
    let dentry: *const u8 = read(file, offset!(file_path) + offset!(path_dentry));
    either(comm, read(dentry, offset!(dentry_name)))
}

/// Returns the kinds of rules (`NAME_*`) that can match the process by its name or the name of its file.
///
/// `string` is the kernel address of the file name. Returns all kinds if it cannot be read.
#[inline(always)]
fn either(comm: Name, string: *const u8) -> u32 {
    // Read as a block, which is cheaper than as a string. The buffer of a name in a directory entry is large enough.
    let name = padded(read(string, 0));
    if name[0] == 0 {
        return NAME_BITS;
    }
    let comm = padded(comm);
    let bits = bits(&name);
    // Usually the same.
    if comm[0] == name[0] && comm[1] == name[1] {
        bits
    } else {
        bits | self::bits(&comm)
    }
}

/// Clears the bytes after the NUL, where some kernels leave old content.
#[inline(always)]
fn padded(name: Name) -> Name {
    /// Clears the bytes of a word from its first zero byte. Returns also whether there is one.
    #[inline(always)]
    fn begun(word: u64) -> (u64, bool) {
        let zero = word.wrapping_sub(0x0101_0101_0101_0101) & !word & 0x8080_8080_8080_8080;
        // Bits above the lowest can be wrong and are ignored. Without any bit the whole word counts.
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

/// Returns the kinds of rules (`NAME_*`) that can match a program with this name.
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

/// Returns the kinds of rules (`NAME_*`) in [`NAMES`] for a name or prefix; 0 if it is not there.
#[inline(always)]
fn look_up(name: &Name) -> u32 {
    // SAFETY: a number that is copied at once.
    unsafe { NAMES.get(name) }.map_or(0, |bits| *bits)
}
