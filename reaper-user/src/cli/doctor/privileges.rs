//! What this program may do to others.

use super::{Check, place};
use reaper_host::sys::host::Host;
use reaper_host::sys::pidfd::PidfdUnavailable;

/// What loads the probes.
const PROBES: [&str; 3] = ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN"];

pub(super) fn checks(host: &Host, pidfds: Result<(), PidfdUnavailable>) -> Vec<Check> {
    let held = |names: &[&'static str]| {
        let have = names.iter().copied();
        let have: Vec<_> = have.filter(|n| host.capabilities.has(n)).collect();
        match (have.is_empty(), host.in_first_user_namespace()) {
            (true, _) => "none".to_owned(),
            (false, true) => have.join(" "),
            (false, false) => format!("{}, in its user namespace alone", have.join(" ")),
        }
    };
    let (own, first) = (&host.user_namespace, host.in_first_user_namespace());
    let check =
        |name, has: bool, names: &[&'static str]| Check::new(name, has && first, held(names));
    let caps = host.capabilities;
    let one = |name, capability| check(name, caps.has(capability), &[capability]);
    // Whoever is root already is not helped by being told to become it.
    let root = host.euid == Some(0);
    let get = |what: &str| match (first, root) {
        (false, _) => "run it on the host, outside of rootless containers".to_owned(),
        (true, true) => format!(
            "give {what} to this root, which a container does with --cap-add or --privileged (docker, podman)"
        ),
        (true, false) => format!("run it as root (sudo reaper …), or give it {what}"),
    };
    let who = host
        .euid
        .map_or("this user".to_owned(), |id| format!("user id {id}"));
    let others = match first {
        true => "processes of other users",
        false => "processes of other user namespaces",
    };
    let unwatched = match caps.has("CAP_KILL") {
        true => "",
        false => "; without the probes they are not watched either",
    };
    let refused = pidfds.err().map(|PidfdUnavailable(errno)| errno);
    vec![
        check("load probes", caps.may_load_probes(), &PROBES)
            .needed()
            .or(
                match first {
                    true => format!("{who} has neither CAP_BPF and CAP_PERFMON nor CAP_SYS_ADMIN"),
                    false => format!(
                        "{who} has no capabilities on the host, but in its user namespace at most"
                    ),
                },
                get("CAP_BPF, CAP_PERFMON, CAP_KILL and CAP_SYS_PTRACE"),
            ),
        Check::new(
            "pidfds",
            refused.is_none(),
            refused.map_or("given, and take signals".into(), |errno| {
                format!("refused: {errno}")
            }),
        )
        .or(
            "no process can be signalled: a daemon only observes",
            PidfdUnavailable::ADVICE,
        ),
        one("signal others", "CAP_KILL").or(
            format!("{others} cannot be signalled{unwatched}"),
            get("CAP_KILL"),
        ),
        one("look at others", "CAP_SYS_PTRACE").or(
            format!(
                "what {others} run is known only where a probe has told of it; else they are kept"
            ),
            get("CAP_SYS_PTRACE"),
        ),
        Check::new("user namespace", first, place(own.is_initial, own.inode)).or(
            "in a user namespace of its own, capabilities do not hold on the host",
            "run it on the host, outside of rootless containers",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use reaper_host::sys::host::Namespace;

    /// A host on which this user has these capabilities, in the first user namespace or not.
    fn host(uid: u32, capabilities: &str, first: bool) -> Host {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("proc/self");
        std::fs::create_dir_all(&own).unwrap();
        let status = format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}\n");
        std::fs::write(own.join("status"), status).unwrap();
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
    fn nobody_is_told_to_become_what_they_are() {
        for (host, ok, said) in [
            (host(0, ALL, true), true, None),
            (host(0, "0", true), false, Some("to this root")),
            (host(1000, "0", true), false, Some("run it as root")),
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
                if ["load probes", "signal others", "look at others"].contains(&check.name) {
                    assert_eq!(check.ok, ok, "{check:?}");
                    let advice = check.advice.as_deref();
                    assert_eq!(advice.is_some(), said.is_some(), "{check:?}");
                    assert!(
                        said.is_none_or(|said| advice.unwrap().contains(said)),
                        "{check:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_holds_in_a_user_namespace_alone_is_said_to() {
        let checks = checks(&host(0, ALL, false), Ok(()));
        let kill = checks.iter().find(|check| check.name == "signal others");
        let kill = kill.unwrap();
        assert!(
            kill.value.ends_with("in its user namespace alone"),
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
    fn why_there_are_no_pidfds_and_what_that_means() {
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
