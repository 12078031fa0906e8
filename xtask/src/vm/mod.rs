//! `cargo xtask vm`: runs the tests with real process trees on other kernels and processors, each in a virtual machine.
//!
//! The machine contains only the kernel, the test binary as init (`tests/init.rs`), `reaper`, and the programs that tests
//! use. Without KVM, QEMU emulates it, which is slow.

mod cpio;
mod debian;
mod kernel;
mod machine;
mod report;
mod root;
mod systemd;
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::cross::Arch;
use crate::shell::{say, target_dir};
use crate::test::Binaries;
use kernel::Kernel;
use machine::Machine;
use report::{LEFT_OUT, Run};
use root::Programs;

const EXAMPLES: &str = "\
Examples:
  # All tests on all usual kernels
  cargo xtask vm
  # These kernels
  cargo xtask vm 5.10 6.12
  # Only tests with this word in their name
  cargo xtask vm 6.1 --filter enforce::
  # These tests on an emulated arm64
  cargo xtask vm --arch arm64 6.16 --filter enforce::
  # A kernel of your own
  cargo xtask vm ./vmlinuz-6.5.0
  # The service on a Debian with systemd
  cargo xtask vm --systemd
  # Trees there, with daemons that have the privileges of the service's unit
  cargo xtask vm --systemd --filter enforce::
  # List the available kernels
  cargo xtask vm --list

The command takes the newest release of a version from Debian's packages and keeps it in target/vm. A kernel of your own needs built-in BPF with BTF, cgroups, devtmpfs and two serial ports. A kernel that is not available is an error only if you name it.";

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Kernels: versions such as `6.1`, `newest`, or paths of a vmlinuz
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Run only tests whose name contains this; may be given several times
    #[arg(long, value_name = "NAME")]
    filter: Vec<String>,
    /// Processor of the machines [default: that of this machine]
    #[arg(long, value_enum)]
    arch: Option<Arch>,
    /// Also run the tests that are skipped on emulated processors
    #[arg(long)]
    all: bool,
    /// List the available kernels, and run nothing
    #[arg(long)]
    list: bool,
    /// Install the service on a Debian with systemd, and kill, restart, upgrade and remove it there. With --filter, run those tests
    /// there instead, with daemons that have the privileges of the service's unit
    #[arg(long, conflicts_with_all = ["kernels", "arch", "all", "list"])]
    systemd: bool,
    /// Download kernels again, in case there is a newer release
    #[arg(long)]
    update: bool,
}

/// Kernels of `cargo xtask test` in CI: the oldest one, for which the probes have separate code, and a recent fixed version.
const CI_KERNELS: [&str; 2] = ["5.10", RECENT];

/// Kernel of the machine with systemd, and of other processors.
const RECENT: &str = "6.16";

/// Tests of `cargo xtask test` in CI: those in which events or signals can depend on the kernel version. The others run on
/// the machine itself.
const CI_TREES: &str = "enforce::setsid enforce::short-lived-intermediates enforce::clone-parent enforce::stopped \
    enforce::fork-bomb enforce::leader-thread-first enforce::exec-from-a-thread enforce::segfault \
    enforce::subreaper-inside enforce::zombie-below enforce::namespace-init enforce::cgroup-scope enforce::other-uid";

/// Tests of `cargo xtask test --full` with the privileges of the service's unit: all trees, and services that stop, hand over
/// and resume with pins. Most other tests of `survival` fork too often for an emulated machine.
const UNIT_TREES: &str = "enforce:: survival::clean-stop-unpins survival::handed-over-in-escalation \
    survival::kernel-reap survival::leave-pinned survival::relaunch-while-down survival::stopped-in-escalation \
    survival::tree-kept-over-a-restart";

impl Args {
    /// Returns the arguments for a Debian with systemd: for the service's test, or with `trees` for trees with the
    /// privileges of its unit.
    pub fn of_systemd(trees: bool) -> Args {
        let trees = if trees { UNIT_TREES } else { "" };
        Args {
            filter: trees.split_whitespace().map(str::to_owned).collect(),
            systemd: true,
            ..Args::of_tests(true)
        }
    }

    /// Returns the arguments for the tests of CI on an emulated processor.
    pub fn of_processor(arch: Arch) -> Args {
        Args {
            kernels: vec![RECENT.to_owned()],
            arch: Some(arch),
            ..Args::of_tests(false)
        }
    }

    /// Returns the arguments for `cargo xtask test`: some tests on two kernels, or with `full` all on each usual kernel.
    pub fn of_tests(full: bool) -> Args {
        let kernels: &[&str] = if full { &[] } else { &CI_KERNELS };
        let trees = if full { "enforce::" } else { CI_TREES };
        Args {
            kernels: kernels.iter().copied().map(str::to_owned).collect(),
            filter: trees.split_whitespace().map(str::to_owned).collect(),
            arch: None,
            all: false,
            list: false,
            systemd: false,
            update: false,
        }
    }
}

/// Runs the tests on the kernels, as many at a time as there are processors, and prints a table. Builds the tests unless
/// `built` is given.
///
/// # Errors
/// A test failed, none was run, or a named kernel is not available.
pub fn vm(args: &Args, built: Option<&Binaries>) -> Result<()> {
    let arch = args.arch.unwrap_or(Arch::of_host());
    let mut dir = target_dir().join("vm");
    if !arch.is_host() {
        dir.push(arch.in_debian());
    }
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    if args.list {
        return kernel::list(&dir, arch);
    }
    if args.systemd {
        return match (built, &args.filter[..]) {
            (_, []) => systemd::service(&dir),
            (Some(built), names) => systemd::trees(&dir, built, names),
            (None, names) => systemd::trees(&dir, &Binaries::build()?, names),
        };
    }
    let usual = kernel::USUAL.map(str::to_owned);
    let by_name = !args.kernels.is_empty();
    let wanted: &[String] = if by_name { &args.kernels } else { &usual };

    say("1/3 getting kernels from Debian's packages");
    let (kernels, missing) = kernel::get_all(wanted, &dir, arch, args.update);
    say("2/3 building the root file system: tests as init, reaper, and programs that tests use");
    machine::install_qemu(arch)?;
    let root = dir.join("root.cpio");
    let programs = Programs::get(arch, &dir)?;
    match built.filter(|_| arch.is_host()) {
        Some(binaries) => root::build(&root, binaries, &programs)?,
        None => root::build(&root, &Binaries::build_for(arch)?, &programs)?,
    }
    say("3/3 running real process trees on each kernel");
    let machine = Machine::new(arch, root, &args.filter, args.all);
    let runs = run_all(&machine, &kernels, &dir)?;

    table::print(&runs);
    let left_out: BTreeSet<&String> = runs.iter().flat_map(|run| run.named(LEFT_OUT)).collect();
    for test in &left_out {
        let mut emulated = machine::EMULATED.iter();
        let why = emulated.find(|(name, _)| name == test);
        let why = why.map_or("ignored by the test binary", |(_, why)| why);
        println!("left out: {test}: {why}");
    }
    for (name, why) in &missing {
        println!("left out: kernel {name}: {why}");
    }
    let count = |outcome| runs.iter().map(|run| run.named(outcome).count()).sum();
    let (passed, failed): (usize, usize) = (count("ok"), count("failed"));
    if failed > 0 {
        println!("output of the tests: {}/console-*.log", dir.display());
    }
    let broken = runs.iter().filter(|run| run.trouble.is_some()).count();
    println!(
        "{passed} passed, {failed} failed, {} left out, on {} kernels; {} kernels left out",
        count(LEFT_OUT),
        runs.len(),
        missing.len()
    );
    ensure!(
        failed == 0 && broken == 0,
        "{failed} tests failed, {broken} machines did not finish"
    );
    ensure!(passed > 0, "no test was run");
    ensure!(
        !by_name || missing.is_empty(),
        "a requested kernel is not available"
    );
    Ok(())
}

/// Runs the tests on each kernel, and returns the results in the order of the kernels.
fn run_all(machine: &Machine, kernels: &[Kernel], dir: &Path) -> Result<Vec<Run>> {
    let at_once = std::thread::available_parallelism().map_or(1, usize::from);
    let mut runs = Vec::new();
    for some in kernels.chunks(at_once) {
        let results: Vec<Result<Run>> = std::thread::scope(|scope| {
            let mut running = Vec::new();
            for kernel in some {
                let mut machine = machine.clone();
                let log = dir.join(format!("console-{}.log", kernel.name));
                running.push(scope.spawn(move || machine.run(kernel, &log)));
            }
            let results = running.into_iter().map(|thread| thread.join());
            results
                .map(|result| result.unwrap_or_else(|_| bail!("the machine's thread panicked")))
                .collect()
        });
        for run in results {
            runs.push(run?);
        }
    }
    Ok(runs)
}
