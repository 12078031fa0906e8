//! Virtual machine that runs the tests and powers off.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::kernel::Kernel;
use super::report::{LEFT_OUT, Run};
use crate::cross::Arch;
use crate::shell::{find_program, install, line, say};

/// Hardware that QEMU emulates for a processor.
struct Hardware {
    qemu: &'static str,
    /// Debian packages with QEMU.
    packages: &'static [&'static str],
    machine: &'static str,
    cpu: &'static str,
    /// Serial port for which the kernels have a driver.
    serial: &'static str,
    /// Arguments of its kernels.
    arguments: &'static str,
}

const PC: Hardware = Hardware {
    qemu: "qemu-system-x86_64",
    packages: &["qemu-system-x86", "seabios"],
    machine: "q35",
    cpu: "max",
    serial: "isa-serial",
    // An emulated timer may be too late for the kernel's check on a busy host.
    arguments: "no_timer_check",
};
const ARM: Hardware = Hardware {
    qemu: "qemu-system-aarch64",
    packages: &["qemu-system-arm"],
    machine: "virt",
    // Signs pointers with a function that is quick to emulate.
    cpu: "max,pauth-impdef=on",
    serial: "pci-serial",
    arguments: "",
};

impl Hardware {
    fn of(arch: Arch) -> &'static Hardware {
        match arch {
            Arch::X86_64 => &PC,
            Arch::Aarch64 => &ARM,
        }
    }
}

/// Memory of the machine. One of the tests starts ten thousand processes.
const MEMORY: &str = "3G";

/// Time without output after which the machine is killed. Tests time out much earlier.
const SILENCE: Duration = Duration::from_secs(900);
/// Time limit for all tests.
const ALL: Duration = Duration::from_secs(5400);

/// Time limit for the first output with KVM, which many hosts have although it does not work.
const FIRST_WORD: Duration = Duration::from_secs(20);

/// Number of lines of the console that are printed if the tests do not finish.
const TAIL: usize = 40;

/// Tests that are too slow for an emulated machine: name and reason.
pub const EMULATED: &[(&str, &str)] = &[
    ("soak::ten-thousand-children", LIFETIME),
    ("enforce::two-threads-give-away", LIFETIME),
    (
        "enforce::recycled-pid",
        "an emulated machine hardly ever reuses a pid within a clock tick of 10 ms",
    ),
];

const LIFETIME: &str = "an emulated machine needs longer for so many processes than the 180 s after which they exit \
                        by themselves";

/// Accelerator of QEMU, and the factor for test time limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accelerator {
    pub option: &'static str,
    slowdown: u32,
}

const KVM: Accelerator = Accelerator {
    option: "kvm",
    slowdown: 2,
};
pub const EMULATION: Accelerator = Accelerator {
    option: "tcg,thread=multi",
    slowdown: 10,
};

#[derive(Clone)]
pub struct Machine<'a> {
    root: PathBuf,
    /// Words of which one must be in a test's name; empty for all tests.
    names: &'a [String],
    /// Whether to run the tests that are skipped on emulated processors.
    all: bool,
    accelerator: Accelerator,
}

impl Machine<'_> {
    pub fn new(arch: Arch, root: PathBuf, names: &[String], all: bool) -> Machine<'_> {
        let kvm = File::options().read(true).write(true).open("/dev/kvm");
        let has_kvm = arch.is_host() && kvm.is_ok();
        Machine {
            root,
            names,
            all,
            accelerator: if has_kvm { KVM } else { EMULATION },
        }
    }

    /// Runs the tests on one kernel and writes its console to the file `log`.
    ///
    /// # Errors
    /// QEMU cannot be started.
    pub fn run(&mut self, kernel: &Kernel, log: &Path) -> Result<Run> {
        let mut run = self.boot(kernel, log)?;
        if self.accelerator == KVM && run.release.is_none() {
            say("KVM does not work here: emulating processors, which is slow");
            self.accelerator = EMULATION;
            run = self.boot(kernel, log)?;
        }
        if let Some(trouble) = &run.trouble {
            say(format_args!(
                "{}: {trouble}; last lines of its console, {}:",
                kernel.name,
                log.display()
            ));
            println!("{}", tail(log));
        }
        Ok(run)
    }

    fn boot(&self, kernel: &Kernel, log: &Path) -> Result<Run> {
        let began = Instant::now();
        let mut run = Run {
            name: kernel.name.clone(),
            ..Run::default()
        };
        for test in self.left_out() {
            run.tests.insert(test.to_owned(), LEFT_OUT.to_owned());
        }
        let mut qemu = self.command(kernel, log);
        println!("$ {}", line(&qemu));
        let mut qemu = qemu.spawn().context("cannot start QEMU")?;
        run.trouble = self.read_report(&mut qemu, &mut run);
        // The machine has powered off, or must be stopped.
        let _ = qemu.kill();
        qemu.wait().context("waiting for QEMU")?;
        run.trouble = run.trouble.take().or_else(|| run.missing());
        run.took = began.elapsed();
        Ok(run)
    }

    /// Reads the report of the machine. Returns what was wrong if the report does not end.
    fn read_report(&self, qemu: &mut Child, run: &mut Run) -> Option<String> {
        let report = qemu.stdout.take()?;
        let (sender, lines) = channel();
        // The thread exits at the end of the report, at the latest with QEMU.
        std::thread::spawn(move || {
            for line in BufReader::new(report).split(b'\n').map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let end = Instant::now() + ALL;
        loop {
            let unsure = self.accelerator == KVM && run.release.is_none();
            let patience = if unsure { FIRST_WORD } else { SILENCE };
            match lines.recv_timeout(patience) {
                Ok(line) => {
                    if let Some(shown) = run.read_line(String::from_utf8_lossy(&line).trim()) {
                        println!("{shown}");
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {
                    return Some(format!("killed after {} s of silence", patience.as_secs()));
                }
            }
            if Instant::now() > end {
                return Some(format!("killed after {} s", ALL.as_secs()));
            }
        }
    }

    fn command(&self, kernel: &Kernel, log: &Path) -> Command {
        let mut command = qemu(kernel, &self.root, log);
        command
            .args(["-accel", self.accelerator.option])
            .arg("-append")
            .arg(self.kernel_arguments(kernel.arch));
        let errors = if self.accelerator == KVM {
            Stdio::null()
        } else {
            Stdio::inherit()
        };
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors);
        command
    }

    /// Returns the kernel command line. The kernel passes unknown variables before `--` to init as environment, and words
    /// after it as arguments.
    fn kernel_arguments(&self, arch: Arch) -> String {
        let mut tests = vec!["--format=json".to_owned(), "--test-threads=1".to_owned()];
        tests.extend(self.left_out().map(|test| format!("--skip={test}")));
        tests.extend(self.names.iter().cloned());
        format!(
            "{} quiet CI=true REAPER_TEST_SLOWDOWN={} -- init {}",
            arguments(arch),
            self.accelerator.slowdown,
            tests.join(" ")
        )
    }

    /// Returns the selected tests that are skipped.
    fn left_out(&self) -> impl Iterator<Item = &'static str> {
        let is_emulated = self.accelerator == EMULATION && !self.all;
        let is_meant = |test: &&str| {
            self.names.is_empty() || self.names.iter().any(|name| test.contains(name))
        };
        let tests = EMULATED.iter().map(|(test, _)| *test);
        tests.filter(move |test| is_emulated && is_meant(test))
    }
}

/// Installs QEMU, if it is missing.
///
/// # Errors
/// It cannot be installed.
pub fn install_qemu(arch: Arch) -> Result<()> {
    let hardware = Hardware::of(arch);
    match find_program(hardware.qemu) {
        Some(_) => Ok(()),
        None => install(hardware.packages, "other kernels run in virtual machines"),
    }
}

/// Returns the command of a machine, without accelerator and kernel arguments. Its console goes to the file `log`, and
/// its second serial line to stdout.
pub fn qemu(kernel: &Kernel, initramfs: &Path, log: &Path) -> Command {
    let hardware = Hardware::of(kernel.arch);
    let mut command = match find_program("setpriv") {
        // The kernel kills QEMU when this program exits.
        Some(setpriv) => {
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", "KILL", hardware.qemu]);
            command
        }
        None => Command::new(hardware.qemu),
    };
    command
        .args(["-nodefaults", "-no-reboot", "-display", "none"])
        .args(["-machine", hardware.machine, "-cpu", hardware.cpu])
        .args(["-smp", "2", "-m", MEMORY])
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(initramfs);
    // The console, and the report of the tests.
    let console = format!("file,id=console,path={}", log.display());
    for (name, backend) in [("console", &console[..]), ("report", "stdio,id=report")] {
        let device = format!("{},chardev={name}", hardware.serial);
        command.args(["-chardev", backend, "-device", &device]);
    }
    command
}

/// Returns the kernel arguments of every machine.
pub fn arguments(arch: Arch) -> String {
    let own = Hardware::of(arch).arguments;
    format!("console=ttyS0 panic=-1 rdinit=/init {own}")
}

/// Returns the last lines of a console.
pub fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}
