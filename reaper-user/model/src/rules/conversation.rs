//! Reads the `conversation` table of an `[[agent]]`, which says where to find the ids of the agent's conversations.
//!
//! ```toml
//! [agent.conversation]
//! variable = "CLAUDE_CODE_SESSION_ID"         # environment variable with the id, set by the agent
//! # The registry of running agents, if the agent has one:
//! directory_variable = "CLAUDE_CONFIG_DIR"    # environment variable that names its directory
//! directory = ".claude"                       # its directory below the user's home, if the variable is not set
//! files = ["sessions/{pid}.json"]             # JSON files that name running processes
//! pid = ["pid"]                               # JSON keys of process ids
//! start = ["procStart"]                       # JSON keys of their start times (clock ticks), one for each of `pid`
//! job = ["jobId"]                             # JSON keys of the name of a process's job
//! adopted = ["jobs/{job}/adopt.json"]         # files that list the processes that a job takes over
//! ```

use std::path::{Component, Path};
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::conversation::{ConversationSource, Registry};
use crate::value::{list, text};

/// Reads the table.
pub(super) fn read<'de, D: Deserializer<'de>>(
    value: D,
) -> Result<Arc<ConversationSource>, D::Error> {
    let source = Table::deserialize(value)?.try_into();
    source.map(Arc::new).map_err(D::Error::custom)
}

/// Returns the table in the form that `reaper config show` prints.
pub fn show(source: &ConversationSource) -> impl Serialize {
    Table::from(source.clone())
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields, expecting = "a table: [agent.conversation]")]
struct Table {
    #[serde(deserialize_with = "name")]
    variable: Arc<str>,
    #[serde(default, deserialize_with = "optional_name")]
    directory_variable: Option<Arc<str>>,
    #[serde(default, deserialize_with = "optional_name")]
    directory: Option<Arc<str>>,
    #[serde(default, deserialize_with = "paths")]
    files: Vec<Arc<str>>,
    #[serde(default, deserialize_with = "names")]
    pid: Vec<Arc<str>>,
    #[serde(default, deserialize_with = "names")]
    start: Vec<Arc<str>>,
    #[serde(default, deserialize_with = "names")]
    job: Vec<Arc<str>>,
    #[serde(default, deserialize_with = "paths")]
    adopted: Vec<Arc<str>>,
}

impl TryFrom<Table> for ConversationSource {
    type Error = &'static str;

    fn try_from(table: Table) -> Result<ConversationSource, &'static str> {
        if table.pid.len() != table.start.len() {
            return Err(
                "`pid` and `start` differ in length: each key in `pid` needs its counterpart in `start`, at the same position",
            );
        }
        let has_registry = !table.files.is_empty() && !table.pid.is_empty();
        if table.directory.is_some() != has_registry {
            return Err(
                "a registry needs `directory`, `files`, `pid` and `start`: add what is missing",
            );
        }
        let registry = table.directory.map(|directory| Registry {
            directory_variable: table.directory_variable,
            directory,
            files: table.files,
            process: table.pid.into_iter().zip(table.start).collect(),
            job: table.job,
            adopted: table.adopted,
        });
        let variable = table.variable;
        Ok(ConversationSource { variable, registry })
    }
}

impl From<ConversationSource> for Table {
    fn from(source: ConversationSource) -> Table {
        let registry = source.registry.unwrap_or_default();
        let (pid, start) = registry.process.into_iter().unzip();
        Table {
            variable: source.variable,
            directory_variable: registry.directory_variable,
            directory: Some(registry.directory).filter(|directory| !directory.is_empty()),
            files: registry.files,
            pid,
            start,
            job: registry.job,
            adopted: registry.adopted,
        }
    }
}

fn name<'de, D: Deserializer<'de>>(value: D) -> Result<Arc<str>, D::Error> {
    text(value, "a string such as \"NAME\"", |name| match name {
        "" => Err("the string is empty: fill it or leave it out".into()),
        name => Ok(name.into()),
    })
}

fn optional_name<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Arc<str>>, D::Error> {
    name(value).map(Some)
}

fn names<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<Arc<str>>, D::Error> {
    list(value, |name| Ok(name.into()))
}

fn paths<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<Arc<str>>, D::Error> {
    list(value, |path| {
        let mut parts = Path::new(path).components();
        if parts.all(|part| matches!(part, Component::Normal(_))) {
            return Ok(path.into());
        }
        Err(format!(
            "{path:?} leaves the directory: write a path below it, without `..`"
        ))
    })
}
