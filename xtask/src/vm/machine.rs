//! A virtual machine that runs the tests and is gone.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::kernel::Kernel;
use super::report::{LEFT_OUT, Run};
use crate::shell::{find_program, line, say};

pub const QEMU: &str = "qemu-system-x86_64";

/// As much as ten thousand processes need, which one of the tests has.
const MEMORY: &str = "3G";

/// A test gives up by itself long before; what is silent for so long is hung.
const SILENCE: Duration = Duration::from_secs(900);
const ALL: Duration = Duration::from_secs(5400);

/// KVM is there on many machines where it does not work.
const FIRST_WORD: Duration = Duration::from_secs(20);

/// How much of the console is shown when the tests do not come to their end.
const TAIL: usize = 40;

/// Tests that are not run in an emulated machine, because what they ask of it is speed: name and reason.
pub const EMULATED: &[(&str, &str)] = &[
    ("soak::ten-thousand-children", LIFETIME),
    ("enforce::two-threads-give-away", LIFETIME),
    (
        "enforce::recycled-pid",
        "an emulated machine hardly ever gives a pid away again within a clock tick of 10 ms",
    ),
];

const LIFETIME: &str = "so many processes take an emulated machine longer than the 180 s after which the tests' \
                        processes end by themselves";

/// How a processor is made, and how many times longer the tests wait on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Accelerator {
    option: &'static str,
    slowdown: u32,
}

const KVM: Accelerator = Accelerator {
    option: "kvm",
    slowdown: 2,
};
const EMULATION: Accelerator = Accelerator {
    option: "tcg,thread=multi",
    slowdown: 10,
};

#[derive(Clone)]
pub struct Machine<'a> {
    root: PathBuf,
    /// Tests with one of these words in their name are run; all if there is none.
    names: &'a [String],
    /// Whether tests are run that are left out where processors are emulated.
    all: bool,
    accelerator: Accelerator,
}

impl Machine<'_> {
    pub fn new(root: PathBuf, names: &[String], all: bool) -> Machine<'_> {
        let kvm = File::options().read(true).write(true).open("/dev/kvm");
        Machine {
            root,
            names,
            all,
            accelerator: if kvm.is_ok() { KVM } else { EMULATION },
        }
    }

    /// Runs the tests on one kernel, whose console goes to the file `log`.
    ///
    /// # Errors
    /// QEMU cannot be started.
    pub fn run(&mut self, kernel: &Kernel, log: &Path) -> Result<Run> {
        let mut run = self.boot(kernel, log)?;
        if self.accelerator == KVM && run.release.is_none() {
            say("KVM cannot be used here, so processors are emulated, which is slow");
            self.accelerator = EMULATION;
            run = self.boot(kernel, log)?;
        }
        if let Some(trouble) = &run.trouble {
            say(format_args!(
                "{}: {trouble}; its console, {}, ends with:",
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
        run.trouble = self.listen(&mut qemu, &mut run);
        // It has powered itself off, or is to be gone.
        let _ = qemu.kill();
        qemu.wait().context("waiting for QEMU")?;
        run.trouble = run.trouble.take().or_else(|| run.missing());
        run.took = began.elapsed();
        Ok(run)
    }

    /// Takes in the machine's report to its end; tells what was wrong if that does not come.
    fn listen(&self, qemu: &mut Child, run: &mut Run) -> Option<String> {
        let report = qemu.stdout.take()?;
        let (sender, lines) = channel();
        // Ends with the report, which ends with QEMU.
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
                    if let Some(shown) = run.take(String::from_utf8_lossy(&line).trim()) {
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
        let mut command = match find_program("setpriv") {
            // So that it does not outlive this program, whatever ends that.
            Some(setpriv) => {
                let mut command = Command::new(setpriv);
                command.args(["--pdeathsig", "KILL", QEMU]);
                command
            }
            None => Command::new(QEMU),
        };
        command
            .args(["-nodefaults", "-no-reboot", "-display", "none"])
            .args(["-machine", "q35", "-cpu", "max", "-smp", "2", "-m", MEMORY])
            .args(["-accel", self.accelerator.option])
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(&self.root)
            .arg("-append")
            .arg(self.kernel_arguments())
            // The console, and what the tests report.
            .arg("-serial")
            .arg(format!("file:{}", log.display()))
            .args(["-serial", "stdio"]);
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

    /// What stands before `--` and is not known to the kernel is the init's environment, what stands behind it its
    /// arguments.
    fn kernel_arguments(&self) -> String {
        let mut tests = vec!["--format=json".to_owned(), "--test-threads=1".to_owned()];
        tests.extend(self.left_out().map(|test| format!("--skip={test}")));
        tests.extend(self.names.iter().cloned());
        format!(
            "console=ttyS0 quiet panic=-1 rdinit=/init CI=true REAPER_TEST_SLOWDOWN={} -- init {}",
            self.accelerator.slowdown,
            tests.join(" ")
        )
    }

    /// Tests that are not run of those that are meant.
    fn left_out(&self) -> impl Iterator<Item = &'static str> {
        let is_emulated = self.accelerator == EMULATION && !self.all;
        let is_meant = |test: &&str| {
            self.names.is_empty() || self.names.iter().any(|name| test.contains(name))
        };
        let tests = EMULATED.iter().map(|(test, _)| *test);
        tests.filter(move |test| is_emulated && is_meant(test))
    }
}

/// The end of a console.
fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}
