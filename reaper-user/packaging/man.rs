//! Writes a man page for `reaper` and each of its commands: `man DIRECTORY DATE`, with a date such as 2026-11-25.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use clap::Command;
use clap_mangen::Man;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, date] = &arguments[..] else {
        eprintln!("usage: man DIRECTORY DATE");
        return ExitCode::from(2);
    };
    let mut reaper = reaper::cli::command().disable_help_subcommand(true);
    reaper.build();
    match write(reaper, Path::new(directory), date) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cannot write to {directory}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes the pages of a command and of all commands below it.
fn write(command: Command, directory: &Path, date: &str) -> io::Result<()> {
    let visible = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    for sub in visible.cloned() {
        write(sub, directory, date)?;
    }
    let man = Man::new(command).date(date).manual("User Commands");
    man.source(concat!("reaper ", env!("CARGO_PKG_VERSION")))
        .generate_to(directory)?;
    Ok(())
}
