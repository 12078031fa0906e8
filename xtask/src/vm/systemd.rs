//! Runs an emulated Debian with systemd. Either installs the service there, and kills, restarts, upgrades, stops and removes
//! it, or runs real process trees there with daemons that have the privileges of the service's unit.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::RECENT;
use super::cpio::Archive;
use super::kernel::{self, Kernel};
use super::machine::{self, tail};
use super::root::OBJECT;
use crate::cross::Arch;
use crate::dist;
use crate::shell::{OwnedChild, as_root, find_program, install, line, run, say, workspace};
use crate::test::Binaries;

/// Packages of Debian in the machine: those of the service's test, and programs that trees use.
const PACKAGES: &str = "--include=systemd,systemd-sysv,dbus-user-session,libpam-systemd,procps,util-linux,\
                        podman,catatonit,netavark,uidmap,git,less,openssh-client,tmux";
const SUITE: &str = "bookworm";
/// Prepares the Debian in the directory `$1`, and writes it to the archive `$2`.
const SETUP: &str = include_str!("systemd-setup.sh");
/// Commands of the service's test.
const SERVICE: &str = include_str!("systemd.sh");
/// Commands that run trees. `@tests@` stands for options and words of their names.
const TREES: &str = include_str!("systemd-trees.sh");
/// Unit that runs the commands.
const UNIT: &str = "\
[Unit]
After=multi-user.target
[Service]
ExecStart=/root/test.sh
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS1
KillMode=process
TasksMax=infinity
";

/// Versions of the packages in the machine.
const VERSIONS: [&str; 2] = ["0.0.1", "9.9.9"];
/// Unit whose privileges the daemons of trees have.
const SERVICE_UNIT: &str = "reaper-user/packaging/reaper.service";
/// Trees that are left out, besides those that are too slow.
const LEFT_OUT: &[(&str, &str)] = &[(
    "enforce::daemon-in-a-pid-namespace",
    "the unit's daemon has the /proc of the host",
)];

/// Time without output after which the machine is killed.
const SILENCE: Duration = Duration::from_secs(900);
/// Limit of the time from `systemctl poweroff` to the end of the machine. systemd gives processes that ignore SIGTERM 90 s.
const POWEROFF: Duration = Duration::from_secs(60);

/// Tests the service, with a development build in two packages.
///
/// # Errors
/// A check failed, or the machine cannot be built or does not finish.
pub fn service(dir: &Path) -> Result<()> {
    let debs = dist::debs(&dir.join("debs"), &VERSIONS)?;
    let places = ["/root/old.deb", "/root/new.deb"].map(Path::new);
    let files: Vec<_> = debs.iter().map(PathBuf::as_path).zip(places).collect();
    test(dir, SERVICE, &files)
}

/// Runs the trees whose names contain one of `names`.
///
/// # Errors
/// A tree failed, or the machine cannot be built or does not finish.
pub fn trees(dir: &Path, binaries: &Binaries, names: &[String]) -> Result<()> {
    let mut tests = names.to_vec();
    let is_meant = |test: &str| names.iter().any(|name| test.contains(name));
    let left_out = machine::EMULATED.iter().chain(LEFT_OUT);
    for (test, why) in left_out.filter(|(test, _)| is_meant(test)) {
        say(format_args!("left out: {test}: {why}"));
        tests.push(format!("--skip={test}"));
    }
    // Paths below the workspace are compiled into the tests.
    let [object, unit] = [OBJECT, SERVICE_UNIT].map(|path| workspace().join(path));
    let reaper = binaries.reaper.as_path();
    let files = [
        (binaries.real.path(), Path::new("/root/real")),
        (reaper, reaper),
        (&object, &object),
        (&unit, Path::new("/root/reaper.service")),
    ];
    test(dir, &TREES.replace("@tests@", &tests.join(" ")), &files)
}

/// Boots a machine that has these files of this host, and runs a script there.
fn test(dir: &Path, script: &str, files: &[(&Path, &Path)]) -> Result<()> {
    let wanted = [RECENT.to_owned()];
    let (kernels, missing) = kernel::get_all(&wanted, dir, Arch::of_host(), false);
    let Some(kernel) = kernels.first() else {
        bail!("kernel {RECENT} is not available: {missing:?}");
    };
    machine::install_qemu(Arch::of_host())?;
    let debian = debian(dir)?;
    let own = dir.join("systemd-own.cpio");
    let mut archive = Archive::create(&own)?;
    let mut add =
        |place: &str, mode, text: &str| archive.file(Path::new(place), mode, text.as_bytes());
    add("/root/test.sh", 0o755, script)?;
    add("/etc/systemd/system/test.service", 0o644, UNIT)?;
    for (file, place) in files {
        archive.copy(file, place)?;
    }
    archive.finish()?;
    // The kernel unpacks one archive after the other.
    let initramfs = dir.join("systemd-all.cpio");
    let mut all = fs::File::create(&initramfs).with_context(|| initramfs.display().to_string())?;
    for part in [debian, own] {
        let mut part = fs::File::open(&part).with_context(|| part.display().to_string())?;
        io::copy(&mut part, &mut all)?;
    }
    let log = dir.join("console-systemd.log");
    boot(kernel, &initramfs, &log).with_context(|| tail(&log))
}

/// Returns the archive of a Debian, which is built once.
fn debian(dir: &Path) -> Result<PathBuf> {
    let [root, archive, version] =
        ["systemd", "systemd.cpio", "systemd.version"].map(|name| dir.join(name));
    let wanted = format!("{SUITE} {PACKAGES}\n{SETUP}");
    if fs::read_to_string(&version).is_ok_and(|version| version == wanted) {
        return Ok(archive);
    }
    for program in ["mmdebstrap", "cpio"] {
        if find_program(program).is_none() {
            install(&[program], "the machine with systemd is built with it")?;
        }
    }
    say("building a Debian with systemd (about 2 min)");
    run(as_root("rm")?.args(["-rf", "--one-file-system"]).arg(&root))?;
    let words = [
        "--quiet",
        "--mode=root",
        "--variant=minbase",
        PACKAGES,
        SUITE,
    ];
    run(as_root("mmdebstrap")?.args(words).arg(&root))?;
    run(as_root("sh")?
        .args(["-c", SETUP, "sh"])
        .args([&root, &archive]))?;
    // Written last: an archive with this file is complete.
    fs::write(&version, wanted).with_context(|| version.display().to_string())?;
    Ok(archive)
}

/// Boots the machine, reads its report, and checks that it powers off in time.
fn boot(kernel: &Kernel, initramfs: &Path, log: &Path) -> Result<()> {
    let mut qemu = machine::qemu(kernel, initramfs, log);
    let arguments = machine::arguments(kernel.arch) + " systemd.log_target=console";
    qemu.args(["-accel", machine::EMULATION.option, "-append", &arguments]);
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
