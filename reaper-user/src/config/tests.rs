mod rules;

use std::path::PathBuf;

use super::*;
use crate::model::agent::{Action, Class};
use crate::model::event::Image;

/// A directory that is removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("reaper-config-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("r.toml"))
}

/// Every problem of a text, a line each.
#[track_caller]
fn wrong(text: &str, expected: &str) {
    assert_eq!(parse(text).expect_err(text).to_string(), expected, "{text}");
}

fn names(config: &Config, action: Action) -> Vec<&str> {
    config
        .rules
        .rules()
        .iter()
        .filter(|rule| rule.action == action)
        .map(|rule| &*rule.name)
        .collect()
}

#[test]
fn an_empty_file_means_the_defaults() {
    let config = parse("").unwrap();
    assert_eq!(config.mode, Mode::Enforce);
    assert_eq!(config.events, EventScope::Agents);
    assert_eq!(
        (config.grace, config.stuck_after),
        (Duration::from_secs(5), Duration::from_secs(1))
    );
    assert_eq!(config.ring_size, 8 << 20);
    assert_eq!(config.runtime_dir, Path::new("/run/reaper"));
    assert!(config.pin && config.pin_dir == Path::new("/sys/fs/bpf/reaper"));
    assert_eq!(
        (config.max_members, config.kernel_reap),
        (65_536, KernelReap::Auto)
    );
    assert_eq!(
        names(&config, Action::Agent),
        [
            "claude-code",
            "codex",
            "gemini-cli",
            "copilot-cli",
            "opencode",
            "qwen-code",
            "amp",
            "cursor-agent",
            "crush",
            "goose",
            "aider",
            "reaper-run"
        ]
    );
    assert_eq!(
        config.rules.rules().len(),
        Config::default().rules.rules().len()
    );
}

#[test]
fn every_key_is_read() {
    let config = parse(
        r#"
        mode = "observe"
        events = "all"
        grace = "1m 30s"
        stuck_after = "500ms"
        ring_size = "64 KiB"
        max_members = 0x1_0000
        pin = false
        pin_dir = "/bpf/r"
        kernel_reap = "off"
        runtime_dir = "/var/run/r"
        defaults = { agents = false, boundaries = false, keeps = false }
        [[agent]]
        name = "a"
        comm = ["x", "y"]
        script = "**/s.py"
        not_argv = "* --version"
        [[agent]]
        name = "b"
        argv_regex = '^b( |$)'
        any = [{ exe = "/opt/b" }, { comm = "b*" }]
        [[boundary]]
        name = "c"
        exe = "**/c"
        [[keep]]
        name = "d"
        uid = "other"
        "#,
    )
    .unwrap();
    assert_eq!(
        (config.mode, config.events),
        (Mode::Observe, EventScope::All)
    );
    assert_eq!(
        (config.grace, config.stuck_after),
        (Duration::from_secs(90), Duration::from_millis(500))
    );
    assert_eq!(config.ring_size, 64 << 10);
    assert_eq!(config.runtime_dir, Path::new("/var/run/r"));
    assert!(!config.pin && config.pin_dir == Path::new("/bpf/r"));
    assert_eq!(
        (config.max_members, config.kernel_reap),
        (65_536, KernelReap::Off)
    );
    assert_eq!(names(&config, Action::Agent), ["a", "b"]);
    assert_eq!(names(&config, Action::Boundary), ["c"]);
    assert_eq!(names(&config, Action::Keep), ["d"]);
    let class = |comm: &str, exe: &str, argv: &[u8]| {
        let image = Image {
            comm: comm.into(),
            exe: exe.into(),
            argv: argv.into(),
            ..Image::default()
        };
        config.rules.classify(&image)
    };
    assert!(matches!(
        class("y", "/bin/python3", b"python3\0/x/s.py\0"),
        Class::Agent(_)
    ));
    assert_eq!(
        class("y", "/bin/python3", b"python3\0/x/s.py\0--version\0"),
        Class::Plain
    );
    assert_eq!(
        class("z", "/bin/python3", b"python3\0/x/s.py\0"),
        Class::Plain
    );
    assert!(matches!(class("z", "/opt/b", b"b\0"), Class::Agent(_)));
    assert!(matches!(class("bb", "/bin/b", b"b\0x\0"), Class::Agent(_)));
    assert_eq!(
        class("z", "/bin/b", b"b\0"),
        Class::Plain,
        "no alternative holds"
    );
    assert_eq!(
        class("b", "/opt/b", b"bb\0"),
        Class::Plain,
        "what is common does not hold"
    );
    assert!(matches!(class("c", "/c", b"c\0"), Class::Boundary(_)));
}

#[test]
fn a_rule_of_the_user_comes_first_and_replaces_a_built_in_one_of_its_name() {
    let config =
        parse("[[keep]]\nname = 'tmux'\ncomm = 'tmux'\n[[agent]]\nname = 'zz'\ncomm = 'zz'")
            .unwrap();
    assert_eq!(names(&config, Action::Agent)[..2], ["zz", "claude-code"]);
    assert_eq!(names(&config, Action::Keep)[..2], ["tmux", "other-uid"]);
    assert!(!names(&config, Action::Boundary).contains(&"tmux"));
    assert!(names(&config, Action::Boundary).contains(&"screen"));
}

#[test]
fn parts_of_the_catalogue_can_be_switched_off() {
    let config = parse("[defaults]\nagents = false\nkeeps = false").unwrap();
    assert_eq!(
        config.defaults,
        Defaults {
            agents: false,
            boundaries: true,
            keeps: false
        }
    );
    assert_eq!(
        names(&config, Action::Agent).len() + names(&config, Action::Keep).len(),
        0
    );
    assert!(names(&config, Action::Boundary).contains(&"tmux"));
}

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
        "r.toml:1:1: unknown key `colour`: known are mode, events, source, scan_min_interval, scan_max_interval, grace, stuck_after, ring_size, max_members, \
         pin, pin_dir, kernel_reap, reap_strays, runtime_dir, socket, journal, journal_dir, journal_max_age, journal_max_size, honor_keep, enable, defaults, agent, boundary, keep, rule",
    );
    wrong(
        "\"a\\nb\\u001b\" = 1",
        &format!("r.toml:1:1: unknown key `a\\nb\\u{{1b}}`: {}", {
            "known are mode, events, source, scan_min_interval, scan_max_interval, grace, stuck_after, ring_size, max_members, pin, pin_dir, kernel_reap, \
             reap_strays, runtime_dir, socket, journal, journal_dir, journal_max_age, journal_max_size, honor_keep, enable, defaults, agent, boundary, keep, rule"
        }),
    );
    wrong(
        "[defaults]\nkeep = true",
        "r.toml:2:1: unknown key `keep` in [defaults]: did you mean `keeps`?",
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
        "r.toml:3:1: unknown key `uid` in [[boundary]]: known are name, any, comm, exe, script, argv, argv_regex, \
         not_comm, not_exe, not_script, not_argv, not_argv_regex",
    );
}

#[test]
fn wrong_types() {
    wrong(
        "mode = 1",
        "r.toml:1:8: `mode` is an integer: write a string such as \"enforce\"",
    );
    wrong(
        "grace = 5",
        "r.toml:1:9: `grace` is an integer: write a string such as \"5s\"",
    );
    wrong(
        "ring_size = 65536",
        "r.toml:1:13: `ring_size` is an integer: write a string such as \"8 MiB\"",
    );
    wrong(
        "max_members = '64k'",
        "r.toml:1:15: `max_members` is a string: write a number from 1024 to 1048576",
    );
    wrong(
        "pin = 'yes'",
        "r.toml:1:7: `pin` is a string: write true or false",
    );
    wrong(
        "pin_dir = true",
        "r.toml:1:11: `pin_dir` is a boolean: write a string such as \"/sys/fs/bpf/reaper\"",
    );
    wrong(
        "defaults = true",
        "r.toml:1:12: `defaults` is a boolean: write a table: [defaults]",
    );
    wrong(
        "[defaults]\nagents = 'yes'",
        "r.toml:2:10: `agents` is a string: write true or false",
    );
    wrong(
        "agent = 'x'",
        "r.toml:1:9: `agent` is a string: write [[agent]] with its keys in the lines below",
    );
    wrong(
        "[agent]\nname = 'x'",
        "r.toml:1:1: `agent` is a table: write [[agent]] with its keys in the lines below",
    );
    wrong(
        "[[agent]]\nname = 'x'\ncomm = true",
        "r.toml:3:8: `comm` is a boolean: write a string or a list of strings",
    );
    wrong(
        "[[agent]]\nname = 'x'\nexe = ['/x', 1]",
        "r.toml:3:14: `exe` holds an integer: write strings only",
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = { comm = 'x' }",
        "r.toml:3:7: `any` is a table: write a list such as [{ comm = \"a\" }, { exe = \"**/b\" }]",
    );
}

#[test]
fn bad_values() {
    wrong(
        "mode = 'obsrve'",
        "r.toml:1:8: `mode` is \"obsrve\": write \"enforce\" or \"observe\"",
    );
    wrong(
        "events = ''",
        "r.toml:1:10: `events` is \"\": write \"agents\" or \"all\"",
    );
    wrong(
        "[[keep]]\nname = 'x'\nuid = '0'",
        "r.toml:3:7: `uid` is \"0\": write \"other\", \"same\" or a number",
    );
    wrong(
        "runtime_dir = 'run'",
        "r.toml:1:15: `runtime_dir` is \"run\": write an absolute path",
    );
    wrong(
        "pin_dir = 'bpf'",
        "r.toml:1:11: `pin_dir` is \"bpf\": write an absolute path",
    );
    wrong(
        "kernel_reap = 'on'",
        "r.toml:1:15: `kernel_reap` is \"on\": write \"auto\" or \"off\"",
    );
}

#[test]
fn bad_durations() {
    let no = "which is no duration: write one such as \"5s\" or \"500ms\"";
    wrong(
        "grace = '5 parsecs'",
        &format!("r.toml:1:9: `grace` is \"5 parsecs\", {no}"),
    );
    wrong(
        "grace = '5'",
        &format!("r.toml:1:9: `grace` is \"5\", {no}"),
    );
    wrong(
        "grace = '-5s'",
        &format!("r.toml:1:9: `grace` is \"-5s\", {no}"),
    );
    wrong(
        "grace = '2h'",
        "r.toml:1:9: `grace` is \"2h\": write a duration from 0s to 1h",
    );
    wrong(
        "stuck_after = '0s'",
        "r.toml:1:15: `stuck_after` is \"0s\": write a duration from 1ms to 1h",
    );
    assert_eq!(parse("grace = '0s'").unwrap().grace, Duration::ZERO);
}

#[test]
fn bad_sizes() {
    wrong(
        "ring_size = 'big'",
        "r.toml:1:13: `ring_size` is \"big\", which is no size: write one such as \"8 MiB\"",
    );
    wrong(
        "ring_size = '8 MB'",
        "r.toml:1:13: `ring_size` is 8000000 bytes, which is no power of two: write for instance \"4 MiB\"",
    );
    wrong(
        "ring_size = '96 KiB'",
        "r.toml:1:13: `ring_size` is 98304 bytes, which is no power of two: write for instance \"64 KiB\"",
    );
    let bounds = "write a power of two from \"64 KiB\" to \"1 GiB\"";
    wrong(
        "ring_size = '32 KiB'",
        &format!("r.toml:1:13: `ring_size` is \"32 KiB\": {bounds}"),
    );
    wrong(
        "ring_size = '16 GiB'",
        &format!("r.toml:1:13: `ring_size` is \"16 GiB\": {bounds}"),
    );
}

#[test]
fn bad_numbers() {
    for number in ["1023", "1048577", "-1", "99999999999999999999"] {
        wrong(
            &format!("max_members = {number}"),
            &format!("r.toml:1:15: `max_members` is {number}: write a number from 1024 to 1048576"),
        );
    }
    for (text, number) in [("1_024", 1024), ("1048576", 1 << 20)] {
        let config = parse(&format!("max_members = {text}")).unwrap();
        assert_eq!(config.max_members, number);
    }
}

#[test]
fn bad_rules() {
    let add = "add `comm`, `exe`, `script`, `argv` or `argv_regex`";
    wrong(
        "[[agent]]\ncomm = 'x'",
        "r.toml:1:1: this [[agent]] has no name: add `name = \"…\"`",
    );
    wrong(
        "[[agent]]\nname = 'x y'\ncomm = 'x'",
        "r.toml:2:8: `name` is \"x y\": write letters, digits, `-`, `_` and `.`",
    );
    let name = "x".repeat(64);
    wrong(
        &format!("[[agent]]\nname = '{name}'\ncomm = 'x'"),
        "r.toml:2:8: `name` has 64 letters, and the kernel keeps it with a session: write at most 63",
    );
    let longest = format!("[[agent]]\nname = '{}'\ncomm = 'x'", &name[1..]);
    assert!(parse(&longest).is_ok());
    wrong(
        "[[keep]]\nname = 'x'",
        &format!("r.toml:1:1: [[keep]] `x` has no condition: {add}"),
    );
    wrong(
        "[[agent]]\nname = 'x'\nnot_comm = 'x'",
        &format!("r.toml:1:1: [[agent]] `x` says only what it is not: {add}"),
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = [{ comm = 'x' }, { not_comm = 'y' }]",
        &format!("r.toml:1:1: [[agent]] `x` says only what it is not: {add}"),
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = []",
        "r.toml:3:7: `any` has no alternative: fill it or leave it out",
    );
    wrong(
        "[[agent]]\nname = 'x'\nany = [{ comm = 'x' }, {}]",
        "r.toml:3:24: this alternative of `any` is empty, so it would always hold: fill it or remove it",
    );
    wrong(
        "[[agent]]\nname = 'x'\ncomm = []",
        "r.toml:3:8: `comm` is an empty list, which can never match: fill it or leave it out",
    );
    wrong(
        "[[agent]]\nname = 'x'\ncomm = 'x'\n[[keep]]\nname = 'x'\ncomm = 'x'",
        "r.toml:4:1: `x` is the name of another rule too: rename one of them",
    );
}

#[test]
fn bad_patterns() {
    let rule = |line: &str| format!("[[agent]]\nname = 'x'\n{line}");
    wrong(
        &rule("exe = '/x[a'"),
        "r.toml:3:7: `exe` \"/x[a\" is no good glob: unclosed character class; missing ']'",
    );
    wrong(
        &rule("argv = ['a', '{b']"),
        "r.toml:3:14: `argv` \"{b\" is no good glob: unclosed alternate group; missing '}' (maybe escape '{' with '[{]'?)",
    );
    wrong(
        &rule("not_argv_regex = '(a'"),
        "r.toml:3:18: `not_argv_regex` \"(a\" is no good regex: unclosed group",
    );
    wrong(
        &rule("argv_regex = 'a**{2'"),
        "r.toml:3:14: `argv_regex` \"a**{2\" is no good regex: unclosed counted repetition",
    );
    wrong(
        &rule("exe = '~/bin/x'"),
        "r.toml:3:7: `exe` \"~/bin/x\" is no good glob: it is matched against the whole path, so start it with `/` \
         or `**/`: \"**/bin/x\"",
    );
    wrong(
        &rule("comm = 'a-name-of-sixteen'"),
        "r.toml:3:8: `comm` \"a-name-of-sixteen\" is no good glob: the kernel keeps 15 bytes of a name: write \
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
fn every_problem_is_told_in_the_order_of_the_file() {
    wrong(
        "grace = 5\nmoed = 'x'\n[[agent]]\nname = 'é'\nexe = ['é', 1]\n[[keep]]\n",
        "r.toml:1:9: `grace` is an integer: write a string such as \"5s\"\n\
         r.toml:2:1: unknown key `moed`: did you mean `mode`?\n\
         r.toml:4:8: `name` is \"é\": write letters, digits, `-`, `_` and `.`\n\
         r.toml:5:8: `exe` \"é\" is no good glob: it is matched against the whole path, so start it with `/` or \
         `**/`: \"**/é\"\n\
         r.toml:5:13: `exe` holds an integer: write strings only\n\
         r.toml:6:1: this [[keep]] has no name: add `name = \"…\"`",
    );
}

#[test]
fn files() {
    let dir = Dir::new("files");
    let file = dir.0.join("r.toml");
    let said = |path: &Path| {
        let error = Config::load(path).unwrap_err().to_string();
        error
            .strip_prefix(&path.display().to_string())
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        said(&file),
        ": no such file: write it, or leave out `--config` to run with the defaults"
    );
    assert_eq!(said(&dir.0), ": this is a directory: name a TOML file");
    std::fs::write(&file, b"mode = 'observe'\nx = 'a\xffb'\n").unwrap();
    assert_eq!(
        said(&file),
        ":2:7: byte 0xff is not UTF-8: save the file as UTF-8"
    );
    std::fs::write(&file, "mode = 'observe'\n").unwrap();
    assert_eq!(Config::load(&file).unwrap().mode, Mode::Observe);
}

#[test]
fn what_would_have_to_be_waited_for_is_no_config() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("c.toml");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR).unwrap();
    let error = Config::load(&pipe).unwrap_err().to_string();
    assert!(
        error.contains("c.toml") && error.contains("no regular file"),
        "{error}"
    );
}
