//! The config file of a service, as its records and answers name it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Config file that a service reads when it starts and at each reload. Displayed as its path, or as `built-in`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ConfigFile {
    /// Path; absent if the service reads no file.
    #[serde(
        rename = "config_file",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub path: Option<String>,
    /// Whether the file existed. Otherwise the built-in settings apply.
    #[serde(rename = "config_file_exists", default)]
    pub exists: bool,
}

impl fmt::Display for ConfigFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.path, self.exists) {
            (Some(path), true) => f.write_str(path),
            (Some(path), false) => write!(f, "built-in (no {path})"),
            (None, _) => f.write_str("built-in"),
        }
    }
}
