//! Configurations that are refused, and what is said of them.

use std::fs;

use libtest_mimic::Trial;

use super::reaper;
use crate::trees::{CONFIG, trial};
use crate::world::TempDir;

pub fn trials() -> Vec<Trial> {
    let bad = BAD_CONFIGS.iter().map(|bad| {
        trial("cli", &format!("config-{}", bad.name), move || {
            bad_config(bad)
        })
    });
    bad.chain([trial("cli", "good-config", good_config)])
        .collect()
}

struct BadConfig {
    name: &'static str,
    text: &'static str,
    line: u32,
    /// What the message must name.
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
        name: "bad-mode",
        text: "mode = \"kill\"\n",
        line: 1,
        names: &["enforce", "observe"],
    },
];

/// Exit 2, the file, the line and what is wrong with it; nothing is started.
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
