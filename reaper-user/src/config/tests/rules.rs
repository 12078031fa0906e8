use super::*;
use crate::config::show::ShownConfig;
use reaper_model::ruleset::{SessionCondition, UidCondition};

fn named<'a>(config: &'a Config, name: &str) -> &'a reaper_model::ruleset::Rule {
    let mut rules = config.rules.rules().iter();
    rules.find(|rule| &*rule.name == name).unwrap()
}

#[test]
fn all_keys_of_a_rule_are_read() {
    let config = parse(
        r#"
        [[rule]]
        name = "all"
        action = "report"
        after = "10min"
        agent = ["claude-code", "codex"]
        session = "failed"
        orphan = true
        inferred = true
        min_age = "10min"
        max_age = "1h"
        uid = 1000
        unit = "docker-*.scope"
        own_unit = false
        tty = true
        multiplexed = false
        new_session = true
        min_cpu = 90
        listening = true
        children = false
        environment = ["CI=*", "X=1"]
        exe = "**/x"
        [[rule]]
        name = "kept"
        action = "keep"
        comm = "x"
        [[rule]]
        name = "stop"
        action = "boundary"
        comm = "y"
        "#,
    )
    .unwrap();
    let rule = named(&config, "all");
    let when = &rule.when;
    assert_eq!(
        (rule.action, rule.delay_ns),
        (Action::Report, 600_000_000_000)
    );
    assert_eq!(
        (when.session, when.uid),
        (SessionCondition::Failed, Some(UidCondition::Id(1000)))
    );
    assert_eq!(when.agents.len(), 2);
    assert_eq!(
        (when.min_age, when.max_age, when.min_cpu),
        (Some(600_000_000_000), Some(3_600_000_000_000), Some(90))
    );
    assert_eq!(when.inferred, Some(true));
    let flags = [
        when.orphan,
        when.own_unit,
        when.tty,
        when.multiplexed,
        when.new_session,
        when.listening,
        when.children,
    ];
    let expected = [true, false, true, false, true, true, false];
    assert_eq!(flags, expected.map(Some));
    assert!(when.units[0].is_match(b"docker-a.scope"));
    assert_eq!(when.marker_bits, 0b110);
    assert_eq!(named(&config, "kept").when.session, SessionCondition::Any);
    assert_eq!(names(&config, Action::Boundary)[0], "stop");
}

#[test]
fn keeps_and_rules_are_in_the_order_of_the_file() {
    let text = "[[rule]]\nname = 'a'\naction = 'reap'\ncomm = 'a'\n[[keep]]\nname = 'b'\ncomm = 'b'\n\
                [[rule]]\nname = 'c'\naction = 'report'\ncomm = 'c'\n";
    let config = parse(text).unwrap();
    let deciding = config.rules.rules().iter();
    let deciding = deciding.filter(|rule| !rule.action.is_of_program());
    let names: Vec<_> = deciding.map(|rule| &*rule.name).take(4).collect();
    assert_eq!(names, ["a", "b", "c", "other-uid"]);
}

#[test]
fn enable_and_enabled_switch_built_in_rules() {
    let has = |text: &str, name: &str| {
        let config = parse(text).unwrap();
        config.rules.rules().iter().any(|rule| &*rule.name == name)
    };
    assert!(has("", "asked-for-servers") && !has("", "busy-loops"));
    assert!(has("enable = ['busy-loops']", "busy-loops"));
    assert!(!has("enable = []", "busy-loops") && has("enable = []", "asked-for-servers"));
    assert!(has(
        "enable = 'busy-loops'\ndefaults = { keeps = false }",
        "busy-loops"
    ));
    assert!(!has("defaults = { keeps = false }", "asked-for-servers"));
    let off = "[[rule]]\nname = 'own-unit'\naction = 'keep'\nown_unit = true\nenabled = false\n";
    assert!(!has(off, "own-unit"));
    wrong(
        "enable = ['busy-loops', 'busy-loop']",
        "r.toml:1:25: `enable`: no built-in rule is named \"busy-loop\": did you mean `busy-loops`?",
    );
    wrong(
        "enable = 'x'",
        "r.toml:1:10: `enable`: no built-in rule is named \"x\": `reaper config show --defaults` lists them",
    );
}

#[test]
fn invalid_rules_are_refused() {
    let rule = |text: &str| format!("[[rule]]\nname = 'x'\n{text}");
    for (text, said) in [
        (
            "comm = 'x'",
            "r.toml:1:1: this [[rule]] has no action: add `action = \"reap\"`, \"keep\", \"boundary\", \"note\" or \"report\"",
        ),
        (
            "action = 'kill'\ncomm = 'x'",
            "r.toml:3:10: `action`: expected one of `boundary`, `keep`, `reap`, `report`, `note`, not `kill`",
        ),
        (
            "action = 'keep'",
            "r.toml:1:1: [[rule]] `x` has no condition: add `comm`, `exe`, `script`, `args` or `options`",
        ),
        (
            "action = 'reap'\nsession = 'alive'\nmin_cpu = 1",
            "r.toml:1:1: [[rule]] `x` would reap processes that a living agent uses: add `orphan = true` or a program: `comm`, `exe`, `script`, `args` or `options`",
        ),
        (
            "action = 'boundary'\ncomm = 'x'\ntty = true",
            "r.toml:5:1: unknown key `tty` in a [[rule]] whose `action` is boundary, which checks only the program: known keys: name, any, comm, exe, script, arg0, args, options, not_comm, not_exe, not_script, not_arg0, not_args, not_options, argv, argv_regex, not_argv, not_argv_regex, value_options, command_at, action, attends, enabled",
        ),
        (
            "action = 'keep'\nenvironment = ['CI']",
            "r.toml:4:16: `environment`: \"CI\" is not a valid glob: it is matched against the whole variable: write \"CI=*\", or with its value",
        ),
        (
            "action = 'keep'\nenvironment = '*'",
            "r.toml:4:15: `environment`: \"*\" matches everything: narrow it or leave it out",
        ),
        (
            "action = 'keep'\nunit = '/x.service'",
            "r.toml:4:8: `unit`: \"/x.service\" is not a valid glob: it is matched against the unit's name, which has no slash: write only that name",
        ),
        (
            "action = 'keep'\nmin_age = '2h'\nmax_age = '1h'",
            "r.toml:5:11: `max_age` is not longer than `min_age`, so the rule can never apply: make it longer",
        ),
        (
            "action = 'keep'\ntty = 1",
            "r.toml:4:7: `tty`: expected a boolean, not integer `1`",
        ),
        (
            "action = 'keep'\nmin_cpu = 0",
            "r.toml:4:11: `min_cpu`: expected a number from 1 to 1000000, not integer `0`",
        ),
        (
            "action = 'keep'\nsession = 'dead'",
            "r.toml:4:11: `session`: expected one of `gone`, `alive`, `any`, `exited`, `ok`, `failed`, `signalled`, not `dead`",
        ),
    ] {
        wrong(&rule(text), said);
    }
    let many: String = (0..61).map(|n| format!("'A{n}=1', ")).collect();
    wrong(
        &rule(&format!("action = 'keep'\nenvironment = [{many}]")),
        "r.toml:1:1: the rules and the built-in ones use 61 different `environment` globs: at most 60 are possible",
    );
}

#[test]
fn unreachable_rules_are_warned_of() {
    let keep = |name: &str, what: &str| format!("[[keep]]\nname = '{name}'\n{what}\n");
    let rule =
        |name: &str, what: &str| format!("[[rule]]\nname = '{name}'\naction = 'report'\n{what}\n");
    let reap =
        |name: &str, what: &str| format!("[[rule]]\nname = '{name}'\naction = 'reap'\n{what}\n");
    for (text, said) in [
        (keep("a", "exe = '**/x'"), ""),
        (
            keep("a", "exe = '**/tmux'"),
            "`a` never applies: boundary `tmux` comes first and covers every case",
        ),
        (
            keep("a", "comm = ['a', 'b']") + &rule("b", "comm = 'a'\nargv = '* x'"),
            "`b` never applies: keep `a` comes first and covers every case",
        ),
        (
            keep("a", "comm = 'a*'") + &rule("b", "comm = 'ab'\nsession = 'ok'"),
            "`b` never applies: keep `a` comes first and covers every case",
        ),
        (
            rule("a", "comm = 'a'") + &rule("b", "comm = 'a'\nsession = 'alive'"),
            "",
        ),
        (rule("a", "tty = true") + &rule("b", "comm = 'a'"), ""),
        (
            rule("a", "comm = 'a'\nnot_argv = '* x'") + &keep("b", "comm = 'a'"),
            "",
        ),
        (
            rule("a", "min_age = '1h'") + &rule("b", "min_age = '2h'\ntty = true"),
            "`b` never applies: report `a` comes first and covers every case",
        ),
        (
            reap("a", "comm = 'x'") + &reap("b", "comm = 'x'\ninferred = true"),
            "",
        ),
        (reap("a", "comm = 'x'") + &rule("b", "comm = 'x'"), ""),
        (
            reap("a", "comm = 'x'") + &reap("b", "comm = 'x'"),
            "`b` never applies: reap `a` comes first and covers every case",
        ),
        (
            rule("a", "comm = 'x'") + &reap("b", "comm = 'x'\ninferred = true"),
            "`b` never applies: report `a` comes first and covers every case",
        ),
        (
            rule("a", "comm = 'x'\nsession = 'alive'\nlistening = true"),
            "`a` checks `listening` only when the process has an event, which may take long below a living agent: \
             add `after` to check again when that delay expires",
        ),
        (
            rule(
                "a",
                "comm = 'x'\nsession = 'alive'\nlistening = true\nafter = '1min'",
            ),
            "",
        ),
        (
            rule("a", "agent = ['cluade-code']\ncomm = 'x'"),
            "`a` can never apply: `agent` names no agent that is enabled: did you mean `claude-code`?",
        ),
        (
            rule("a", "agent = ['codex', 'cluade-code', 'x']\ncomm = 'x'"),
            "`agent` of `a` has \"cluade-code\", and no agent of that name is enabled: did you mean `claude-code`?",
        ),
        (
            rule("a", "comm = 'x'\nnot_comm = ['x', 'y']"),
            "`a` can never apply: its conditions contradict each other",
        ),
        (
            rule("a", "exe = '**/tclsh'\nscript = '**/x'"),
            "`a` can never apply: it has `script`, but its `exe` is no interpreter that reaper knows",
        ),
        (
            keep("a", "comm = 'x'\nargs = ['y', 'z']\nnot_args = 'y'"),
            "`a` can never apply: its conditions contradict each other",
        ),
        (
            keep("a", "comm = 'x'\nargs = 'y'\nnot_args = ['x', 'y']"),
            "",
        ),
        (
            keep("a", "comm = 'x'\nargs = 'y'") + &keep("b", "comm = 'x'\nargs = ['y', 'z']"),
            "`b` never applies: keep `a` comes first and covers every case",
        ),
        (
            keep("a", "comm = 'x'\nargs = ['y', 'z']") + &keep("b", "comm = 'x'\nargs = 'z'"),
            "",
        ),
        (
            keep("a", "comm = 'x'\nargs = 'y'\nvalue_options = '-c'")
                + &keep("b", "comm = 'x'\nargs = 'y'"),
            "",
        ),
        (
            keep("tmux", "comm = 'x'"),
            "`tmux` replaces the built-in boundary of the same name: rename it to keep both",
        ),
    ] {
        let warnings = parse(&text).unwrap().warnings;
        let whats: Vec<_> = warnings.iter().map(|warning| &*warning.message).collect();
        assert_eq!(whats.join("\n"), said, "{text}");
    }
    let at = parse(&("\n".to_owned() + &keep("a", "exe = '**/tmux'")))
        .unwrap()
        .warnings;
    assert_eq!(at[0].place, Some((2, 1)));
}

#[test]
fn shown_config_parses_to_the_same_config() {
    let own = r#"
        mode = "observe"
        grace = "1m 30s"
        ring_size = "64 KiB"
        journal_max_size = "10000001 B"
        honor_keep = false
        enable = ["busy-loops", "idle-tool-shells"]
        [[agent]]
        name = "a"
        comm = "a\u007f\""
        args = ['x', "*"]
        command_at = 2
        value_options = "-c"
        any = [{ options = "-y*", value_options = ["-y"] }, { exe = ["/z", "**/z"], not_arg0 = "z", command_at = 3 }]
        [[agent]]
        name = "b"
        any = [{ comm = "b" }, { comm = "b", exe = "/b" }]
        [[rule]]
        name = "c"
        action = "report"
        after = "1h 1s"
        session = "any"
        uid = 7
        unit = "a*"
        environment = "A=*"
        max_age = "3days"
        tty = true
        [[rule]]
        name = "d"
        action = "keep"
        session = "gone"
        comm = "d"
        argv_regex = 'x\d'
        not_argv = "* z"
        [[rule]]
        name = "e"
        action = "keep"
        comm = "e"
        inferred = true
    "#;
    for text in ["", own] {
        let config = parse(text).unwrap();
        let shown = ShownConfig::new(&config).toml();
        let again = parse(&shown).unwrap_or_else(|error| panic!("{error}\n{shown}"));
        let rules = |config: &Config| format!("{:#?}", config.rules);
        assert_eq!(ShownConfig::new(&again).toml(), shown);
        assert_eq!(ShownConfig::new(&again), ShownConfig::new(&config));
        assert_eq!(again.rules.rules().len(), config.rules.rules().len());
        assert!(text.is_empty() || rules(&again).contains("busy-loops"));
        assert_eq!(shown.contains("inferred = true"), !text.is_empty());
    }
    let defaults = parse(&show::toml_defaults()).unwrap();
    assert_eq!(
        ShownConfig::new(&defaults).toml(),
        ShownConfig::new(&Config::default()).toml()
    );
    let all = ShownConfig::defaults().rules;
    let off = all.iter().filter(|rule| rule["enabled"] == false);
    let off: Vec<_> = off.map(|rule| rule["name"].as_str().unwrap()).collect();
    assert_eq!(off, ["idle-tool-shells", "busy-loops"]);
}

#[test]
fn exe_that_is_a_link_or_a_script_gives_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    // The directory itself may be below a link.
    let dir = dir.path().canonicalize().unwrap();
    let path = |name: &str| dir.join(name).display().to_string();
    let write = |name: &str, text: &str| std::fs::write(path(name), text).unwrap();
    write("program", "ELF");
    write("script", "#!/bin/sh\n");
    std::os::unix::fs::symlink(path("program"), path("link")).unwrap();
    let rule = |name: &str| format!("[[agent]]\nname = '{name}'\nexe = '{}'\n", path(name));
    let text: String = ["program", "script", "link", "absent"].map(rule).concat()
        + "[[agent]]\nname = 'g'\nexe = '/**/script'\n";
    write("c.toml", &text);
    let warnings = Config::load(&dir.join("c.toml")).unwrap().warnings;
    let found: Vec<_> = warnings.iter().map(|w| (w.place, &*w.message)).collect();
    let (script, link, program) = (path("script"), path("link"), path("program"));
    let of_script = format!(
        "`script`: `exe` can never match {script}, which is a script: match it with `script`, or write `reaper agent add {script}`"
    );
    let of_link = format!("`link`: `exe` can never match {link}, which is a link: write {program}");
    assert_eq!(
        found,
        [(Some((4, 1)), &*of_script), (Some((7, 1)), &*of_link)]
    );
}
