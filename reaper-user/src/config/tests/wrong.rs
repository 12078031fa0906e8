//! Invalid configs and their error messages.

use super::*;

#[test]
fn not_toml() {
    wrong(
        "mode = \n",
        "r.toml:1:8: not TOML: string values must be quoted, expected literal string",
    );
    wrong("a = 1\na = 2\n", "r.toml:2:1: not TOML: duplicate key");
    wrong(
        "[[agent]\n",
        "r.toml:1:9: not TOML: unclosed array table, expected `]`",
    );
    wrong(
        "= 3",
        "r.toml:1:1: not TOML: unquoted keys cannot be empty, expected letters, numbers, `-`, `_`",
    );
}

#[test]
fn unknown_keys() {
    wrong(
        "\nmoed = 1",
        "r.toml:2:1: unknown key `moed`: did you mean `mode`?",
    );
    wrong(
        "[default]",
        "r.toml:1:2: unknown key `default`: did you mean `defaults`?",
    );
    wrong(
        "[[agents]]",
        "r.toml:1:3: unknown key `agents`: did you mean `agent`?",
    );
    wrong(
        "ring-size = 1",
        "r.toml:1:1: unknown key `ring-size`: did you mean `ring_size`?",
    );
    wrong(
        "colour = 1",
        "r.toml:1:1: unknown key `colour`: known keys: mode, events, source, scan_min_interval, scan_max_interval, grace, kill_timeout, ring_size, max_members, \
         pin, pin_dir, kernel_reap, reap_leftovers, runtime_dir, socket, journal, journal_dir, journal_max_age, journal_max_size, honor_keep, enable, defaults, agent, server, boundary, keep, rule",
    );
    wrong(
        "\"a\\nb\\u001b\" = 1",
        &format!("r.toml:1:1: unknown key `a\\nb\\u{{1b}}`: {}", {
            "known keys: mode, events, source, scan_min_interval, scan_max_interval, grace, kill_timeout, ring_size, max_members, pin, pin_dir, kernel_reap, \
             reap_leftovers, runtime_dir, socket, journal, journal_dir, journal_max_age, journal_max_size, honor_keep, enable, defaults, agent, server, boundary, keep, rule"
        }),
    );
    wrong(
        "[defaults]\nkeep = true",
        "r.toml:2:1: unknown key `keep`: did you mean `keeps`?",
    );
    wrong(
        "[[agent]]\nname = 'x'\nexec = '/x'\ncomm = 'x'",
        "r.toml:3:1: unknown key `exec` in [[agent]]: did you mean `exe`?",
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = [{ com = 'x' }]",
        "r.toml:3:10: unknown key `com` in `any`: did you mean `comm`?",
    );
    wrong(
        "[[boundary]]\nname = 'x'\nuid = 'other'\ncomm = 'x'",
        "r.toml:3:1: unknown key `uid` in [[boundary]]: known keys: name, any, comm, exe, script, arg0, args, options, \
         not_comm, not_exe, not_script, not_arg0, not_args, not_options, argv, argv_regex, not_argv, not_argv_regex, \
         value_options, command_at, attends",
    );
}

#[test]
fn wrong_types() {
    wrong(
        "mode = 1",
        "r.toml:1:8: `mode`: expected `enforce` or `observe`, not integer `1`",
    );
    wrong(
        "grace = 5",
        "r.toml:1:9: `grace`: expected a string such as \"5s\", not integer `5`",
    );
    wrong(
        "ring_size = 65536",
        "r.toml:1:13: `ring_size`: expected a string such as \"64 MiB\", not integer `65536`",
    );
    wrong(
        "max_members = '64k'",
        "r.toml:1:15: `max_members`: expected a number from 1024 to 1048576, not string \"64k\"",
    );
    wrong(
        "pin = 'yes'",
        "r.toml:1:7: `pin`: expected a boolean, not string \"yes\"",
    );
    wrong(
        "pin_dir = true",
        "r.toml:1:11: `pin_dir`: expected an absolute path, not boolean `true`",
    );
    wrong(
        "defaults = true",
        "r.toml:1:12: `defaults`: expected a table: [defaults], not boolean `true`",
    );
    wrong(
        "[defaults]\nagents = 'yes'",
        "r.toml:2:10: `agents`: expected a boolean, not string \"yes\"",
    );
    wrong(
        "agent = 'x'",
        "r.toml:1:9: `agent` is not a list of tables: write [[agent]] with its keys in the lines below",
    );
    wrong(
        "[agent]\nname = 'x'",
        "r.toml:1:1: `agent` is not a list of tables: write [[agent]] with its keys in the lines below",
    );
    wrong(
        "[[agent]]\nname = 'x'\ncomm = true",
        "r.toml:3:8: `comm`: expected a string or a list of strings, not boolean `true`",
    );
    wrong(
        "[[agent]]\nname = 'x'\nexe = ['/x', 1]",
        "r.toml:3:14: `exe`: expected a string, not integer `1`",
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = { comm = 'x' }",
        "r.toml:3:7: `any` is not a list of tables: write a list such as [{ comm = \"a\" }, { exe = \"**/b\" }]",
    );
}

#[test]
fn bad_values() {
    wrong(
        "mode = 'obsrve'",
        "r.toml:1:8: `mode`: expected `enforce` or `observe`, not `obsrve`",
    );
    wrong(
        "events = ''",
        "r.toml:1:10: `events`: expected `agents` or `all`, not ``",
    );
    wrong(
        "[[keep]]\nname = 'x'\nuid = '0'",
        "r.toml:3:7: `uid`: write \"other\", \"other-login\", \"same\" or a number",
    );
    wrong(
        "runtime_dir = 'run'",
        "r.toml:1:15: `runtime_dir`: \"run\" is not an absolute path: write one that begins with `/`",
    );
    wrong(
        "pin_dir = 'bpf'",
        "r.toml:1:11: `pin_dir`: \"bpf\" is not an absolute path: write one that begins with `/`",
    );
    wrong(
        "kernel_reap = 'on'",
        "r.toml:1:15: `kernel_reap`: expected `auto` or `off`, not `on`",
    );
}

#[test]
fn bad_durations() {
    let no = "not a time: write 30s, 10min or 2h";
    wrong(
        "grace = '5 parsecs'",
        &format!("r.toml:1:9: `grace`: \"5 parsecs\": {no}"),
    );
    wrong("grace = '5'", &format!("r.toml:1:9: `grace`: \"5\": {no}"));
    wrong(
        "grace = '-5s'",
        &format!("r.toml:1:9: `grace`: \"-5s\": {no}"),
    );
    wrong(
        "grace = '2h'",
        "r.toml:1:9: `grace`: \"2h\" is out of bounds: write a time from 0s to 1h",
    );
    wrong(
        "kill_timeout = '0s'",
        "r.toml:1:16: `kill_timeout`: \"0s\" is out of bounds: write a time from 1ms to 1h",
    );
    assert_eq!(parse("grace = '0s'").unwrap().grace, Duration::ZERO);
    wrong(
        "scan_min_interval = '10s'\nscan_max_interval = '1s'",
        "r.toml:2:21: `scan_max_interval` is less than `scan_min_interval`: write a longer duration",
    );
    let longer = parse("scan_min_interval = '10s'").unwrap();
    assert_eq!(longer.scan_max_interval, Duration::from_secs(10));
}

#[test]
fn bad_sizes() {
    wrong(
        "ring_size = 'big'",
        "r.toml:1:13: `ring_size`: \"big\": not a size: write 512 KiB, 64 MiB or 2 GiB",
    );
    wrong(
        "ring_size = '8 MB'",
        "r.toml:1:13: `ring_size`: 8000000 bytes is not a power of two: write, for example, \"4 MiB\"",
    );
    wrong(
        "ring_size = '96 KiB'",
        "r.toml:1:13: `ring_size`: 98304 bytes is not a power of two: write, for example, \"64 KiB\"",
    );
    let bounds = "is out of bounds: write a size from \"64 KiB\" to \"1 GiB\"";
    wrong(
        "ring_size = '32 KiB'",
        &format!("r.toml:1:13: `ring_size`: \"32 KiB\" {bounds}"),
    );
    wrong(
        "ring_size = '16 GiB'",
        &format!("r.toml:1:13: `ring_size`: \"16 GiB\" {bounds}"),
    );
    wrong(
        "journal_max_size = '1 KiB'",
        "r.toml:1:20: `journal_max_size`: \"1 KiB\" is out of bounds: write a size from \"1 MiB\" to \"1 TiB\"",
    );
    let config = parse("journal_max_size = '1048576'").unwrap();
    assert_eq!(config.journal_max_size, 1 << 20);
}

#[test]
fn bad_numbers() {
    for (number, what) in [
        ("1023", "integer `1023`"),
        ("1048577", "integer `1048577`"),
        ("-1", "integer `-1`"),
        ("99999999999999999999", "integer `99999999999999999999`"),
    ] {
        wrong(
            &format!("max_members = {number}"),
            &format!(
                "r.toml:1:15: `max_members`: expected a number from 1024 to 1048576, not {what}"
            ),
        );
    }
    for (text, number) in [("1_024", 1024), ("1048576", 1 << 20)] {
        let config = parse(&format!("max_members = {text}")).unwrap();
        assert_eq!(config.max_members, number);
    }
}

#[test]
fn bad_rules() {
    let add = "add `comm`, `exe`, `script`, `args` or `options`";
    wrong(
        "[[agent]]\ncomm = 'x'",
        "r.toml:1:1: this [[agent]] has no name: add `name = \"…\"`",
    );
    wrong(
        "[[agent]]\nname = 'x y'\ncomm = 'x'",
        "r.toml:2:8: `name`: \"x y\" is not a valid name: use only letters, digits, `-`, `_` and `.`",
    );
    let name = "x".repeat(64);
    wrong(
        &format!("[[agent]]\nname = '{name}'\ncomm = 'x'"),
        "r.toml:2:8: `name`: a name of 64 characters is too long: write at most 63",
    );
    let longest = format!("[[agent]]\nname = '{}'\ncomm = 'x'", &name[1..]);
    assert!(parse(&longest).is_ok());
    wrong(
        "[[keep]]\nname = 'x'",
        &format!("r.toml:1:1: [[keep]] `x` has no condition: {add}"),
    );
    wrong(
        "[[agent]]\nname = 'x'\nnot_comm = 'x'",
        &format!("r.toml:1:1: [[agent]] `x` has only `not_` conditions: {add}"),
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = [{ comm = 'x' }, { not_comm = 'y' }]",
        &format!("r.toml:1:1: [[agent]] `x` has only `not_` conditions: {add}"),
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = []",
        "r.toml:3:7: `any` has no alternative: fill it or leave it out",
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = [{ comm = 'x' }, {}]",
        "r.toml:3:24: this alternative of `any` is empty, so it would always match: fill it or remove it",
    );
    wrong(
        "[[agent]]\nname = 'x'\ncomm = []",
        "r.toml:3:8: `comm`: an empty list can never match: fill it or leave it out",
    );
    let no_options = "[[agent]]\nname = 'x'\ncomm = 'x'\nvalue_options = []";
    assert!(parse(no_options).is_ok(), "an empty list means none");
    wrong(
        "[[agent]]\nname = 'x'\ncomm = 'x'\n[[keep]]\nname = 'x'\ncomm = 'x'",
        "r.toml:4:1: `x` is the name of two rules: rename one of them",
    );
}

#[test]
fn bad_patterns() {
    let rule = |line: &str| format!("[[keep]]\nname = 'x'\n{line}");
    wrong(
        &rule("exe = '/x[a'"),
        "r.toml:3:7: `exe`: \"/x[a\" is not a valid glob: unclosed character class; missing ']'",
    );
    wrong(
        &rule("argv = ['a', '{b']"),
        "r.toml:3:14: `argv`: \"{b\" is not a valid glob: unclosed alternate group; missing '}' (maybe escape '{' with '[{]'?)",
    );
    wrong(
        &rule("not_argv_regex = '(a'"),
        "r.toml:3:18: `not_argv_regex`: \"(a\" is not a valid regex: unclosed group",
    );
    wrong(
        &rule("argv_regex = 'a**{2'"),
        "r.toml:3:14: `argv_regex`: \"a**{2\" is not a valid regex: unclosed counted repetition",
    );
    wrong(
        &rule("exe = '~/bin/x'"),
        "r.toml:3:7: `exe`: \"~/bin/x\" is not a valid glob: it is matched against the whole path, so start it with `/` \
         or `**/`: \"**/bin/x\"",
    );
    wrong(
        &rule("comm = 'a-name-of-sixteen'"),
        "r.toml:3:8: `comm`: \"a-name-of-sixteen\" is not a valid glob: the kernel keeps 15 bytes of a name: write \
         \"a-name-of-sixte\", or match `exe`",
    );
    for all in [
        "comm = '*'",
        "exe = '**'",
        "exe = '/**'",
        "argv = '**'",
        "argv_regex = ''",
        "argv_regex = '.*'",
    ] {
        let error = parse(&rule(all)).unwrap_err().to_string();
        assert!(
            error.ends_with(" matches everything: narrow it or leave it out"),
            "{all}: {error}"
        );
    }
}

#[test]
fn problems_of_settings_and_rules_are_in_file_order() {
    wrong(
        "grace = 5\nmoed = 'x'\n[[agent]]\nname = 'é'\nexe = ['é', 1]\n[[keep]]\n",
        "r.toml:1:9: `grace`: expected a string such as \"5s\", not integer `5`\n\
         r.toml:4:8: `name`: \"é\" is not a valid name: use only letters, digits, `-`, `_` and `.`\n\
         r.toml:6:1: this [[keep]] has no name: add `name = \"…\"`",
    );
}

#[test]
fn joined_arguments_are_refused_for_agents_and_boundaries() {
    let why = "matches the joined arguments, where a prompt can look like an option; agents and boundaries \
               match single arguments: write";
    let instead = |not: &str| {
        format!(
            "`{not}args = [\"serve\"]` for the first argument that is no option, `{not}options = [\"--type=*\"]` or `{not}arg0`"
        )
    };
    for (text, place, key, not) in [
        (
            "[[agent]]\nname = 'x'\ncomm = 'x'\nargv = '* y'",
            "4:1",
            "argv",
            "",
        ),
        (
            "[[boundary]]\nname = 'x'\ncomm = 'x'\n  not_argv_regex = 'y'",
            "4:3",
            "not_argv_regex",
            "not_",
        ),
        (
            "[[boundary]]\nname = 'x'\nany = [{ comm = 'x', argv_regex = 'y' }]",
            "3:22",
            "argv_regex",
            "",
        ),
        (
            "[[rule]]\nname = 'x'\naction = 'boundary'\nnot_argv = 'y'\ncomm = 'x'",
            "4:1",
            "not_argv",
            "not_",
        ),
    ] {
        wrong(
            text,
            &format!("r.toml:{place}: `{key}` {why} {}", instead(not)),
        );
    }
    for action in ["keep", "report", "reap"] {
        let text =
            format!("[[rule]]\nname = 'x'\naction = '{action}'\nargv = '* y'\nargv_regex = 'z'");
        assert!(parse(&text).is_ok(), "{action}");
    }
}

#[test]
fn bad_arguments() {
    let rule = |line: &str| format!("[[agent]]\nname = 'x'\ncomm = 'x'\n{line}");
    wrong(
        &rule("options = ['-v', 'all']"),
        "r.toml:4:18: `options`: \"all\" is not a valid glob: it is matched against an option, which starts with `-`: \"--all\"; \
         `args` matches the other arguments",
    );
    for name in ["c", "-", "--a=b", "--a*"] {
        wrong(
            &rule(&format!("args = 'y'\nvalue_options = ['{name}']")),
            &format!(
                "r.toml:5:18: `value_options`: \"{name}\" is not the name of an option: write one such as \"--config\""
            ),
        );
    }
    wrong(
        &rule("args = ['*', '**']"),
        "r.toml:4:8: `args` matches any arguments: narrow it or leave it out",
    );
    wrong(
        &rule("args = 'y'\ncommand_at = 0"),
        "r.toml:5:14: `command_at`: expected a number from 1 to 99, not integer `0`",
    );
    wrong(
        "[[agent]]\nname = 'x'\nvalue_options = '-c'",
        "r.toml:1:1: [[agent]] `x` has no condition: add `comm`, `exe`, `script`, `args` or `options`",
    );
}

#[test]
fn bad_conversations() {
    let rule =
        |table: &str| format!("[[agent]]\nname = 'x'\ncomm = 'x'\n[agent.conversation]\n{table}");
    for (table, said) in [
        (
            "variabel = 'V'",
            "5:1: unknown key `variabel`: did you mean `variable`?",
        ),
        (
            "job = 'j'",
            "4:1: `conversation`: the key `variable` is missing",
        ),
        (
            "variable = ''",
            "5:12: `variable`: the string is empty: fill it or leave it out",
        ),
        (
            "variable = 'V'\nfiles = ['../x']",
            "6:10: `files`: \"../x\" leaves the directory: write a path below it, without `..`",
        ),
        (
            "variable = 'V'\npid = 'p'",
            "4:1: `conversation`: `pid` and `start` differ in length: each key in `pid` needs its counterpart \
             in `start`, at the same position",
        ),
        (
            "variable = 'V'\ndirectory = 'd'",
            "4:1: `conversation`: a registry needs `directory`, `files`, `pid` and `start`: add what is missing",
        ),
    ] {
        wrong(&rule(table), &format!("r.toml:{said}"));
    }
}
