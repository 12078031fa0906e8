//! Maps each test to the guarantees to users that it shows.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};

use super::api;
use super::binaries::{Binaries, TestBinary};
use super::promises;

/// Name and text of each guarantee, one per line.
const GUARANTEES: &str = "\
members      whatever a member starts is a member, whatever it does with setsid, forks, environment or uid
orphans      a member is an orphan when its parent process exits, and is reaped at that moment
identity     no signal without a pidfd that was verified after it was opened
kept         kept processes are never signalled; observe makes the same decisions and sends no signal
escalation   SIGTERM, grace, SIGKILL, until no member is left; fork bombs included
zombies      zombies, stopped processes and leaders that exit before their threads are handled
agents       agents are recognised by their program, and their sessions open, nest and close
budgets      a time budget ends a command exactly as a stop does
restart      SIGKILL of the service loses no session; nothing of another boot is signalled
run          `reaper run` passes status, signals and terminal on, and exits only after its whole tree
leftovers    processes that agents left before the service started are found by evidence alone
loss         lost events are counted, reported and reconciled; an idle service has no wake-ups
own-user     the service runs a command or removes a path only as the user who requested it
isolation    no user delays, hides or ends the processes of another
fallback     without BPF, the proc connector or a scan does the same and reports what it cannot see
macos        the same engine on a process-table scan of macOS
stream       each event, decision and outcome is reported once, in order, and escaped
journal      history and users' keeps survive crashes, within bounds
answers      requests are answered correctly, and only for permitted users
input        bad input gives a clear error and loses nothing
probes       one BPF object loads on each kernel from 5.10 on
tools        the developer commands work as documented";

/// Guarantees by prefix of the test's name. The longest prefix counts.
const SHOWN: &[(&str, &[&str])] = &[
    // Real process trees.
    (
        "enforce::",
        &["members", "orphans", "escalation", "identity"],
    ),
    ("enforce::keep-rule", &["kept"]),
    ("enforce::boundary", &["kept"]),
    ("enforce::other-uid", &["kept"]),
    ("enforce::out-of-scope", &["kept"]),
    ("enforce::recycled-pid", &["identity"]),
    ("enforce::fork-bomb", &["escalation"]),
    ("enforce::runaway", &["escalation"]),
    ("enforce::stopped", &["zombies"]),
    ("enforce::zombie-below", &["zombies"]),
    ("enforce::leader-thread-first", &["zombies"]),
    ("enforce::relaunch", &["agents"]),
    ("enforce::conversation", &["agents"]),
    ("observe::", &["kept"]),
    ("corpus::", &["kept", "agents", "orphans"]),
    ("proc-connector::", &["fallback", "members", "orphans"]),
    ("procfs::", &["fallback", "members", "orphans"]),
    ("survival::", &["restart"]),
    ("survival::fork-bomb", &["loss"]),
    ("survival::births", &["loss"]),
    ("survival::members-full", &["loss"]),
    ("survival::filter", &["loss"]),
    ("survival::socket", &["loss"]),
    ("survival::kernel-reap", &["orphans"]),
    ("survival::killed-on-", &["escalation"]),
    ("survival::overwritten-marker", &["kept"]),
    ("survival::newer-journal", &["journal", "kept"]),
    ("run::as-", &["run"]),
    ("run::as-root::link-", &["own-user"]),
    ("run::as-root::root-refuses", &["own-user"]),
    ("run::as-root::other-users", &["isolation"]),
    ("run::as-root::records-of-others", &["isolation"]),
    ("run::as-root::another-boot", &["restart"]),
    ("soak::", &["restart"]),
    // The command line.
    ("cli::", &["input", "answers"]),
    ("cli::scan", &["leftovers"]),
    ("cli::escaped", &["leftovers"]),
    ("cli::events_continue", &["stream"]),
    ("cli::hostile", &["stream"]),
    ("cli::forged", &["stream"]),
    ("cli::lines", &["stream"]),
    ("cli::requests-of-other-users", &["isolation"]),
    ("cli::runtime-dir-of-others", &["isolation"]),
    ("cli::config-of-others", &["isolation"]),
    ("cli::history-of-its-owner", &["isolation"]),
    ("cli::judgement", &["answers", "kept"]),
    ("cli::kept-by-user", &["kept"]),
    ("cli::keep", &["kept"]),
    ("cli::history-of-a-session", &["journal"]),
    ("cli::journal-of", &["journal"]),
    ("cli::doctor", &["fallback"]),
    ("cli::unprivileged-service", &["fallback"]),
    ("cli::without-pidfds", &["fallback"]),
    ("cli::unpin", &["restart"]),
    // Unit tests.
    ("tests::", &["members", "orphans", "kept"]),
    ("activity::", &["kept"]),
    ("idle::", &["kept"]),
    ("ruleset::", &["agents"]),
    ("conversation::", &["agents"]),
    ("leftover::", &["leftovers"]),
    ("clock::", &["budgets"]),
    ("tests::restart", &["restart"]),
    ("tests::survival", &["restart"]),
    ("tests::promises", &["orphans", "kept"]),
    ("tests::successors", &["agents"]),
    ("tests::sessions", &["agents"]),
    ("reap::", &["escalation", "identity"]),
    ("source::ebpf::", &["probes"]),
    ("source::ebpf::ring", &["loss"]),
    ("source::proc_connector::", &["fallback"]),
    ("source::procfs::", &["fallback"]),
    ("source::scan::", &["fallback"]),
    ("source::kind::", &["fallback"]),
    ("source::selection::", &["fallback"]),
    ("source::darwin::", &["macos"]),
    ("advice::", &["input"]),
    ("value::", &["input"]),
    ("workers::", &["isolation"]),
    ("facts::", &["isolation", "kept"]),
    ("facts::reading::registry", &["agents"]),
    ("engine::", &["answers"]),
    ("engine::scan", &["loss"]),
    ("engine::tests", &["orphans", "identity"]),
    ("leftovers::", &["leftovers"]),
    ("api::", &["answers", "isolation"]),
    ("export::", &["stream"]),
    ("journal::", &["journal"]),
    ("config::", &["input"]),
    ("rules::tests", &["input"]),
    ("rules::suggest", &["kept"]),
    ("session::", &["members"]),
    ("rules::catalogue::", &["agents", "kept"]),
    ("run::", &["run"]),
    ("cli::lock", &["restart"]),
    ("sys::", &["input"]),
    ("sys::held_path", &["own-user"]),
    ("sys::kinfo::", &["macos"]),
    ("sys::allocations", &["loss"]),
    ("decode::", &["input"]),
    ("state::", &["probes"]),
    ("names::", &["agents"]),
    ("agents::", &["tools"]),
    ("bench::", &["tools"]),
    ("demo_svg::", &["tools"]),
    ("docs::", &["tools"]),
    ("docs_output::", &["tools"]),
    ("dist::", &["tools"]),
    ("ebpf::", &["tools"]),
    ("mutants::", &["tools"]),
    ("schemathesis::", &["answers", "input"]),
    ("tally::", &["tools"]),
    ("test::", &["tools"]),
    ("tidy::", &["tools"]),
    ("vm::", &["tools"]),
];

/// Prints each test with its guarantees and whether it needs root, and the texts of the guarantees.
///
/// # Errors
/// A test executable cannot be run.
pub fn list(binaries: &Binaries, names: &[String]) -> Result<()> {
    let unit = binaries.unit.iter().map(|binary| (binary, ""));
    for (binary, needs) in unit.chain([(&binaries.real, "root")]) {
        for test in binary.tests()? {
            list_one(needs, &test, names);
        }
    }
    list_one("root", api::NAME, names);
    println!("\n{GUARANTEES}");
    Ok(())
}

fn list_one(needs: &str, test: &str, names: &[String]) {
    if names.is_empty() || names.iter().any(|name| test.contains(name)) {
        let shows = shown(test).unwrap_or_default().join(", ");
        println!("{needs:<4} {test:<90} {shows}");
    }
}

/// Checks that each test shows a guarantee, and that each guarantee is shown by a test. Also checks that the tests of
/// each promise of the README exist.
///
/// # Errors
/// Lists the tests and guarantees for which this is not so.
pub fn check(binaries: &Binaries) -> Result<()> {
    let (mut unnamed, mut unseen) = (Vec::new(), names_of_guarantees());
    let tests = all(binaries)?;
    for test in &tests {
        match shown(test) {
            Some(shown) => shown.iter().for_each(|name| {
                unseen.remove(name);
            }),
            None => unnamed.push(test),
        }
    }
    ensure!(
        unnamed.is_empty() && unseen.is_empty(),
        "xtask/src/test/guarantees.rs: tests without a guarantee: {unnamed:?}; guarantees without a test: {unseen:?}"
    );
    promises::check(&tests)
}

fn names_of_guarantees() -> BTreeSet<&'static str> {
    let names = GUARANTEES.lines().filter_map(|line| line.split(' ').next());
    names.collect()
}

/// Returns the names of all tests.
fn all(binaries: &Binaries) -> Result<Vec<String>> {
    let binaries = binaries.unit.iter().chain([&binaries.real]);
    let tests: Result<Vec<_>> = binaries.map(TestBinary::tests).collect();
    Ok(tests?.concat())
}

/// Returns the guarantees that a test shows, or `None` if no prefix matches.
fn shown(test: &str) -> Option<&'static [&'static str]> {
    let known = SHOWN.iter().filter(|(start, _)| test.starts_with(start));
    let longest = known.max_by_key(|(start, _)| start.len());
    longest.map(|(_, shown)| *shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_beginning_decides_and_all_names_are_known() {
        assert_eq!(shown("enforce::recycled-pid"), Some(&["identity"][..]));
        assert_eq!(shown("enforce::setsid").map(<[_]>::len), Some(4));
        assert_eq!(shown("somewhere::else"), None);
        let known = names_of_guarantees();
        for name in SHOWN.iter().flat_map(|(_, shown)| *shown) {
            assert!(known.contains(name), "{name}");
        }
    }
}
