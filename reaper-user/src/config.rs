//! The config file: its keys, their checks, and the diagnostics for mistakes.
//!
//! The file is TOML, and every key is optional. [`Config`] describes the keys, [`reaper_model::rules::read`] the
//! rule language. Parsing reports the first problem of the settings and of each rule, with line and column.

mod error;
mod file;
pub mod new_agent;
mod program_paths;
pub mod show;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::de::DeTable;

use crate::export::ConfigFile;
pub use error::{ConfigError, Diagnostic};
use reaper_host::source::kind::SourceChoice;
use reaper_host::source::scan;
use reaper_host::sys::paths;
use reaper_model::rules::read::RuleEntry;
use reaper_model::rules::{self, Defaults, Rules, warn};
use reaper_model::ruleset::{Action, Ruleset};
use reaper_model::value::{self, choice, duration, number, show_duration, show_size, size, text};

/// Config file in which every setting is a comment with its default.
pub const EXAMPLE: &str = include_str!("config/example.toml");

// Bounds of durations, in milliseconds.
const HOUR: u64 = 3_600_000;
const TEN_YEARS: u64 = 3650 * 24 * HOUR;
// Bounds of sizes, in bytes.
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Whether the service carries out its decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    #[default]
    Enforce,
    /// Makes the same decisions, but sends no signal.
    Observe,
}

/// Processes with lifecycle events in the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EventScope {
    /// Members of sessions only.
    #[default]
    Agents,
    /// Every process in scope.
    All,
}

/// Whether the probes send the first signal to the children of an agent that exits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelReap {
    /// If the kernel supports it.
    #[default]
    Auto,
    /// The service sends all signals.
    Off,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Mode::Enforce => "enforce",
            Mode::Observe => "observe",
        }
    }
}

/// Checked settings and rules of the service.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default = "Config::without_rules", deny_unknown_fields)]
pub struct Config {
    /// `mode = "enforce" | "observe"`
    #[serde(deserialize_with = "choice")]
    pub mode: Mode,
    /// `events = "agents" | "all"`
    #[serde(deserialize_with = "choice")]
    pub events: EventScope,
    /// `source = "auto" | "ebpf" | "proc-connector" | "procfs"`: source of process events.
    #[serde(deserialize_with = "source", serialize_with = "write_source")]
    pub source: SourceChoice,
    /// `scan_min_interval = "50ms"`: interval between scans of the process table while processes change, if the table
    /// is the source; from 5 ms to a minute.
    #[serde(
        deserialize_with = "duration::<_, 5, 60_000>",
        serialize_with = "write_duration"
    )]
    pub scan_min_interval: Duration,
    /// `scan_max_interval = "2s"`: the same while nothing changes; at least `scan_min_interval`.
    #[serde(
        deserialize_with = "duration::<_, 5, 60_000>",
        serialize_with = "write_duration"
    )]
    pub scan_max_interval: Duration,
    /// `grace = "5s"`: time from SIGTERM to SIGKILL; at most an hour.
    #[serde(
        deserialize_with = "duration::<_, 0, HOUR>",
        serialize_with = "write_duration"
    )]
    pub grace: Duration,
    /// `kill_timeout = "1s"`: time from a SIGKILL without progress to the report of a failure; from 1 ms to an hour.
    #[serde(
        deserialize_with = "duration::<_, 1, HOUR>",
        serialize_with = "write_duration"
    )]
    pub kill_timeout: Duration,
    /// `ring_size = "8 MiB"`: size of the ring buffer in bytes; a power of two from 64 KiB to 1 GiB.
    #[serde(deserialize_with = "ring_size", serialize_with = "write_size")]
    pub ring_size: u32,
    /// `max_members = 65536`: capacity of the kernel map of members; from 1024 to 1048576.
    #[serde(deserialize_with = "number::<_, 1024, 1_048_576>")]
    pub max_members: u32,
    /// `pin = true`: whether probes, maps and ring buffer are pinned, so that tracking continues without the service.
    pub pin: bool,
    /// `pin_dir = "/sys/fs/bpf/reaper"`: directory of the pins; an absolute path on a bpffs.
    #[serde(deserialize_with = "absolute_path", serialize_with = "write_path")]
    pub pin_dir: PathBuf,
    /// `kernel_reap = "auto" | "off"`
    #[serde(deserialize_with = "choice")]
    pub kernel_reap: KernelReap,
    /// `reap_leftovers = true`: whether the service searches at its start for leftovers (processes that agents left
    /// behind while no service was watching), and reaps those with strong evidence.
    pub reap_leftovers: bool,
    /// `runtime_dir = "/run/reaper"`: directory of the lock files and the socket; an absolute path.
    #[serde(deserialize_with = "absolute_path", serialize_with = "write_path")]
    pub runtime_dir: PathBuf,
    /// `socket = true`: whether the service answers requests on a socket in `runtime_dir`.
    pub socket: bool,
    /// `journal = true`: whether sessions, decisions, outcomes and users' keeps are written to a database.
    pub journal: bool,
    /// `journal_dir = "/var/lib/reaper"`: directory of the journal; an absolute path.
    #[serde(deserialize_with = "absolute_path", serialize_with = "write_path")]
    pub journal_dir: PathBuf,
    /// `journal_max_age = "30d"`: age at which journal entries are removed; from an hour to ten years.
    #[serde(
        deserialize_with = "duration::<_, HOUR, TEN_YEARS>",
        serialize_with = "write_duration"
    )]
    pub journal_max_age: Duration,
    /// `journal_max_size = "64 MiB"`: maximum size of the journal in bytes; from 1 MiB to 1 TiB.
    #[serde(
        deserialize_with = "size::<_, MIB, TIB>",
        serialize_with = "write_size"
    )]
    pub journal_max_size: u64,
    /// `honor_keep = true`: whether processes with `REAPER_KEEP=1` in their environment are kept.
    #[serde(skip_deserializing)]
    pub honor_keep: bool,
    /// `[defaults]`
    #[serde(skip)]
    pub defaults: Defaults,
    /// `[[agent]]`, `[[server]]`, `[[boundary]]`, `[[keep]]` and `[[rule]]`, followed by built-in rules.
    ///
    /// A built-in rule is included if `defaults` or `enable` switches it on. A rule of the file with the same name
    /// replaces it.
    #[serde(skip)]
    pub rules: Ruleset,
    /// Problems that do not prevent the use of the file.
    #[serde(skip)]
    pub warnings: Vec<Diagnostic>,
    /// File that was read.
    #[serde(skip)]
    pub file: ConfigFile,
}

impl Default for Config {
    /// Returns the config of an empty file.
    fn default() -> Config {
        Config {
            rules: rules::built_in(),
            ..Config::without_rules()
        }
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// - The file cannot be read, or is not UTF-8.
    /// - This process runs as root, and other users may change the file.
    /// - The errors of [`Config::parse`].
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        Config::from_bytes(path, &file::read(path)?)
    }

    /// Reads and checks a file as [`Config::load`]. If it does not exist, returns the built-in settings.
    ///
    /// # Errors
    /// As [`Config::load`]. Also if the file does not exist and this process runs as root, but other users could
    /// create it.
    pub fn load_if_exists(path: &Path) -> Result<Config, ConfigError> {
        if let Some(bytes) = file::read_if_exists(path)? {
            return Config::from_bytes(path, &bytes);
        }
        Ok(Config {
            file: named(path, false),
            ..Config::default()
        })
    }

    fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Config, ConfigError> {
        let text = str::from_utf8(bytes)
            .map_err(|e| ConfigError::not_utf8(path, bytes, e.valid_up_to()))?;
        let (config, own_rules) = Config::parse_rules(text, path)?;
        let unresolved = program_paths::warnings(&own_rules);
        let unresolved = ConfigError::at(path, text, unresolved).problems;
        Ok(Config {
            file: named(path, true),
            warnings: config.warnings.into_iter().chain(unresolved).collect(),
            ..config
        })
    }

    /// Parses and checks a text. `path` is only used in errors.
    ///
    /// # Errors
    /// The text is not TOML, or the settings or rules have problems: unknown keys, wrong types, values out of bounds,
    /// bad patterns. Names the first problem of the settings and of each rule.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        Config::parse_rules(text, path).map(|(config, _)| config)
    }

    /// Does the same as [`Config::parse`], and returns the rules of the text too.
    fn parse_rules(text: &str, path: &Path) -> Result<(Config, Vec<RuleEntry>), ConfigError> {
        let (root, broken) = DeTable::parse_recoverable(text);
        if !broken.is_empty() {
            // Problems in the recovered part would only be consequences of the syntax errors.
            return Err(ConfigError::not_toml(path, text, &broken));
        }
        let (config, rules) = match (
            Config::settings(root.get_ref()),
            Rules::read(root.get_ref()),
        ) {
            (Ok(config), Ok(rules)) => (config, rules),
            (config, rules) => {
                let problems = rules.err().into_iter().flatten().chain(config.err());
                return Err(ConfigError::at(path, text, problems.collect()));
            }
        };
        let warnings = warn::warnings(&rules);
        let config = Config {
            honor_keep: rules.honor_keep,
            defaults: rules.defaults,
            rules: rules.in_force,
            warnings: ConfigError::at(path, text, warnings).problems,
            ..config
        };
        Ok((config, rules.user_rules))
    }

    /// Reads the keys that do not belong to rules. Raises `scan_max_interval` to `scan_min_interval` if the file has
    /// only the latter.
    ///
    /// # Errors
    /// Returns the first problem, with its byte offset in the file.
    fn settings(root: &DeTable<'_>) -> Result<Config, value::Problem> {
        let mut config: Config = value::read(root, 0, &rules::KEYS, "")?;
        let (min, max) = (config.scan_min_interval, &mut config.scan_max_interval);
        if let Some(given) = root.get("scan_max_interval").filter(|_| *max < min) {
            let problem =
                "`scan_max_interval` is less than `scan_min_interval`: write a longer duration";
            return Err((given.span().start, problem.into()));
        }
        *max = min.max(*max);
        Ok(config)
    }

    /// Returns how many rules of each kind are in force, as text.
    pub fn summary(&self) -> String {
        let count = |actions: &[Action]| {
            let rules = self.rules.rules().iter();
            rules.filter(|rule| actions.contains(&rule.action)).count()
        };
        format!(
            "{} agents, {} servers, {} boundaries, {} keeps, {} other rules",
            count(&[Action::Agent]),
            count(&[Action::Server]),
            count(&[Action::Boundary]),
            count(&[Action::Keep]),
            count(&[Action::Reap, Action::Report, Action::Note]),
        )
    }

    /// Returns the keys of settings that differ in `other` and need a restart. Leaves out `grace`, `kill_timeout`,
    /// `honor_keep` and the rules, which a reload applies.
    pub fn restart_only_changes(&self, other: &Config) -> Vec<String> {
        let (own, others) = (show::fields(self), show::fields(other));
        let differs = own.into_iter().filter(|(key, value)| others[key] != *value);
        let keys = differs.map(|(key, _)| key);
        keys.filter(|key| !["grace", "kill_timeout", "honor_keep"].contains(&&**key))
            .collect()
    }

    /// Returns the intervals between scans of the process table.
    pub fn scan(&self) -> scan::ScanOptions {
        scan::ScanOptions {
            min_interval: self.scan_min_interval,
            max_interval: self.scan_max_interval,
        }
    }

    /// Returns whether the probes may send signals. Never in mode `observe`.
    pub fn may_kernel_reap(&self) -> bool {
        self.mode == Mode::Enforce && self.kernel_reap == KernelReap::Auto
    }

    /// Returns the default settings without any rules.
    fn without_rules() -> Config {
        let scan = scan::ScanOptions::default();
        Config {
            mode: Mode::default(),
            events: EventScope::default(),
            source: SourceChoice::default(),
            scan_min_interval: scan.min_interval,
            scan_max_interval: scan.max_interval,
            grace: Duration::from_secs(5),
            kill_timeout: Duration::from_secs(1),
            ring_size: 8 << 20,
            max_members: 65_536,
            pin: true,
            pin_dir: PathBuf::from("/sys/fs/bpf/reaper"),
            kernel_reap: KernelReap::default(),
            reap_leftovers: true,
            runtime_dir: PathBuf::from(paths::RUNTIME),
            socket: true,
            journal: true,
            journal_dir: PathBuf::from(paths::STATE),
            journal_max_age: Duration::from_secs(30 * 24 * 3600),
            journal_max_size: 64 << 20,
            honor_keep: true,
            defaults: Defaults::default(),
            rules: Ruleset::default(),
            warnings: Vec::new(),
            file: ConfigFile::default(),
        }
    }
}

/// Returns the description of a file. Services read it again later, so the path is absolute.
fn named(path: &Path, exists: bool) -> ConfigFile {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    ConfigFile {
        path: Some(path.to_string_lossy().into_owned()),
        exists,
    }
}

fn source<'de, D: Deserializer<'de>>(value: D) -> Result<SourceChoice, D::Error> {
    let name = |name: &str| {
        name.parse()
            .map_err(|known| format!("no source {name:?}: {known}"))
    };
    text(value, "a string such as \"auto\"", name)
}

fn ring_size<'de, D: Deserializer<'de>>(value: D) -> Result<u32, D::Error> {
    let bytes = size::<D, { 64 << 10 }, { 1 << 30 }>(value)?;
    match u32::try_from(bytes) {
        Ok(bytes) if bytes.is_power_of_two() => Ok(bytes),
        _ => Err(D::Error::custom(format!(
            "{bytes} bytes is not a power of two: write, for example, {:?}",
            show_size(1 << bytes.ilog2())
        ))),
    }
}

fn absolute_path<'de, D: Deserializer<'de>>(value: D) -> Result<PathBuf, D::Error> {
    text(value, "an absolute path", |path| {
        if path.starts_with('/') && !path.contains('\0') {
            return Ok(path.into());
        }
        Err(format!(
            "{path:?} is not an absolute path: write one that begins with `/`"
        ))
    })
}

fn write_source<S: Serializer>(source: &SourceChoice, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(source.name())
}

fn write_duration<S: Serializer>(time: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&show_duration(*time))
}

fn write_size<S: Serializer>(bytes: &(impl Copy + Into<u64>), out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&show_size((*bytes).into()))
}

fn write_path<S: Serializer>(path: &Path, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&path.to_string_lossy())
}
