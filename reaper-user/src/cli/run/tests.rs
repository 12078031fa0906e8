use super::*;

#[test]
fn time_limit_is_a_time_above_zero() {
    assert_eq!(limit("45min"), Ok(Duration::from_secs(45 * 60)));
    for wrong in ["0s", "5", "", "soon"] {
        assert!(limit(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn signal_accepts_names_and_numbers() {
    for text in ["TERM", "term", "SIGTERM", "15"] {
        assert_eq!(signal(text), Ok(Signal::SIGTERM));
    }
    for wrong in ["", "0", "99", "-9", "SIGSIGTERM", "STOPPED"] {
        assert!(signal(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn root_and_home_cannot_be_removed() {
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

/// Services parse a command line of `reaper run` as this program does, to find its subcommand and `--detach`.
#[test]
fn run_rule_lists_all_options_with_a_value() {
    use clap::CommandFactory;
    let mut cli = crate::cli::Cli::command();
    // Adds the options of all commands.
    cli.build();
    let run = cli
        .find_subcommand(super::super::run::SUPERVISE)
        .expect("a subcommand");
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

#[test]
fn timeout_takes_fractions_of_seconds_and_zero() {
    for (text, ms) in [
        ("0.5", 500),
        (".5", 500),
        ("10", 10_000),
        ("5.", 5000),
        ("0", 0),
        ("0s", 0),
        ("2min", 120_000),
    ] {
        assert_eq!(timeout(text), Ok(Duration::from_millis(ms)), "{text}");
    }
    // Not zero, which is no limit.
    assert_eq!(timeout("0.0000000001"), Ok(Duration::from_nanos(1)));
    for wrong in [
        "",
        ".",
        "-1",
        "1e1",
        "inf",
        "1.2.3",
        "soon",
        "99999999999999999999",
    ] {
        assert!(timeout(wrong).is_err(), "{wrong}");
    }
    let timeout_of = |text: &str| {
        use clap::FromArgMatches;
        let command = RunArgs::augment_args(clap::Command::new("run"));
        let matches = command.try_get_matches_from(["run", "--timeout", text, "true"]);
        build_run(RunArgs::from_arg_matches(&matches.unwrap()).unwrap()).timeout
    };
    assert_eq!(timeout_of("0"), None);
    assert_eq!(timeout_of("1"), Some(Duration::from_secs(1)));
}
