//! The config file: what may stand in it, what it means, and what is said when it is wrong.
//!
//! TOML, every key optional; see [`Config`] for the keys and [`reaper_model::rules::read`] for the language of rules. Reading notes the first problem of the
//! settings and of each rule, with its line and column.

mod error;
pub mod show;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::de::DeTable;

pub use error::{ConfigError, Diagnostic};
use reaper_host::source::kind::SourceChoice;
use reaper_host::source::scan;
use reaper_host::sys::{owner, paths};
use reaper_model::rules::{self, Defaults, Rules, warn};
use reaper_model::ruleset::{Action, Ruleset};
use reaper_model::value::{self, choice, duration, number, show_duration, show_size, size, text};

/// Bounds of durations, in milliseconds.
const HOUR: u64 = 3_600_000;
const TEN_YEARS: u64 = 3650 * 24 * HOUR;
/// Bounds of sizes, in bytes.
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Whether decisions are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    #[default]
    Enforce,
    /// The same decisions, and no signal.
    Observe,
}

/// Whose lifecycle events go to the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EventScope {
    /// Members of sessions only.
    #[default]
    Agents,
    /// Every process in scope.
    All,
}

/// Whether the kernel itself sends the first signal to the children of an agent that exits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelReap {
    /// Where it can.
    #[default]
    Auto,
    /// Every signal is the service's.
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

/// The settings of the service, checked.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default = "Config::without_rules", deny_unknown_fields)]
pub struct Config {
    /// `mode = "enforce" | "observe"`
    #[serde(deserialize_with = "choice")]
    pub mode: Mode,
    /// `events = "agents" | "all"`
    #[serde(deserialize_with = "choice")]
    pub events: EventScope,
    /// `source = "auto" | "ebpf" | "proc-connector" | "procfs"`: where events come from.
    #[serde(deserialize_with = "source", serialize_with = "write_source")]
    pub source: SourceChoice,
    /// `scan_min_interval = "50ms"`: how often the process table is looked at where that is the source, while something
    /// happens; from 5 ms to a minute.
    #[serde(
        deserialize_with = "duration::<_, 5, 60_000>",
        serialize_with = "write_duration"
    )]
    pub scan_min_interval: Duration,
    /// `scan_max_interval = "2s"`: the same while nothing happens, and no less.
    #[serde(
        deserialize_with = "duration::<_, 5, 60_000>",
        serialize_with = "write_duration"
    )]
    pub scan_max_interval: Duration,
    /// `grace = "5s"`: from SIGTERM to SIGKILL, at most an hour.
    #[serde(
        deserialize_with = "duration::<_, 0, HOUR>",
        serialize_with = "write_duration"
    )]
    pub grace: Duration,
    /// `kill_timeout = "1s"`: from a SIGKILL without progress to a named failure; more than nothing.
    #[serde(
        deserialize_with = "duration::<_, 1, HOUR>",
        serialize_with = "write_duration"
    )]
    pub kill_timeout: Duration,
    /// `ring_size = "8 MiB"`: bytes, a power of two from 64 KiB to 1 GiB.
    #[serde(deserialize_with = "ring_size", serialize_with = "write_size")]
    pub ring_size: u32,
    /// `max_members = 65536`: for how many processes the kernel's map of members has room, from 1024
    /// to 1048576.
    #[serde(deserialize_with = "number::<_, 1024, 1_048_576>")]
    pub max_members: u32,
    /// `pin = true`: whether probes, maps and ring are pinned, so that tracking outlives the service.
    pub pin: bool,
    /// `pin_dir = "/sys/fs/bpf/reaper"`: where they are, an absolute path on a bpffs.
    #[serde(deserialize_with = "absolute_path", serialize_with = "write_path")]
    pub pin_dir: PathBuf,
    /// `kernel_reap = "auto" | "off"`
    #[serde(deserialize_with = "choice")]
    pub kernel_reap: KernelReap,
    /// `reap_leftovers = true`: whether leftovers that are older than the service are looked for at its start, and
    /// those on strong evidence reaped.
    pub reap_leftovers: bool,
    /// `runtime_dir = "/run/reaper"`: where the lock files and the socket are, an absolute path.
    #[serde(deserialize_with = "absolute_path", serialize_with = "write_path")]
    pub runtime_dir: PathBuf,
    /// `socket = true`: whether the service answers on a socket there.
    pub socket: bool,
    /// `journal = true`: whether sessions, decisions and outcomes are written to a database.
    pub journal: bool,
    /// `journal_dir = "/var/lib/reaper"`: where that is, an absolute path.
    #[serde(deserialize_with = "absolute_path", serialize_with = "write_path")]
    pub journal_dir: PathBuf,
    /// `journal_max_age = "30d"`: for how long it keeps what was written, from an hour to ten years.
    #[serde(
        deserialize_with = "duration::<_, HOUR, TEN_YEARS>",
        serialize_with = "write_duration"
    )]
    pub journal_max_age: Duration,
    /// `journal_max_size = "64 MiB"`: how large it becomes, in bytes, from a MiB to a TiB.
    #[serde(
        deserialize_with = "size::<_, MIB, TIB>",
        serialize_with = "write_size"
    )]
    pub journal_max_size: u64,
    /// `honor_keep = true`: whether what has `REAPER_KEEP=1` in its environment is kept.
    #[serde(skip_deserializing)]
    pub honor_keep: bool,
    /// `[defaults]`
    #[serde(skip)]
    pub defaults: Defaults,
    /// `[[agent]]`, `[[boundary]]`, `[[keep]]` and `[[rule]]`, followed by those of the catalogue that
    /// `defaults` leaves on, or `enable` switches on, and that no rule of the file replaces by its name.
    #[serde(skip)]
    pub rules: Ruleset,
    /// What is hardly meant as it is written, though it can be used.
    #[serde(skip)]
    pub warnings: Vec<Diagnostic>,
}

impl Default for Config {
    /// What an empty file means.
    fn default() -> Config {
        Config {
            rules: rules::built_in(),
            ..Config::without_rules()
        }
    }
}

/// The content of a file. For root, one that nobody else may change: it says who is killed.
fn read_trusted(path: &Path) -> Result<Vec<u8>, ConfigError> {
    let unreadable = |e| ConfigError::unreadable(path, &e);
    // A pipe, of which opening and reading would wait for somebody who writes, is not waited for.
    let mut file = File::options()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)
        .map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    // A directory says so itself.
    if !metadata.is_file() && !metadata.is_dir() {
        let what = std::io::Error::other("it is no regular file: name one");
        return Err(unreadable(what));
    }
    if nix::unistd::geteuid().is_root() {
        let directory = match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => Path::new("/"),
        };
        let around = directory.metadata().map_err(unreadable)?;
        if owner::is_writable_by_others(&metadata) || owner::allows_replacement(&around) {
            return Err(ConfigError::not_trusted(
                path,
                metadata.uid(),
                metadata.mode(),
            ));
        }
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The file cannot be read, others than root may write to it though this program is root's, is not UTF-8, or is wrong in the ways [`Config::parse`] tells.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let bytes = read_trusted(path)?;
        let text = str::from_utf8(&bytes)
            .map_err(|e| ConfigError::not_utf8(path, &bytes, e.valid_up_to()))?;
        Config::parse(text, path)
    }

    /// Checks a text; `path` is only named in errors.
    ///
    /// # Errors
    /// It is not TOML; or the first problem of the settings and of each rule: unknown keys, wrong types, values out of
    /// bounds, bad patterns.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let (root, broken) = DeTable::parse_recoverable(text);
        if !broken.is_empty() {
            // What could be recovered of a broken file would only give problems that follow from that.
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
        let warnings = warn::of(&rules.own, rules.in_force.rules());
        Ok(Config {
            honor_keep: rules.honor_keep,
            defaults: rules.defaults,
            rules: rules.in_force,
            warnings: ConfigError::at(path, text, warnings).problems,
            ..config
        })
    }

    /// Reads all keys but those of rules.
    fn settings(root: &DeTable<'_>) -> Result<Config, value::Problem> {
        let mut config: Config = value::read(root, 0, &rules::KEYS, "")?;
        let (min, max) = (config.scan_min_interval, &mut config.scan_max_interval);
        if let Some(given) = root.get("scan_max_interval").filter(|_| *max < min) {
            let what =
                "`scan_max_interval`: it is less than `scan_min_interval`: write a longer duration";
            return Err((given.span().start, what.into()));
        }
        *max = min.max(*max);
        Ok(config)
    }

    /// What there is in force of rules, in words.
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
            count(&[Action::Reap, Action::Report]),
        )
    }

    /// Keys of the settings in which another config differs, and which a service takes over only when it starts.
    pub fn restart_only_changes(&self, other: &Config) -> Vec<String> {
        let (own, others) = (show::fields(self), show::fields(other));
        let differs = own.into_iter().filter(|(key, value)| others[key] != *value);
        let keys = differs.map(|(key, _)| key);
        keys.filter(|key| !["grace", "kill_timeout", "honor_keep"].contains(&&**key))
            .collect()
    }

    /// How often the process table is looked at.
    pub fn scan(&self) -> scan::ScanOptions {
        scan::ScanOptions {
            min_interval: self.scan_min_interval,
            max_interval: self.scan_max_interval,
        }
    }

    /// Whether the probes may send signals, where the kernel can: never in observe.
    pub fn may_kernel_reap(&self) -> bool {
        self.mode == Mode::Enforce && self.kernel_reap == KernelReap::Auto
    }

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
        }
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
            "{bytes} bytes are no power of two: write for instance {:?}",
            show_size(1 << bytes.ilog2())
        ))),
    }
}

fn absolute_path<'de, D: Deserializer<'de>>(value: D) -> Result<PathBuf, D::Error> {
    text(value, "an absolute path", |path| {
        if path.starts_with('/') && !path.contains('\0') {
            return Ok(path.into());
        }
        Err(format!("{path:?}: write an absolute path"))
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
