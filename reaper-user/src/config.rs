//! The config file: what may stand in it, what it means, and what is said when it is wrong.
//!
//! TOML, every key optional; see [`Config`] for the keys and [`rules`] for the language of rules, in
//! which the built-in [`catalogue`] is written too. Reading collects every problem it finds, each
//! with its line and column, instead of stopping at the first.

pub mod catalogue;
mod error;
mod reader;
pub mod rules;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::DeTable;

use crate::model::agent::Ruleset;
pub use error::{ConfigError, Problem};
use reader::Reader;

/// Smallest ring, in bytes.
pub const RING_MIN: u32 = 64 << 10;
/// Largest ring, in bytes.
pub const RING_MAX: u32 = 1 << 30;
/// Longest time that a duration of the config may name.
pub const DURATION_MAX: Duration = Duration::from_secs(3600);

const KEYS: [&str; 10] = [
    "mode",
    "events",
    "grace",
    "stuck_after",
    "ring_size",
    "runtime_dir",
    "defaults",
    "agent",
    "boundary",
    "keep",
];

/// Whether decisions are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    #[default]
    Enforce,
    /// The same decisions, and no signal.
    Observe,
}

/// Whose lifecycle events go to the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventScope {
    /// Members of sessions only.
    #[default]
    Agents,
    /// Every process in scope.
    All,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Mode::Enforce => "enforce",
            Mode::Observe => "observe",
        }
    }
}

/// Which parts of the built-in catalogue are in force: `[defaults]`, each `true` unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    pub agents: bool,
    pub boundaries: bool,
    pub keeps: bool,
}

impl Default for Defaults {
    fn default() -> Defaults {
        Defaults {
            agents: true,
            boundaries: true,
            keeps: true,
        }
    }
}

/// The settings of the service, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// `mode = "enforce" | "observe"`
    pub mode: Mode,
    /// `events = "agents" | "all"`
    pub events: EventScope,
    /// `grace = "5s"`: from SIGTERM to SIGKILL, at most [`DURATION_MAX`].
    pub grace: Duration,
    /// `stuck_after = "1s"`: from a SIGKILL without progress to a named failure; more than nothing.
    pub stuck_after: Duration,
    /// `ring_size = "8 MiB"`: bytes, a power of two from [`RING_MIN`] to [`RING_MAX`].
    pub ring_size: u32,
    /// `runtime_dir = "/run/reaper"`: where the lock files are, an absolute path.
    pub runtime_dir: PathBuf,
    /// `[defaults]`
    pub defaults: Defaults,
    /// `[[agent]]`, `[[boundary]]` and `[[keep]]`, followed by those of the catalogue that
    /// `defaults` leaves on and that no rule of the file replaces by its name.
    pub rules: Ruleset,
}

impl Default for Config {
    /// What an empty file means.
    fn default() -> Config {
        Config {
            rules: Ruleset::new(catalogue::rules()),
            ..Config::without_rules()
        }
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The file cannot be read, is not UTF-8, or is wrong in the ways [`Config::parse`] tells.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let bytes = std::fs::read(path).map_err(|e| ConfigError::unreadable(path, &e))?;
        let text = str::from_utf8(&bytes)
            .map_err(|e| ConfigError::not_utf8(path, &bytes, e.valid_up_to()))?;
        Config::parse(text, path)
    }

    /// Checks a text; `path` is only named in errors.
    ///
    /// # Errors
    /// Every problem there is: not TOML, unknown keys, wrong types, values out of bounds, bad patterns.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let (root, broken) = DeTable::parse_recoverable(text);
        if !broken.is_empty() {
            // What could be recovered of a broken file would only give problems that follow from that.
            return Err(ConfigError::not_toml(path, text, &broken));
        }
        let mut reader = Reader::default();
        let config = Config::read(&mut reader, root.get_ref());
        reader.finish(path, text).map(|()| config)
    }

    fn without_rules() -> Config {
        Config {
            mode: Mode::default(),
            events: EventScope::default(),
            grace: Duration::from_secs(5),
            stuck_after: Duration::from_secs(1),
            ring_size: 8 << 20,
            runtime_dir: PathBuf::from("/run/reaper"),
            defaults: Defaults::default(),
            rules: Ruleset::default(),
        }
    }

    fn read(r: &mut Reader, root: &DeTable<'_>) -> Config {
        let mut config = Config::without_rules();
        r.known_keys(root, &KEYS, "");
        let modes = [("enforce", Mode::Enforce), ("observe", Mode::Observe)];
        r.choice(root, "mode", &modes, &mut config.mode);
        let scopes = [("agents", EventScope::Agents), ("all", EventScope::All)];
        r.choice(root, "events", &scopes, &mut config.events);
        r.duration(root, "grace", Duration::ZERO, &mut config.grace);
        r.duration(
            root,
            "stuck_after",
            Duration::from_millis(1),
            &mut config.stuck_after,
        );
        r.ring_size(root, "ring_size", &mut config.ring_size);
        r.absolute_path(root, "runtime_dir", &mut config.runtime_dir);
        if let Some(table) = r.table(root, "defaults") {
            r.known_keys(table, &["agents", "boundaries", "keeps"], " in [defaults]");
            r.flag(table, "agents", &mut config.defaults.agents);
            r.flag(table, "boundaries", &mut config.defaults.boundaries);
            r.flag(table, "keeps", &mut config.defaults.keeps);
        }
        let own = rules::read(r, root);
        config.rules = Ruleset::new(catalogue::added_to(own, config.defaults));
        config
    }
}
