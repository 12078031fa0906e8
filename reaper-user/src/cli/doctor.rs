//! `reaper doctor`: what this host can do, the reason for each no, and what would be used.

use std::fmt::{Display, Write as _};
use std::io::{self, Write as _};
use std::path::Path;

use anstyle::{AnsiColor, Style};
use reaper_common::{ABSENT, Offsets};
use serde::Serialize;

use crate::source::ebpf::btf::{self, Btf, BtfError};
use crate::sys::host::{Host, Limit};

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
pub struct Report {
    /// Whether `reaper daemon` can work here.
    pub usable: bool,
    /// Where its events would come from, if anywhere.
    pub source: Option<&'static str>,
    /// Why it is not usable, what comes first being most likely the cause.
    pub reasons: Vec<String>,
    pub checks: Vec<Check>,
}

/// Looks at this host, calls `probe` to load the probes and let them go again, and prints the answers.
/// Returns the exit status: 0 if the probes can be used, 3 if not.
///
/// # Errors
/// If standard output cannot be written.
pub fn run<E: Display>(json: bool, probe: impl FnOnce() -> Result<(), E>) -> io::Result<u8> {
    let report = examine(&Host::read(), &Btf::load(Path::new(btf::VMLINUX)), probe());
    if json {
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &report)?;
        writeln!(out)?;
    } else {
        // Takes the colours out where they are not wanted: no terminal, or NO_COLOR.
        anstream::stdout()
            .lock()
            .write_all(render(&report).as_bytes())?;
    }
    Ok(if report.usable { 0 } else { 3 })
}

/// Answers everything. What the probes did when they were loaded decides; the rest explains it.
pub fn examine<E: Display>(
    host: &Host,
    btf: &Result<Btf, BtfError>,
    probed: Result<(), E>,
) -> Report {
    let usable = probed.is_ok();
    let offsets = btf
        .as_ref()
        .map_err(ToString::to_string)
        .and_then(|b| b.offsets().map_err(|e| e.to_string()));
    let mut checks = privileges(host);
    checks.insert(0, kernel(host));
    checks.insert(1, type_information(&offsets));
    checks.extend(surroundings(host));
    checks.extend(features(btf.as_ref().ok(), offsets.as_ref().ok()));
    let failure = probed.err().map(|e| e.to_string());
    let loaded = if usable {
        "loaded and let go"
    } else {
        "refused"
    };
    checks.push(Check::new("programs load", usable, loaded).needed().or(
        failure.unwrap_or_default(),
        "mend what is said no to above; if that is all yes, report this line and the kernel's release",
    ));
    let failed = checks.iter().filter(|c| !usable && c.needed && !c.ok);
    Report {
        usable,
        source: usable.then_some("ebpf"),
        reasons: failed.filter_map(|c| c.reason.clone()).collect(),
        checks,
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

fn privileges(host: &Host) -> Vec<Check> {
    let caps = host.capabilities;
    let listed = |names: &[&'static str]| {
        let have: Vec<_> = names.iter().copied().filter(|n| caps.has(n)).collect();
        if have.is_empty() {
            "none".to_owned()
        } else {
            have.join(" ")
        }
    };
    let who = host
        .euid
        .map_or("this user".to_owned(), |id| format!("user id {id}"));
    let bpf = caps.may_load_probes();
    let load = Check::new(
        "load probes",
        bpf,
        listed(&["CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN"]),
    )
    .needed();
    let kill = Check::new("signal others", caps.has("CAP_KILL"), listed(&["CAP_KILL"]));
    let look = Check::new(
        "look at others",
        caps.has("CAP_SYS_PTRACE"),
        listed(&["CAP_SYS_PTRACE"]),
    );
    let own = &host.user_namespace;
    vec![
        load.or(
            format!("{who} has neither CAP_BPF and CAP_PERFMON nor CAP_SYS_ADMIN"),
            "run it as root (sudo reaper …), or give it CAP_BPF, CAP_PERFMON, CAP_KILL and CAP_SYS_PTRACE",
        ),
        kill.or("processes of other users cannot be signalled", "run it as root or give it CAP_KILL"),
        look.or(
            "executables of processes that already run for other users stay unknown",
            "run it as root or give it CAP_SYS_PTRACE",
        ),
        Check::new("user namespace", own.first || own.inode == 0, place(own.first, own.inode)).or(
            "in a user namespace of its own, capabilities do not hold on the host",
            "run it on the host, outside of rootless containers",
        ),
    ]
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
    vec![
        Check::new("lockdown", host.lockdown != "confidentiality", &*host.lockdown).needed().or(
            "the kernel is locked down for confidentiality and shows its memory to no program",
            "boot with lockdown=integrity, or without lockdown",
        ),
        Check::new("pid namespace", pids.first || pids.inode == 0, place(pids.first, pids.inode)).or(
            "only processes of this pid namespace are seen",
            "run it on the host, or its container with the host's pid namespace (docker run --pid=host)",
        ),
        Check::new("host", signs.is_empty(), if signs.is_empty() { "no container".into() } else { signs.join(", ") }).or(
            "containers and guests may be refused what root may do on a host",
            "run it on the host if a check below says no",
        ),
        Check::new("locked memory", enough, memlock)
            .or("kernels before 5.11 count the ring as locked memory", "raise the limit (ulimit -l unlimited)"),
    ]
}

fn features(btf: Option<&Btf>, offsets: Option<&Offsets>) -> Vec<Check> {
    let ask = |name, asked: &dyn Fn(&Btf) -> bool| {
        let answer = btf.map(asked);
        let word = match answer {
            Some(true) => "there",
            Some(false) => "not there",
            None => "unknown without type information",
        };
        Check::new(name, answer == Some(true), word)
    };
    let inode = |_: &Btf| offsets.is_some_and(|o| o.pid_ino != ABSENT);
    let kfuncs = |b: &Btf| {
        [
            "bpf_send_signal_task",
            "bpf_task_from_pid",
            "bpf_task_release",
        ]
        .iter()
        .all(|f| b.has_func(f))
    };
    vec![
        ask("ring buffer", &|b| {
            b.has_enum_value("bpf_map_type", "BPF_MAP_TYPE_RINGBUF")
        })
        .needed()
        .or(
            "the kernel has no BPF ring buffer",
            "run a kernel of 5.10 or later",
        ),
        ask("bpf_loop", &|b| {
            b.has_enum_value("bpf_func_id", "BPF_FUNC_loop")
        })
        .or(
            "lists of children are followed to a lower bound; user space sees the rest",
            "5.17 and later have it",
        ),
        ask("inode of a pidfd", &inode).or(
            "a process has no second name beside pid and start time",
            "6.9 and later have it",
        ),
        ask("PIDFD_GET_INFO", &|b| b.has_struct("pidfd_info")).or(
            "how a process ended cannot be asked of its pidfd",
            "6.13 and later have it",
        ),
        ask("kills in the kernel", &kfuncs).or(
            "the kernel lacks bpf_send_signal_task or bpf_task_from_pid, which are not used yet",
            "6.13 and later have them",
        ),
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
fn render(report: &Report) -> String {
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
            check.name, check.value
        );
        for (label, text) in [("why", &check.reason), ("do", &check.advice)] {
            if let Some(text) = text {
                let dim = Style::new().dimmed();
                let _ = writeln!(out, "     {:width$}  {dim}{label}: {text}{dim:#}", "");
            }
        }
    }
    let bold = Style::new().bold();
    let verdict = match report.source {
        Some(source) => source.to_owned(),
        None => format!(
            "nothing here: {}",
            report.reasons.first().map_or("unknown", |r| r)
        ),
    };
    let _ = writeln!(out, "{bold}would use: {verdict}{bold:#}");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("proc/sys/kernel");
        std::fs::create_dir_all(&kernel).unwrap();
        std::fs::write(kernel.join("osrelease"), "6.12.1-test").unwrap();
        Host::read_at(dir.path())
    }

    fn no_btf() -> Result<Btf, BtfError> {
        Btf::load(Path::new("/nonexistent"))
    }

    #[test]
    fn what_the_probes_did_decides() {
        let report = examine(&host(), &no_btf(), Ok::<(), String>(()));
        assert!(report.usable && report.reasons.is_empty());
        assert_eq!(report.source, Some("ebpf"));
        assert!(render(&report).ends_with("would use: ebpf\u{1b}[0m\n"));
    }

    #[test]
    fn each_no_has_a_reason_and_an_advice() {
        let report = examine(&host(), &no_btf(), Err("the kernel said no"));
        assert!(!report.usable && report.source.is_none());
        for check in &report.checks {
            assert_eq!(check.ok, check.reason.is_none(), "{check:?}");
            assert_eq!(check.ok, check.advice.is_none(), "{check:?}");
        }
        assert!(report.checks[0].ok, "the kernel is new enough");
        assert!(
            report.reasons[0].starts_with("cannot read /nonexistent: "),
            "{:?}",
            report.reasons
        );
        assert_eq!(report.reasons.last().unwrap(), "the kernel said no");
        let text = render(&report);
        assert!(
            text.contains("would use: nothing here: cannot read /nonexistent: "),
            "{text}"
        );
    }

    #[test]
    fn old_kernels_and_lockdown_are_named() {
        let host = Host {
            release: "4.19.0".into(),
            lockdown: "confidentiality".into(),
            ..host()
        };
        let report = examine(&host, &no_btf(), Err("no"));
        assert!(report.reasons[0].contains("older than 5.10"));
        assert!(report.reasons.iter().any(|r| r.contains("locked down")));
    }

    #[test]
    fn json_has_what_is_promised() {
        let report = examine(&host(), &no_btf(), Err("no"));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["usable"], false);
        assert!(json["source"].is_null() && json["reasons"].is_array());
        let check = json["checks"][0].as_object().unwrap();
        let mut keys: Vec<_> = check.keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["advice", "name", "ok", "reason", "value"]);
    }
}
