//! Installs the service on an emulated Debian with systemd, and kills, restarts, upgrades, stops and removes it there.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::kernel::{self, Kernel};
use super::machine::{self, tail};
use crate::shell::{OwnedChild, as_root, find_program, install, line, run, say};

/// Kernel of the machine.
const KERNEL: &str = "6.16";
/// Packages of Debian in the machine.
const PACKAGES: &str = "--include=systemd,systemd-sysv,dbus,libpam-systemd,procps,util-linux";
const SUITE: &str = "bookworm";
/// Commands of the test, and the unit that runs them.
const SCRIPT: &str = include_str!("systemd.sh");
const UNIT: &str = "\
[Unit]
After=multi-user.target
[Service]
ExecStart=/root/test.sh
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS1
KillMode=process
";

/// Time without output after which the machine is killed.
const SILENCE: Duration = Duration::from_secs(300);
/// Limit of the time from `systemctl poweroff` to the end of the machine. systemd gives processes that ignore SIGTERM 90 s.
const POWEROFF: Duration = Duration::from_secs(60);

/// Runs the test with this `reaper`, and prints its lines.
///
/// # Errors
/// A check failed, or the machine cannot be built or does not finish.
pub fn test(dir: &Path, reaper: &Path) -> Result<()> {
    let wanted = [KERNEL.to_owned()];
    let (kernels, missing) = kernel::get_all(&wanted, dir, false);
    let Some(kernel) = kernels.first() else {
        bail!("kernel {KERNEL} is not available: {missing:?}");
    };
    machine::install_qemu()?;
    let initramfs = build(dir, reaper)?;
    let log = dir.join("console-systemd.log");
    boot(kernel, &initramfs, &log).with_context(|| tail(&log))
}

/// Builds the root file system, and returns its archive. Debian's part of it is built once.
fn build(dir: &Path, reaper: &Path) -> Result<std::path::PathBuf> {
    let (root, archive) = (dir.join("systemd"), dir.join("systemd.cpio"));
    for program in ["debootstrap", "cpio"] {
        if find_program(program).is_none() {
            install(&[program], "the machine with systemd is built with it")?;
        }
    }
    let complete = root.join("complete");
    if !complete.exists() {
        say("building a Debian with systemd (about 1 min)");
        let words = ["--variant=minbase", PACKAGES, SUITE];
        run(as_root("debootstrap")?
            .args(words)
            .arg(&root)
            .stdout(Stdio::null()))?;
    }
    let script = dir.join("systemd-test.sh");
    let unit = dir.join("systemd-test.service");
    fs::write(&script, SCRIPT)?;
    fs::write(&unit, UNIT)?;
    // The agent is a copy of bash under another name.
    let setup = "
        set -e
        root=$1 reaper=$2 script=$3 unit=$4 archive=$5
        rm -rf $root/usr/share/doc $root/usr/share/man $root/usr/share/locale $root/var/cache/apt $root/var/lib/apt/lists
        install $reaper $root/root/reaper
        install $script $root/root/test.sh
        install $root/bin/bash $root/usr/local/bin/test-agent
        install -m 644 $unit $root/etc/systemd/system/test.service
        wants=$root/etc/systemd/system/multi-user.target.wants
        mkdir -p $wants
        ln -sf ../test.service $wants/test.service
        ln -sf /dev/null $root/etc/systemd/system/serial-getty@ttyS0.service
        ln -sf /lib/systemd/systemd $root/init
        grep -q ^user: $root/etc/passwd || echo user:x:1000:1000::/tmp:/bin/sh >> $root/etc/passwd
        touch $root/complete
        cd $root
        find . | cpio --quiet -o -H newc > $archive
        chmod a+r $archive";
    let mut sh = as_root("sh")?;
    sh.args(["-c", setup, "sh"]);
    run(sh.args([&root, &reaper.to_owned(), &script, &unit, &archive]))?;
    Ok(archive)
}

/// Boots the machine, reads its report, and checks that it powers off in time.
fn boot(kernel: &Kernel, initramfs: &Path, log: &Path) -> Result<()> {
    let mut qemu = machine::qemu(kernel, initramfs, log);
    qemu.args(["-accel", machine::EMULATION.option, "-append"]);
    qemu.arg("console=ttyS0 panic=-1 rdinit=/init systemd.log_target=console");
    println!("$ {}", line(&qemu));
    let qemu = qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut qemu = OwnedChild(qemu.context("cannot start QEMU")?);
    let report = qemu.stdout.take().context("no output of QEMU")?;
    let (sender, lines) = channel();
    // The thread exits with QEMU.
    std::thread::spawn(move || {
        for line in BufReader::new(report).split(b'\n').map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let mut failures = None;
    let mut ends = None;
    loop {
        let patience = match ends {
            Some(end) => POWEROFF.saturating_sub(Instant::duration_since(&Instant::now(), end)),
            None => SILENCE,
        };
        match lines.recv_timeout(patience) {
            Ok(line) => {
                let line = String::from_utf8_lossy(&line);
                let line = line.trim();
                println!("{line}");
                if let Some(count) = line.strip_prefix("DONE ") {
                    failures = count.parse::<u32>().ok();
                    ends = Some(Instant::now());
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) if ends.is_some() => {
                bail!(
                    "the machine did not power off within {} s",
                    POWEROFF.as_secs()
                );
            }
            Err(RecvTimeoutError::Timeout) => {
                bail!("killed after {} s of silence", SILENCE.as_secs());
            }
        }
    }
    let took = ends.map_or(Duration::ZERO, |end| end.elapsed());
    ensure!(failures.is_some(), "the machine ended before the test did");
    say(format_args!(
        "the machine powered off in {} s",
        took.as_secs()
    ));
    ensure!(
        failures == Some(0),
        "checks failed: {}",
        failures.unwrap_or(0)
    );
    Ok(())
}
