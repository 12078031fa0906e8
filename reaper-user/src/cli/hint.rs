//! Commands in messages. If this command asks a service on another socket than the default, so do they.

use std::path::Path;
use std::sync::OnceLock;

/// Option that names the socket of the service, as this command got it.
static OPTION: OnceLock<String> = OnceLock::new();

/// Makes later hints name this socket. Only the first call has an effect.
pub(super) fn use_socket(socket: &Path) {
    let _ = OPTION.set(format!("--socket {}", quoted(&socket.to_string_lossy())));
}

/// Returns a text in which each command in backticks names the socket, if it has an option for that.
pub(super) fn hints(text: &str) -> String {
    match OPTION.get() {
        Some(option) => with_option(text, option),
        None => text.into(),
    }
}

/// Returns a command that asks a service, with the socket.
pub(super) fn command(command: &str) -> String {
    match OPTION.get() {
        Some(option) => format!("{command} {option}"),
        None => command.into(),
    }
}

fn with_option(text: &str, option: &str) -> String {
    let parts = text.split('`').enumerate();
    let parts = parts.map(|(n, part)| match n % 2 == 1 && asks_service(part) {
        true => format!("{part} {option}"),
        false => part.into(),
    });
    parts.collect::<Vec<_>>().join("`")
}

/// Returns whether a text is a command of `reaper` with the option `--socket`.
fn asks_service(text: &str) -> bool {
    let text = text.strip_prefix("sudo ").unwrap_or(text);
    let Some(words) = text.strip_prefix("reaper ") else {
        return false;
    };
    let cli = super::command();
    let mut command = &cli;
    for word in words.split(' ') {
        match command.find_subcommand(word) {
            Some(found) => command = found,
            None => break,
        }
    }
    let mut options = command.get_arguments();
    let Some(socket) = options.find(|option| option.get_long() == Some("socket")) else {
        return false;
    };
    let excluded = command.get_arg_conflicts_with(socket);
    let mut excluded = excluded.iter().filter_map(|option| option.get_long());
    !excluded.any(|option| words.contains(&format!("--{option}")))
}

/// Returns a path as a word of a shell.
fn quoted(path: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+@%:=,".contains(c);
    match path.chars().all(is_plain) {
        true => path.into(),
        false => format!("'{}'", path.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_ask_a_service_get_the_socket() {
        let option = "--socket /x.sock";
        for (text, expected) in [
            (
                "run `reaper keep 42`",
                "run `reaper keep 42 --socket /x.sock`",
            ),
            (
                "`sudo reaper scan --reap` or `reaper config reload`; `x`",
                "`sudo reaper scan --reap --socket /x.sock` or `reaper config reload --socket /x.sock`; `x`",
            ),
            ("start `sudo reaper daemon`", "start `sudo reaper daemon`"),
            ("reaper keep 42 and `tmux`", "reaper keep 42 and `tmux`"),
            ("`reaper config check x`", "`reaper config check x`"),
            (
                "`reaper history --file FILE`",
                "`reaper history --file FILE`",
            ),
            ("one ` alone", "one ` alone"),
        ] {
            assert_eq!(with_option(text, option), expected);
        }
    }

    #[test]
    fn path_is_a_word_of_a_shell() {
        assert_eq!(quoted("/run/reaper-7-7.sock"), "/run/reaper-7-7.sock");
        assert_eq!(quoted("/a b/it's"), r"'/a b/it'\''s'");
    }
}
