//! `cargo xtask agents`: installs real agents, runs them, and records their processes.

mod docs;
pub mod drive;
mod install;
mod packages;
mod record;
mod sandbox;

/// Arguments of `cargo xtask agents`
#[derive(clap::Args)]
pub struct Args {
    /// Names of agent rules; all agents if none is given
    agents: Vec<String>,
    /// Run the agents against mock models, end them in different ways, and record what is left
    #[arg(long, conflicts_with = "docs")]
    drive: bool,
    /// With --drive: run only these cells, such as `print` or `print:TERM`
    #[arg(long, requires = "drive")]
    cell: Vec<String>,
    /// Only write docs/agents.md from the recorded data
    #[arg(long)]
    docs: bool,
}

/// Records how the agents run, or what they leave behind, and writes the page about them.
///
/// # Errors
/// This process is not root, an agent is unknown, or a table cannot be read or written. An agent that cannot be installed
/// is no error but a row of the table.
pub fn agents(args: &Args) -> anyhow::Result<()> {
    if args.drive {
        drive::drive(&args.agents, &args.cell)?;
    } else if !args.docs {
        record::record(&args.agents)?;
    }
    docs::write()
}
