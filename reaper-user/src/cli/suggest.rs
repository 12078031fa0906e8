//! Suggests commands for words that other programs use.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Words of other programs, with the commands that do the same here.
const MEANINGS: &[(&str, &[&str])] = &[
    ("list", &["tree", "ps"]),
    ("ls", &["tree", "ps"]),
    ("show", &["tree", "explain"]),
    ("top", &["tree", "status"]),
    ("why", &["explain"]),
    ("log", &["history", "logs"]),
    ("kill", &["stop", "scan"]),
    ("reap", &["scan", "stop"]),
    ("clean", &["scan"]),
    ("start", &["daemon", "run"]),
    ("watch", &["daemon"]),
];

/// Adds suggestions to the error for an unknown command, if its word has a meaning in other programs.
pub(super) fn suggest(error: &mut clap::Error) {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return;
    }
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return;
    };
    let commands = commands(word);
    if !commands.is_empty() {
        let commands = ContextValue::Strings(commands);
        error.insert(ContextKind::SuggestedSubcommand, commands);
    }
}

/// Returns the commands with the meaning of a word that exist on this platform.
fn commands(word: &str) -> Vec<String> {
    let cli = <super::Cli as clap::CommandFactory>::command();
    let meant = MEANINGS.iter().find(|(known, _)| *known == word);
    let meant = meant.into_iter().flat_map(|(_, commands)| *commands);
    let exists = |command: &&&str| cli.find_subcommand(command).is_some();
    meant
        .filter(exists)
        .map(|command| (*command).into())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn words_of_other_programs_suggest_commands() {
        for (word, commands) in MEANINGS {
            let mut error = crate::cli::Cli::try_parse_from(["reaper", word])
                .err()
                .unwrap();
            suggest(&mut error);
            let text = error.render().to_string();
            for command in *commands {
                assert!(text.contains(&format!("'{command}'")), "{word}: {text}");
            }
        }
    }

    #[test]
    fn mistyped_command_keeps_its_suggestion() {
        let mut error = crate::cli::Cli::try_parse_from(["reaper", "explian", "1"])
            .err()
            .unwrap();
        suggest(&mut error);
        assert!(error.render().to_string().contains("'explain'"));
    }
}
