//! `reaper doctor`: what this host can do, the reason for each no, and what would be used.

mod features;
mod privileges;
#[cfg(test)]
mod tests;

use std::fmt::{Display, Write as _};
use std::io;
use std::path::Path;

use anstyle::{AnsiColor, Style};
use reaper_common::Offsets;
use serde::Serialize;

use crate::config::Config;
use crate::export::{print, printable, to_json};
use reaper_host::source::SourceKind;
use reaper_host::source::ebpf::btf::{self, Btf, BtfError};
use reaper_host::sys::host::{Host, Limit};
use reaper_host::sys::pidfd::{self, PidfdUnavailable};

/// The oldest kernel that the probes are made for.
const OLDEST: (u32, u32) = (5, 10);

/// One question and its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub ok: bool,
    /// What was found.
    pub value: String,
    /// Why not, or what is missed without it.
    pub reason: Option<String>,
    /// What to do about it.
    pub advice: Option<String>,
    /// Whether the probes cannot be used without it.
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

    /// What is said if the answer is no.
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

/// All answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// Whether `reaper daemon` can work here.
    pub usable: bool,
    /// Whether it can signal anything; else it only observes.
    pub can_signal: bool,
    /// Where its events would come from, if anywhere.
    pub source: Option<&'static str>,
    /// All that the settings let it choose from, the best first.
    pub sources: Vec<Candidate>,
    /// Why the probes cannot be used, what comes first being most likely the cause.
    pub reasons: Vec<String>,
    pub checks: Vec<Check>,
}

/// A source that a daemon would try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    pub name: &'static str,
    pub usable: bool,
    /// Why it cannot be used.
    pub reason: Option<String>,
    /// What it cannot tell that the probes can.
    pub limitations: Option<&'static str>,
}

/// Looks at this host with the eyes of a daemon with these settings, calls `probe` to open each source and let it go again, and prints the answers.
/// Returns the exit status: 0 if one of those that the settings allow can be used, 3 if not.
///
/// # Errors
/// If standard output cannot be written.
pub fn run<E: Display>(
    config: &Config,
    json: bool,
    probe: impl Fn(SourceKind) -> Result<(), E>,
) -> io::Result<u8> {
    let btf = Btf::load(Path::new(btf::VMLINUX));
    let report = examine(config, &Host::read(), &btf, pidfd::probe(), probe);
    match json {
        true => print(to_json(&report))?,
        false => print(render(&report))?,
    }
    Ok(if report.usable { 0 } else { 3 })
}

/// Answers everything. What the sources did when they were opened decides; the rest explains it.
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
    let loaded = if loads {
        "loaded and let go"
    } else {
        "refused"
    };
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

/// What to do where the probes are refused.
fn remedy(checks: &[Check], host: &Host) -> String {
    let unmet = checks.iter().filter(|check| check.needed && !check.ok);
    let unmet: Vec<_> = unmet.map(|check| check.name).collect();
    if !unmet.is_empty() {
        return format!("see to what is said of this above: {}", unmet.join(", "));
    }
    let pids = &host.pid_namespace;
    match host.container.is_empty() && (pids.is_initial || pids.inode == 0) {
        true => "report this line and the kernel's release".into(),
        false => "run it on the host: a container may be refused this whoever runs in it (by seccomp, for one; docker run \
             --privileged lifts that); if the host refuses it too, report this line and the kernel's release"
            .into(),
    }
}

fn kernel(host: &Host) -> Check {
    let (major, minor) = OLDEST;
    Check::new(
        "kernel",
        host.version().is_some_and(|v| v >= OLDEST),
        known(&host.release),
    )
    .needed()
    .or(
        format!("the kernel is older than {major}.{minor}, or does not tell its release"),
        format!("run a kernel of {major}.{minor} or later"),
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
        "run a kernel built with CONFIG_DEBUG_INFO_BTF=y, as the big distributions build theirs, and mount sysfs",
    )
}

fn surroundings(host: &Host) -> Vec<Check> {
    let pids = &host.pid_namespace;
    let signs = &host.container;
    let memlock = match host.memlock {
        Limit::Bytes(n) => format!("{n} bytes"),
        Limit::Unlimited => "unlimited".to_owned(),
        Limit::Unknown => "unknown".to_owned(),
    };
    let counts = host.version().is_some_and(|v| v < (5, 11));
    let enough =
        !counts || host.memlock == Limit::Unlimited || host.capabilities.has("CAP_SYS_RESOURCE");
    let wsl = signs.iter().any(|sign| sign.starts_with("wsl"));
    let (elsewhere, unrefused) = match wsl {
        true => (
            "run it in each WSL distribution in which there are agents: each has a namespace of its own",
            "update the kernel (wsl --update) if something is refused here",
        ),
        false => (
            "run it on the host, or its container with the host's pid namespace (docker run --pid=host)",
            "run it on the host if something is refused here",
        ),
    };
    vec![
        Check::new("lockdown", host.lockdown != "confidentiality", &*host.lockdown).needed().or(
            "the kernel is locked down for confidentiality and shows its memory to no program",
            "boot with lockdown=integrity, or without lockdown",
        ),
        Check::new("/proc", host.proc_matches_pid_namespace, if host.proc_matches_pid_namespace { "this pid namespace's" } else { "none, or another pid namespace's" })
            .needed()
            .or(
                "what runs here is not to be had from it, and its pids would be those of others",
                "mount this pid namespace's own (mount -t proc proc /proc; unshare has --mount-proc for it)",
            ),
        Check::new("pid namespace", pids.is_initial || pids.inode == 0, place(pids.is_initial, pids.inode))
            .or("only processes of this pid namespace are seen", elsewhere),
        Check::new("host", signs.is_empty(), if signs.is_empty() { "no container".into() } else { signs.join(", ") })
            .or("containers and guests may be refused what root may do on a host", unrefused),
        Check::new("processes of others", host.proc_shows_others, if host.proc_shows_others { "shown in /proc" } else { "hidden" }).or(
            "/proc is mounted with hidepid: without the probes or the proc connector only own processes are seen",
            "run it as root, or in the group that `gid=` of that mount names, or mount -o remount,hidepid=0 /proc",
        ),
        Check::new("locked memory", enough, memlock)
            .or("kernels before 5.11 count the ring as locked memory", "raise the limit (ulimit -l unlimited)"),
    ]
}

fn place(first: bool, inode: u64) -> String {
    match (first, inode) {
        (true, _) => "the host's own".to_owned(),
        (false, 0) => "unknown".to_owned(),
        (false, inode) => format!("private ({inode})"),
    }
}

fn known(text: &str) -> &str {
    if text.is_empty() { "unknown" } else { text }
}

/// The answers as a table, with colours.
fn render(report: &DoctorReport) -> String {
    let width = report
        .checks
        .iter()
        .map(|c| c.name.len())
        .max()
        .unwrap_or(0);
    let mut out = String::new();
    for check in &report.checks {
        let (word, colour) = match (check.ok, check.needed) {
            (true, _) => ("yes", AnsiColor::Green),
            (false, true) => ("no ", AnsiColor::Red),
            (false, false) => ("no ", AnsiColor::Yellow),
        };
        let style = colour.on_default().bold();
        let _ = writeln!(
            out,
            "{style}{word}{style:#}  {:width$}  {}",
            check.name,
            printable(&check.value, usize::MAX)
        );
        for (label, text) in [("why", &check.reason), ("do", &check.advice)] {
            if let Some(text) = text {
                let text = printable(text, usize::MAX);
                let dim = Style::new().dimmed();
                let _ = writeln!(out, "     {:width$}  {dim}{label}: {text}{dim:#}", "");
            }
        }
    }
    let bold = Style::new().bold();
    let verdict = match report.source {
        Some(source) if report.can_signal => source.to_owned(),
        Some(source) => format!("{source}, to observe: nothing can be signalled"),
        None => "nothing".to_owned(),
    };
    let _ = writeln!(out, "{bold}would use: {verdict}{bold:#}");
    let dim = Style::new().dimmed();
    for source in &report.sources {
        let Candidate { name, reason, .. } = source;
        let said = match (reason, source.limitations) {
            (Some(reason), _) => format!("{name} cannot be used: {reason}"),
            (None, Some(lacks)) if report.source == Some(name) => format!("{name}: {lacks}"),
            (None, _) if report.source == Some(name) => continue,
            (None, _) => format!("{name} could be used, and takes over should a better one fail"),
        };
        let said = printable(&said, usize::MAX);
        let _ = writeln!(out, "     {dim}{said}{dim:#}");
    }
    out
}
