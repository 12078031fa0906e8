//! Directories and links that a command puts in the place of a path that `reaper run` removes or writes later.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::{RunWorld, ScenarioFn};

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("link-in-place-of-the-workspace", workspace_is_a_link),
    ("link-in-place-of-its-parent", parent_is_a_link),
    ("another-parent-in-its-place", parent_is_another),
    ("link-inside-the-workspace", link_inside),
    ("link-in-place-of-the-report", report_is_a_link),
    (
        "link-in-place-of-the-directory-of-the-report",
        reports_directory_is_a_link,
    ),
    ("report-to-what-a-link-led-to", report_through_a_link),
    ("paths-with-parent-components", parent_components),
];

pub const ROOT_SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("mount-inside-the-workspace", mount_inside),
    ("root-refuses-directories-of-others", roots_refusals),
];

/// Creates the workspace `a/ws`, and `victim` with files of the same names, which must survive.
fn prepare(place: &RunWorld) {
    let script = "mkdir -p a/ws/inner victim/ws && echo old | tee a/ws/inner/f victim/f victim/ws/f victim/report";
    assert_eq!(place.bash(script, &[]).code, Some(0));
}

fn assert_victim_lives(place: &RunWorld) {
    for file in ["victim/f", "victim/ws/f", "victim/report"] {
        assert_eq!(place.read(file), "old\n", "{file}");
    }
}

fn cleaned(place: &RunWorld, script: &str) -> super::CommandOutput {
    place.run(&["--clean-on-success", "a/ws", "--", "sh", "-c", script])
}

fn exists(place: &RunWorld, path: &str) -> bool {
    fs::symlink_metadata(place.path(path)).is_ok()
}

fn workspace_is_a_link(place: &RunWorld) {
    prepare(place);
    let said = cleaned(place, "mv a/ws a/moved; ln -s ../victim a/ws");
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert!(!exists(place, "a/ws") && exists(place, "a/moved/inner/f"));
    assert_victim_lives(place);
}

fn parent_is_a_link(place: &RunWorld) {
    prepare(place);
    let said = cleaned(place, "mv a moved; ln -s victim a");
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert!(!exists(place, "moved/ws"));
    assert_victim_lives(place);
}

fn parent_is_another(place: &RunWorld) {
    prepare(place);
    let said = cleaned(place, "mv a moved; mv victim a");
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert!(!exists(place, "moved/ws"));
    assert_eq!(place.read("a/ws/f"), "old\n");
}

fn link_inside(place: &RunWorld) {
    prepare(place);
    let said = cleaned(
        place,
        "ln -s ../../victim a/ws/link; ln -s ../../victim/f a/ws/inner/link",
    );
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert!(exists(place, "a") && !exists(place, "a/ws"));
    assert_victim_lives(place);
}

fn assert_is_a_report(place: &RunWorld, path: &str) {
    assert!(fs::symlink_metadata(place.path(path)).is_ok_and(|meta| meta.is_file()));
    let report: serde_json::Value = serde_json::from_str(&place.read(path)).expect("a report");
    assert_eq!(report["outcome"], "success");
}

fn report_is_a_link(place: &RunWorld) {
    prepare(place);
    let said = place.run(&[
        "--report",
        "a/report",
        "--",
        "ln",
        "-s",
        "../victim/report",
        "a/report",
    ]);
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert_is_a_report(place, "a/report");
    assert_victim_lives(place);
}

fn reports_directory_is_a_link(place: &RunWorld) {
    prepare(place);
    let script = "mv a moved; ln -s victim a";
    let said = place.run(&["--report", "a/report", "--", "sh", "-c", script]);
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert_is_a_report(place, "moved/report");
    assert_victim_lives(place);
}

/// A report path that was no regular file at the start is opened then. The report goes there, whatever the path names later.
fn report_through_a_link(place: &RunWorld) {
    prepare(place);
    symlink("before", place.path("link")).expect("make a link");
    let script = "echo > before; chmod 666 before";
    assert_eq!(place.bash(script, &[]).code, Some(0));
    let script = "rm link; ln -s victim/report link";
    let said = place.run(&["--report", "link", "--", "sh", "-c", script]);
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert_is_a_report(place, "before");
    assert_victim_lives(place);
}

fn parent_components(place: &RunWorld) {
    prepare(place);
    for (option, path) in [
        ("--clean-on-success", "a/.."),
        ("--clean-on-success", "new/.."),
        ("--clean-on-success", "a/../victim"),
        ("--report", "new/../victim/report"),
    ] {
        let said = place.run(&[option, path, "--", "mkdir", "-p", "new"]);
        assert!(
            said.code != Some(0) && said.err.contains("`..`"),
            "{path}: {}",
            said.err
        );
        assert!(!exists(place, "new"), "{path}: the command was started");
    }
    assert_victim_lives(place);
}

/// A mount point in the workspace is left in place and named in the error.
fn mount_inside(place: &RunWorld) {
    prepare(place);
    let script = "mkdir a/ws/mounted && mount --bind victim a/ws/mounted &&
        exec ./reaper run --clean-on-success a/ws -- true";
    let mut command = place.command("unshare");
    command.args(["-m", "--propagation", "private", "bash", "-c", script]);
    let said = crate::cli::run(place.dir.path(), &mut command);
    assert!(said.err.contains("a/ws/mounted"), "{}", said.err);
    assert!(said.err.contains("something is mounted on"), "{}", said.err);
    assert!(!exists(place, "a/ws/inner"));
    assert_victim_lives(place);
}

fn roots_refusals(place: &RunWorld) {
    prepare(place);
    let refused = |option: &str, path: &str| {
        let said = place.run(&[option, path, "--", "touch", "started"]);
        assert_eq!(said.code, Some(125), "{path}: {}", said.err);
        assert!(
            said.err.contains("other users than root can change"),
            "{path}: {}",
            said.err
        );
        assert!(!exists(place, "started"));
    };
    let bash = |script: &str| assert_eq!(place.bash(script, &[]).code, Some(0), "{script}");
    bash("chmod 777 a");
    refused("--clean-on-success", "a/ws");
    refused("--report", "a/report");
    bash("chmod 755 a; chown 61010 a");
    refused("--clean-on-success", "a/ws");
    refused("--report", "a/new/report");
    bash("chown 0 a; chmod 1777 a");
    let said = cleaned(place, "true");
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert!(Path::new(&place.path("a")).exists() && !exists(place, "a/ws"));
    assert_victim_lives(place);
}
