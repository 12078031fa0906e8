//! `reaper service status`.

use serde::Serialize;

use super::control::{UnitState, unit_state};
use super::place::{Place, UNIT};
use super::{Failure, StatusArgs, own_place};
use crate::api::SOCKET;
use crate::api::Status;
use crate::api::client::Client;
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
    // Also lists other services that answer.
    status.map_err(|error| Failure::from(error).to_string())
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
        false => format!("{UNIT} is not installed: {}", place.command("install")),
    });
    let status = match answer {
        Ok(status) => status,
        Err(error) => {
            lines.extend(error.lines().map(str::to_owned));
            if unit.is_installed {
                lines.push(format!("why:     sudo reaper service logs{user}"));
            }
            return lines;
        }
    };
    lines.push(status.summary());
    lines.push(format!(
        "since {} ({} ago)",
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
        "what and why: {sudo}reaper history --since {}s",
        status.uptime_s.max(1)
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
        let next = "to reap:      sudo reaper service install --enforce";
        assert!(observing.ends_with(next), "{observing}");
        let enforcing = lines(&place, &unit, Ok(&status("enforce"))).join("\n");
        assert!(!enforcing.contains("--enforce"), "{enforcing}");
        let failed = "no service answers".to_owned();
        let failed = lines(&place, &unit, Err(&failed)).join("\n");
        assert!(failed.ends_with("sudo reaper service logs"), "{failed}");
        let absent = lines(&place, &UnitState::default(), Err(&"none".to_owned()));
        assert_eq!(
            absent[0],
            "reaper.service is not installed: sudo reaper service install"
        );
    }
}
