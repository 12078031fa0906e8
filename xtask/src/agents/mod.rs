//! `cargo xtask agents`: agents as their users install them.

mod docs;
mod install;
mod packages;
mod record;
mod room;

/// Which agents, and what to do with them
#[derive(clap::Args)]
pub struct Args {
    /// Names of agents' rules; without one, all
    agents: Vec<String>,
    /// Only write docs/agents.md from what is recorded
    #[arg(long)]
    docs: bool,
}

/// Records how the agents run, and writes the page about them.
///
/// # Errors
/// Not root, an agent is not known, or a table cannot be read or written. Agents that cannot be installed are rows of the table.
pub fn agents(args: &Args) -> anyhow::Result<()> {
    if !args.docs {
        record::record(&args.agents)?;
    }
    docs::write()
}
