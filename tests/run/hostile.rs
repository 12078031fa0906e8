//! Output of `reaper run` about programs and paths whose names contain terminal escape sequences.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::Signal;

use super::{RunWorld, ScenarioFn, UNPRIVILEGED_UID};
use crate::cli::hostile::{ARGUMENT, NAME, assert_both, assert_harmless, on_terminal};
use crate::world::copy;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("hostile_name_in_messages_and_records_is_escaped", messages),
    ("hostile_name_of_damaged_record_is_escaped", damaged),
];

pub const ROOT_SCENARIOS: &[(&str, ScenarioFn)] =
    &[("hostile_name_of_survivor_is_escaped", survivor)];

/// Returns a `reaper` command. `@` stands for the hostile argument.
fn reaper(place: &RunWorld, words: &[&str]) -> Command {
    let reaper = place.path("reaper").display().to_string();
    let mut command = place.command(&reaper);
    command.args(words.iter().map(|word| match *word {
        "@" => OsStr::from_bytes(ARGUMENT),
        word => OsStr::new(word),
    }));
    command
}

fn messages(place: &RunWorld) {
    let directory = place.path(&String::from_utf8_lossy(&ARGUMENT[..12]));
    fs::create_dir_all(&directory).expect("make a directory");
    chown(&directory, Some(place.uid), Some(place.uid)).expect("give the directory to its user");
    for words in [
        &["run", "--", "@"][..],
        &["run", "--json", "--", "true", "@"],
        &["run", "--report", &format!("absent/{NAME}"), "--", "true"],
        &[
            "run",
            "--on-failure",
            &format!("exit 3; {NAME}"),
            "--",
            "false",
        ],
        &[
            "run",
            "--session",
            "\u{202e}\u{feff}",
            "--json",
            "--",
            "true",
        ],
        &["run", "--name", NAME, "--", "true"],
        &["stop", NAME],
        &["wait", NAME],
        &["ps", "--all"],
        &["ps", "--all", "--json"],
    ] {
        let what = words.join(" ").escape_debug().to_string();
        assert_both(&what, || {
            let mut command = reaper(place, words);
            command.current_dir(&directory);
            command
        });
    }
    let report = place.run(&["--report", "report.json", "--", "sh", "-c", "exit 3", NAME]);
    assert_eq!(report.code, Some(3), "{}", report.err);
    assert_harmless("the report", place.read("report.json").as_bytes(), false);
    assert_eq!(place.report()["command"][3], NAME);
    for record in fs::read_dir(place.records()).expect("list the records") {
        let record = record.expect("an entry").path();
        assert_harmless(
            "a record",
            &fs::read(&record).expect("read the record"),
            false,
        );
    }
}

/// `ps` logs a line about the damaged record.
fn damaged(place: &RunWorld) {
    place.run(&["--", "true"]);
    fs::write(place.records().join(format!("{NAME}.run")), "x\n").expect("write a record");
    assert_harmless(
        "ps",
        &on_terminal(&mut reaper(place, &["ps", "--all"])),
        true,
    );
}

/// A setuid program in a user's run becomes root's and cannot be signalled.
fn survivor(place: &RunWorld) {
    let raise = place.path("raise");
    copy("/usr/bin/setpriv", &raise);
    chown(&raise, Some(0), Some(UNPRIVILEGED_UID)).expect("change the owner");
    fs::set_permissions(&raise, fs::Permissions::from_mode(0o4750)).expect("set the setuid bit");
    symlink("/bin/sleep", place.path(NAME)).expect("link the program");
    let script = "./raise --reuid 0 --regid 0 --clear-groups sh -c 'echo $$ > pid; exec \"$0\" 60' \"./$0\" > /dev/null 2>&1 &
        until grep -q FORG /proc/$!/comm; do sleep 0.01; done; exit 3";
    let words = [
        "--grace", "200ms", "--json", "--report", "r", "--", "sh", "-c", script, NAME,
    ];
    let mut command = place.reaper(&words);
    let said = on_terminal(command.uid(UNPRIVILEGED_UID).gid(UNPRIVILEGED_UID));
    let root = place.await_pid("pid");
    assert_harmless("reaper run", &said, true);
    let text = String::from_utf8_lossy(&said);
    assert!(
        text.contains("left behind: pid") && text.contains("FORG"),
        "{text}"
    );
    assert!(root.is_alive());
    assert!(root.signal(Signal::SIGKILL));
}
