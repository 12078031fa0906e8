//! `cargo xtask agents`: agents as their users install them.

mod docs;
pub mod drive;
mod install;
mod packages;
mod record;
mod sandbox;

/// Which agents, and what to do with them
#[derive(clap::Args)]
pub struct Args {
    /// Names of agents' rules; without one, all
    agents: Vec<String>,
    /// Run the agents against mock models, end them in every way, and record what is left
    #[arg(long, conflicts_with = "docs")]
    drive: bool,
    /// Only these cells of the drive, such as `print` or `print:TERM`
    #[arg(long, requires = "drive")]
    cell: Vec<String>,
    /// Only write docs/agents.md from what is recorded
    #[arg(long)]
    docs: bool,
}

/// Records how the agents run, or what they leave behind, and writes the page about them.
///
/// # Errors
/// Not root, an agent is not known, or a table cannot be read or written. Agents that cannot be installed are rows of the table.
pub fn agents(args: &Args) -> anyhow::Result<()> {
    if args.drive {
        drive::drive(&args.agents, &args.cell)?;
    } else if !args.docs {
        record::record(&args.agents)?;
    }
    docs::write()
}
