//! `cargo xtask run`: from a fresh machine to a service that watches it.

use std::os::unix::process::CommandExt;

use anyhow::{Result, bail};

use crate::shell::{as_root, built_reaper, run as run_command, say};

/// Builds as the user, runs as root: the demo to its end, then the daemon in this process's place.
pub fn run(arguments: &[String]) -> Result<()> {
    let mut arguments = arguments.to_vec();
    let mode = if arguments.iter().any(|a| a == "--enforce") {
        "reaping for real"
    } else {
        if !arguments.iter().any(|a| a == "--observe") {
            arguments.insert(0, "--observe".to_owned());
        }
        "observing only: no signal is sent"
    };

    say("building reaper; the kernel probes come with the sources, built");
    let reaper = built_reaper(&["--release"])?;

    say("demo: a small tree of its own loses its root, and its orphans are reaped");
    run_command(as_root(&reaper)?.arg("demo"))?;

    say(format_args!(
        "daemon on the whole host, {mode}; Ctrl-C ends it"
    ));
    let mut daemon = as_root(&reaper)?;
    daemon.arg("daemon").args(&arguments);
    // In this process's place, so that Ctrl-C and the exit status are the daemon's own.
    let error = daemon.exec();
    bail!("cannot start {}: {error}", reaper.display())
}
