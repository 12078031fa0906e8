use super::*;

#[test]
fn times_are_typed_as_for_timeout_or_in_words() {
    assert_eq!(time("5"), Ok(Duration::from_secs(5)));
    assert_eq!(time("0"), Ok(Duration::ZERO));
    assert_eq!(time("45min"), Ok(Duration::from_secs(45 * 60)));
    assert_eq!(time("1h 30m"), Ok(Duration::from_secs(5400)));
    for wrong in [
        "",
        "-1",
        "1.5",
        "soon",
        "99999999999999999999",
        "1 fortnight",
    ] {
        assert!(time(wrong).is_err(), "{wrong}");
    }
    assert!(limit("0s").is_err());
}

#[test]
fn signals_are_typed_as_for_kill() {
    for typed in ["TERM", "term", "SIGTERM", "15"] {
        assert_eq!(signal(typed), Ok(Signal::SIGTERM));
    }
    for wrong in ["", "0", "99", "-9", "SIGSIGTERM", "STOPPED"] {
        assert!(signal(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn nobody_loses_everything() {
    for wrong in ["/", "//", "/.."] {
        assert!(removable(wrong).is_err(), "{wrong}");
    }
    let home = std::env::var("HOME").unwrap();
    assert!(removable(&home).is_err());
    assert_eq!(
        removable("/tmp/some/where"),
        Ok(PathBuf::from("/tmp/some/where"))
    );
}

/// The service must read a command line of `reaper run` as this program does, to find its sub-command and `--detach`.
#[test]
fn rule_for_runs_knows_all_options_with_a_value() {
    use clap::CommandFactory;
    let cli = crate::cli::Cli::command();
    let run = cli
        .find_subcommand(super::super::run::OWNER)
        .expect("it is a sub-command");
    let valued = run
        .get_opts()
        .filter(|option| option.get_action().takes_values());
    let mut options: Vec<String> = valued
        .filter_map(|option| Some(format!("--{}", option.get_long()?)))
        .collect();
    let rules = crate::config::Config::default().rules;
    let rule = rules.rule(rules.session_rule("reaper-run").expect("a built-in rule"));
    let known = &rule.matchers[0].syntax().value_options;
    let mut known: Vec<String> = known.iter().map(|option| option.to_string()).collect();
    options.sort();
    known.sort();
    assert_eq!(known, options);
}
