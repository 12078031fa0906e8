//! Commands of README.md and reaper-user/docs that only read, and requests of curl: they are run as they are written.
//!
//! `docs::tests` in reaper-user parses all other commands.

use std::fs;
use std::process::Command;

use libtest_mimic::Trial;
use serde_json::Value;

use super::run;
use super::service_requests::{ask_json, find, socket};
use crate::daemon::REAPER;
use crate::snippets;
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, eventually};

pub fn trials() -> Vec<Trial> {
    vec![trial("cli", "docs-commands-succeed", docs_commands_succeed)]
}

/// Returns the test that needs a service.
pub fn privileged() -> Trial {
    trial("cli", "docs-requests-succeed", docs_requests_succeed)
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

/// Each curl command gets an answer from a service in which a member takes the place of process 4250.
fn docs_requests_succeed() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &["--observe"]);
    world.launch("claude", "agent", "agent", &["leaf=sleep".into()]);
    let leaf = world.await_processes("leaf", 1)[0].pid.to_string();
    let socket = socket(&world);
    eventually("the leaf is a member", || {
        find(&ask_json(&world, &["tree"]), leaf.parse().expect("a pid"))
    });
    let mut count = 0;
    for (place, arguments) in snippets::calls(&["curl"], false) {
        let words = arguments.iter().map(|word| {
            word.replace("/run/reaper/reaper.sock", &socket)
                .replace("4250", &leaf)
        });
        let mut command = Command::new("curl");
        command.args(words).args(["--write-out", "%{http_code}"]);
        let said = run(world.dir(), &mut command);
        let (body, status) = said.out.split_at(said.out.len().saturating_sub(3));
        assert_eq!(status, "200", "{place}: {arguments:?}: {body}{}", said.err);
        let body: Value = serde_json::from_str(body).expect("JSON");
        assert!(body.is_object(), "{place}: {body}");
        count += 1;
    }
    assert!(count >= 5, "{count} requests made");
}
