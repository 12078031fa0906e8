//! Tests of the report for different hosts.

use super::*;
use reaper_host::source::kind::SourceChoice;

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
fn loaded_probes_make_the_host_usable() {
    let report = examine(&Config::default(), &host(), &no_btf(), Ok(()), |_| {
        Ok::<(), String>(())
    });
    assert!(report.usable && report.reasons.is_empty());
    assert_eq!(report.source, Some("ebpf"));
    let text = render(&report, None);
    assert!(
        text.contains("can run here, with the event source ebpf.\u{1b}[0m\n"),
        "{text}"
    );
    let rest = text.matches("available as a fallback").count();
    assert_eq!(rest, 2, "{text}");
}

#[test]
fn each_failed_check_has_a_reason_and_advice() {
    let report = examine(&Config::default(), &host(), &no_btf(), Ok(()), |_| {
        Err("the kernel said no")
    });
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
    let text = render(&report, None);
    assert!(text.contains("A daemon cannot run here"), "{text}");
    assert!(
        text.contains("cannot be used: the kernel said no"),
        "{text}"
    );
}

#[test]
fn advice_fits_container_and_wsl() {
    let private = reaper_host::sys::host::Namespace {
        inode: 4,
        is_initial: false,
    };
    let place = |sign: &str| Host {
        container: vec![sign.into()],
        pid_namespace: private,
        proc_matches_pid_namespace: false,
        ..host()
    };
    for (sign, in_it) in [
        ("docker (/.dockerenv)", "--pid=host"),
        ("wsl (kernel release)", "each WSL distribution"),
    ] {
        let checks = surroundings(&place(sign));
        let advice = |name| {
            checks
                .iter()
                .find(|check| check.name == name)
                .unwrap()
                .advice
                .as_deref()
        };
        assert!(advice("pid namespace").unwrap().contains(in_it));
        assert!(advice("/proc").unwrap().contains("mount -t proc"));
    }
}

/// Returns the advice if loading the probes fails. `needed` has the other checks, and whether each passed.
fn advice(host: &Host, needed: &[(&'static str, bool)]) -> String {
    let check = |(name, ok): &(&'static str, bool)| Check::new(name, *ok, "").needed();
    remedy(&needed.iter().map(check).collect::<Vec<_>>(), host)
}

#[test]
fn bug_report_is_advised_if_all_checks_pass() {
    let host = Host {
        container: Vec::new(),
        ..host()
    };
    let said = advice(
        &host,
        &[("BTF", false), ("kernel", true), ("lockdown", false)],
    );
    assert!(said.ends_with("first: BTF, lockdown"), "{said}");
    let said = advice(&host, &[("BTF", true)]);
    assert!(said.starts_with("report a bug"), "{said}");
    let container = Host {
        container: vec!["docker".into()],
        ..host
    };
    let said = advice(&container, &[("BTF", true)]);
    assert!(said.starts_with("run it on the host"), "{said}");
}

#[test]
fn missing_pidfds_make_the_daemon_observe() {
    let refused = PidfdUnavailable(nix::Error::EPERM);
    let probe = |_| Ok::<(), String>(());
    let report = examine(&Config::default(), &host(), &no_btf(), Err(refused), probe);
    assert!(report.usable && !report.can_signal);
    let text = render(&report, None);
    for said in [
        "refused: EPERM",
        "only observes",
        "it can only observe: no process can be signalled",
    ] {
        assert!(text.contains(said), "no '{said}' in {text}");
    }
}

#[test]
fn next_source_is_used_if_probes_do_not_load() {
    let no_probes = |kind| match kind {
        SourceKind::Ebpf => Err("no"),
        _ => Ok(()),
    };
    let config = Config::default();
    let report = examine(&config, &host(), &no_btf(), Ok(()), no_probes);
    assert_eq!(
        (report.usable, report.source),
        (true, Some("proc-connector"))
    );
    assert!(!report.reasons.is_empty());
    let text = render(&report, None);
    assert!(text.contains("cannot be used: no\n"), "{text}");
    assert!(text.contains("used; programs are looked up"), "{text}");
    let config = Config {
        source: SourceChoice::of(SourceKind::Ebpf),
        ..config
    };
    assert_eq!(
        examine(&config, &host(), &no_btf(), Ok(()), no_probes).source,
        None
    );
}

#[test]
fn old_kernel_and_lockdown_are_reasons() {
    let host = Host {
        release: "4.19.0".into(),
        lockdown: Ok("confidentiality".into()),
        ..host()
    };
    let report = examine(&Config::default(), &host, &no_btf(), Ok(()), |_| Err("no"));
    assert!(report.reasons[0].contains("older than 5.10"));
    assert!(report.reasons.iter().any(|r| r.contains("lockdown")));
}

#[test]
fn unknown_lockdown_is_neither_yes_nor_no() {
    let report = examine(&Config::default(), &host(), &no_btf(), Ok(()), |_| {
        Ok::<(), String>(())
    });
    let text = anstream::adapter::strip_str(&render(&report, None)).to_string();
    let mut lines = text.lines();
    let line = lines.find(|line| line.contains("  lockdown  ")).unwrap();
    assert!(line.starts_with("?  "), "{line}");
    let why = "unknown: there is no /sys/kernel/security/lockdown, ";
    assert!(line.contains(why), "{line}");
}

#[test]
fn json_report_has_the_documented_keys() {
    let report = examine(&Config::default(), &host(), &no_btf(), Ok(()), |_| {
        Err("no")
    });
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["usable"], false);
    assert!(json["source"].is_null() && json["reasons"].is_array());
    assert_eq!(json["sources"][2]["name"], "procfs");
    let check = json["checks"][0].as_object().unwrap();
    let mut keys: Vec<_> = check.keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["advice", "name", "ok", "reason", "value"]);
}
