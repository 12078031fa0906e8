//! How much slower processes are made while somebody watches.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::daemon::{Daemon, Setup};
use super::load::{Load, LoadPlacement};
use super::stats::{median, quantile};
use super::table::Row;
use super::{Bench, raw, wait};
use crate::shell::find_program;

/// Prints what forkstat prints, as far as the three tracepoints have it.
const SCRIPT: &str = r#"
tracepoint:sched:sched_process_fork { printf("%d fork %s %d\n", pid, comm, args->child_pid); }
tracepoint:sched:sched_process_exec { printf("%d exec %s\n", pid, str(args->filename)); }
tracepoint:sched:sched_process_exit { printf("%d exit %s\n", pid, comm); }
"#;

/// Who watches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tracer {
    Reaper(LoadPlacement),
    Forkstat,
    Bpftrace,
}

/// What is timed, how often at a time, and the goal.
const WORK: [(&str, &str, u64, Option<f64>); 2] = [
    ("spawn + exec + wait of /bin/true", "spawn", 200, Some(2.0)),
    ("vfork + exit + wait", "vfork", 1500, None),
];

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let tracers = [
        Tracer::Reaper(LoadPlacement::Outside),
        Tracer::Reaper(LoadPlacement::Inside),
        Tracer::Forkstat,
        Tracer::Bpftrace,
    ];
    let (present, absent): (Vec<_>, Vec<_>) = tracers.into_iter().partition(|t| t.is_installed());
    let mut ratios = vec![[Vec::new(), Vec::new()]; present.len()];
    let mut base = [Vec::new(), Vec::new()];
    for _ in 0..bench.pick(25, 5) {
        for (tracer, ratios) in present.iter().zip(&mut ratios) {
            round(bench, *tracer, ratios, &mut base)?;
        }
    }
    let mut rows = Vec::new();
    for (n, (what, _, _, goal)) in WORK.iter().enumerate() {
        let alone = Row::new(
            format!("{what}, nobody watching"),
            median(&base[n]) / 1e3,
            "µs",
        );
        rows.push(alone.note("the load keeps to one CPU"));
        for (tracer, ratios) in present.iter().zip(&ratios) {
            let slower = |part| (quantile(&ratios[n], part) - 1.0) * 100.0;
            let note = format!(
                "{} rounds between two without; half of them {:.1} to {:.1} %",
                ratios[n].len(),
                slower(0.25),
                slower(0.75)
            );
            let row = Row::new(
                format!("{what}, slower with {}", tracer.name()),
                slower(0.5),
                "%",
            )
            .note(note);
            rows.push(match goal {
                Some(goal) if matches!(tracer, Tracer::Reaper(_)) => row.at_most(*goal),
                _ => row,
            });
        }
        let missing = absent
            .iter()
            .map(|t| format!("{what}, slower with {}", t.name()));
        rows.extend(missing.map(|what| Row::missing(what, "not installed")));
    }
    Ok(rows)
}

/// Without, with, and without again.
fn round(
    bench: &Bench,
    tracer: Tracer,
    ratios: &mut [Vec<f64>; 2],
    base: &mut [Vec<f64>; 2],
) -> Result<()> {
    let place = match tracer {
        Tracer::Reaper(place) => place,
        _ => LoadPlacement::Outside,
    };
    let mut load = Load::start(bench, place)?;
    load.request("pin")?;
    let before = work(&mut load)?;
    let running = tracer.start(bench, &mut load)?;
    let with = work(&mut load)?;
    drop(running);
    let after = work(&mut load)?;
    for n in 0..WORK.len() {
        let without = f64::midpoint(before[n], after[n]);
        ratios[n].push(with[n] / without);
        base[n].push(without);
    }
    Ok(())
}

/// Nanoseconds for each kind of work, once.
fn work(load: &mut Load) -> Result<[f64; WORK.len()]> {
    // Starting and ending a tracer has the kernel busy for a while yet.
    std::thread::sleep(Duration::from_millis(150));
    let mut each = [0.0; WORK.len()];
    for (each, (_, order, n, _)) in each.iter_mut().zip(WORK) {
        // Caches and the CPU's clock have to find their way again.
        load.request(&format!("{order} {}", n / 10))?;
        *each = load.request(&format!("{order} {n}"))? as f64 / n as f64;
    }
    Ok(each)
}

/// A tracer at work; it ends when this is dropped.
#[expect(dead_code, reason = "held for what their drops do")]
enum Running {
    Reaper(Daemon),
    Other(Other),
}

struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(self.0.id().cast_signed()),
            nix::sys::signal::Signal::SIGINT,
        );
        if !wait::ended(&mut self.0) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

impl Tracer {
    fn name(self) -> String {
        match self {
            Tracer::Reaper(place) => format!("reaper, {}", place.name()),
            Tracer::Forkstat => "forkstat".to_owned(),
            Tracer::Bpftrace => "bpftrace".to_owned(),
        }
    }

    fn is_installed(self) -> bool {
        match self {
            Tracer::Reaper(_) => true,
            Tracer::Forkstat => find_program("forkstat").is_some(),
            Tracer::Bpftrace => find_program("bpftrace").is_some(),
        }
    }

    fn start(self, bench: &Bench, load: &mut Load) -> Result<Running> {
        let (program, arguments): (_, &[&str]) = match self {
            Tracer::Reaper(_) => {
                // The whole host: the load is nobody's, or an agent and what descends from it.
                let setup = Setup::new(bench, "enforce").named();
                return Ok(Running::Reaper(setup.start()?));
            }
            Tracer::Forkstat => ("forkstat", &[]),
            Tracer::Bpftrace => ("bpftrace", &["-e", SCRIPT]),
        };
        let output = bench.dir.join("tracer");
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        command.stdout(File::create(&output)?).stderr(Stdio::null());
        raw::end_with_us(&mut command);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        let running = Other(child);
        // bpftrace shows what it sees at once; forkstat writes when much has gathered, but opens its socket
        // once it is set up.
        let watches = || match self {
            Tracer::Forkstat => has_socket(running.0.id()),
            _ => {
                load.request("spawn 1").is_ok()
                    && std::fs::read_to_string(&output).is_ok_and(|text| text.contains("/bin/true"))
            }
        };
        ensure!(wait::until(watches), "{program} does not come to watch");
        Ok(Running::Other(running))
    }
}

fn has_socket(pid: u32) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    let targets = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    targets
        .into_iter()
        .any(|target| target.to_string_lossy().starts_with("socket:"))
}
