//! Capabilities that the service uses.

use std::io;

use super::host::Capabilities;

/// A capability that the service uses.
#[derive(Debug)]
pub struct Privilege {
    /// Name, such as `CAP_KILL`.
    pub name: &'static str,
    /// Effect of its absence.
    pub loss: &'static str,
    /// Whether the service keeps it after its start.
    pub is_kept: bool,
}

/// All capabilities that the service uses. It drops every other one.
pub const PRIVILEGES: [Privilege; 6] = [
    Privilege {
        name: "CAP_BPF",
        loss: "the probes cannot be used",
        // Before Linux 5.19, every call of bpf(2) may need it.
        is_kept: true,
    },
    Privilege {
        name: "CAP_PERFMON",
        loss: "the probes cannot be used",
        is_kept: false,
    },
    Privilege {
        name: "CAP_KILL",
        loss: "processes of other users cannot be signalled",
        is_kept: true,
    },
    Privilege {
        name: "CAP_SYS_PTRACE",
        loss: "programs of other users cannot be read, so their processes are kept",
        is_kept: true,
    },
    Privilege {
        name: "CAP_DAC_READ_SEARCH",
        loss: "sockets and files of other users' processes cannot be read, so their processes are kept",
        is_kept: true,
    },
    Privilege {
        name: "CAP_SYS_NICE",
        loss: "signals can be late on a busy host",
        is_kept: true,
    },
];

/// Returns the capabilities that the service lacks. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON, and
/// CAP_DAC_OVERRIDE includes CAP_DAC_READ_SEARCH.
pub fn missing(held: Capabilities) -> impl Iterator<Item = &'static Privilege> {
    PRIVILEGES.iter().filter(move |privilege| {
        let other = match privilege.name {
            "CAP_BPF" | "CAP_PERFMON" => "CAP_SYS_ADMIN",
            "CAP_DAC_READ_SEARCH" => "CAP_DAC_OVERRIDE",
            name => name,
        };
        !held.has(privilege.name) && !held.has(other)
    })
}

/// Drops the capabilities that the service no longer needs, from the calling thread and from those it starts later.
/// With `writes_elsewhere` it keeps CAP_DAC_OVERRIDE, for files in directories of other users.
///
/// # Errors
/// As `capget(2)` and `capset(2)`.
#[cfg(target_os = "linux")]
pub fn drop_unneeded(writes_elsewhere: bool) -> io::Result<()> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None)?;
    let bits = |name: &str| {
        let bit = Capabilities::bit(name)?;
        CapabilitySet::from_bits(1 << bit)
    };
    let kept = PRIVILEGES.iter().filter(|privilege| privilege.is_kept);
    let names = kept.map(|privilege| privilege.name);
    let mut kept: CapabilitySet = names.filter_map(bits).collect();
    // Those that it was given in place of others.
    if !sets.permitted.contains(CapabilitySet::BPF) {
        kept |= CapabilitySet::SYS_ADMIN;
    }
    if writes_elsewhere || !sets.permitted.contains(CapabilitySet::DAC_READ_SEARCH) {
        kept |= CapabilitySet::DAC_OVERRIDE;
    }
    sets.permitted &= kept;
    sets.effective &= kept;
    sets.inheritable &= kept;
    Ok(set_capabilities(None, sets)?)
}

/// Does nothing: macOS has no capabilities.
///
/// # Errors
/// Never.
#[cfg(target_os = "macos")]
pub fn drop_unneeded(_: bool) -> io::Result<()> {
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::sys::host::Host;

    fn names(held: &[&str]) -> Vec<&'static str> {
        let held = held.iter().filter_map(|name| Capabilities::bit(name));
        let held = Capabilities::from_bits(held.fold(0, |bits, bit| bits | 1 << bit));
        missing(held).map(|privilege| privilege.name).collect()
    }

    #[test]
    fn broader_capability_stands_for_those_it_includes() {
        let all: Vec<_> = PRIVILEGES.iter().map(|privilege| privilege.name).collect();
        assert_eq!(names(&[]), all);
        assert_eq!(names(&all), [""; 0]);
        let broad = ["CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE", "CAP_KILL"];
        assert_eq!(names(&broad), ["CAP_SYS_PTRACE", "CAP_SYS_NICE"]);
    }

    /// Uses its own thread, because capabilities belong to a thread.
    #[test]
    fn thread_keeps_only_the_capabilities_of_a_running_service() {
        let (before, after) = std::thread::spawn(|| {
            let read = || Host::read().capabilities;
            let before = read();
            drop_unneeded(false).unwrap();
            (before, read())
        })
        .join()
        .unwrap();
        for privilege in &PRIVILEGES {
            let expected = privilege.is_kept && before.has(privilege.name);
            assert_eq!(after.has(privilege.name), expected, "{}", privilege.name);
        }
        if before.has("CAP_BPF") {
            assert!(!after.has("CAP_SYS_ADMIN") && !after.has("CAP_NET_ADMIN"));
        }
    }
}
