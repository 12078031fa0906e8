//! `reaper status`: shows what the service watches, has done and has missed.

use super::client::{BOLD, client, print};
use super::hint::hints;
use super::show::{count, memory_text, row, time, width, wrap};
use super::{Failure, ServiceArgs};
use crate::api::Status;
use crate::export::{
    self, FreedMemory, gap_text, printable, unmeasured_count, without_error_codes,
};

/// Width of the column with the names, in characters.
const NAMES: usize = 11;
/// Longest value, in characters.
const VALUE_MAX: usize = 500;

pub(super) fn run(service: &ServiceArgs) -> Result<(), Failure> {
    let response = client(service).get("/v1/status")?;
    print(service, &response, |status: Status| table(&status, width()))
}

fn table(status: &Status, width: Option<usize>) -> String {
    let mut out = String::new();
    for line in wrap(&status.summary(), 0, width).lines() {
        out += &format!("{BOLD}{line}{BOLD:#}\n");
    }
    out.push('\n');
    for (name, value) in rows(status) {
        let value = printable(&without_error_codes(&value), VALUE_MAX);
        out += &row(name, &value, NAMES, width);
    }
    out
}

fn rows(status: &Status) -> Vec<(&'static str, String)> {
    let Status {
        version,
        pid,
        since,
        ..
    } = status;
    let up = time(status.uptime_s);
    let scope = match status.scope.as_slice() {
        [] => "the whole host".to_owned(),
        scope => export::scope_text(scope),
    };
    let mode = match &*status.mode {
        "observe" => "observe: decisions are made, but no signals are sent",
        "enforce" => "enforce: what agents leave behind is reaped",
        other => other,
    };
    let mut rows = vec![
        ("service", format!("reaper {version}, pid {pid}")),
        ("started", format!("{up} ago ({since})")),
        ("mode", mode.to_owned()),
    ];
    rows.extend(status.mode_reason.iter().map(|why| ("", why.clone())));
    rows.push(("config", status.config.to_string()));
    if let Some(refused) = &status.config_refused {
        let (ago, since) = (time(refused.age_s), &refused.since);
        let text = format!(
            "the file has been refused for {ago} (since {since}), and the config from before is in force"
        );
        rows.push(("", text));
        rows.extend(refused.error.iter().map(|error| ("", error.clone())));
    }
    if !status.config_waiting.is_empty() {
        let settings = status.config_waiting.join(", ");
        rows.push((
            "",
            format!("these settings wait for a restart of the service: {settings}"),
        ));
    }
    rows.push(("scope", scope));
    rows.push(("source", status.source.clone()));
    rows.extend(status.rejected_sources.iter().map(|why| ("", why.clone())));
    if let Some(gap) = &status.gap {
        rows.push(("gap", gap_text(gap).to_owned()));
    }
    rows.extend([
        (
            "sessions",
            format!(
                "{} open, {} since the start",
                status.sessions_open, status.sessions
            ),
        ),
        ("processes", format!("{} known", status.processes)),
    ]);
    // A number of the present, unlike those below: a kept process that exits is no longer one of them.
    let kept = count(status.kept, "process", "processes");
    let kept = format!("{kept} whose agent has exited");
    rows.push(match status.kept {
        0 => ("kept", kept),
        _ => ("kept", hints(&format!("{kept}; `reaper tree` shows why"))),
    });
    if status.zombies > 0 {
        let text = format!(
            "{}, which their parents have not waited for; they hold no memory",
            status.zombies
        );
        rows.push(("zombies", text));
    }
    let reaped = format!(
        "{} ended, {} failed, {} sent",
        status.reaped,
        status.failed,
        count(status.signals, "signal", "signals")
    );
    rows.push(("reaped", reaped));
    if status.mode == "observe" {
        rows.push((
            "",
            format!("{} would have been reaped", status.would_have_reaped),
        ));
    }
    rows.push(("freed", freed(&status.memory)));
    rows.push((
        "events",
        format!(
            "{} read, {} lost, {}",
            status.events,
            status.lost,
            count(status.gaps, "gap", "gaps")
        ),
    ));
    if status.stream_dropped > 0 || status.stream_error.is_some() {
        let dropped = count(status.stream_dropped, "line", "lines");
        let error = status.stream_error.as_ref();
        let error = error.map_or(String::new(), |error| {
            format!("; cannot be written now: {error}")
        });
        rows.push(("stream", format!("{dropped} dropped{error}")));
    }
    // A user's own service needs none.
    let is_own = status.scope.iter().any(|scope| scope.starts_with("uid:"));
    let missing = status.missing_capabilities.iter().filter(|_| !is_own);
    let names = ["lacks"].into_iter().chain(std::iter::repeat(""));
    rows.extend(names.zip(missing.cloned()));
    let pinned = status.pin_dir.clone();
    let pinned = pinned.unwrap_or_else(|| "nothing: tracking ends with the service".into());
    rows.push(("pinned", pinned));
    rows
}

/// Returns the memory of the reaped processes.
fn freed(memory: &FreedMemory) -> String {
    let unmeasured = match memory.unmeasured {
        0 => String::new(),
        n => format!("; {}", unmeasured_count(n)),
    };
    format!("{}{unmeasured}", memory_text(memory.rss, memory.swap))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::api::RefusedConfig;
    use crate::export::ConfigFile;

    /// Returns a status of a service in this mode.
    pub fn status(mode: &str) -> Status {
        Status {
            version: "1.0".into(),
            pid: 7,
            mode: mode.into(),
            mode_reason: None,
            config: ConfigFile::default(),
            config_refused: None,
            config_waiting: Vec::new(),
            source: "ebpf".into(),
            rejected_sources: Vec::new(),
            scope: Vec::new(),
            since: "2026-11-25T20:00:00Z".into(),
            uptime_s: 180,
            processes: 300,
            sessions_open: 1,
            sessions: 4,
            events: 9,
            lost: 0,
            gaps: 0,
            gap: None,
            stream_dropped: 0,
            stream_error: None,
            signals: 3,
            reaped: 2,
            kept: 0,
            failed: 0,
            would_have_reaped: 5,
            memory: FreedMemory {
                rss: 1_200_000_000,
                ..FreedMemory::default()
            },
            capabilities: Vec::new(),
            missing_capabilities: Vec::new(),
            zombies: 0,
            pin_dir: None,
        }
    }

    #[test]
    fn first_line_says_what_the_service_does() {
        let first = |status: &Status| {
            let text = anstream::adapter::strip_str(&table(status, None)).to_string();
            text.lines().next().unwrap_or_default().to_owned()
        };
        assert_eq!(
            first(&status("enforce")),
            "Reaping: 1 open session, 2 processes reaped, 1.2 GB RSS freed"
        );
        assert_eq!(
            first(&status("observe")),
            "Observing only: 1 open session, 5 processes would have been reaped"
        );
        let gap = Status {
            gap: Some("the ring was full".into()),
            failed: 1,
            ..status("enforce")
        };
        assert_eq!(
            first(&gap),
            "Events are missing, so nothing new is decided: 1 open session, 2 processes reaped, 1.2 GB RSS freed, 1 failed"
        );
    }

    #[test]
    fn refused_config_is_shown_below_the_config() {
        let refused = |error: Option<&str>| {
            let config_refused = Some(RefusedConfig {
                since: "2026-11-25T20:01:00Z".into(),
                age_s: 120,
                error: error.map(str::to_owned),
            });
            let status = Status {
                config_refused,
                ..status("enforce")
            };
            let rows = rows(&status).into_iter();
            let below = rows.skip_while(|(name, _)| *name != "config").skip(1);
            let below = below.take_while(|(name, _)| name.is_empty());
            below.map(|(_, text)| text).collect::<Vec<_>>()
        };
        let since = "the file has been refused for 2m (since 2026-11-25T20:01:00Z), and the config from before is in force";
        let error = "/c.toml:1:1: unknown key `grave`";
        assert_eq!(refused(Some(error)), [since, error]);
        assert_eq!(refused(None), [since], "for users who may not see it");
        let waiting = Status {
            config_waiting: vec!["mode".into(), "ring_size".into()],
            ..status("enforce")
        };
        let expected = "these settings wait for a restart of the service: mode, ring_size";
        assert!(rows(&waiting).iter().any(|(_, text)| text == expected));
    }

    #[test]
    fn losses_of_the_stream_are_shown() {
        let text = |status: &Status| {
            let rows = rows(status).into_iter();
            let mut stream = rows.filter(|(name, _)| *name == "stream");
            stream.next().map(|(_, text)| text)
        };
        let mut status = status("observe");
        assert_eq!(text(&status), None);
        status.stream_dropped = 1;
        assert_eq!(text(&status).as_deref(), Some("1 line dropped"));
        status.stream_error = Some("disk full".into());
        assert_eq!(
            text(&status).as_deref(),
            Some("1 line dropped; cannot be written now: disk full")
        );
    }

    #[test]
    fn long_values_are_wrapped_to_the_terminal() {
        let status = Status {
            rejected_sources: vec!["word ".repeat(40)],
            ..status("enforce")
        };
        let text = anstream::adapter::strip_str(&table(&status, Some(80))).to_string();
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        assert!(text.contains("\n           word"), "{text}");
    }
}
