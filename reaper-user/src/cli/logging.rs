//! Log of the program on standard error.

use std::fmt;
use std::io::{self, IsTerminal as _};

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::export;
use reaper_host::sys;

/// Logs warnings and errors to stderr, with `probes` also the messages of the probes.
pub(super) fn log_to_stderr(probes: bool) {
    let level = if probes {
        LevelFilter::TRACE
    } else {
        LevelFilter::OFF
    };
    let wanted = Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("reaper_ebpf", level);
    let for_journal = export::journald::is_journal(io::stderr());
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(export::MakeLog { for_journal })
        .with_target(false)
        .with_ansi(export::colors_on_stderr());
    let log = tracing_subscriber::registry().with(wanted);
    match for_journal {
        true => log.with(lines.with_level(false).without_time()).init(),
        false if io::stderr().is_terminal() => log.with(lines.with_timer(TimeOfDay)).init(),
        false => log.with(lines).init(),
    }
}

/// Local time of day, as in the lines of the daemon.
struct TimeOfDay;

impl FormatTime for TimeOfDay {
    fn format_time(&self, out: &mut Writer<'_>) -> fmt::Result {
        write!(out, "{}", export::time_of_day_in_seconds(sys::boot_time()))
    }
}
