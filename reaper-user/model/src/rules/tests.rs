//! Errors for invalid rules, and warnings about rules without effect.

use toml::de::DeTable;

use super::{Rules, warn};
use crate::value::Problem;

/// Reads a valid text, without the built-in rules.
#[track_caller]
fn read(text: &str) -> Rules {
    read_any(text).expect(text)
}

fn read_any(text: &str) -> Result<Rules, Vec<String>> {
    let text = format!(
        "{text}\n[defaults]\nagents = false\nboundaries = false\nkeeps = false\n\
         [[agent]]\nname = 'claude'\ncomm = 'claude'\n[[agent]]\nname = 'codex'\ncomm = 'codex'\n"
    );
    let root = DeTable::parse(&text).unwrap();
    let what = |problems: Vec<Problem>| problems.into_iter().map(|(_, what)| what).collect();
    Rules::read(root.get_ref()).map_err(what)
}

#[track_caller]
fn warnings(text: &str) -> String {
    warnings_of(&read(text))
}

fn warnings_of(rules: &Rules) -> String {
    let found = warn::warnings(rules).into_iter();
    found.map(|(_, what)| what).collect::<Vec<_>>().join("\n")
}

fn rule(name: &str, action: &str, conditions: &str) -> String {
    format!("[[rule]]\nname = '{name}'\naction = '{action}'\n{conditions}\n")
}

type Case<'a> = ((&'a str, &'a str), (&'a str, &'a str), bool);

/// Checks for each case whether a warning says that the first rule covers the second.
///
/// All cases are one text, because for each text the catalogue is read.
#[track_caller]
fn check_coverage(cases: &[Case<'_>]) {
    let (mut text, mut expected) = (String::new(), Vec::new());
    for (n, ((action, what), (other, asks), covers)) in cases.iter().enumerate() {
        text += &rule(&format!("a{n}"), action, &format!("comm = 'p{n}'\n{what}"));
        text += &rule(&format!("b{n}"), other, &format!("comm = 'p{n}'\n{asks}"));
        if *covers {
            expected.push(format!(
                "`b{n}` never applies: {action} `a{n}` comes first and covers every case"
            ));
        }
    }
    let found = warnings(&text);
    let found: Vec<_> = found.lines().collect();
    for (n, case) in cases.iter().enumerate() {
        let of = |line: &&str| {
            line.starts_with(&format!("`b{n}` ")) || line.starts_with(&format!("`a{n}` "))
        };
        assert_eq!(found.iter().any(of), case.2, "{case:?}");
    }
    assert_eq!(found, expected);
}

#[test]
fn rule_covers_a_later_one_with_more_conditions() {
    let mut cases = Vec::new();
    for (less, more) in [
        ("session = 'any'", "session = 'alive'\nafter = '1s'"),
        ("session = 'any'", "session = 'ok'"),
        ("", "session = 'ok'"),
        ("session = 'exited'", "session = 'failed'"),
        ("", "agent = 'claude'"),
        ("agent = ['claude', 'codex']", "agent = 'claude'"),
        ("", "unit = 'x*'"),
        ("unit = ['x*', 'y*']", "unit = 'x*'"),
        ("", "environment = 'A=*'"),
        ("environment = ['A=*', 'B=*']", "environment = 'A=*'"),
        ("", "min_age = '1h'"),
        ("min_age = '1h'", "min_age = '2h'"),
        ("", "max_age = '1h'"),
        ("max_age = '2h'", "max_age = '1h'"),
        ("", "min_cpu = 5"),
        ("min_cpu = 5", "min_cpu = 6"),
        ("", "orphan = true"),
        ("", "uid = 'other'"),
        ("", "own_unit = true"),
        ("", "tty = false"),
        ("", "multiplexed = true"),
        ("", "new_session = true"),
        ("", "listening = true"),
        ("", "children = false"),
        ("", "inferred = true"),
        ("session = 'alive'", "session = 'alive'\nserver = true"),
        ("session = 'alive'", "session = 'alive'\nidle = '1h'"),
        (
            "session = 'alive'\nidle = '1h'",
            "session = 'alive'\nidle = '2h'",
        ),
        (
            "session = 'alive'\nidle = '1h'",
            "session = 'alive'\nidle = '1h'\nhung_up = true",
        ),
        ("", "argv = '* x'"),
        ("not_args = 'x'", "not_args = 'x'\nnot_options = '-x'"),
        ("args = 'x'", "args = ['x', 'y']"),
        ("not_options = '-x'", "not_options = ['-x', '-y']"),
        ("not_args = ['x', 'y']", "not_args = 'x'"),
        ("exe = ['**/x', '**/y']", "exe = '**/x'"),
    ] {
        let (less, more) = (("report", less), ("report", more));
        cases.extend([(less, more, true), (more, less, false), (more, more, true)]);
    }
    check_coverage(&cases);
}

#[test]
fn negative_condition_does_not_cover_a_positive_one() {
    let (wanted, denied) = (("report", "argv = 'x'"), ("report", "not_argv = 'x'"));
    check_coverage(&[(wanted, denied, false), (denied, wanted, false)]);
}

#[test]
fn reap_rule_covers_inferred_members_only_on_request() {
    let (all, sure, inferred) = ("", "inferred = false", "inferred = true");
    check_coverage(&[
        (("reap", all), ("reap", all), true),
        (("reap", all), ("report", all), false),
        (("reap", all), ("report", sure), true),
        (("reap", all), ("reap", inferred), false),
        (("reap", inferred), ("reap", inferred), true),
        (("reap", inferred), ("report", sure), false),
        (("report", all), ("reap", inferred), true),
        (("report", sure), ("report", sure), true),
        (("report", sure), ("report", inferred), false),
    ]);
}

#[test]
fn only_boundaries_and_servers_cover_other_rule_types() {
    let boundary = rule("a", "boundary", "comm = 'p'");
    let server = "[[server]]\nname = 'a'\ncomm = 'p'\n".to_owned();
    let agent = "[[agent]]\nname = 'a'\ncomm = 'p'\n".to_owned();
    let keep = rule("a", "keep", "comm = 'p'");
    let last = rule("b", "report", "comm = 'p'");
    for (text, warning) in [
        (
            boundary + &last,
            "`b` never applies: boundary `a` comes first and covers every case",
        ),
        (
            server + &last,
            "`b` never applies: server `a` comes first and covers every case",
        ),
        (agent + &last, ""),
        (keep + "[[agent]]\nname = 'b'\ncomm = 'p'\n", ""),
    ] {
        assert_eq!(warnings(&text), warning, "{text}");
    }
}

#[test]
fn rule_that_can_never_apply_gives_a_warning() {
    const DENIES: Option<&str> = Some("its conditions contradict each other");
    const NO_SCRIPT: Option<&str> =
        Some("it has `script`, but its `exe` is no interpreter that reaper knows");
    const NO_AGENT: Option<&str> = Some("`agent` names no agent that is enabled");
    const MISTYPED: Option<&str> =
        Some("`agent` names no agent that is enabled: did you mean `claude`?");
    let cases = [
        ("agent = 'claude'", None),
        ("agent = ['claude', 'x']", None),
        ("agent = 'cluade'", MISTYPED),
        ("agent = 'kept'", NO_AGENT),
        ("comm = 'p'\nnot_comm = ['p', 'q']", DENIES),
        ("comm = ['p', 'q']\nnot_comm = 'p'", None),
        ("exe = '**/tclsh'\nscript = '**/x'", NO_SCRIPT),
        ("exe = ['**/tcl*', '**/sh5']\nscript = '**/x'", NO_SCRIPT),
        ("exe = '**/node'\nscript = '**/x'", None),
        ("exe = '**/bash'\nscript = '**/x'", None),
        ("exe = '**/python*'\nscript = '**/x'", None),
        ("exe = '/opt/*/{tclsh,ruby3.3}'\nscript = '**/x'", None),
        ("exe = '/opt/**'\nscript = '**/x'", None),
        ("args = ['y', 'z']\nnot_args = 'y'", DENIES),
        ("args = 'y'\nnot_args = ['y', 'z']", None),
        ("args = ['y', 'z']\nnot_args = 'z'", None),
    ];
    let mut text = rule("kept", "keep", "comm = 'kept'");
    let mut expected = Vec::new();
    for (n, (what, warning)) in cases.iter().enumerate() {
        text += &rule(
            &format!("r{n}"),
            "report",
            &format!("argv = 'r{n}'\n{what}"),
        );
        expected.extend(warning.map(|why| format!("`r{n}` can never apply: {why}")));
    }
    assert_eq!(warnings(&text), expected.join("\n"), "{text}");
}

#[test]
fn condition_on_what_precedes_a_script_gives_a_warning() {
    let cases = [
        (
            "exe = '**/bash'\nargs = ['**/dev.sh']",
            Some(("bash", "args")),
        ),
        ("comm = 'bash'\nargs = 'dev.sh'", Some(("bash", "args"))),
        (
            "exe = '/usr/bin/{x,perl5*}'\nargs = '/opt/x'",
            Some(("perl", "args")),
        ),
        (
            "exe = '**/python3.1?'\nargs = '*serve*'",
            Some(("python", "args")),
        ),
        (
            "exe = '**/ruby*'\nargs = ['*', 'serve']",
            Some(("ruby", "args")),
        ),
        ("exe = '**/bash'\nnot_args = '*.sh'", Some(("bash", "args"))),
        ("exe = '**/perl'\noptions = '-T'", Some(("perl", "options"))),
        (
            "exe = '**/x'\nany = [{ args = 'a' }, { comm = 'sh', args = '*.sh' }]",
            None,
        ),
        (
            "any = [{ args = 'a' }, { comm = 'sh', args = '*.sh' }]",
            Some(("sh", "args")),
        ),
        (
            "exe = '**/bash'\nscript = '**/dev.sh'\nargs = '/opt/x'",
            None,
        ),
        (
            "exe = '**/bash'\nnot_script = '**/x'\nargs = '/opt/x'",
            None,
        ),
        ("exe = '**/bash'\nargs = 'sleep 33 & ./x.sh'", None),
        ("exe = '**/node'\nargs = 'serve'", None),
        ("exe = '**/node'\noptions = '--port=80'", None),
        ("exe = '**/bash'\noptions = ['-c', '-lc*']", None),
        ("exe = '**/node'\noptions = '-e'", None),
        ("exe = '/opt/**'\nargs = '/opt/x'", None),
        ("exe = '**/tclsh'\nargs = '/opt/x'", None),
        ("not_exe = '**/bash'\nargs = '/opt/x'", None),
        ("args = '**/dev.sh'", None),
    ];
    let (mut text, mut expected) = (String::new(), Vec::new());
    for (n, (what, warning)) in cases.iter().enumerate() {
        let name = format!("r{n}");
        text += &rule(&name, "report", &format!("argv = '{name}'\n{what}"));
        expected.extend(warning.map(|(program, field)| {
            format!(
                "`{name}` may not match: if {program} runs a script, `{field}` counts only the arguments after the \
                 script; match the script with `script`"
            )
        }));
    }
    assert_eq!(warnings(&text), expected.join("\n"), "{text}");
}

#[test]
fn changing_state_without_a_delay_gives_a_warning() {
    let (mut text, mut expected) = (String::new(), Vec::new());
    for key in ["listening", "min_cpu", "children"] {
        let value = if key == "min_cpu" { "5" } else { "true" };
        for (n, (action, what, is_warned)) in [
            ("report", "session = 'alive'", true),
            ("report", "session = 'alive'\nafter = '1min'", false),
            ("keep", "session = 'alive'", false),
            ("report", "session = 'gone'", false),
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("{key}{n}");
            let asks = format!("argv = '{name}'\n{key} = {value}\n{what}");
            text += &rule(&name, action, &asks);
            if is_warned {
                expected.push(format!(
                    "`{name}` checks `{key}` only when the process has an event"
                ));
            }
        }
    }
    let found = warnings(&text);
    let found: Vec<_> = found
        .lines()
        .map(|line| line.split(", ").next().unwrap())
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn rule_that_replaces_a_built_in_one_gives_a_warning() {
    let replaces = |text: &str| {
        let root = DeTable::parse(text).unwrap();
        warnings_of(&Rules::read(root.get_ref()).unwrap())
    };
    let warning = "`tmux` replaces the built-in boundary of the same name: rename it to keep both";
    for (text, expected) in [
        (rule("tmux", "keep", "comm = 'p'"), warning),
        (rule("tmux", "boundary", "comm = 'p'"), warning),
        (rule("tmux", "keep", "comm = 'p'\nenabled = false"), ""),
        (rule("busy-loops", "report", "comm = 'p'"), ""),
        (rule("my-tmux", "boundary", "comm = 'p'"), ""),
        (
            "defaults = { boundaries = false }\n".to_owned() + &rule("tmux", "keep", "comm = 'p'"),
            "",
        ),
    ] {
        assert_eq!(replaces(&text), expected, "{text}");
    }
}

#[test]
fn pattern_that_matches_everything_is_rejected() {
    for (what, error) in [
        (
            "comm = '*'",
            "`comm`: \"*\" matches everything: narrow it or leave it out",
        ),
        (
            "args = ['*', '*']",
            "`args` matches any arguments: narrow it or leave it out",
        ),
    ] {
        assert_eq!(read_any(&rule("a", "report", what)).unwrap_err(), [error]);
    }
    read(&rule("a", "report", "args = ['*', 'x']"));
}

#[test]
fn more_environment_globs_than_bits_are_rejected() {
    let with = |count: usize| {
        let markers: String = (0..count).map(|n| format!("'A{n}=1', ")).collect();
        read_any(&rule("a", "keep", &format!("environment = [{markers}]")))
    };
    assert!(with(60).is_ok());
    assert_eq!(
        with(61).unwrap_err(),
        [
            "the rules and the built-in ones use 61 different `environment` globs: at most 60 are possible"
        ]
    );
}
