//! What the kernel and the host offer beyond what is needed, as this daemon's settings would use it.

use reaper_common::{ABSENT, Offsets};

use super::Check;
use crate::config::Config;
use reaper_host::source::ebpf::btf::Btf;
use reaper_host::source::ebpf::kfunc;
use reaper_host::sys::host::Host;

/// Where a bpffs belongs.
const BPFFS: &str = "/sys/fs/bpf";

/// What it takes from the kernel.
pub(super) fn kernel(btf: Option<&Btf>, offsets: Option<&Offsets>) -> Vec<Check> {
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
        ask("process table", &|b| b.has_func("bpf_iter_task")).or(
            "what runs before the daemon is found in /proc alone, which tells starts to 10 ms",
            "run a kernel of 5.10 or later with /proc in it (CONFIG_PROC_FS=y)",
        ),
    ]
}

/// Whether what is pinned would find its place; `loads`: there are probes to be pinned.
pub(super) fn bpffs(config: &Config, host: &Host, loads: bool) -> Check {
    const NAME: &str = "bpffs";
    const LOSS: &str = "nothing is pinned: tracking ends with the daemon, and what agents leave behind \
        until the next start is found only where its parents still show whose it was";
    if !config.pin {
        return Check::new(NAME, true, "not wanted (pin = false)");
    }
    if !loads {
        return Check::new(NAME, true, "not needed: there are no probes to pin");
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
            format!("mount -t bpf bpf {BPFFS}; the daemon does so itself where it runs as root"),
        ),
        _ => Check::new(NAME, false, format!("{directory} is on none")).or(
            LOSS,
            format!(
                "mkdir -p {directory} && mount -t bpf bpf {directory}, or set pin_dir below {BPFFS}"
            ),
        ),
    }
}

/// Whether an agent's children can be sent their first signal by the probe that sees it exit.
pub(super) fn kernel_reap(config: &Config, btf: Option<&Btf>, loads: bool) -> Check {
    let can = btf.map(kfunc::has_all);
    let value = match can {
        None => "unknown without type information",
        Some(false) => "not there",
        Some(true) if !loads => "there, for probes alone",
        Some(true) if config.may_kernel_reap() => "there, and used (kernel_reap = \"auto\")",
        Some(true) => "there, and not used, as the config says",
    };
    Check::new("kills in the kernel", can == Some(true), value).or(
        "every signal is sent by the daemon, some 30 µs later; nothing else is missed",
        "6.16 and later have what it takes",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with these mounts, whose daemon has these capabilities.
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
    fn pins_want_a_bpffs_that_can_be_written() {
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
