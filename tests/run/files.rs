//! `reaper run` with few file descriptors, and without a pidfd of its command.

use std::time::{Duration, Instant};

use super::{RunWorld, ScenarioFn};
use crate::cli;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("sixteen_files_suffice", sixteen_files),
    ("too_few_files_are_refused_in_one_line", too_few_files),
    ("command_without_a_pidfd_is_killed", no_pidfd),
];

/// Starts the run with only standard input, output and error open. The command leaves 20 processes.
const SCRIPT: &str =
    "for file in $(ls /proc/$$/fd); do [ $file -le 2 ] || eval \"exec $file>&-\" 2> /dev/null; done
    ulimit -n $1; shift
    exec ./reaper run \"$@\" -- sh -c 'for i in $(seq 20); do setsid sleep 60 & done; exit 3'";

fn sixteen_files(place: &RunWorld) {
    for options in [
        &[][..],
        &["--report", "report.json"],
        &["--on-failure", "true"],
        &["--done-when", "false"],
        &["--limit", "x=1"],
        &["--name", "x", "--leader-first"],
        &["--clean-on-success", "absent"],
    ] {
        let said = place.bash(SCRIPT, &[&["16"], options].concat());
        assert_eq!((said.code, &*said.err), (Some(3), ""), "{options:?}");
        place.assert_alone();
    }
}

/// The command is started or refused. It is never started if what it leaves behind cannot be ended.
fn too_few_files(place: &RunWorld) {
    for files in 4..16 {
        let started = Instant::now();
        let said = place.bash(SCRIPT, &[&files.to_string()]);
        assert!(started.elapsed() < Duration::from_secs(20), "{files}");
        match said.code {
            Some(3) => assert_eq!(said.err, "", "{files}"),
            code => {
                assert_eq!(code, Some(125), "{files}: {}", said.err);
                assert_eq!(said.err.lines().count(), 1, "{files}: {}", said.err);
                assert!(said.err.contains("started"), "{files}: {}", said.err);
                assert!(said.err.contains("ulimit -n"), "{files}: {}", said.err);
            }
        }
        place.assert_alone();
    }
}

fn no_pidfd(place: &RunWorld) {
    place.install_worker();
    let wrapper = "without-pidfds-of-others 1 ./reaper run -- sleep 60";
    let words = place.worker_command(wrapper, "filter");
    let mut command = place.command(&words[0]);
    let said = cli::run(place.path("").as_path(), command.args(&words[1..]));
    assert_eq!(said.code, Some(125), "{}", said.err);
    assert!(said.err.contains("it was killed"), "{}", said.err);
    place.assert_alone();
}
