//! Finds the systemd unit of a process in its `cgroup` file.

use crate::source::procfs::parse::{field, number};

/// Returns the innermost systemd unit in a `cgroup` file; empty if there is no unit. Uses cgroup v2, and systemd's own
/// v1 hierarchy if v2 shows no unit.
pub(super) fn unit(file: &[u8]) -> String {
    let path = |line: &[u8]| unit_of_path(line.strip_suffix(b" (deleted)").unwrap_or(line));
    let v2 = field(file, b"0::").and_then(path);
    let v1 = || {
        let mut lines = file.split(|b| *b == b'\n');
        lines.find_map(|line| {
            let mut parts = line.splitn(3, |b| *b == b':');
            let named = parts.nth(1)? == b"name=systemd";
            path(parts.next().filter(|_| named)?)
        })
    };
    v2.or_else(v1).unwrap_or_default()
}

/// Returns the innermost unit in a cgroup path, except for units that hold everything of a user or a login.
///
/// A user's service manager (`user@1000.service`) contains all processes of the user, and a login session
/// (`session-3.scope`) all that was started in one terminal. Agents and their leftovers are in there with everything
/// else, so these two do not show that a process is managed. A unit nested in them does.
fn unit_of_path(path: &[u8]) -> Option<String> {
    let name = path.rsplit(|b| *b == b'/').find_map(|name| {
        // systemd prefixes names that could be confused with files of a cgroup.
        let name = name.strip_prefix(b"_").unwrap_or(name);
        let service = name.ends_with(b".service") && !name.starts_with(b"user@");
        let scope = name.ends_with(b".scope") && !is_login(name);
        (service || scope).then_some(name)
    })?;
    Some(String::from_utf8_lossy(name).into_owned())
}

/// Returns whether a scope is that of a login session, such as `session-3.scope`.
fn is_login(scope: &[u8]) -> bool {
    let id = scope.strip_prefix(b"session-");
    let id = id.and_then(|id| id.strip_suffix(b".scope"));
    // `3`, or `c3` for a session that is not a login of a user.
    id.is_some_and(|id| number::<u64>(id.strip_prefix(b"c").unwrap_or(id)).is_some())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::{arbitrary_bytes, proc_self_file};

    proptest! {
        #[test]
        fn any_cgroup_file_can_be_parsed(bytes in arbitrary_bytes(proc_self_file("cgroup"))) {
            let unit = unit(&bytes);
            let ends = [".service", ".scope"].iter().any(|end| unit.ends_with(end));
            prop_assert!(unit.is_empty() || ends, "{}", unit);
        }
    }

    #[test]
    fn innermost_managed_unit_is_found() {
        for (file, expected) in [
            ("0::/system.slice/nginx.service\n", "nginx.service"),
            ("0::/system.slice/a.service/inner/leaf\n", "a.service"),
            ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
            ("0::/user.slice/user-1000.slice/session-c2.scope\n", ""),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice\n",
                "",
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/dev.service\n",
                "dev.service",
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-u12.scope\n",
                "run-u12.scope",
            ),
            ("0::/system.slice/docker-0a1b.scope\n", "docker-0a1b.scope"),
            ("0::/x.slice/session-build.scope\n", "session-build.scope"),
            ("0::/system.slice/_cpu.service\n", "cpu.service"),
            ("0::/system.slice/b.service (deleted)\n", "b.service"),
            ("0::/../../../system.slice/c.service\n", "c.service"),
            (
                "12:cpu:/x.service\n1:name=systemd:/system.slice/d.service\n0::/\n",
                "d.service",
            ),
            ("12:cpu,cpuacct:/x.service\n", ""),
            ("0::/\n", ""),
            ("", ""),
        ] {
            assert_eq!(unit(file.as_bytes()), expected, "{file:?}");
        }
    }
}
