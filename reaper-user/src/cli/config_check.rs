//! `reaper config check`: validates a config file.

use std::path::Path;

use serde::Serialize;

use super::Failure;
use super::show::{width, wrap};
use super::user::ConfigOwner;
use crate::config::{Config, ConfigError, Diagnostic};
use crate::export::{message, print, printable, to_json};

/// Result as JSON.
#[derive(Serialize)]
struct CheckReport<'a> {
    file: String,
    /// Whether the file can be used.
    ok: bool,
    /// Problems that prevent the use of the file.
    problems: Vec<Finding<'a>>,
    /// Problems that do not.
    warnings: Vec<Finding<'a>>,
}

#[derive(Serialize)]
struct Finding<'a> {
    /// Line and column, from 1; absent if the problem has no place in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<usize>,
    message: &'a str,
}

/// Checks the file and returns the exit status.
pub(super) fn run(file: Option<&Path>, json: bool) -> Result<u8, Failure> {
    let default = || ConfigOwner::this_user().path();
    let file = file.map_or_else(default, |file| Ok(file.to_owned()))?;
    let loaded = Config::load(&file);
    if json {
        print(to_json(&report(&file, &loaded))).map_err(Failure::stdout)?;
        return Ok(match loaded {
            Ok(_) => 0,
            Err(error) => Failure::from(error).status(),
        });
    }
    let config = loaded?;
    let path = file.display();
    for warning in &config.warnings {
        let (line, column) = warning.place.unwrap_or((1, 1));
        message!("{path}:{line}:{column}: warning: {}", warning.message);
    }
    let (mode, summary) = (config.mode.name(), config.summary());
    let summary_line = printable(&format!("{path}: ok; mode {mode}, {summary}"), usize::MAX);
    print(wrap(&summary_line, 0, width())).map_err(Failure::stdout)?;
    Ok(0)
}

fn report<'a>(file: &Path, loaded: &'a Result<Config, ConfigError>) -> CheckReport<'a> {
    let findings = |all: &'a [Diagnostic]| all.iter().map(Finding::of).collect();
    let (problems, warnings) = match loaded {
        Ok(config) => (Vec::new(), findings(&config.warnings)),
        Err(error) => (findings(&error.problems), Vec::new()),
    };
    CheckReport {
        file: file.display().to_string(),
        ok: loaded.is_ok(),
        problems,
        warnings,
    }
}

impl Finding<'_> {
    fn of(diagnostic: &Diagnostic) -> Finding<'_> {
        Finding {
            line: diagnostic.place.map(|(line, _)| line),
            column: diagnostic.place.map(|(_, column)| column),
            message: &diagnostic.message,
        }
    }
}
