//! `reaper completions`: writes completions for a shell.

use clap::Command;
use clap_complete::{Shell, generate};

use super::Failure;
use crate::export::print;

pub(super) const HELP: &str = "\
The packages install these files already. Examples, for a copy of the program alone:
  reaper completions bash > ~/.local/share/bash-completion/completions/reaper
  reaper completions fish > ~/.config/fish/completions/reaper.fish

  # A directory in $fpath, before `compinit` runs
  reaper completions zsh > ~/.zfunc/_reaper";

pub(super) fn run(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    generate(shell, &mut visible(), "reaper", &mut script);
    print(script).map_err(Failure::stdout)
}

/// Returns the definition without hidden commands, which clap_complete would offer too.
fn visible() -> Command {
    let all = super::command();
    let commands = all.get_subcommands().filter(|sub| !sub.is_hide_set());
    Command::new("reaper")
        .version(env!("CARGO_PKG_VERSION"))
        .args(all.get_arguments())
        .subcommands(commands)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_offer_each_visible_command_and_no_hidden_one() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            generate(shell, &mut visible(), "reaper", &mut script);
            let script = String::from_utf8(script).unwrap();
            for command in super::super::command().get_subcommands() {
                let name = command.get_name();
                let offered = script.contains(name);
                assert_eq!(offered, !command.is_hide_set(), "{shell}: {name}");
            }
        }
    }
}
