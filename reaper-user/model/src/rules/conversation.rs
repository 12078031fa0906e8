//! The `conversation` table of an `[[agent]]`: where the agent leaves the ids of its conversations.
//!
//! ```toml
//! [agent.conversation]
//! variable = "CLAUDE_CODE_SESSION_ID"         # in the environment of what the agent starts
//! # The agent's own registry, if it has one:
//! directory_variable = "CLAUDE_CONFIG_DIR"    # names the directory, where it is set
//! directory = ".claude"                       # else this one, below the user's home
//! files = ["sessions/{pid}.json"]             # JSON files that name running processes
//! pid = ["pid"]                               # keys of a process id, and
//! start = ["procStart"]                       # of its start in clock ticks, pair by pair
//! job = ["jobId"]                             # keys of the name of a process's job
//! adopted = ["jobs/{job}/adopt.json"]         # files that list the processes a job takes over
//! ```

use std::path::{Component, Path};
use std::sync::Arc;

use serde_json::{Map, Value};
use toml::de::DeTable;

use super::reader::Reader;
use crate::conversation::{ConversationSource, Registry};

const KEYS: [&str; 8] = [
    "variable",
    "directory_variable",
    "directory",
    "files",
    "pid",
    "start",
    "job",
    "adopted",
];

/// Reads the table. Problems are noted in `r`.
pub(super) fn read(r: &mut Reader, rule: &DeTable<'_>) -> Option<Arc<ConversationSource>> {
    let at = rule.get("conversation")?.span().start;
    let table = r.table(rule, "conversation")?;
    r.known_keys(table, &KEYS, " in `conversation`");
    let Some(variable) = text(r, table, "variable") else {
        r.problem(
            at,
            "`conversation` has no `variable`: name the environment variable that holds the id of a conversation",
        );
        return None;
    };
    let directory = text(r, table, "directory");
    let files = paths(r, table, "files");
    let (pid, start) = (texts(r, table, "pid"), texts(r, table, "start"));
    if pid.len() != start.len() {
        r.problem(
            at,
            "`pid` and `start` of `conversation` differ in length: write one key of each for each pair",
        );
    }
    let has_registry = !files.is_empty() && !pid.is_empty();
    if directory.is_some() != has_registry {
        r.problem(
            at,
            "a registry in `conversation` needs `directory`, `files`, `pid` and `start`: add what is missing",
        );
    }
    let registry = directory
        .filter(|_| has_registry)
        .map(|directory| Registry {
            directory_variable: text(r, table, "directory_variable"),
            directory,
            files,
            process: pid.into_iter().zip(start).collect(),
            job: texts(r, table, "job"),
            adopted: paths(r, table, "adopted"),
        });
    Some(Arc::new(ConversationSource { variable, registry }))
}

/// Returns the table as `config show` prints it.
pub fn show(source: &ConversationSource) -> Value {
    let mut table = Map::new();
    let mut put = |key: &str, value: Value| drop(table.insert(key.into(), value));
    let list = |texts: &[Arc<str>]| texts.iter().map(|text| Value::from(&**text)).collect();
    put("variable", (&*source.variable).into());
    if let Some(registry) = &source.registry {
        if let Some(name) = &registry.directory_variable {
            put("directory_variable", (&**name).into());
        }
        put("directory", (&*registry.directory).into());
        put("files", list(&registry.files));
        let (pid, start): (Vec<_>, Vec<_>) = registry.process.iter().cloned().unzip();
        put("pid", list(&pid));
        put("start", list(&start));
        for (key, texts) in [("job", &registry.job), ("adopted", &registry.adopted)] {
            if !texts.is_empty() {
                put(key, list(texts));
            }
        }
    }
    table.into()
}

fn text(r: &mut Reader, table: &DeTable<'_>, key: &str) -> Option<Arc<str>> {
    let (at, text) = r.string(key, table.get(key)?, "NAME")?;
    if text.is_empty() {
        r.problem(at, format!("`{key}` is empty: fill it or leave it out"));
    }
    Some(text.into())
}

fn texts(r: &mut Reader, table: &DeTable<'_>, key: &str) -> Vec<Arc<str>> {
    let Some(value) = table.get(key) else {
        return Vec::new();
    };
    let texts = r.strings(key, value).into_iter();
    texts.map(|(_, text)| text.into()).collect()
}

fn paths(r: &mut Reader, table: &DeTable<'_>, key: &str) -> Vec<Arc<str>> {
    let Some(value) = table.get(key) else {
        return Vec::new();
    };
    let mut paths = Vec::new();
    for (at, path) in r.strings(key, value) {
        let mut parts = Path::new(path).components();
        if parts.all(|part| matches!(part, Component::Normal(_))) {
            paths.push(path.into());
        } else {
            r.problem(
                at,
                format!(
                    "`{key}` {path:?} leaves the directory: write a path below it, without `..`"
                ),
            );
        }
    }
    paths
}
