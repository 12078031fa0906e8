//! `reaper status`

use std::fmt::Write;

use bytesize::ByteSize;

use super::client::{BOLD, client, print, span};
use super::show::count;
use super::{Failure, ServiceArgs};
use crate::api::Status;
use crate::export::{FreedMemory, printable};

pub(super) fn run(asking: &ServiceArgs) -> Result<(), Failure> {
    print(asking, &client(asking).get("/v1/status")?, table)
}

fn table(status: Status) -> String {
    let scope = match status.scope.as_slice() {
        [] => "the whole host".to_owned(),
        scope => scope.join(", "),
    };
    let mut rows = vec![
        (
            "service",
            format!("reaper {}, pid {}", status.version, status.pid),
        ),
        ("mode", status.mode.clone()),
    ];
    rows.extend(status.mode_reason.iter().map(|why| ("", why.clone())));
    rows.push(("watches", format!("{scope}, through {}", status.source)));
    rows.extend(status.rejected_sources.iter().map(|why| ("", why.clone())));
    rows.extend([
        (
            "since",
            format!("{} ({})", status.since, span(status.uptime_s)),
        ),
        ("processes", format!("{} known", status.processes)),
        (
            "sessions",
            format!(
                "{} open, {} since the start",
                status.sessions_open, status.sessions
            ),
        ),
        (
            "done",
            format!(
                "{} reaped, {} failed, {} signals",
                status.reaped, status.failed, status.signals
            ),
        ),
    ]);
    if status.kept > 0 {
        let kept = count(status.kept, "process", "processes");
        let what = format!("{kept} whose agent is gone: `reaper tree` says why");
        rows.push(("kept", what));
    }
    rows.push(("given back", given_back(&status.memory)));
    if status.zombies > 0 {
        let what = format!(
            "{}, not waited for by their parents: they hold no memory",
            status.zombies
        );
        rows.push(("zombies", what));
    }
    if status.mode == "observe" {
        let would = format!("{} processes", status.would_have_reaped);
        rows.push(("would have reaped", would));
    }
    rows.push((
        "events",
        format!(
            "{} read, {} lost, {} gaps",
            status.events, status.lost, status.gaps
        ),
    ));
    if let Some(gap) = &status.gap {
        let what = format!("{gap}: nothing new is decided until it is made up for");
        rows.push(("gap", what));
    }
    let pinned = status
        .pin_dir
        .unwrap_or_else(|| "no: tracking ends with the service".into());
    rows.push(("pinned", pinned));
    let mut out = String::new();
    for (name, value) in rows {
        let _ = writeln!(out, "{BOLD}{name:<17}{BOLD:#}  {}", printable(&value, 500));
    }
    out
}

/// What those reaped had.
fn given_back(memory: &FreedMemory) -> String {
    let swap = match memory.swap {
        0 => String::new(),
        swap => format!(" and {} of swap", ByteSize::b(swap)),
    };
    let unread = match memory.unmeasured {
        0 => String::new(),
        unread => format!(", {unread} of them too quick to weigh"),
    };
    format!("{}{swap}{unread}", ByteSize::b(memory.rss))
}
