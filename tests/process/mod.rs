//! The processes of the trees: this very binary under other names, playing a part each.
//!
//! `IMAGE WORD… process PLAY ROLE DIR ARG…`: the words are there to be seen, `PLAY` names a function below, `ROLE` is what the test calls the
//! process, `DIR` is the test's directory. A process reports itself when it is what it should be, by a line
//! in `DIR/report`; everything it needs is in its arguments, so that an empty environment changes nothing.

mod agent;
mod bomb;
mod deaf;
mod filter;
mod guest;
mod launcher;
mod member;
mod recorder;
mod recycle;
mod setup;
mod threads;

use std::ffi::OsString;
use std::path::Path;

pub use filter::step;
use setup::RoleSetup;

/// Seconds after which a process ends by itself, should everything that cleans up fail.
const LIFETIME_S: u32 = 180;

type RoleFn = fn(&RoleSetup) -> !;

const ROLES: &[(&str, RoleFn)] = &[
    ("launcher", launcher::launcher),
    ("witness", launcher::witness),
    ("capsule", launcher::capsule),
    ("agent", agent::agent),
    ("hoarder", agent::hoarder),
    ("shim-exec", agent::shim_exec),
    ("shim-spawn", agent::shim_spawn),
    ("shim-thread", agent::shim_thread),
    ("terminal", agent::terminal),
    ("sleep", member::sleep),
    ("setsid", member::own_session),
    ("parent", member::parent),
    ("middle", member::middle),
    ("orphan", member::orphan),
    ("stubborn", member::stubborn),
    ("trap", member::trap),
    ("cleaner", member::cleaner),
    ("stopped", member::stopped),
    ("leader-first", member::leader_first),
    ("thread-exec", member::thread_exec),
    ("nurse", member::nurse),
    ("negligent", member::negligent),
    ("twins", member::twins),
    ("chain", member::chain),
    ("later", member::later),
    ("other-uid", member::other_uid),
    ("drop-privileges", member::drop_privileges),
    ("namespace", member::namespace),
    ("run", member::run),
    ("host", member::host),
    ("deafening", deaf::deafening),
    ("listen", guest::listen),
    ("serve", guest::serve),
    ("client", guest::client),
    ("editor", guest::editor),
    ("burn", guest::burn),
    ("family", guest::family),
    ("in-unit", guest::in_unit),
    ("to-unit", guest::to_unit),
    ("exec", guest::exec),
    ("program", guest::program),
    ("daemonized", guest::daemonized),
    ("forger", member::forger),
    ("hydra", bomb::hydra),
    ("runner", bomb::runner),
    ("hopper", bomb::hopper),
    ("hop", bomb::hop),
    ("handover", bomb::handover),
    ("busy", bomb::busy),
    ("swarm", bomb::swarm),
    ("givers", threads::givers),
    ("recorder", recorder::recorder),
    ("without-pidfds", filter::without_pidfds),
    ("recycler", recycle::recycler),
    ("recycled-agent", recycle::agent),
];

fn run_role(name: &str) -> RoleFn {
    let found = ROLES.iter().find(|(n, _)| *n == name);
    found
        .unwrap_or_else(|| panic!("no role is called '{name}'"))
        .1
}

/// Plays the part that the arguments after `process` name. Returns only to the caller's `exit`.
pub fn main(args: impl Iterator<Item = OsString>) -> ! {
    let mut args = args.map(|a| a.to_string_lossy().into_owned());
    let mut next = || args.next().expect("`role` needs ROLE, NAME and DIR");
    let (name, role, dir) = (next(), next(), next());
    nix::unistd::alarm::set(LIFETIME_S);
    run_role(&name)(&RoleSetup {
        role,
        dir: Path::new(&dir).to_owned(),
        args: args.collect(),
    })
}
