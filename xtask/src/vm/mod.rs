//! `cargo xtask vm`: the tests of real process trees on other kernels, each in a virtual machine.
//!
//! In the machine is nothing but the kernel, the test binary as its init (`tests/init.rs`), `reaper`, and the few
//! programs that tests drive. It is emulated where KVM cannot be used, which is slow and otherwise the same.

mod cpio;
mod debian;
mod kernel;
mod machine;
mod report;
mod root;
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::shell::{find_program, install, say, target_dir};
use crate::test::Binaries;
use kernel::Kernel;
use machine::Machine;
use report::{LEFT_OUT, Run};

const EXAMPLES: &str = "\
Examples:
  cargo xtask vm                          every usual kernel that can be had, every test
  cargo xtask vm 5.10 6.12                these kernels
  cargo xtask vm 6.1 --filter enforce::   only the tests with this in their name
  cargo xtask vm ./vmlinuz-6.5.0          a kernel of your own
  cargo xtask vm --list                   which kernels there are

The newest release of a version is taken from Debian's packages and kept in target/vm. A kernel of your own needs
compiled in what the tests need: BPF with BTF, cgroups, devtmpfs, two serial ports. A kernel that cannot be had is
named, and fails only those who asked for it.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Only these: versions as in `6.1`, `newest`, or paths of a vmlinuz
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Only the tests whose name contains this; may be given several times
    #[arg(long, value_name = "NAME")]
    filter: Vec<String>,
    /// Also the tests that are left out where processors are emulated
    #[arg(long)]
    all: bool,
    /// List the kernels that there are, and run nothing
    #[arg(long)]
    list: bool,
    /// Fetch again what was fetched before, should there be a newer release
    #[arg(long)]
    update: bool,
}

/// Kernels of `cargo xtask test` in CI: the oldest one, whose probes have a walk of their own, and the newest that is no
/// moving target.
const CI_KERNELS: &str = "5.10 6.16";

/// Trees of `cargo xtask test` in CI: those whose events or signals another kernel could report or handle otherwise. All
/// others run on the machine itself.
const CI_TREES: &str = "enforce::setsid enforce::short-lived-intermediates enforce::clone-parent enforce::stopped \
    enforce::fork-bomb enforce::leader-thread-first enforce::exec-from-a-thread enforce::segfault \
    enforce::subreaper-inside enforce::zombie-below enforce::namespace-init enforce::cgroup-scope enforce::other-uid";

impl Args {
    /// What `cargo xtask test` runs: a few trees on two kernels, or with `full` all trees on each usual one.
    pub fn of_tests(full: bool) -> Args {
        let owned = |names: &str| names.split_whitespace().map(str::to_owned).collect();
        Args {
            kernels: owned(if full { "" } else { CI_KERNELS }),
            filter: owned(if full { "enforce::" } else { CI_TREES }),
            all: false,
            list: false,
            update: false,
        }
    }
}

/// Boots the kernels, as many at a time as there are processors, and prints a table. Builds what runs there, unless it
/// has been built.
///
/// # Errors
/// A test failed or none was run, or a kernel cannot be had that was asked for by name.
pub fn vm(args: &Args, built: Option<&Binaries>) -> Result<()> {
    let dir = target_dir().join("vm");
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    if args.list {
        return kernel::list(&dir);
    }
    let usual = kernel::USUAL.map(str::to_owned);
    let by_name = !args.kernels.is_empty();
    let wanted: &[String] = if by_name { &args.kernels } else { &usual };

    say("1/3 kernels, from Debian's packages");
    let (kernels, missing) = kernel::get_all(wanted, &dir, args.update);
    say("2/3 what is in the machine: the tests as init, reaper, and programs that tests drive");
    if find_program(machine::QEMU).is_none() {
        install(
            &["qemu-system-x86", "seabios"],
            "other kernels are run in virtual machines",
        )?;
    }
    let root = dir.join("root.cpio");
    match built {
        Some(binaries) => root::build(&root, binaries)?,
        None => root::build(&root, &Binaries::build()?)?,
    }
    say("3/3 real process trees on each kernel");
    let machine = Machine::new(root, &args.filter, args.all);
    let runs = run_all(&machine, &kernels, &dir)?;

    table::print(&runs);
    let left_out: BTreeSet<&String> = runs.iter().flat_map(|run| run.named(LEFT_OUT)).collect();
    for test in &left_out {
        let mut emulated = machine::EMULATED.iter();
        let why = emulated.find(|(name, _)| name == test);
        let why = why.map_or("it ignores itself", |(_, why)| why);
        println!("left out: {test}: {why}");
    }
    for (name, why) in &missing {
        println!("left out: kernel {name}: {why}");
    }
    let count = |outcome| runs.iter().map(|run| run.named(outcome).count()).sum();
    let (passed, failed): (usize, usize) = (count("ok"), count("failed"));
    if failed > 0 {
        println!("what the tests said: {}/console-*.log", dir.display());
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
        "{failed} tests failed, {broken} machines did not come to their end"
    );
    ensure!(passed > 0, "no test was run");
    ensure!(
        !by_name || missing.is_empty(),
        "not every kernel that was asked for can be had"
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
