//! Checks the developer commands in the docs.

#[path = "../../tests/snippets.rs"]
#[allow(dead_code, reason = "the rest is for the tests of reaper-user")]
mod snippets;

use clap::CommandFactory;
use clap::error::ErrorKind;

use crate::Cli;

#[test]
fn docs_xtask_commands_have_valid_arguments() {
    let calls = snippets::calls(&["cargo", "xtask"], true);
    assert!(calls.len() > 20, "{} commands found", calls.len());
    let wrong = calls.iter().filter_map(|(place, arguments)| {
        let words = std::iter::once("xtask").chain(arguments.iter().map(String::as_str));
        let error = Cli::command().try_get_matches_from(words).err()?;
        let is_help = error.kind() == ErrorKind::DisplayHelp;
        (!is_help).then(|| format!("{place}: cargo xtask {}: {error}", arguments.join(" ")))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn docs_list_each_xtask_command() {
    let page = snippets::page("reaper-user/docs/contributing.md");
    let cli = Cli::command();
    for command in cli
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
    {
        let name = format!("`cargo xtask {}`", command.get_name());
        assert!(page.contains(&name), "contributing.md lacks {name}");
    }
}
