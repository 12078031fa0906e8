//! `reaper doctor`: checks what this host supports, and which event source a daemon would use.

mod features;
mod privileges;
#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::io;
use std::path::Path;

use anstyle::Style;
use reaper_common::Offsets;
use serde::Serialize;

use super::show::{self, Mark, row, width, wrap};
use crate::config::Config;
use crate::export::{print, printable, size, to_json};
use reaper_host::source::SourceKind;
use reaper_host::source::ebpf::btf::{self, Btf, BtfError};
use reaper_host::sys::host::{Host, Limit};
use reaper_host::sys::pidfd::{self, PidfdUnavailable};

/// Oldest kernel that the probes support.
const OLDEST: (u32, u32) = (5, 10);

/// One check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub ok: bool,
    /// Value found.
    pub value: String,
    /// Why the check failed, or what is missing because of that.
    pub reason: Option<String>,
    /// Step to take.
    pub advice: Option<String>,
    /// Whether the probes need it.
    #[serde(skip)]
    needed: bool,
}

impl Check {
    fn new(name: &'static str, ok: bool, value: impl Into<String>) -> Check {
        Check {
            name,
            ok,
            value: value.into(),
            reason: None,
            advice: None,
            needed: false,
        }
    }

    fn needed(self) -> Check {
        Check {
            needed: true,
            ..self
        }
    }

    /// Adds a reason and an advice if the check has failed.
    fn or(self, reason: impl Into<String>, advice: impl Into<String>) -> Check {
        match self.ok {
            true => self,
            false => Check {
                reason: Some(reason.into()),
                advice: Some(advice.into()),
                ..self
            },
        }
    }
}

/// Results of all checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// Whether `reaper daemon` can run here.
    pub usable: bool,
    /// Whether it can send signals; otherwise it only observes.
    pub can_signal: bool,
    /// Event source that it would use, if any is usable.
    pub source: Option<&'static str>,
    /// All sources that the config allows, the best first.
    pub sources: Vec<Candidate>,
    /// Reasons why the probes cannot be used, the most likely cause first.
    pub reasons: Vec<String>,
    pub checks: Vec<Check>,
}

/// Event source that a daemon would try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    pub name: &'static str,
    pub usable: bool,
    /// Why it cannot be used.
    pub reason: Option<String>,
    /// Limits compared with the probes.
    pub limitations: Option<&'static str>,
}

/// Checks this host for a daemon with this config, and prints the results.
///
/// `probe` opens a source and closes it again. Returns the exit status: 0 if an allowed source can be used, 3 if not.
///
/// # Errors
/// Standard output cannot be written.
pub fn run<E: Display>(
    config: &Config,
    json: bool,
    probe: impl Fn(SourceKind) -> Result<(), E>,
) -> io::Result<u8> {
    let btf = Btf::load(Path::new(btf::VMLINUX));
    let report = examine(config, &Host::read(), &btf, pidfd::probe(), probe);
    match json {
        true => print(to_json(&report))?,
        false => print(render(&report, width()))?,
    }
    Ok(if report.usable { 0 } else { 3 })
}

/// Runs all checks. Whether a source opens decides the result; the other checks explain it.
pub fn examine<E: Display>(
    config: &Config,
    host: &Host,
    btf: &Result<Btf, BtfError>,
    pidfds: Result<(), PidfdUnavailable>,
    probe: impl Fn(SourceKind) -> Result<(), E>,
) -> DoctorReport {
    let probed = probe(SourceKind::Ebpf).map_err(|e| e.to_string());
    let loads = probed.is_ok();
    let offsets = btf
        .as_ref()
        .map_err(ToString::to_string)
        .and_then(|b| b.offsets().map_err(|e| e.to_string()));
    let mut checks = vec![kernel(host), type_information(&offsets)];
    checks.extend(privileges::checks(host, pidfds));
    checks.extend(surroundings(host));
    let btf = btf.as_ref().ok();
    checks.push(features::bpffs(config, host, loads));
    checks.extend(features::kernel(btf, offsets.as_ref().ok()));
    checks.push(features::kernel_reap(config, btf, loads));
    checks.push(Check::new("config", true, config.file.to_string()));
    let loaded = if loads { "loaded" } else { "refused" };
    let failure = probed.clone().err().unwrap_or_default();
    let advice = remedy(&checks, host);
    let load = Check::new("programs load", loads, loaded);
    checks.push(load.needed().or(failure, advice));
    let failed = checks.iter().filter(|c| !loads && c.needed && !c.ok);
    let candidate = |kind: &SourceKind| {
        let answer = match kind {
            SourceKind::Ebpf => probed.clone(),
            other => probe(*other).map_err(|e| e.to_string()),
        };
        Candidate {
            name: kind.name(),
            usable: answer.is_ok(),
            reason: answer.err(),
            limitations: kind.limitation(),
        }
    };
    let sources: Vec<_> = config.source.kinds().iter().map(candidate).collect();
    let source = sources.iter().find(|source| source.usable);
    let source = source.map(|source| source.name);
    DoctorReport {
        usable: source.is_some(),
        can_signal: pidfds.is_ok(),
        source,
        sources,
        reasons: failed.filter_map(|c| c.reason.clone()).collect(),
        checks,
    }
}

/// Returns what to do if the probes do not load.
fn remedy(checks: &[Check], host: &Host) -> String {
    let unmet = checks.iter().filter(|check| check.needed && !check.ok);
    let unmet: Vec<_> = unmet.map(|check| check.name).collect();
    if !unmet.is_empty() {
        return format!("fix these checks first: {}", unmet.join(", "));
    }
    let pids = &host.pid_namespace;
    match host.container.is_empty() && (pids.is_initial || pids.inode == 0) {
        true => "report a bug with this line and the kernel release".into(),
        false => "run it on the host: a container may be refused this even as root, for example by seccomp (docker run \
             --privileged allows it); if the host refuses it too, report a bug with this line and the kernel release"
            .into(),
    }
}

fn kernel(host: &Host) -> Check {
    let (major, minor) = OLDEST;
    Check::new(
        "kernel",
        host.version().is_some_and(|v| v >= OLDEST),
        or_unknown(&host.release),
    )
    .needed()
    .or(
        format!("the kernel is older than {major}.{minor}, or its release is unknown"),
        format!("use kernel {major}.{minor} or later"),
    )
}

fn type_information(offsets: &Result<Offsets, String>) -> Check {
    let value = if offsets.is_ok() {
        btf::VMLINUX
    } else {
        "not usable"
    };
    Check::new("BTF", offsets.is_ok(), value).needed().or(
        offsets.as_ref().err().cloned().unwrap_or_default(),
        "use a kernel built with CONFIG_DEBUG_INFO_BTF=y, as most distributions do, and mount sysfs",
    )
}

fn surroundings(host: &Host) -> Vec<Check> {
    let pids = &host.pid_namespace;
    let signs = &host.container;
    let memlock = match host.memlock {
        Limit::Bytes(n) => size(n),
        Limit::Unlimited => "unlimited".to_owned(),
        Limit::Unknown => "unknown".to_owned(),
    };
    let counts = host.version().is_some_and(|v| v < (5, 11));
    let enough =
        !counts || host.memlock == Limit::Unlimited || host.capabilities.has("CAP_SYS_RESOURCE");
    let wsl = signs.iter().any(|sign| sign.starts_with("wsl"));
    let (elsewhere, unrefused) = match wsl {
        true => (
            "run it in each WSL distribution that runs agents: each has its own pid namespace",
            "if something is refused, update the kernel (wsl --update)",
        ),
        false => (
            "run it on the host, or in a container with the host's pid namespace (docker run --pid=host)",
            "if something is refused, run it on the host",
        ),
    };
    let proc_value = match host.proc_matches_pid_namespace {
        true => "of this pid namespace",
        false => "missing, or of another pid namespace",
    };
    let lockdown = match &host.lockdown {
        Ok(mode) => mode.clone(),
        Err(cause) => format!("unknown: {cause}"),
    };
    vec![
        Check::new("lockdown", lockdown != "confidentiality", lockdown).needed().or(
            "kernel lockdown (confidentiality) forbids reading kernel memory",
            "boot with lockdown=integrity, or without lockdown",
        ),
        Check::new("/proc", host.proc_matches_pid_namespace, proc_value)
            .needed()
            .or(
                "it does not list the processes of this pid namespace, and its pids mean other processes",
                "mount the /proc of this pid namespace (mount -t proc proc /proc, or unshare --mount-proc)",
            ),
        Check::new("pid namespace", pids.is_initial || pids.inode == 0, place(pids.is_initial, pids.inode))
            .or("only processes of this pid namespace are visible", elsewhere),
        Check::new("bare host", signs.is_empty(), if signs.is_empty() { "no sign of a container or guest".into() } else { signs.join(", ") })
            .or("a container or guest may be refused what root can do on a host", unrefused),
        Check::new("processes of others", host.proc_shows_others, if host.proc_shows_others { "shown in /proc" } else { "hidden" }).or(
            "/proc is mounted with hidepid: without the probes or the proc connector, only your own processes are visible",
            "run as root or in the group of the mount option `gid=`, or use mount -o remount,hidepid=0 /proc",
        ),
        Check::new("locked memory", enough, memlock)
            .or("kernels before 5.11 count the ring buffer as locked memory", "raise the limit (ulimit -l unlimited)"),
    ]
}

fn place(first: bool, inode: u64) -> String {
    match (first, inode) {
        (true, _) => "the host's own".to_owned(),
        (false, 0) => "unknown".to_owned(),
        (false, inode) => format!("private ({inode})"),
    }
}

fn or_unknown(text: &str) -> &str {
    if text.is_empty() { "unknown" } else { text }
}

/// Formats the report as text: the result first, then the sources and the checks.
fn render(report: &DoctorReport, width: Option<usize>) -> String {
    let bold = Style::new().bold();
    let result = match report.source {
        Some(source) if report.can_signal => {
            format!("A daemon can run here, with the event source {source}.")
        }
        Some(source) => format!(
            "A daemon can run here, with the event source {source}, but it can only observe: no process can be signalled."
        ),
        None => "A daemon cannot run here: no event source can be used.".to_owned(),
    };
    let mut out = String::new();
    for line in wrap(&result, 0, width).lines() {
        out += &format!("{bold}{line}{bold:#}\n");
    }
    out += "\nEvent sources, the best first:\n";
    let names = report.sources.iter().map(|source| source.name.len());
    let column = names.max().unwrap_or(0) + 4;
    for source in &report.sources {
        let Candidate { name, reason, .. } = source;
        let state = match (reason, source.limitations) {
            (Some(reason), _) => format!("cannot be used: {reason}"),
            (None, Some(limits)) if report.source == Some(name) => format!("used; {limits}"),
            (None, _) if report.source == Some(name) => "used".to_owned(),
            (None, _) => "available as a fallback".to_owned(),
        };
        let state = printable(&state, usize::MAX);
        out += &row(&format!("  {name}"), &state, column, width);
    }
    out += "\nChecks:\n";
    let names = report.checks.iter().map(|check| check.name.len());
    let names = names.max().unwrap_or(0);
    for check in &report.checks {
        let notes = [check.reason.as_deref(), check.advice.as_deref()];
        let state = Mark::of(check.ok, check.needed, &check.value);
        out += &show::check(state, check.name, &check.value, notes, names, width);
    }
    out
}
