//! Keeps the exact process trees of AI coding agents and reaps their orphans the moment they are
//! orphaned. This page is the architecture; the README is for users.
//!
//! # One way through the house
//!
//! ```text
//! source ──Event──▶ tree ──Change──▶ session ──▶ policy ──Decision──▶ reap ──Report──▶ export
//!   ebpf             └────────── model/: pure, no IO, no clock ────────┘   pidfd        lines, JSON
//!   procfs                    engine.rs owns the loop, the clock and the channels
//! ```
//!
//! Read [`model::event`] for the words, then [`engine`] for the order in which things happen.
//!
//! # Invariants
//! - A process is a thread group, named by pid and start time ([`model::event::Key`]), never by pid alone.
//! - [`model`] cannot fail, block, or look at a clock: the same events give the same decisions.
//! - Only [`reap`] sends signals, each through a pidfd that was opened before the ring was drained and
//!   found to be the process that was decided about after that.
//! - The ring is drained in order before anything is decided, so a decision never rests on less than
//!   the kernel has told.
//! - Nothing on the way from an exit to a signal blocks: no read of another process's memory, no lock, and
//!   no file but `/proc/PID/status` where the kernel is too old to tell uids by a pidfd. After a loss of
//!   events /proc is read by threads that are not waited for when one of them gets stuck.
//! - Export has its own thread; it may leave lines out, which it says, but holds nobody up.
//! - What is not known speaks for a process: it is kept.
//! - `unsafe` is in [`sys`] and [`source::ebpf`] alone.
//!
//! # Absent on purpose
//! - Ticks. Timers are one-shot and run only while there is something to wait for.
//! - Names as proof of ownership. A rule recognises an agent's root; below that only descent counts.
//! - Signals to process groups: a group can hold processes that are nobody's.

pub mod cli;
pub mod config;
pub mod engine;
pub mod export;
pub mod model;
pub mod reap;
pub mod source;
pub mod sys;
