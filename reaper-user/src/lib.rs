//! Keeps the exact process trees of AI coding agents and reaps their orphans the moment they are
//! orphaned. This page is the architecture; the README is for users.
//!
//! # One way through the house
//!
//! ```text
//! source ──Event──▶ tree ──Change──▶ session ──▶ policy ──Decision──▶ reap ──Event──▶ export ──▶ journal
//!   ebpf             └──── reaper-model: pure, no I/O, no clock ────────┘   pidfd       lines, JSON  SQLite
//!   proc_connector        ▲   engine.rs owns the loop, the clock and the channels
//!   procfs              facts                 │ ◀── api: requests through a socket
//!    ▲                                        │
//!    └── maps in the kernel ◀──── map_sync ───┘   memberships and sessions
//! ```
//!
//! # Crates
//! - `reaper-common`: what probes and service share. `reaper-ebpf`: the probes.
//! - `reaper-model` ([`reaper_model`]): tree, sessions, rules and policy.
//! - `reaper-host` ([`reaper_host`]): sources, facts about processes, and system calls.
//! - this one: engine, reaping, export, journal, API, `reaper run` and the commands.
//!
//! Within a crate imports follow the order of its rooms, and no two files import from each other; `cargo xtask tidy` checks
//! both.
//!
//! The maps are the way back: the probes hand membership on by themselves, at each fork, and the service
//! that comes after one that was killed begins with what it finds there ([`engine`], `restore`).
//!
//! What a rule asks for and no event tells ([`reaper_host::facts`]: environment, cgroup, sockets) is read by threads that nobody waits
//! for longer than is good: ahead of time where it lasts, else while the decision waits.
//!
//! Read [`reaper_model::event`] for the words, then [`engine`] for the order in which things happen.
//!
//! # Invariants
//! - A process is a thread group, named by pid and start time ([`reaper_model::event::ProcessKey`]), never by pid alone.
//! - The crate [`reaper_model`] cannot fail, block, or look at a clock: the same events give the same decisions.
//! - Only [`reap`] sends signals, each through a pidfd that was opened before the ring was drained and
//!   found to be the process that was decided about after that. The probes send two of their own
//!   (`reaper-ebpf/src/kill.rs`), to members of whom no rule knows more and whom the service has cleared
//!   (`MEMBER_CLEAR`; another program keeps that only where the probe sees that nothing else has changed): SIGTERM to the
//!   children of a root as it exits, SIGKILL to what forks or execs in a session that has come to that.
//! - The ring is drained in order before anything is decided, so a decision never rests on less than
//!   the kernel has told.
//! - Nothing on the way from an exit to a signal blocks: no read of another process's memory, no lock, and
//!   no file but `/proc/PID/status` where the kernel is too old to tell uids by a pidfd; without probes that and
//!   `/proc/PID/stat`, with each event. What can block is read by threads that are not waited for when one of them
//!   gets stuck: all of /proc after a loss of events, and, without probes, the program of whoever runs another.
//! - The engine answers questions by copies of what it knows; files are read, and words found, in the socket's thread.
//! - Export and the journal each have their own thread; they may leave something out, which they say, but
//!   hold nobody up.
//! - What is not known speaks for a process: it is kept. After a loss of events nothing new is decided
//!   before what was lost has been looked for.
//! - What the service knows and must not lose is in the kernel's maps before room in the ring is given
//!   back: whoever comes next reads the same events again, and they change nothing twice.
//! - `unsafe` is in [`reaper_host::sys`] and [`reaper_host::source`] alone.
//!
//! # On macOS
//! The same, with other answers in the same places: modules with a twin in a `darwin.rs` or below a `darwin/`, chosen where they are
//! declared. [`reaper_host::source`] says what the kernel tells there, and `sys/darwin/pidfd.rs` what stands in the place of a pidfd and
//! what that leaves open.
//!
//! # Absent on purpose
//! - Ticks. Timers are one-shot and run only while there is something to wait for.
//! - Names as proof of ownership. A rule recognises an agent's root; below that only descent counts.
//! - Signals to process groups: a group can hold processes that are nobody's.

pub mod api;
pub mod cli;
pub mod config;
#[cfg(test)]
#[path = "../host/src/damage.rs"]
#[allow(dead_code, reason = "some of it is for the tests of reaper-host")]
mod damage;
pub mod engine;
pub mod export;
pub mod journal;
pub mod leftovers;
pub mod reap;
#[cfg(target_os = "linux")]
pub mod run;
