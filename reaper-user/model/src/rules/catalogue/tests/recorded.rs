//! Processes of real agent packages, recorded by `cargo xtask agents` in `tests/agents/recorded.json`.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

use crate::event::Image;
use crate::rules;
use crate::ruleset::{Class, Ruleset};

const RECORDED: &str = include_str!("../../../../../../tests/agents/recorded.json");

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Row {
    Ran {
        forms: BTreeMap<String, Vec<Process>>,
    },
    Unavailable {},
}

#[derive(Deserialize)]
struct Process {
    comm: String,
    exe: String,
    resolved: Option<String>,
    argv: Vec<String>,
    recognised: Option<String>,
}

/// Returns the rule that recognises a process, by its script as given or by the resolved path.
fn recognised(rules: &Ruleset, process: &Process) -> Option<String> {
    let argv = process.argv.iter();
    let image = Arc::new(Image {
        comm: process.comm.clone().into(),
        exe: process.exe.clone().into(),
        argv: argv.flat_map(|word| word.bytes().chain([0])).collect(),
        ..Image::default()
    });
    let class = match (rules.classify(&image), &process.resolved) {
        (Class::Plain, Some(path)) => rules.matched_script(&image, path.clone().into()).class,
        (class, _) => class,
    };
    match class {
        Class::Agent(id) | Class::Server(id) => Some(rules.name(id).to_string()),
        Class::Boundary(_) | Class::Plain => None,
    }
}

#[test]
fn processes_of_real_packages_are_recognised() {
    let rules = rules::built_in();
    let all: BTreeMap<String, Row> = serde_json::from_str(RECORDED).unwrap();
    assert!(all.len() >= 25, "only {} agents have a row", all.len());
    let (mut installed, mut wrong) = (0, Vec::new());
    for (name, row) in all {
        assert!(rules.session_rule(&name).is_some(), "no rule {name}");
        let Row::Ran { forms } = row else { continue };
        installed += 1;
        for (form, processes) in forms {
            let found: Vec<_> = processes
                .iter()
                .map(|one| recognised(&rules, one))
                .collect();
            let daemon: Vec<_> = processes.iter().map(|one| one.recognised.clone()).collect();
            if found != daemon || !found.contains(&Some(name.clone())) {
                wrong.push(format!("{name}, {form}: {found:?}, recorded {daemon:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(installed >= 15, "only {installed} agents were installed");
}
