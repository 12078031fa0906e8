//! Processes of the test trees: this binary under other names, each with one behaviour.
//!
//! `IMAGE WORD… test-process BEHAVIOUR ROLE DIR ARG…`: the words only make the process look like another program.
//! `BEHAVIOUR` names a function in [`BEHAVIOURS`], `ROLE` is the test's name for the process, and `DIR` is the test's
//! directory. A process reports that it is set up by a line in `DIR/report`. All its input is in its arguments, so that
//! it also works with an empty environment.

mod agent;
mod bomb;
mod context;
mod filter;
mod guest;
mod launcher;
mod member;
mod pid_reuse;
mod podman;
mod recorder;
mod socket_failure;
mod threads;

use std::ffi::OsString;
use std::path::Path;

use context::ProcessContext;
pub use filter::instruction;

/// Seconds after which SIGALRM ends a process, in case the test does not.
const LIFETIME_S: u32 = 180;

type BehaviourFn = fn(&ProcessContext) -> !;

const BEHAVIOURS: &[(&str, BehaviourFn)] = &[
    ("launcher", launcher::launcher),
    ("check-survivors", launcher::check_survivors),
    ("run-in-pid-namespace", launcher::run_in_pid_namespace),
    ("agent", agent::agent),
    ("never-waiting-subreaper", agent::never_waiting_subreaper),
    ("shim-exec", agent::shim_exec),
    ("shim-spawn", agent::shim_spawn),
    ("shim-thread", agent::shim_thread),
    ("terminal", agent::terminal),
    ("sleep", member::sleep),
    ("finish", member::finish),
    ("setsid", member::own_session),
    ("parent", member::parent),
    ("middle", member::middle),
    ("orphan", member::orphan),
    ("ignore-term", member::ignore_term),
    ("title", member::title),
    ("trap", member::trap),
    ("with-helper", member::with_helper),
    ("cleaner", member::cleaner),
    ("stopped", member::stopped),
    ("leader-first", member::leader_first),
    ("thread-exec", member::thread_exec),
    ("nested-subreaper", member::nested_subreaper),
    ("zombie-parent", member::zombie_parent),
    ("clone-sibling", member::clone_sibling),
    ("chain", member::chain),
    ("later", member::later),
    ("other-uid", member::other_uid),
    ("drop-privileges", member::drop_privileges),
    ("namespace", member::namespace),
    ("run", member::run),
    ("host", member::host),
    ("failing-socket", socket_failure::failing_socket),
    ("listen", guest::listen),
    ("serve", guest::serve),
    ("client", guest::client),
    ("editor", guest::editor),
    ("burn", guest::burn),
    ("pipeline", guest::pipeline),
    ("family", guest::family),
    ("in-unit", guest::in_unit),
    ("to-unit", guest::to_unit),
    ("exec", guest::exec),
    ("program", guest::program),
    ("daemonized", guest::daemonized),
    ("podman-detached", podman::detached),
    ("podman-attached", podman::attached),
    ("forger", member::forger),
    ("fork-bomb-on-term", bomb::fork_bomb_on_term),
    ("fork-chain-on-term", bomb::fork_chain_on_term),
    ("exec-chain-on-term", bomb::exec_chain_on_term),
    ("exec-chain", bomb::exec_chain),
    ("handover", bomb::handover),
    ("busy", bomb::busy),
    ("swarm", bomb::swarm),
    ("two-thread-parents", threads::two_thread_parents),
    ("recorder", recorder::recorder),
    ("without-pidfds", filter::without_pidfds),
    ("without-pidfds-of-others", filter::without_pidfds_of_others),
    ("recycler", pid_reuse::recycler),
    ("recycled-agent", pid_reuse::agent),
];

fn find_behaviour(name: &str) -> BehaviourFn {
    let found = BEHAVIOURS.iter().find(|(n, _)| *n == name);
    found
        .unwrap_or_else(|| panic!("no behaviour is named '{name}'"))
        .1
}

/// Runs the behaviour that the arguments after `test-process` name.
pub fn main(args: impl Iterator<Item = OsString>) -> ! {
    let mut args = args.map(|a| a.to_string_lossy().into_owned());
    let mut next = || {
        args.next()
            .expect("`test-process` needs BEHAVIOUR, ROLE and DIR")
    };
    let (name, role, dir) = (next(), next(), next());
    nix::unistd::alarm::set(LIFETIME_S);
    find_behaviour(&name)(&ProcessContext {
        role,
        dir: Path::new(&dir).to_owned(),
        args: args.collect(),
    })
}
