//! `reaper service status`.

use std::io::ErrorKind;

use serde::Serialize;

use super::control::{UNKNOWN, UnitState, unit_state};
use super::place::{Place, UNIT};
use super::{Failure, StatusArgs, own_place};
use crate::api::SOCKET;
use crate::api::Status;
use crate::api::client::{Client, ClientError};
use crate::cli::show::{width, wrap};
use crate::cli::user;
use crate::export::{print, printable, time, to_json};
use reaper_host::sys::paths;

/// Status as JSON.
#[derive(Serialize)]
struct ServiceStatus {
    unit: &'static str,
    installed: bool,
    /// State such as `active (running)`.
    state: String,
    /// Whether it starts at boot or login, such as `enabled`.
    start: String,
    restarts: u32,
    /// Answer of the service, as of `reaper status`.
    service: Option<Status>,
    /// Why the service did not answer.
    error: Option<String>,
}

/// Prints the status, and returns the exit status.
pub(super) fn run(args: &StatusArgs) -> Result<u8, Failure> {
    let place = own_place(args.user)?;
    let unit = unit_state(&place);
    let answer = ask(&place);
    let status = match &answer {
        Ok(_) => 0,
        Err(error) => Failure::NoService(error.clone()).status(),
    };
    let text = match args.json {
        true => {
            let (service, error) = match answer {
                Ok(status) => (Some(status), None),
                Err(error) => (None, error.lines().next().map(str::to_owned)),
            };
            to_json(&ServiceStatus {
                unit: UNIT,
                installed: unit.is_installed,
                state: unit.state,
                start: unit.start,
                restarts: unit.restarts,
                service,
                error,
            })
        }
        false => {
            let lines = lines(&place, &unit, answer.as_ref());
            let lines = lines.iter().map(|line| printable(line, usize::MAX));
            let lines = lines.map(|line| wrap(&line, 0, width()));
            lines.collect::<String>().into()
        }
    };
    print(text).map_err(Failure::stdout)?;
    Ok(status)
}

/// Asks the service for its status. The error says in its first line why it did not answer.
fn ask(place: &Place) -> Result<Status, String> {
    let directory = match place.is_own {
        true => user::runtime_dir().ok_or("the variable XDG_RUNTIME_DIR is not set")?,
        false => paths::RUNTIME.into(),
    };
    let answer = Client::new(directory.join(SOCKET)).get("/v1/status");
    let status = answer.and_then(|response| response.read());
    status.map_err(|error| match error {
        // The general advice is about a daemon that was started by hand.
        ClientError::NoService { path, source }
            if matches!(
                source.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) =>
        {
            format!("no service answers on {}", path.display())
        }
        // Also lists other services that answer.
        error => Failure::from(error).to_string(),
    })
}

/// Returns the lines of the status.
fn lines(place: &Place, unit: &UnitState, answer: Result<&Status, &String>) -> Vec<String> {
    let user = if place.is_own { " --user" } else { "" };
    let mut lines = Vec::new();
    let restarts = match unit.restarts {
        0 => String::new(),
        n => format!(", restarted {n} times after failures"),
    };
    lines.push(match unit.is_installed {
        true => format!("{UNIT}: {}, {}{restarts}", unit.state, unit.start),
        false if unit.state == UNKNOWN => {
            format!("{UNIT}: systemd does not run this host, or does not answer")
        }
        false => format!("{UNIT} is not installed: {}", place.command("install")),
    });
    let status = match answer {
        Ok(status) => status,
        Err(error) => {
            let is_stopped = unit.state.starts_with("inactive");
            if !is_stopped {
                lines.extend(error.lines().map(str::to_owned));
            }
            if unit.is_installed {
                let sudo = if place.is_own { "" } else { "sudo " };
                lines.push(format!("why:      {sudo}reaper service logs{user}"));
                lines.push(format!("to start: {}", place.command("install")));
            } else if unit.state == UNKNOWN {
                let sudo = if place.is_own { "" } else { "sudo " };
                lines.push(format!(
                    "to start: {sudo}reaper daemon{user} (--observe only watches)"
                ));
            }
            return lines;
        }
    };
    lines.push(status.summary());
    lines.push(format!(
        "reaper {} since {} ({} ago)",
        status.version,
        status.since,
        time(status.uptime_s)
    ));
    lines.extend(
        status
            .missing_capabilities
            .iter()
            .filter(|_| !place.is_own)
            .map(|lack| format!("lacks {lack}")),
    );
    let sudo = if place.is_own { "" } else { "sudo " };
    lines.push(format!(
        "what and why: {sudo}reaper history --since {}",
        time_span(status.uptime_s)
    ));
    lines.push(format!("log:          {sudo}reaper service logs{user}"));
    if status.mode == "observe" {
        lines.push(match &status.mode_reason {
            Some(reason) => format!("only observes: {reason}"),
            None => format!("to reap:      {}", place.command("install --enforce")),
        });
    }
    lines
}

/// Returns a time of at least `seconds` in whole minutes, hours or days. It is not exact, because the user types the command
/// later.
fn time_span(seconds: u64) -> String {
    let minutes = seconds / 60 + 2;
    match minutes {
        ..120 => format!("{minutes}m"),
        120..2880 => format!("{}h", minutes / 60 + 1),
        _ => format!("{}d", minutes / 1440 + 1),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::cli::service::place::Manager;
    use crate::cli::status::tests::status;

    #[test]
    fn status_names_the_command_that_comes_next() {
        let place = Place::new(Manager::Systemd, Path::new("/"), false).unwrap();
        let unit = UnitState {
            is_installed: true,
            state: "active (running)".into(),
            start: "enabled".into(),
            ..UnitState::default()
        };
        let observing = lines(&place, &unit, Ok(&status("observe"))).join("\n");
        assert!(
            observing.contains("5 processes would have been reaped"),
            "{observing}"
        );
        assert!(observing.contains("\nreaper 1.0 since "), "{observing}");
        assert!(observing.contains("--since 5m\n"), "{observing}");
        let next = "to reap:      sudo reaper service install --enforce";
        assert!(observing.ends_with(next), "{observing}");
        let enforcing = lines(&place, &unit, Ok(&status("enforce"))).join("\n");
        assert!(!enforcing.contains("--enforce"), "{enforcing}");
        let failed = "no service answers".to_owned();
        let failed = lines(&place, &unit, Err(&failed)).join("\n");
        assert!(failed.contains("sudo reaper service logs"), "{failed}");
        let stopped = UnitState {
            state: "inactive (dead)".into(),
            ..unit
        };
        let stopped = lines(&place, &stopped, Err(&"none".to_owned())).join("\n");
        let next = "to start: sudo reaper service install";
        assert!(
            stopped.ends_with(next) && !stopped.contains("none"),
            "{stopped}"
        );
        assert_eq!(
            [time_span(0), time_span(7200), time_span(200_000)],
            ["2m", "3h", "3d"]
        );
        let absent = lines(&place, &UnitState::default(), Err(&"none".to_owned()));
        assert_eq!(
            absent[0],
            "reaper.service is not installed: sudo reaper service install"
        );
    }
}
