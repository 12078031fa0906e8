//! The config file: what may stand in it, what it means, and what is said when it is wrong.
//!
//! TOML, every key optional; see [`Config`] for the keys and [`reaper_model::rules::read`] for the language of rules. Reading collects every problem it finds, each
//! with its line and column, instead of stopping at the first.

mod error;
pub mod show;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::DeTable;

pub use error::{ConfigError, Diagnostic};
use reaper_host::source::kind::SourceChoice;
use reaper_host::source::scan;
use reaper_host::sys::{owner, paths};
use reaper_model::rules::reader::Reader;
use reaper_model::rules::{self, Defaults, Rules, warn};
use reaper_model::ruleset::{Action, Ruleset};

/// Smallest ring, in bytes.
pub const RING_MIN: u32 = 64 << 10;
/// Largest ring, in bytes.
pub const RING_MAX: u32 = 1 << 30;
/// Fewest and most processes that the kernel's map of members may be given room for.
pub const MEMBERS: RangeInclusive<u32> = 1 << 10..=1 << 20;
/// Shortest and longest time for which the journal may keep what was written.
pub const JOURNAL_AGE: RangeInclusive<Duration> =
    Duration::from_secs(3600)..=Duration::from_secs(3650 * 24 * 3600);
/// Smallest and largest journal, in bytes.
pub const JOURNAL_SIZE: RangeInclusive<u64> = 1 << 20..=1 << 40;
/// Shortest and longest time from one look at the process table to the next.
pub const SCAN_INTERVAL: RangeInclusive<Duration> =
    Duration::from_millis(5)..=Duration::from_secs(60);
/// Longest time that a duration of the config may name.
pub const DURATION_MAX: Duration = Duration::from_secs(3600);

const KEYS: [&str; 19] = [
    "mode",
    "events",
    "source",
    "scan_min_interval",
    "scan_max_interval",
    "grace",
    "kill_timeout",
    "ring_size",
    "max_members",
    "pin",
    "pin_dir",
    "kernel_reap",
    "reap_leftovers",
    "runtime_dir",
    "socket",
    "journal",
    "journal_dir",
    "journal_max_age",
    "journal_max_size",
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

/// Whether the kernel itself sends the first signal to the children of an agent that exits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
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
#[derive(Clone, Debug)]
pub struct Config {
    /// `mode = "enforce" | "observe"`
    pub mode: Mode,
    /// `events = "agents" | "all"`
    pub events: EventScope,
    /// `source = "auto" | "ebpf" | "proc-connector" | "procfs"`: where events come from.
    pub source: SourceChoice,
    /// `scan_min_interval = "50ms"`, `scan_max_interval = "2s"`: how often the process table is looked at where that is the
    /// source, within [`SCAN_INTERVAL`].
    pub scan: scan::ScanOptions,
    /// `grace = "5s"`: from SIGTERM to SIGKILL, at most [`DURATION_MAX`].
    pub grace: Duration,
    /// `kill_timeout = "1s"`: from a SIGKILL without progress to a named failure; more than nothing.
    pub kill_timeout: Duration,
    /// `ring_size = "8 MiB"`: bytes, a power of two from [`RING_MIN`] to [`RING_MAX`].
    pub ring_size: u32,
    /// `max_members = 65536`: for how many processes the kernel's map of members has room, within
    /// [`MEMBERS`].
    pub max_members: u32,
    /// `pin = true`: whether probes, maps and ring are pinned, so that tracking outlives the service.
    pub pin: bool,
    /// `pin_dir = "/sys/fs/bpf/reaper"`: where they are, an absolute path on a bpffs.
    pub pin_dir: PathBuf,
    /// `kernel_reap = "auto" | "off"`
    pub kernel_reap: KernelReap,
    /// `reap_leftovers = true`: whether leftovers that are older than the service are looked for at its start, and
    /// those on strong evidence reaped.
    pub reap_leftovers: bool,
    /// `runtime_dir = "/run/reaper"`: where the lock files and the socket are, an absolute path.
    pub runtime_dir: PathBuf,
    /// `socket = true`: whether the service answers on a socket there.
    pub socket: bool,
    /// `journal = true`: whether sessions, decisions and outcomes are written to a database.
    pub journal: bool,
    /// `journal_dir = "/var/lib/reaper"`: where that is, an absolute path.
    pub journal_dir: PathBuf,
    /// `journal_max_age = "30d"`: for how long it keeps what was written, within [`JOURNAL_AGE`].
    pub journal_max_age: Duration,
    /// `journal_max_size = "64 MiB"`: how large it becomes, in bytes, within [`JOURNAL_SIZE`].
    pub journal_max_size: u64,
    /// `honor_keep = true`: whether what has `REAPER_KEEP=1` in its environment is kept.
    pub honor_keep: bool,
    /// `[defaults]`
    pub defaults: Defaults,
    /// `[[agent]]`, `[[boundary]]`, `[[keep]]` and `[[rule]]`, followed by those of the catalogue that
    /// `defaults` leaves on, or `enable` switches on, and that no rule of the file replaces by its name.
    pub rules: Ruleset,
    /// What is hardly meant as it is written, though it can be used.
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
    /// Every problem there is: not TOML, unknown keys, wrong types, values out of bounds, bad patterns.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let (root, broken) = DeTable::parse_recoverable(text);
        if !broken.is_empty() {
            // What could be recovered of a broken file would only give problems that follow from that.
            return Err(ConfigError::not_toml(path, text, &broken));
        }
        let mut reader = Reader::default();
        let (mut config, own) = Config::read(&mut reader, root.get_ref());
        let problems = reader.into_problems();
        if !problems.is_empty() {
            return Err(ConfigError::at(path, text, problems));
        }
        let warnings = warn::of(&own, config.rules.rules());
        config.warnings = ConfigError::at(path, text, warnings).problems;
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
    pub fn restart_only_changes(&self, other: &Config) -> Vec<&'static str> {
        let differs = [
            ("mode", self.mode != other.mode),
            ("events", self.events != other.events),
            ("source", self.source != other.source),
            (
                "scan_min_interval",
                self.scan.min_interval != other.scan.min_interval,
            ),
            (
                "scan_max_interval",
                self.scan.max_interval != other.scan.max_interval,
            ),
            ("ring_size", self.ring_size != other.ring_size),
            ("max_members", self.max_members != other.max_members),
            ("pin", self.pin != other.pin),
            ("pin_dir", self.pin_dir != other.pin_dir),
            ("kernel_reap", self.kernel_reap != other.kernel_reap),
            (
                "reap_leftovers",
                self.reap_leftovers != other.reap_leftovers,
            ),
            ("runtime_dir", self.runtime_dir != other.runtime_dir),
            ("socket", self.socket != other.socket),
            ("journal", self.journal != other.journal),
            ("journal_dir", self.journal_dir != other.journal_dir),
            (
                "journal_max_age",
                self.journal_max_age != other.journal_max_age,
            ),
            (
                "journal_max_size",
                self.journal_max_size != other.journal_max_size,
            ),
        ];
        let differs = differs.into_iter().filter(|(_, differs)| *differs);
        differs.map(|(key, _)| key).collect()
    }

    /// Whether the probes may send signals, where the kernel can: never in observe.
    pub fn may_kernel_reap(&self) -> bool {
        self.mode == Mode::Enforce && self.kernel_reap == KernelReap::Auto
    }

    fn without_rules() -> Config {
        Config {
            mode: Mode::default(),
            events: EventScope::default(),
            source: SourceChoice::default(),
            scan: scan::ScanOptions::default(),
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

    fn read(r: &mut Reader, root: &DeTable<'_>) -> (Config, Vec<rules::read::RuleEntry>) {
        let mut config = Config::without_rules();
        let known: Vec<&str> = KEYS.into_iter().chain(rules::KEYS).collect();
        r.known_keys(root, &known, "");
        let modes = [("enforce", Mode::Enforce), ("observe", Mode::Observe)];
        r.choice(root, "mode", &modes, &mut config.mode);
        let scopes = [("agents", EventScope::Agents), ("all", EventScope::All)];
        r.choice(root, "events", &scopes, &mut config.events);
        r.choice(root, "source", &SourceChoice::all(), &mut config.source);
        let scan = &mut config.scan;
        r.duration(
            root,
            "scan_min_interval",
            SCAN_INTERVAL,
            &mut scan.min_interval,
        );
        let longer = scan.min_interval..=*SCAN_INTERVAL.end();
        scan.max_interval = scan.max_interval.max(scan.min_interval);
        r.duration(root, "scan_max_interval", longer, &mut scan.max_interval);
        r.duration(
            root,
            "grace",
            Duration::ZERO..=DURATION_MAX,
            &mut config.grace,
        );
        r.duration(
            root,
            "kill_timeout",
            Duration::from_millis(1)..=DURATION_MAX,
            &mut config.kill_timeout,
        );
        r.power_of_two(
            root,
            "ring_size",
            RING_MIN..=RING_MAX,
            &mut config.ring_size,
        );
        r.number(root, "max_members", MEMBERS, &mut config.max_members);
        r.flag(root, "pin", &mut config.pin);
        r.absolute_path(root, "pin_dir", &mut config.pin_dir);
        let kernel_reap = [("auto", KernelReap::Auto), ("off", KernelReap::Off)];
        r.choice(root, "kernel_reap", &kernel_reap, &mut config.kernel_reap);
        r.flag(root, "reap_leftovers", &mut config.reap_leftovers);
        r.absolute_path(root, "runtime_dir", &mut config.runtime_dir);
        r.flag(root, "socket", &mut config.socket);
        r.flag(root, "journal", &mut config.journal);
        r.absolute_path(root, "journal_dir", &mut config.journal_dir);
        r.duration(
            root,
            "journal_max_age",
            JOURNAL_AGE,
            &mut config.journal_max_age,
        );
        r.size(
            root,
            "journal_max_size",
            JOURNAL_SIZE,
            &mut config.journal_max_size,
        );
        let Rules {
            honor_keep,
            defaults,
            own,
            in_force,
        } = Rules::read(r, root);
        (config.honor_keep, config.defaults, config.rules) = (honor_keep, defaults, in_force);
        (config, own)
    }
}
