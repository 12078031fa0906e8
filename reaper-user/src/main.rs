//! The command `reaper`.

use std::process::ExitCode;

fn main() -> ExitCode {
    reaper::cli::main()
}
