//! Checks of optional kernel and host features, as the daemon's config would use them.

use reaper_common::{ABSENT, Offsets};

use super::Check;
use crate::config::Config;
use reaper_host::source::ebpf::btf::Btf;
use reaper_host::source::ebpf::kfunc;
use reaper_host::sys::host::Host;

/// Usual mount point of a bpffs.
const BPFFS: &str = "/sys/fs/bpf";

/// Checks kernel features by its BTF type information.
pub(super) fn kernel(btf: Option<&Btf>, offsets: Option<&Offsets>) -> Vec<Check> {
    let ask = |name, asked: &dyn Fn(&Btf) -> bool| {
        let answer = btf.map(asked);
        let word = match answer {
            Some(true) => "available",
            Some(false) => "missing",
            None => "unknown without BTF",
        };
        Check::new(name, answer == Some(true), word)
    };
    let inode = |_: &Btf| offsets.is_some_and(|o| o.pid_ino != ABSENT);
    vec![
        ask("ring buffer", &|b| {
            b.has_enum_value("bpf_map_type", "BPF_MAP_TYPE_RINGBUF")
        })
        .needed()
        .or(
            "the kernel has no BPF ring buffer",
            "use kernel 5.10 or later",
        ),
        ask("bpf_loop", &|b| {
            b.has_enum_value("bpf_func_id", "BPF_FUNC_loop")
        })
        .or(
            "the probes follow only part of a long list of children; the service finds the rest",
            "use kernel 5.17 or later",
        ),
        ask("inode of a pidfd", &inode).or(
            "processes are identified by pid and start time alone",
            "use kernel 6.9 or later",
        ),
        ask("PIDFD_GET_INFO", &|b| b.has_struct("pidfd_info")).or(
            "uids and exit statuses cannot be read through pidfds",
            "use kernel 6.13 or later for uids, 6.15 or later for exit statuses",
        ),
        ask("process iterator", &|b| b.has_func("bpf_iter_task")).or(
            "pre-existing processes are read from /proc, where start times have a resolution of 10ms",
            "use kernel 5.10 or later with CONFIG_PROC_FS=y",
        ),
    ]
}

/// Checks whether the pin directory is on a writable bpffs. `loads` is whether the probes load.
pub(super) fn bpffs(config: &Config, host: &Host, loads: bool) -> Check {
    const NAME: &str = "bpffs";
    const LOSS: &str = "nothing can be pinned: tracking ends with the daemon, and what agents leave behind \
        until the next start is found only if its ancestry is still visible";
    if !config.pin {
        return Check::new(NAME, true, "not used (pin = false)");
    }
    if !loads {
        return Check::new(NAME, true, "not needed: no probes to pin");
    }
    let directory = config.pin_dir.display();
    match host.mounts.of(&config.pin_dir) {
        Some(mount) if mount.kind == "bpf" => {
            let point = mount.point.display();
            let reason = format!("it is mounted read-only; {LOSS}");
            let value = format!("{directory} on {point}");
            Check::new(NAME, mount.writable, value)
                .or(reason, format!("mount -o remount,rw {point}"))
        }
        _ if config.pin_dir.starts_with(BPFFS) && host.capabilities.has("CAP_SYS_ADMIN") => {
            let value = format!("not mounted; the daemon mounts it at {BPFFS} itself");
            Check::new(NAME, true, value)
        }
        _ if config.pin_dir.starts_with(BPFFS) => Check::new(NAME, false, "not mounted").or(
            LOSS,
            format!("mount -t bpf bpf {BPFFS}; a daemon that runs as root does this itself"),
        ),
        _ => Check::new(NAME, false, format!("{directory} is not on a bpffs")).or(
            LOSS,
            format!(
                "mkdir -p {directory} && mount -t bpf bpf {directory}, or set pin_dir below {BPFFS}"
            ),
        ),
    }
}

/// Checks whether the probes can send the first signal to the children of an exiting agent.
pub(super) fn kernel_reap(config: &Config, btf: Option<&Btf>, loads: bool) -> Check {
    let can = btf.map(kfunc::has_all);
    let value = match can {
        None => "unknown without BTF",
        Some(false) => "missing",
        Some(true) if !loads => "available, but only to probes",
        Some(true) if config.may_kernel_reap() => "available and used (kernel_reap = \"auto\")",
        Some(true) => "available, but disabled in the config",
    };
    Check::new("kills in the kernel", can == Some(true), value).or(
        "the daemon sends all signals, about 30 µs later; nothing else changes",
        "use kernel 6.16 or later",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a host with these mounts and capabilities.
    fn host(mounts: &str, capabilities: &str) -> Host {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("proc/self");
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(own.join("mountinfo"), mounts).unwrap();
        std::fs::write(own.join("status"), format!("CapEff:\t{capabilities}\n")).unwrap();
        Host::read_at(dir.path())
    }

    fn config(pin_dir: &str) -> Config {
        Config {
            pin_dir: pin_dir.into(),
            ..Config::default()
        }
    }

    const ROOT: &str = "1ffffffffff";
    const SYS: &str = "1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / /sys rw - sysfs x rw\n";

    #[test]
    fn pin_dir_needs_a_writable_bpffs() {
        let bpf = |options: &str| format!("{SYS}3 2 0:3 / /sys/fs/bpf {options} - bpf x rw\n");
        for (pin_dir, mounts, capabilities, ok, word) in [
            (
                "/sys/fs/bpf/reaper",
                bpf("rw"),
                ROOT,
                true,
                "on /sys/fs/bpf",
            ),
            (
                "/sys/fs/bpf/reaper",
                bpf("ro"),
                ROOT,
                false,
                "mount -o remount,rw /sys/fs/bpf",
            ),
            (
                "/sys/fs/bpf/reaper",
                SYS.into(),
                ROOT,
                true,
                "mounts it at /sys/fs/bpf itself",
            ),
            (
                "/sys/fs/bpf/reaper",
                SYS.into(),
                "0",
                false,
                "mount -t bpf bpf /sys/fs/bpf",
            ),
            (
                "/run/pins",
                bpf("rw"),
                ROOT,
                false,
                "mount -t bpf bpf /run/pins",
            ),
        ] {
            let check = bpffs(&config(pin_dir), &host(&mounts, capabilities), true);
            assert_eq!(check.ok, ok, "{check:?}");
            assert_eq!(check.reason.is_some(), !ok, "{check:?}");
            let said = check.advice.unwrap_or(check.value);
            assert!(said.contains(word), "no '{word}' in: {said}");
        }
        let unpinned = Config {
            pin: false,
            ..config("/run/pins")
        };
        assert!(bpffs(&unpinned, &host(SYS, ROOT), true).ok);
        let none = bpffs(&config("/run/pins"), &host(SYS, "0"), false);
        assert!(none.ok && none.value.contains("no probes"), "{none:?}");
    }
}
