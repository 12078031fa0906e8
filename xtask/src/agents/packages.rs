//! Reads the packages of agents from `tests/agents/packages.toml`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::shell::workspace;

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Registry {
    Npm,
    PyPi,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agent {
    /// Name of the agent's rule.
    pub name: String,
    pub package: Option<Package>,
    /// Reason why there is no package.
    pub unavailable: Option<String>,
    /// Note for readers of the table.
    pub note: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Package {
    pub registry: Registry,
    pub name: String,
    pub version: String,
    /// Hash of the archive: `sha512-` with base64, or `sha256-` with hexadecimal digits.
    pub integrity: String,
    /// Name of the command.
    pub bin: String,
    /// Further packages, as `npm install` takes them.
    #[serde(default)]
    pub with: Vec<String>,
    /// Install scripts of the package that it needs.
    #[serde(default)]
    pub setup: Vec<Setup>,
    /// Version of the Python interpreter.
    pub python: Option<String>,
    /// Name of the module that `python -m` runs.
    pub module: Option<String>,
    #[serde(default)]
    pub arguments: Vec<String>,
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Contents of files by their paths in the home directory.
    #[serde(default)]
    pub home: BTreeMap<PathBuf, String>,
    /// Time for the agent to start, in seconds.
    #[serde(default = "default_seconds")]
    pub seconds: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// Folder below `node_modules`.
    pub folder: PathBuf,
    pub command: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    node: Package,
    agent: Vec<Agent>,
}

fn default_seconds() -> u64 {
    4
}

fn file() -> Result<File> {
    let path = workspace().join("tests/agents/packages.toml");
    let read = || -> Result<File> { Ok(toml::from_str(&std::fs::read_to_string(&path)?)?) };
    read().with_context(|| format!("cannot read {}", path.display()))
}

/// Returns all agents, sorted by name.
///
/// # Errors
/// The file cannot be read, or its contents are not valid.
pub fn read() -> Result<Vec<Agent>> {
    let mut agents = file()?.agent;
    agents.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(agents)
}

/// Returns the package of Node.js, which runs agents.
///
/// # Errors
/// As [`read`].
pub fn node() -> Result<Package> {
    Ok(file()?.node)
}
