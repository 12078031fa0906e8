mod rules;
mod wrong;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::file::Trust;
use super::show::ShownConfig;
use super::*;
use reaper_model::event::Image;
use reaper_model::ruleset::{Action, Class};

/// A directory that is removed on drop.
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

/// Asserts that a text is refused with these problems, one per line.
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
fn empty_file_has_the_defaults() {
    let config = parse("").unwrap();
    assert_eq!(config.mode, Mode::Enforce);
    assert_eq!(config.events, EventScope::Agents);
    assert_eq!(
        (config.grace, config.kill_timeout),
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
            "cline",
            "continue",
            "kilo",
            "droid",
            "auggie",
            "pi",
            "letta",
            "codebuff",
            "qodo",
            "grok",
            "jules",
            "openclaw",
            "hermes",
            "mistral-vibe",
            "kiro-cli",
            "kimi",
            "openhands",
            "plandex",
            "swe-agent",
            "trae-agent",
            "open-interpreter",
            "reaper-run"
        ]
    );
    assert_eq!(
        config.rules.rules().len(),
        Config::default().rules.rules().len()
    );
}

#[test]
fn all_keys_are_read() {
    let config = parse(
        r#"
        mode = "observe"
        events = "all"
        grace = "1m 30s"
        kill_timeout = "500ms"
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
        not_options = "--version"
        [[agent]]
        name = "b"
        arg0 = "b"
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
        (config.grace, config.kill_timeout),
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
        "the shared condition does not hold"
    );
    assert!(matches!(class("c", "/c", b"c\0"), Class::Boundary(_)));
}

#[test]
fn user_rule_precedes_and_replaces_built_in_rule() {
    let config =
        parse("[[keep]]\nname = 'tmux'\ncomm = 'tmux'\n[[agent]]\nname = 'zz'\ncomm = 'zz'")
            .unwrap();
    assert_eq!(names(&config, Action::Agent)[..2], ["zz", "claude-code"]);
    assert_eq!(names(&config, Action::Keep)[..2], ["tmux", "other-uid"]);
    assert!(!names(&config, Action::Boundary).contains(&"tmux"));
    assert!(names(&config, Action::Boundary).contains(&"screen"));
}

#[test]
fn defaults_switch_off_parts_of_the_catalogue() {
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
fn file_errors_name_the_problem() {
    let dir = Dir::new("files");
    let file = dir.0.join("r.toml");
    let message = |path: &Path| {
        let error = Config::load(path).unwrap_err().to_string();
        error
            .strip_prefix(&path.display().to_string())
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        message(&file),
        ": no such file: check the path, or create it with `reaper config init FILE`"
    );
    assert_eq!(message(&dir.0), ": this is a directory: name a TOML file");
    std::fs::write(&file, b"mode = 'observe'\nx = 'a\xffb'\n").unwrap();
    assert_eq!(
        message(&file),
        ":2:7: byte 0xff is not UTF-8: save the file as UTF-8"
    );
    std::fs::write(&file, "mode = 'observe'\n").unwrap();
    assert_eq!(Config::load(&file).unwrap().mode, Mode::Observe);
}

#[test]
fn pipe_is_refused_without_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("c.toml");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR).unwrap();
    let error = Config::load(&pipe).unwrap_err().to_string();
    assert!(
        error.contains("c.toml") && error.contains("not a regular file"),
        "{error}"
    );
}

/// Each row has the modes of a file and its directory. The booleans say whether the file is accepted: as an explicit
/// file of root, and as the default one.
#[test]
fn file_that_others_can_change_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("reaper");
    std::fs::create_dir(&directory).unwrap();
    let path = directory.join("config.toml");
    let chmod = |path: &Path, mode| {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    };
    for (file_mode, directory_mode, kept, private) in [
        (0o600, 0o700, true, true),
        (0o644, 0o755, true, true),
        (0o664, 0o755, false, false),
        (0o646, 0o755, false, false),
        (0o644, 0o775, false, false),
        (0o644, 0o777, false, false),
        // Others can create files in this directory, but not replace this one.
        (0o644, 0o1777, true, false),
    ] {
        std::fs::write(&path, "").unwrap();
        chmod(&path, file_mode);
        chmod(&directory, directory_mode);
        for (trust, accepted) in [(Trust::Kept, kept), (Trust::Private, private)] {
            let read = file::read_as(&path, trust);
            let case = format!("{file_mode:o} in {directory_mode:o}: {read:?}");
            assert_eq!(read.is_ok(), accepted, "{case}");
            let said = read.err().map_or(String::new(), |error| error.to_string());
            assert!(accepted || said.contains("users other than root"), "{case}");
        }
        assert!(file::read_as(&path, Trust::Any).is_ok());
        std::fs::remove_file(&path).unwrap();
        let absent = file::check_directory(&path, &path, Trust::Private);
        assert_eq!(
            absent.is_ok(),
            directory_mode & 0o022 == 0,
            "{directory_mode:o}"
        );
    }
}

#[test]
fn link_is_as_safe_as_the_directory_of_its_target() {
    let dir = tempfile::tempdir().unwrap();
    let open = dir.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::write(open.join("real.toml"), "").unwrap();
    let link = dir.path().join("config.toml");
    std::os::unix::fs::symlink(open.join("real.toml"), &link).unwrap();
    assert!(file::read_as(&link, Trust::Private).is_ok());
    std::fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    assert!(file::read_as(&link, Trust::Private).is_err());
}

#[test]
fn missing_default_file_means_built_in_settings() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none/config.toml");
    let config = Config::load_if_exists(&path).unwrap();
    let shown = path.display();
    assert_eq!(config.file.to_string(), format!("built-in (no {shown})"));
    assert_eq!(
        config.rules.rules().len(),
        Config::default().rules.rules().len()
    );
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    std::fs::write(&path, "mode = 'observe'\n").unwrap();
    let config = Config::load_if_exists(&path).unwrap();
    assert_eq!(config.mode, Mode::Observe);
    assert_eq!(config.file.to_string(), shown.to_string());
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("nowhere", &path).unwrap();
    assert!(
        Config::load_if_exists(&path).is_err(),
        "a dangling link is an error"
    );
}

#[test]
fn example_shows_each_setting_with_its_default() {
    let example = parse(EXAMPLE).unwrap();
    assert_eq!(
        ShownConfig::new(&example),
        ShownConfig::new(&Config::default())
    );
    let is_setting = |line: &&str| !line.is_empty() && !line.starts_with("# ") && *line != "#";
    let settings: Vec<_> = EXAMPLE.lines().filter(is_setting).collect();
    assert!(
        settings.iter().all(|line| line.starts_with('#')),
        "{settings:?}"
    );
    let uncommented: Vec<_> = settings.iter().map(|line| &line[1..]).collect();
    let config = parse(&uncommented.join("\n")).unwrap();
    assert_eq!(config.warnings, []);
    assert!(names(&config, Action::Keep).contains(&"my-database"));
    let shown = ShownConfig::new(&config).settings;
    assert_eq!(shown, ShownConfig::new(&Config::default()).settings);
    for key in shown.keys() {
        let line = format!("{key} = ");
        assert!(
            uncommented.iter().any(|text| text.starts_with(&line)),
            "{key}"
        );
    }
    assert!(EXAMPLE.lines().all(|line| line.len() <= 80));
}
