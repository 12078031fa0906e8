//! Tests of `reaper config`: refused configs, warnings, and the effective config.

use std::fs;

use libtest_mimic::Trial;
use serde_json::Value;

use super::reaper;
use crate::trees::{CONFIG, trial};
use crate::world::TempDir;

pub fn trials() -> Vec<Trial> {
    let bad = BAD_CONFIGS.iter().map(|bad| {
        trial("cli", &format!("config-{}", bad.name), move || {
            bad_config(bad)
        })
    });
    let others = [
        trial("cli", "good-config", good_config),
        trial("cli", "doubtful-config", doubtful_config),
        trial("cli", "config-as-shown", config_as_shown),
    ];
    bad.chain(others).collect()
}

struct BadConfig {
    name: &'static str,
    text: &'static str,
    line: u32,
    /// Words that the message must contain.
    names: &'static [&'static str],
}

const BAD_CONFIGS: &[BadConfig] = &[
    BadConfig {
        name: "not-toml",
        text: "mode = \"observe\"\ngrace = = 3\n",
        line: 2,
        names: &["TOML"],
    },
    BadConfig {
        name: "unknown-key",
        text: "\n\ngrave = \"5s\"\n",
        line: 3,
        names: &["grave", "grace"],
    },
    BadConfig {
        name: "unknown-key-of-a-rule",
        text: "[[agent]]\nname = \"x\"\ncom = \"y\"\n",
        line: 3,
        names: &["com", "comm"],
    },
    BadConfig {
        name: "bad-regex",
        text: "[[agent]]\nname = \"x\"\nargv_regex = \"a(b\"\n",
        line: 3,
        names: &["argv_regex"],
    },
    BadConfig {
        name: "bad-duration",
        text: "grace = \"5 parsecs\"\n",
        line: 1,
        names: &["grace", "5 parsecs"],
    },
    BadConfig {
        name: "bad-members",
        text: "pin = true\nmax_members = 5\n",
        line: 2,
        names: &["max_members", "1024", "1048576"],
    },
    BadConfig {
        name: "bad-kernel-reap",
        text: "kernel_reap = true\n",
        line: 1,
        names: &["kernel_reap", "auto"],
    },
    BadConfig {
        name: "long-name",
        text: "[[agent]]\nname = \"aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffffgggg\"\ncomm = \"x\"\n",
        line: 2,
        names: &["name", "63"],
    },
    BadConfig {
        name: "bad-mode",
        text: "mode = \"kill\"\n",
        line: 1,
        names: &["enforce", "observe"],
    },
];

/// A bad config is refused with exit code 2 and a message with the file, the line and the cause. Nothing is started.
fn bad_config(bad: &BadConfig) {
    let dir = TempDir::new();
    let path = dir.path().join("bad.toml");
    fs::write(&path, bad.text).expect("write the configuration");
    let config = path.to_str().expect("a path in UTF-8");
    for args in [
        &["config", "check", config][..],
        &[
            "daemon",
            "--config",
            config,
            "--events",
            "e",
            "--runtime-dir",
            "r",
        ],
    ] {
        let said = reaper(dir.path(), args);
        assert_eq!(said.code, Some(2), "exit code of {args:?}: {}", said.err);
        let place = format!("bad.toml:{}:", bad.line);
        assert!(said.err.contains(&place), "no '{place}' in: {}", said.err);
        for name in bad.names {
            assert!(said.err.contains(name), "no '{name}' in: {}", said.err);
        }
        assert!(
            !dir.path().join("e").exists() && !dir.path().join("r").exists(),
            "something was started"
        );
    }
}

fn good_config() {
    let dir = TempDir::new();
    fs::write(dir.path().join("good.toml"), CONFIG).expect("write the configuration");
    let said = reaper(dir.path(), &["config", "check", "good.toml"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let said = reaper(dir.path(), &["config", "check", "absent.toml"]);
    assert_eq!(said.code, Some(2), "{}", said.err);
    assert!(
        said.err.contains("absent.toml"),
        "the file is not named: {}",
        said.err
    );
}

/// Rules without an effect cause a warning with their line, and the config is accepted.
fn doubtful_config() {
    let dir = TempDir::new();
    let text = r#"
[[rule]]
name = "unused"
action = "reap"
agent = "no-such-agent"

[[keep]]
name = "node"
exe = "**/node"

[[keep]]
name = "shadowed"
exe = "**/node"
argv = "* server.js"

[[keep]]
name = "never"
exe = "**/x"
not_exe = "**/x"
"#;
    fs::write(dir.path().join("c.toml"), text).expect("write the configuration");
    let said = reaper(dir.path(), &["config", "check", "c.toml"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    for (place, word) in [
        ("c.toml:2:", "`unused` can never apply"),
        ("c.toml:11:", "`shadowed` never applies: keep `node`"),
        ("c.toml:16:", "`never` can never apply"),
    ] {
        let mut lines = said.err.lines();
        assert!(
            lines.any(|line| line.contains(place) && line.contains(word)),
            "no {place} {word} in:\n{}",
            said.err
        );
    }
    assert_eq!(said.err.lines().count(), 3, "{}", said.err);
    assert!(said.out.contains("ok; mode"), "{}", said.out);
}

/// The output of `config show` is a config with the same meaning.
fn config_as_shown() {
    let dir = TempDir::new();
    let own =
        "grace = \"2s\"\nenable = [\"busy-loops\"]\n[[keep]]\nname = \"mine\"\nexe = \"**/mine\"\n";
    fs::write(dir.path().join("own.toml"), own).expect("write the configuration");
    let show = |args: &[&str]| {
        let said = reaper(dir.path(), &[&["config", "show"], args].concat());
        assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
        said.out
    };
    let shown = show(&["--config", "own.toml"]);
    for part in ["grace = \"2s\"", "\"mine\"", "\"busy-loops\""] {
        assert!(shown.contains(part), "no {part} in:\n{shown}");
    }
    let off = |text: &str| text.contains("idle-tool-shells");
    assert!(off(&show(&["--defaults"])) && !off(&shown), "{shown}");
    fs::write(dir.path().join("shown.toml"), &shown).expect("write the configuration");
    let said = reaper(dir.path(), &["config", "check", "shown.toml"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let rules = |text: String| serde_json::from_str::<Value>(&text).expect("JSON")["rules"].clone();
    assert_eq!(
        rules(show(&["--config", "shown.toml", "--json"])),
        rules(show(&["--config", "own.toml", "--json"]))
    );
    assert_eq!(
        reaper(dir.path(), &["config", "show", "--config", "absent"]).code,
        Some(2)
    );
}
