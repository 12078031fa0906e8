//! Reports exits, and the reparenting of the children.

use core::ffi::c_void;

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_ebpf::helpers::generated::bpf_loop;
use aya_ebpf::macros::btf_tracepoint;
use aya_ebpf::programs::BtfTracePointContext;
use aya_log_ebpf::{debug, warn};
use reaper_common::{
    CONTROL_KERNEL_REAP, ExitRecord, MEMBER_CANDIDATE, MEMBER_NAME_MATCHED, MEMBER_ROOT,
    MEMBER_SIGTERM_SENT, MEMBER_UNCERTAIN, Member, RawKey, RecordKind, ReparentRecord, RootExit,
};

use crate::kill::{self, SIGTERM};
use crate::maps::{EVENTS, ROOT_EXITS, constant, dropped, filters, header, is_set, wake};
use crate::task::{Task, key_of, load, offset, read, upid};
use crate::{member, session};

/// `SIGNAL_GROUP_EXIT` of include/linux/sched/signal.h.
const SIGNAL_GROUP_EXIT: u32 = 4;
/// Maximum number of children counted for the exit record.
const COUNTED: u32 = 32;
/// Maximum number of ancestors searched for a subreaper. Beyond them the adopter is unknown.
const ANCESTORS: u32 = 4096;
const ANCESTORS_BOUNDED: u32 = 32;
/// Maximum number of steps of the walk over children, with `bpf_loop` (Linux 5.17) and without.
const STEPS: u32 = 1 << 17;
const STEPS_BOUNDED: u32 = 128;

/// `TP_PROTO(struct task_struct *p)`; since Linux 6.16 `(struct task_struct *p, bool group_dead)`.
///
/// Fires for each thread, before the children are reparented (`exit_notify` of kernel/exit.c).
#[btf_tracepoint(function = "sched_process_exit")]
pub fn process_exit(ctx: BtfTracePointContext) -> i32 {
    let Some(exit) = Exit::of(&ctx, false) else {
        return 0;
    };
    exit.report(&ctx);
    if let Some(mut walk) = exit.walk(true) {
        // SAFETY: `each_child` takes this argument and uses it only during the call.
        let steps =
            unsafe { bpf_loop(STEPS, each_child as *mut c_void, (&raw mut walk).cast(), 0) };
        walk.warn_if_cut(&ctx, steps);
    }
    0
}

/// The same for kernels on which it can signal. If it signals, it reports the children before the exit. A reader of the
/// exit then knows which children have been signalled.
#[btf_tracepoint(function = "sched_process_exit")]
pub fn process_exit_killing(ctx: BtfTracePointContext) -> i32 {
    let Some(exit) = Exit::of(&ctx, true) else {
        return 0;
    };
    if !exit.reaps {
        exit.report(&ctx);
    }
    if let Some(mut walk) = exit.walk(true) {
        // SAFETY: as above.
        let steps = unsafe {
            bpf_loop(
                STEPS,
                end_each_child as *mut c_void,
                (&raw mut walk).cast(),
                0,
            )
        };
        walk.warn_if_cut(&ctx, steps);
    }
    if exit.reaps {
        exit.report(&ctx);
    }
    0
}

/// The same for kernels without `bpf_loop`.
#[btf_tracepoint(function = "sched_process_exit")]
pub fn process_exit_bounded(ctx: BtfTracePointContext) -> i32 {
    let Some(exit) = Exit::of(&ctx, false) else {
        return 0;
    };
    exit.report(&ctx);
    if let Some(mut walk) = exit.walk(false) {
        for _ in 0..STEPS_BOUNDED {
            if walk.step(false) {
                return 0;
            }
        }
        walk.warn_if_cut(&ctx, STEPS.into());
    }
    0
}

/// The exit of a process that must be reported.
struct Exit {
    task: Task,
    process: RawKey,
    member: Member,
    status: u32,
    /// Whether its last thread has children.
    has_children: bool,
    /// Number of these children, at most [`COUNTED`].
    children: u32,
    /// Whether other threads that have exited are still in its list. They can have children too.
    has_other_threads: bool,
    /// Whether to signal its children that are members of its session.
    reaps: bool,
}

impl Exit {
    /// Returns the exit of a process; `None` if this is not its last thread, or the process must not be reported.
    ///
    /// Removes the process from the map of members, and stores the exit of a root. `can_signal` says whether this program
    /// can signal other processes than the current one.
    #[inline(always)]
    fn of(ctx: &BtfTracePointContext, can_signal: bool) -> Option<Exit> {
        // SAFETY: the first argument of the prototype above.
        let task = unsafe { Task::from_argument(ctx.arg(0)) };
        let signal = task.signal();
        // A leader can exit first and another thread last. Before Linux 6.16, threads that exit at the same time can each
        // see no live thread. The service uses the first record and ignores the others.
        let has_group_dead: u32 = constant!(SETTINGS: Settings.exit_has_group_dead);
        let dead = if has_group_dead != 0 {
            ctx.arg::<u32>(1) & 0xff != 0
        } else {
            // SAFETY: `signal` comes from a typed load.
            unsafe { load::<u32>(signal, offset!(signal_live)) == 0 }
        };
        if !dead {
            return None;
        }
        let process = task.key();
        let member = match member::of(&process) {
            None if process.pid == 0 || filters() => return None,
            found => found.unwrap_or(member::UNTRACKED),
        };
        let status = wait_status(task, signal);
        let reaps = member.flags & MEMBER_ROOT != 0
            && on_root_exit(&process, &member, status)
            && can_signal;
        if member.flags != 0 {
            member::forget(&process);
        }
        let (has_children, children) = count_children(task);
        // SAFETY: `signal` comes from a typed load.
        let has_other_threads = unsafe { load::<u32>(signal, offset!(signal_nr_threads)) } > 1;
        Some(Exit {
            task,
            process,
            member,
            status,
            has_children,
            children,
            has_other_threads,
            reaps,
        })
    }

    /// Writes the exit record. Wakes the reader at once for a tracked process that is a root or can have children.
    #[inline(always)]
    fn report(&self, ctx: &BtfTracePointContext) {
        let Some(mut record) = EVENTS.reserve::<ExitRecord>(0) else {
            return dropped(RecordKind::Exit);
        };
        record.write(ExitRecord {
            header: header(RecordKind::Exit, size_of::<ExitRecord>()),
            process: self.process,
            parent: self.task.real_parent().key(),
            status: self.status,
            children: self.children,
            // SAFETY: comes from typed loads.
            peak_rss_pages: unsafe { load(self.task.signal(), offset!(signal_maxrss)) },
            member: self.member,
        });
        let leaves =
            self.has_children || self.has_other_threads || self.member.flags & MEMBER_ROOT != 0;
        record.submit(wake(leaves && self.member.flags != 0));
        debug!(
            ctx,
            "exit: pid {}, {} children", self.process.pid, self.children
        );
    }

    /// Returns the walk over its children, if it can have any. `has_bpf_loop` as in [`adopter`].
    #[inline(always)]
    fn walk(&self, has_bpf_loop: bool) -> Option<Walk> {
        (self.has_children || self.has_other_threads).then(|| Walk::new(self, has_bpf_loop))
    }
}

/// Stores the exit of a session's root for the service, in case the ring has no room for its record.
///
/// Returns whether the probe may signal the root's children. It may if the service and the session allow it, the root was
/// killed by a signal, and the service has classified the root.
#[inline(always)]
fn on_root_exit(process: &RawKey, member: &Member, status: u32) -> bool {
    let Some(session) = session::of(&member.session) else {
        return false;
    };
    if !kill::same(&session.root, process) {
        return false;
    }
    let exit = RootExit {
        // SAFETY: no argument, no precondition.
        time_ns: unsafe { bpf_ktime_get_boot_ns() },
        status,
        _pad: 0,
    };
    // Without room, only the record reports the exit.
    let _ = ROOT_EXITS.insert(&member.session, &exit, 0);
    if !session.allows_kernel_reap() || !is_set(CONTROL_KERNEL_REAP) {
        return false;
    }
    // Not after a normal exit: a child can be the successor, and rules can give the members more time.
    // MEMBER_KERNEL_KILLABLE is computed for a root that was killed by a signal. Not for a root that is not classified
    // yet, as it can be a boundary.
    let doubtful = MEMBER_NAME_MATCHED | MEMBER_UNCERTAIN | MEMBER_CANDIDATE;
    status & 0x7f != 0 && member.flags & doubtful == 0
}

/// Returns the status that `wait_task_zombie` of kernel/exit.c reports to the parent.
#[inline(always)]
fn wait_status(task: Task, signal: *const u8) -> u32 {
    // SAFETY: `signal` comes from a typed load.
    let flags: u32 = unsafe { load(signal, offset!(signal_flags)) };
    if flags & SIGNAL_GROUP_EXIT != 0 {
        // SAFETY: as above.
        return unsafe { load(signal, offset!(signal_group_exit_code)) };
    }
    let leader: *const u8 = task.load(offset!(task_group_leader));
    // SAFETY: comes from a typed load.
    unsafe { load(leader, offset!(task_exit_code)) }
}

/// Returns whether the thread has children, and their number up to a limit. Two results, so that the verifier does not
/// have to follow each number separately.
#[inline(always)]
fn count_children(task: Task) -> (bool, u32) {
    let head = task.as_ptr().wrapping_add(offset!(task_children)) as u64;
    let first: u64 = task.load(offset!(task_children));
    if first == head {
        return (false, 0);
    }
    let (mut node, mut n) = (first, 0);
    while n < COUNTED && node != head {
        n += 1;
        node = read(node as *const u8, 0);
    }
    (true, n)
}

/// Walk over the children of all threads of a process. Each child is in the list of the thread that created it.
#[repr(C)]
struct Walk {
    /// Address of the process's `signal_struct`, which only its threads share.
    signal: u64,
    /// Head of the list of threads, in the `signal_struct`.
    threads: u64,
    /// Thread whose children are walked, by its node in that list.
    thread: u64,
    /// Head of its list of children.
    head: u64,
    /// Node of the next child.
    node: u64,
    parent: RawKey,
    adopter: RawKey,
    /// Session whose members among the children are signalled. [`RawKey::NONE`] if no child is signalled.
    ending: RawKey,
}

unsafe extern "C" fn each_child(_: u32, walk: *mut Walk) -> i64 {
    // SAFETY: `process_exit` passes its own walk, to which nothing else has access meanwhile.
    unsafe { &mut *walk }.step(false).into()
}

unsafe extern "C" fn end_each_child(_: u32, walk: *mut Walk) -> i64 {
    // SAFETY: as above.
    unsafe { &mut *walk }.step(true).into()
}

impl Walk {
    /// Returns a walk that has not handled a child yet.
    #[inline(always)]
    fn new(exit: &Exit, has_bpf_loop: bool) -> Walk {
        let task = exit.task;
        let signal: u64 = read(task.as_ptr(), offset!(task_signal));
        let threads = signal + offset!(signal_thread_head) as u64;
        let adopter = adopter(task, has_bpf_loop);
        // Starts before the first thread, as if a thread before it had been walked. Uses no constants: verifiers before
        // Linux 6.7 analyse the step only with its first arguments, and remove code that these do not reach.
        Walk {
            signal,
            threads,
            thread: threads,
            head: threads,
            node: threads,
            parent: exit.process,
            adopter,
            ending: if exit.reaps {
                exit.member.session
            } else {
                RawKey::NONE
            },
        }
    }

    /// Logs a warning if the walk was stopped after the maximum number of `steps`.
    #[inline(always)]
    fn warn_if_cut(&self, ctx: &BtfTracePointContext, steps: i64) {
        if steps >= i64::from(STEPS) {
            warn!(
                ctx,
                "pid {} had more children than were reported", self.parent.pid
            );
        }
    }

    /// Reports one child, or goes to the next thread. Returns whether the walk has ended. `can_signal` as in [`Exit::of`].
    #[inline(always)]
    fn step(&mut self, can_signal: bool) -> bool {
        if self.node == self.head {
            self.thread = read(self.thread as *const u8, 0);
            if self.thread == self.threads || self.thread == 0 {
                return true;
            }
            self.head =
                self.thread - offset!(task_thread_node) as u64 + offset!(task_children) as u64;
            self.node = read(self.head as *const u8, 0);
            return false;
        }
        if self.node == 0 {
            return true;
        }
        let child = (self.node as *const u8).wrapping_sub(offset!(task_sibling));
        let next: u64 = read(self.node as *const u8, 0);
        let parent: *const u8 = read(child, offset!(task_real_parent));
        // Another thread of the process can be reparenting its children now. Then the list continues into that of the
        // adopter, or a removed child points to itself. The kernel sets the parent first, so a child with another parent
        // ends the list.
        if read::<u64>(parent, offset!(task_signal)) != self.signal || next == self.node {
            self.node = self.head;
            return false;
        }
        self.node = next;
        // A leader can be a zombie while other threads run. A process without live threads has exited.
        let signal: *const u8 = read(child, offset!(task_signal));
        if read::<u32>(signal, offset!(signal_live)) != 0 {
            self.report(child, can_signal);
        }
        false
    }

    /// Writes the reparent record of a child, after the child has been signalled if it must be. `task` is untyped.
    #[inline(always)]
    fn report(&self, task: *const u8, can_signal: bool) {
        let child = key_of(task);
        let mut member = match member::of(&child) {
            None if child.pid == 0 || filters() => return,
            found => found.unwrap_or(member::UNTRACKED),
        };
        // Reserved before the signal, so that it precedes the child's exit record, which another CPU can write at once.
        let record = EVENTS.reserve::<ReparentRecord>(0);
        let is_signalled = can_signal && self.signal_child(task, &child, &member);
        if is_signalled {
            member.flags |= MEMBER_SIGTERM_SENT;
            member::change(&child, &member);
        }
        let Some(mut record) = record else {
            return dropped(RecordKind::Reparent);
        };
        record.write(ReparentRecord {
            header: header(RecordKind::Reparent, size_of::<ReparentRecord>()),
            child,
            old_parent: self.parent,
            adopter: self.adopter,
            member,
            signal: if is_signalled { SIGTERM } else { 0 },
            _pad: 0,
        });
        record.submit(wake(false));
    }

    /// Sends SIGTERM to a child that is a member of the exiting root's session and that no rule can keep. Returns whether
    /// it was sent.
    #[inline(always)]
    fn signal_child(&self, task: *const u8, child: &RawKey, member: &Member) -> bool {
        if self.ending.pid == 0 || !kill::same(&member.session, &self.ending) {
            return false;
        }
        let Some(session) = session::of(&self.ending) else {
            return false;
        };
        kill::is_killable(task, member, &session)
            && member.flags & (MEMBER_ROOT | MEMBER_SIGTERM_SENT) == 0
            && kill::send_to(task, child.start_ns, SIGTERM)
    }
}

/// Search for the adopter of the children, like `find_new_reaper` of kernel/exit.c for a process without live threads.
/// The adopter is the nearest subreaper above in the same pid namespace, otherwise the init process of that namespace.
#[repr(C)]
struct Search {
    /// Next ancestor; at the end the adopter. Null if there is no adopter or it is unknown.
    ancestor: *const u8,
    level: u32,
    found: u32,
}

unsafe extern "C" fn each_ancestor(_: u32, search: *mut Search) -> i64 {
    // SAFETY: `adopter` passes its own search, to which nothing else has access meanwhile.
    unsafe { &mut *search }.step().into()
}

impl Search {
    /// Checks one ancestor. Returns whether the search has ended.
    #[inline(always)]
    fn step(&mut self) -> bool {
        let pid: *const u8 = read(self.ancestor, offset!(task_thread_pid));
        // The idle task is the ancestor of all and has pid 0.
        if read::<u32>(pid, offset!(pid_level)) != self.level
            || read::<u32>(self.ancestor, offset!(task_tgid)) == 0
        {
            self.ancestor = core::ptr::null();
            return true;
        }
        let signal: *const u8 = read(self.ancestor, offset!(task_signal));
        let bits: u8 = read(signal, offset!(signal_subreaper_byte));
        let subreaper = u32::from(bits) & offset!(signal_subreaper_mask) as u32 != 0;
        if subreaper && read::<u32>(signal, offset!(signal_live)) != 0 {
            self.found = 1;
            return true;
        }
        self.ancestor = read(self.ancestor, offset!(task_real_parent));
        false
    }
}

/// Returns the adopter of the children of a process whose last thread is exiting; [`RawKey::NONE`] if it is unknown or
/// there is none. `has_bpf_loop` says whether the kernel has `bpf_loop`, so that all ancestors can be searched and not only
/// the nearest [`ANCESTORS_BOUNDED`].
#[inline(always)]
fn adopter(task: Task, has_bpf_loop: bool) -> RawKey {
    let father = task.as_ptr();
    let pid: *const u8 = read(father, offset!(task_thread_pid));
    let level: u32 = read(pid, offset!(pid_level));
    let signal: *const u8 = read(father, offset!(task_signal));
    let has: u8 = read(signal, offset!(signal_has_subreaper_byte));
    if u32::from(has) & offset!(signal_has_subreaper_mask) as u32 != 0 {
        let ancestor = read(father, offset!(task_real_parent));
        let mut search = Search {
            ancestor,
            level,
            found: 0,
        };
        let over = if has_bpf_loop {
            // SAFETY: `each_ancestor` takes this argument and uses it only during the call.
            let steps = unsafe {
                bpf_loop(
                    ANCESTORS,
                    each_ancestor as *mut c_void,
                    (&raw mut search).cast(),
                    0,
                )
            };
            steps < i64::from(ANCESTORS)
        } else {
            (0..ANCESTORS_BOUNDED).any(|_| search.step())
        };
        if !over {
            return RawKey::NONE;
        }
        if search.found != 0 {
            return key_of(search.ancestor);
        }
    }
    let namespace: *const u8 = read(upid(pid, level), offset!(upid_ns));
    let init: *const u8 = read(namespace, offset!(namespace_child_reaper));
    // The init process itself is exiting. Its namespace ends too, and there is no adopter.
    let ours: u32 = read(father, offset!(task_tgid));
    if read::<u32>(init, offset!(task_tgid)) == ours {
        RawKey::NONE
    } else {
        key_of(init)
    }
}
