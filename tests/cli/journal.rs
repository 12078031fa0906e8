//! Tests of the place of a service's journal.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use libtest_mimic::Trial;
use nix::sys::signal::Signal;

use super::service_requests::ask;
use crate::daemon::{self, Daemon};
use crate::proc::{self, ProcessKey};
use crate::trees::{CONFIG, trial};
use crate::world::World;

pub fn privileged() -> Vec<Trial> {
    vec![trial("cli", "journal-of-a-process", journal_of_a_process)]
}

/// Starts a daemon on a process, with the journal in its default place.
fn start(dir: &Path, scope: ProcessKey) -> Daemon {
    let scope = scope.pid.to_string();
    let mut arguments = daemon::arguments(dir, Some(&scope), CONFIG, &["--observe"]);
    arguments.retain(|word| word != "--no-journal");
    Daemon::start(dir, &arguments)
}

/// Starts a process that lives until its standard input is closed.
fn process() -> (Child, ProcessKey) {
    let mut command = Command::new("cat");
    let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let child = child.expect("start cat");
    let key = proc::stat(child.id().cast_signed()).expect("cat").id;
    (child, key)
}

/// The journal of a daemon that watches one process is in the runtime directory. After the exit of that process, the next
/// daemon removes it.
fn journal_of_a_process() {
    let world = World::new(true);
    let (dir, launcher) = (world.dir().to_owned(), world.process("launcher"));
    let journal = |key: ProcessKey| format!("journal-{}-{}.db", key.pid, key.ticks);
    let exists = |key| dir.join("run").join(journal(key)).exists();
    let (mut cat, exited) = process();
    start(&dir, exited).stop(Signal::SIGTERM);
    assert!(exists(exited), "no journal in the runtime directory");
    let daemon = start(&dir, launcher);
    assert!(
        exists(launcher) && exists(exited),
        "both processes are alive"
    );
    let history = ask(&world, &["history"]);
    assert_eq!(history.code, Some(0), "{}", history.err);
    daemon.stop(Signal::SIGTERM);
    drop(cat.stdin.take());
    cat.wait().expect("wait for cat");
    start(&dir, launcher).stop(Signal::SIGTERM);
    assert!(
        exists(launcher) && !exists(exited),
        "its process has exited"
    );
    for key in [exited, launcher] {
        let host = Path::new("/var/lib/reaper").join(journal(key));
        assert!(!host.exists(), "{}", host.display());
    }
    world.assert_alive(&["canary"]);
}
