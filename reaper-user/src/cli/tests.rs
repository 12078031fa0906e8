//! Checks that hold for all commands.

use super::*;

/// Returns the commands that a user can run, with their names: those without subcommands.
fn commands() -> Vec<(String, clap::Command)> {
    let mut cli = command();
    cli.build();
    let mut found = Vec::new();
    let mut open = vec![("reaper".to_owned(), cli)];
    while let Some((name, command)) = open.pop() {
        let visible = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        let visible = visible.filter(|sub| sub.get_name() != "help");
        let below: Vec<_> = visible
            .map(|sub| (format!("{name} {}", sub.get_name()), sub.clone()))
            .collect();
        match below.is_empty() {
            true => found.push((name, command)),
            false => open.extend(below),
        }
    }
    found
}

#[test]
fn each_command_has_json() {
    let all = commands();
    assert!(all.len() > 15, "{}", all.len());
    let without = all.iter().filter(|(_, command)| {
        let mut longs = command.get_arguments().filter_map(|arg| arg.get_long());
        // The output of `completions` is a script.
        !longs.any(|long| long == "json") && command.get_name() != "completions"
    });
    let names: Vec<&str> = without.map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, [""; 0], "commands without --json");
}

#[test]
fn help_is_short_or_long_and_fits_80_columns() {
    for (name, mut command) in commands() {
        command = command.term_width(80);
        let short = command.render_help().to_string();
        let long = command.render_long_help().to_string();
        let lines = |text: &str| text.lines().count();
        assert!(lines(&short) < lines(&long), "{name}");
        assert!(!short.contains("Example"), "{name}: {short}");
        // Commands in examples and names of values cannot be wrapped.
        let wide = short.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None, "{name}");
    }
}

#[test]
fn command_is_optional_and_color_is_accepted_everywhere() {
    let parse = |args: &[&str]| Cli::try_parse_from(args).map_err(|error| error.to_string());
    assert!(parse(&["reaper"]).unwrap().command.is_none());
    for args in [
        &["reaper", "--color", "never", "tree"][..],
        &["reaper", "tree", "--color=never"],
        &["reaper", "config", "show", "--color", "never"],
    ] {
        assert_eq!(parse(args).unwrap().color, Color::Never, "{args:?}");
    }
    assert!(parse(&["reaper", "--color", "pink", "tree"]).is_err());
}

#[test]
fn times_and_pids_have_one_error_in_all_commands() {
    for (args, error) in [
        (&["history", "--since", "5"][..], "not a time"),
        (&["keep", "7", "--for", "soon"], "not a time"),
        (&["scan", "--min-age", "5"], "not a time"),
        (&["run", "--timeout", "5x", "true"], "not a time"),
        (&["run", "--grace", "x", "true"], "not a time"),
        (&["explain", "x"], "not a pid"),
        (&["keep", "0"], "not a pid"),
        (&["unkeep", "+1"], "not a pid"),
        (&["scan", "--scope", "4194305"], "not a pid"),
    ] {
        let args = std::iter::once("reaper").chain(args.iter().copied());
        let said = Cli::try_parse_from(args).err().unwrap().to_string();
        assert!(said.contains(&format!(": {error}: write ")), "{said}");
        assert!(!said.contains("digit"), "{said}");
    }
}
