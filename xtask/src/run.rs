//! `cargo xtask run`: builds reaper, runs the demo and starts the service.

use std::os::unix::process::CommandExt;

use anyhow::{Result, bail};

use crate::shell::{as_root, built_reaper, run as run_command, say};

/// Builds reaper as the user, runs the demo as root, then replaces this process by the service.
///
/// # Errors
/// The build, the demo or the start of the service fails.
pub fn run(arguments: &[String]) -> Result<()> {
    let mut arguments = arguments.to_vec();
    let mode = if arguments.iter().any(|a| a == "--enforce") {
        "enforcing"
    } else {
        if !arguments.iter().any(|a| a == "--observe") {
            arguments.insert(0, "--observe".to_owned());
        }
        "observing only: no signal is sent"
    };

    say("building reaper (the BPF object is checked in)");
    let reaper = built_reaper(&["--release"])?;

    say("demo: starts a small process tree, kills its root and reaps the orphans");
    run_command(as_root(&reaper)?.arg("demo"))?;

    say(format_args!(
        "starting the daemon on the whole host, {mode}; Ctrl-C stops it"
    ));
    let mut daemon = as_root(&reaper)?;
    daemon.arg("daemon").args(&arguments);
    // By exec, so that Ctrl-C and the exit status are those of the daemon.
    let error = daemon.exec();
    bail!("cannot start {}: {error}", reaper.display())
}
