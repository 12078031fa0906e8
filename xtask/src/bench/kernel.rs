//! Time that the probes take in the kernel, by its own count.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::daemon::{Daemon, Setup};
use super::host::{field, read};
use super::load::{Load, LoadPlacement};
use super::raw::bpf::Empty;
use super::stats::median;
use super::table::Row;
use super::undo::Undo;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// In the order in which reaper loads them.
const PROBES: [&str; 3] = ["a fork", "an exec", "an exit"];
const TRACEPOINTS: [&CStr; PROBES.len()] = [
    c"sched_process_fork",
    c"sched_process_exec",
    c"sched_process_exit",
];
/// The programs besides: the one that lists processes, and the probe of moves between cgroups.
const OTHERS: usize = 2;
/// The figures are medians over so many stretches, so that a few interruptions do not show.
const STRETCHES: u64 = 20;

#[derive(Clone, Copy, Default)]
struct Runs {
    ns: u64,
    count: u64,
}

type All = [Runs; PROBES.len()];

/// Whose forks, execs and exits; the setting `events`, and the goal for their sum in ns.
struct Case {
    who: &'static str,
    place: LoadPlacement,
    events: &'static str,
    goal: Option<f64>,
}

const CASES: [Case; 3] = [
    Case {
        who: "foreign",
        place: LoadPlacement::Outside,
        events: "agents",
        goal: Some(500.0),
    },
    Case {
        who: "foreign, events = \"all\"",
        place: LoadPlacement::Outside,
        events: "all",
        goal: Some(1500.0),
    },
    Case {
        who: "member",
        place: LoadPlacement::Inside,
        events: "agents",
        goal: None,
    },
];

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let _counting = counting()?;
    let mut rows = vec![of_nothing(bench)?];
    for case in CASES {
        rows.extend(one(bench, &case)?);
    }
    Ok(rows)
}

fn one(bench: &Bench, case: &Case) -> Result<Vec<Row>> {
    let mut load = Load::start(bench, case.place)?;
    // The whole host, which is where the names of programs matter; enforcing, since the probes that can
    // signal are not those that observe. There is one agent, and that is the bench's own.
    let setup = Setup::new(bench, "enforce").named();
    let setup = setup.set(&format!("events = \"{}\"", case.events));
    let daemon = setup.sieved().start()?;
    daemon.settle();
    let (each, others) = stretches(bench, &mut load, || held(&daemon))?;
    daemon.stop()?;

    let Case { who, goal, .. } = case;
    let mut rows = Vec::new();
    for (probe, ns) in PROBES.iter().zip(each) {
        let note = match others {
            0..5 => String::new(),
            _ => format!("{others} % more runs than the load makes: others were at work"),
        };
        rows.push(Row::new(format!("kernel time for {probe}, {who}"), ns, "ns").note(note));
    }
    let what = format!("kernel time for fork + exec + exit, {who}");
    let sum = Row::new(what, each.iter().sum(), "ns").note(note(bench));
    rows.push(match goal {
        Some(goal) => sum.at_most(*goal),
        None => sum,
    });
    Ok(rows)
}

/// What the kernel counts for programs that do nothing in the same places.
fn of_nothing(bench: &Bench) -> Result<Row> {
    let mut load = Load::start(bench, LoadPlacement::Outside)?;
    let empty = TRACEPOINTS.map(Empty::at).into_iter();
    let empty: Vec<_> = empty.collect::<Result<_, _>>().context("cannot trace")?;
    let (each, _) = stretches(bench, &mut load, || {
        let mut all = All::default();
        for (runs, empty) in all.iter_mut().zip(&empty) {
            let path = format!("/proc/self/fdinfo/{}", empty.program.as_raw_fd());
            (_, *runs) = program(&read(path)?).context("the kernel does not count")?;
        }
        Ok(all)
    })?;
    let what = "kernel time for fork + exec + exit, of the measuring alone";
    let note = "programs that do nothing; not taken off the figures below";
    Ok(Row::new(what, each.iter().sum(), "ns").note(note))
}

fn note(bench: &Bench) -> String {
    let n = STRETCHES * stretch(bench);
    format!("{n} times /bin/true, BPF run stats, median of {STRETCHES} stretches")
}

fn stretch(bench: &Bench) -> u64 {
    bench.pick(500, 100)
}

/// Time of a run of each program, and how many percent more of them there were than the load made.
fn stretches(
    bench: &Bench,
    load: &mut Load,
    runs: impl Fn() -> Result<All>,
) -> Result<([f64; PROBES.len()], u64)> {
    let n = stretch(bench);
    // Caches have to find their way.
    load.request(&format!("spawn {n}"))?;
    let mut each: [Vec<f64>; PROBES.len()] = Default::default();
    let mut more = 0;
    for _ in 0..STRETCHES {
        let before = runs()?;
        load.request(&format!("spawn {n}"))?;
        let after = runs()?;
        for ((each, before), after) in each.iter_mut().zip(before).zip(after) {
            let count = after.count - before.count;
            more += count.saturating_sub(n);
            each.push((after.ns - before.ns) as f64 / count.max(1) as f64);
        }
    }
    let runs = STRETCHES * n * PROBES.len() as u64;
    Ok((each.map(|each| median(&each)), more * 100 / runs))
}

/// Has the kernel count, until this is dropped.
fn counting() -> Result<Undo> {
    let before = read(SWITCH)?;
    fs::write(SWITCH, "1").with_context(|| format!("cannot write {SWITCH}"))?;
    Ok(Undo::later(move || {
        let _ = fs::write(SWITCH, before.trim());
    }))
}

/// How often and how long the probes ran that a daemon holds.
fn held(daemon: &Daemon) -> Result<All> {
    let pid = daemon.pid();
    let mut programs = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo")).context("reaper is gone")? {
        // A descriptor may be closed meanwhile.
        let info = fs::read_to_string(entry?.path()).unwrap_or_default();
        programs.extend(program(&info));
    }
    let wanted = PROBES.len() + OTHERS;
    let found = programs.len();
    ensure!(
        found == wanted,
        "reaper holds {found} programs, not {wanted}"
    );
    // The one that lists processes is loaded first.
    let mut programs = programs.into_values().skip(1);
    Ok(std::array::from_fn(|_| programs.next().unwrap_or_default()))
}

/// A program's number and its runs, from what /proc tells of a descriptor.
fn program(info: &str) -> Option<(u64, Runs)> {
    let number = |key| field(info, key).ok();
    let runs = Runs {
        ns: number("run_time_ns")?,
        count: number("run_cnt")?,
    };
    Some((number("prog_id")?, runs))
}
