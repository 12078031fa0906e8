//! Checks what this process may do to other processes.

use super::{Check, place};
use reaper_host::sys::host::Host;
use reaper_host::sys::pidfd::PidfdUnavailable;

/// Capabilities to load the probes: the first two together, or the last one.
const PROBES: [&str; 3] = ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN"];

pub(super) fn checks(host: &Host, pidfds: Result<(), PidfdUnavailable>) -> Vec<Check> {
    let held = |names: &[&'static str]| {
        let have = names.iter().copied();
        let have: Vec<_> = have.filter(|n| host.capabilities.has(n)).collect();
        match (have.is_empty(), host.in_initial_user_namespace()) {
            (true, _) => "none".to_owned(),
            (false, true) => have.join(" "),
            (false, false) => format!("{}, but only in its user namespace", have.join(" ")),
        }
    };
    let (namespace, first) = (&host.user_namespace, host.in_initial_user_namespace());
    let check =
        |name, has: bool, names: &[&'static str]| Check::new(name, has && first, held(names));
    let caps = host.capabilities;
    let one = |name, capability| check(name, caps.has(capability), &[capability]);
    // Root gains nothing from the advice to run as root.
    let root = host.euid == Some(0);
    let advice = |what: &str| match (first, root) {
        (false, _) => "run it on the host, outside of rootless containers".to_owned(),
        (true, true) => format!(
            "give this root {what}; for a container: --cap-add or --privileged (docker, podman)"
        ),
        (true, false) => format!("run as root (sudo reaper …), or give it {what}"),
    };
    let user = host
        .euid
        .map_or("this user".to_owned(), |id| format!("user id {id}"));
    let others = match first {
        true => "processes of other users",
        false => "processes of other user namespaces",
    };
    let no_watch = match caps.has("CAP_KILL") {
        true => "",
        false => "; without the probes they are not watched either",
    };
    let refused = pidfds.err().map(|PidfdUnavailable(errno)| errno);
    vec![
        check("load probes", caps.may_load_probes(), &PROBES)
            .needed()
            .or(
                match first {
                    true => format!("{user} has neither CAP_BPF and CAP_PERFMON nor CAP_SYS_ADMIN"),
                    false => format!(
                        "{user} has no capabilities on the host, only in its user namespace"
                    ),
                },
                advice("CAP_BPF, CAP_PERFMON, CAP_KILL, CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"),
            ),
        Check::new(
            "pidfds",
            refused.is_none(),
            refused.map_or("available, and accept signals".into(), |errno| {
                format!("refused: {errno}")
            }),
        )
        .or(
            "no process can be signalled: a daemon only observes",
            PidfdUnavailable::ADVICE,
        ),
        one("signal others", "CAP_KILL").or(
            format!("{others} cannot be signalled{no_watch}"),
            advice("CAP_KILL"),
        ),
        one("inspect others", "CAP_SYS_PTRACE").or(
            format!(
                "programs of {others} are known only if a probe has reported them; otherwise the processes are kept"
            ),
            advice("CAP_SYS_PTRACE"),
        ),
        check(
            "files of others",
            caps.has("CAP_DAC_READ_SEARCH") || caps.has("CAP_DAC_OVERRIDE"),
            &["CAP_DAC_READ_SEARCH", "CAP_DAC_OVERRIDE"],
        )
        .or(
            format!("sockets and files of {others} cannot be read, so their processes are kept"),
            advice("CAP_DAC_READ_SEARCH"),
        ),
        one("real-time priority", "CAP_SYS_NICE").or(
            "signals can be late on a busy host",
            advice("CAP_SYS_NICE"),
        ),
        Check::new("user namespace", first, place(namespace.is_initial, namespace.inode)).or(
            "capabilities in another user namespace do not apply to the host",
            "run it on the host, outside of rootless containers",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use reaper_host::sys::host::Namespace;

    /// Returns a host where this user has these capabilities, in the initial user namespace or in another one.
    fn host(uid: u32, capabilities: &str, first: bool) -> Host {
        let dir = tempfile::tempdir().unwrap();
        let namespace = dir.path().join("proc/self");
        std::fs::create_dir_all(&namespace).unwrap();
        let status = format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}\n");
        std::fs::write(namespace.join("status"), status).unwrap();
        Host {
            user_namespace: Namespace {
                inode: 7,
                is_initial: first,
            },
            ..Host::read_at(dir.path())
        }
    }

    const ALL: &str = "1ffffffffff";

    #[test]
    fn root_is_not_advised_to_run_as_root() {
        for (host, ok, expected) in [
            (host(0, ALL, true), true, None),
            (host(0, "0", true), false, Some("give this root")),
            (host(1000, "0", true), false, Some("run as root")),
            (
                host(0, ALL, false),
                false,
                Some("outside of rootless containers"),
            ),
            (
                host(0, "0", false),
                false,
                Some("outside of rootless containers"),
            ),
        ] {
            for check in checks(&host, Ok(())) {
                if [
                    "load probes",
                    "signal others",
                    "inspect others",
                    "files of others",
                ]
                .contains(&check.name)
                {
                    assert_eq!(check.ok, ok, "{check:?}");
                    let advice = check.advice.as_deref();
                    assert_eq!(advice.is_some(), expected.is_some(), "{check:?}");
                    assert!(
                        expected.is_none_or(|expected| advice.unwrap().contains(expected)),
                        "{check:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn namespaced_capabilities_are_reported_as_such() {
        let checks = checks(&host(0, ALL, false), Ok(()));
        let kill = checks.iter().find(|check| check.name == "signal others");
        let kill = kill.unwrap();
        assert!(
            kill.value.ends_with("only in its user namespace"),
            "{kill:?}"
        );
        assert!(
            kill.reason
                .as_deref()
                .unwrap()
                .contains("other user namespaces")
        );
    }

    #[test]
    fn missing_pidfds_are_explained() {
        let checks = checks(
            &host(0, ALL, true),
            Err(PidfdUnavailable(nix::Error::ENOSYS)),
        );
        let check = checks.iter().find(|check| check.name == "pidfds").unwrap();
        assert!(!check.ok && check.value.contains("ENOSYS"), "{check:?}");
        assert!(check.reason.as_deref().unwrap().contains("only observes"));
        assert!(check.advice.as_deref().unwrap().contains("seccomp"));
    }
}
