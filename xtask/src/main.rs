//! `cargo xtask`: developer commands of reaper.
//!
//! Each command prints its steps and the commands that it runs, so that each can be repeated by hand.

mod agents;
mod apt;
mod bench;
mod cross;
mod demo_svg;
mod dist;
#[cfg(test)]
mod docs;
mod docs_output;
mod ebpf;
mod mutants;
mod run;
mod shell;
mod tally;
mod targets;
mod test;
mod tidy;
mod units;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Developer commands of reaper
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build reaper, run the demo, then observe the whole host without sending signals
    Run {
        /// Arguments for `reaper daemon`; with `--enforce`, the service sends signals
        #[arg(last = true, value_name = "ARGS")]
        args: Vec<String>,
    },
    /// Run all checks and all tests, including those that need root
    ///
    /// With CI set in the environment, a check that cannot run is a failure.
    Test(test::Args),
    /// Rebuild the checked-in BPF object from reaper-ebpf
    BuildEbpf {
        /// Only compare: rebuild with the recorded toolchain and compare the bytes
        #[arg(long)]
        check: bool,
    },
    /// Measure latency, CPU and memory, and print the results beside the goals
    Bench(bench::Args),
    /// Run a process of a benchmark
    #[command(hide = true)]
    BenchProcess { role: Vec<String> },
    /// Install agents from their packages and record how they run
    ///
    /// Not part of CI, because it downloads the packages.
    Agents(agents::Args),
    /// Run a helper process of `agents --drive`
    #[command(hide = true)]
    AgentsProcess {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        role: Vec<String>,
    },
    /// Run the demo, and draw reaper-user/docs/demo.svg from its output
    DemoSvg(demo_svg::Args),
    /// Run a small tree under a daemon that observes, and refresh the output in README.md
    DocsOutput(docs_output::Args),
    /// Build packages: .deb, .rpm, and a tarball with a static program
    Dist(dist::Args),
    /// Run the tests of real process trees on other kernels, in virtual machines
    Vm(vm::Args),
    /// Put small faults into the model and reap/, and count those that the unit tests find
    ///
    /// Not part of CI, because it takes long.
    Mutants(mutants::Args),
    /// Check import rules, names in the root directory, formatting and lints
    Tidy,
    /// Type-check the service and its commands for macOS, and for Linux on aarch64
    Targets,
    /// Check the unit files: no warnings of systemd, a confined service, and a valid job of launchd
    Units,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run { args } => run::run(&args),
        Command::Test(args) => test::test(&args),
        Command::BuildEbpf { check: true } => ebpf::check(),
        Command::BuildEbpf { check: false } => ebpf::build(),
        Command::Bench(args) => bench::bench(&args),
        Command::BenchProcess { role } => bench::process::run_role(&role),
        Command::Agents(args) => agents::agents(&args),
        Command::AgentsProcess { role } => agents::drive::process::run_role(&role),
        Command::DemoSvg(args) => demo_svg::draw(args),
        Command::DocsOutput(args) => docs_output::refresh(args),
        Command::Dist(args) => dist::dist(&args),
        Command::Vm(args) => vm::vm(&args, None),
        Command::Mutants(args) => mutants::mutants(&args),
        Command::Tidy => tidy::tidy(),
        Command::Targets => targets::targets(),
        Command::Units => units::check(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
