//! Commands of README.md and reaper-user/docs that only read: they are run as they are written.
//!
//! `docs::tests` in reaper-user parses all other commands.

use std::fs;
use std::process::Command;

use libtest_mimic::Trial;

use super::run;
use crate::daemon::REAPER;
use crate::snippets;
use crate::trees::trial;
use crate::world::TempDir;

pub fn trials() -> Vec<Trial> {
    vec![trial("cli", "docs-commands-succeed", docs_commands_succeed)]
}

fn docs_commands_succeed() {
    let dir = TempDir::new();
    let config = dir.path().join("config.toml").display().to_string();
    fs::write(&config, "").expect("write the configuration");
    let mut count = 0;
    for (place, arguments) in snippets::calls(&["reaper"], false) {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let expected: &[i32] = match words[..] {
            // 3: no source can be used here.
            ["doctor", ..] => &[0, 3],
            ["config", "check" | "show", ..] | ["ps", ..] | ["--version"] => &[0],
            _ => continue,
        };
        let mut command = Command::new(REAPER);
        command
            .args(words)
            .args((arguments == ["config", "check"]).then_some(&config))
            .env("XDG_STATE_HOME", dir.path());
        let said = run(dir.path(), command.current_dir(dir.path()));
        let code = said.code.unwrap_or(-1);
        assert!(
            expected.contains(&code),
            "{place}: {arguments:?}: {code}: {}",
            said.err
        );
        count += 1;
    }
    assert!(count >= 8, "{count} commands run");
}
