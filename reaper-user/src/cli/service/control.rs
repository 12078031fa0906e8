//! Calls the service manager.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::place::{Manager, Place, UNIT};
use super::{Failure, LogsArgs};
use crate::export::printable;

/// Directory that exists if systemd is the init of this host (sd_booted(3)).
const BOOTED: &str = "/run/systemd/system";

/// State of a unit about which the service manager says nothing.
pub(super) const UNKNOWN: &str = "unknown";

/// State of the unit, as the service manager reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UnitState {
    /// Whether a unit is installed.
    pub is_installed: bool,
    /// State such as `active (running)`.
    pub state: String,
    /// Whether it starts at boot or login, such as `enabled`.
    pub start: String,
    /// Main process.
    pub pid: Option<u32>,
    /// Number of restarts after failures.
    pub restarts: u32,
}

/// Checks that the host has the service manager.
///
/// # Errors
/// It has not, or the user has none.
pub(super) fn check_manager(place: &Place) -> Result<(), Failure> {
    let refused = |what: &str| Err(Failure::Usage(what.into()));
    if place.manager == Manager::Launchd {
        return Ok(());
    }
    if !Path::new(BOOTED).is_dir() {
        return refused(
            "systemd does not run this host (no /run/systemd/system): let its init run `reaper daemon`, or write the files of an \
             image with --root DIR",
        );
    }
    if place.is_own && std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        return refused(
            "there is no systemd of this user, as XDG_RUNTIME_DIR is not set: log in as this user, or run `loginctl enable-linger` \
             and set it to /run/user/UID",
        );
    }
    Ok(())
}

/// Runs a command of the service manager.
///
/// # Errors
/// It cannot be started, or fails. The error has its message.
pub(super) fn call(words: &[String]) -> Result<(), Failure> {
    let line = words.join(" ");
    let output = command(words)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Failure::Usage(format!("cannot start `{line}`: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr)
        .trim()
        .replace('\n', "; ");
    Err(Failure::Refused(format!(
        "`{line}` failed ({}): {}",
        output.status,
        printable(&text, 1000)
    )))
}

/// Waits until launchd does not know a job any more, so that `query` fails. `bootout` may return before the process has
/// exited, and until then `bootstrap` fails.
///
/// # Errors
/// The job is still there after `limit`.
pub(super) fn wait_gone(query: &[String], limit: Duration) -> Result<(), Failure> {
    let end = Instant::now() + limit;
    while call(query).is_ok() {
        if Instant::now() >= end {
            return Err(Failure::Refused(format!(
                "launchd has not ended the job within {} s: see `{}`, then run this command again",
                limit.as_secs(),
                query.join(" ")
            )));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn command(words: &[String]) -> Command {
    let mut command = Command::new(words.first().map_or("", String::as_str));
    command.args(words.iter().skip(1));
    command
}

/// Reads the state of the unit. What cannot be read is empty.
pub(super) fn unit_state(place: &Place) -> UnitState {
    if place.manager == Manager::Launchd {
        return UnitState {
            is_installed: place.unit().exists(),
            ..UnitState::default()
        };
    }
    let properties = "--property=LoadState,ActiveState,SubState,UnitFileState,MainPID,NRestarts";
    let output = command(&place.control(&["show", properties, UNIT])).output();
    let text = output.map_or(Vec::new(), |output| output.stdout);
    parse_state(&String::from_utf8_lossy(&text))
}

/// Parses lines such as `ActiveState=active`.
fn parse_state(text: &str) -> UnitState {
    let value = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once('='));
        lines
            .find(|(key, _)| *key == name)
            .map_or("", |(_, value)| value)
    };
    UnitState {
        is_installed: value("LoadState") == "loaded",
        state: match (value("ActiveState"), value("SubState")) {
            ("", _) => UNKNOWN.into(),
            (active, sub) => format!("{active} ({sub})"),
        },
        start: value("UnitFileState").into(),
        pid: value("MainPID").parse().ok().filter(|pid| *pid != 0),
        restarts: value("NRestarts").parse().unwrap_or(0),
    }
}

/// Replaces this program by one that shows the log.
///
/// # Errors
/// It cannot be started.
pub(super) fn show_logs(place: &Place, args: &LogsArgs) -> Result<(), Failure> {
    let words = log_command(place, args);
    let error = command(&words).exec();
    Err(Failure::Usage(format!(
        "cannot start `{}`: {error}",
        words.join(" ")
    )))
}

/// Returns the command that shows the log.
fn log_command(place: &Place, args: &LogsArgs) -> Vec<String> {
    let lines = args.lines.to_string();
    let log = place.log().display().to_string();
    let mut words: Vec<&str> = Vec::new();
    if place.manager == Manager::Launchd {
        words.extend(["tail", "-n", &lines]);
        words.extend(args.follow.then_some("-f"));
        words.push(&log);
        return words.into_iter().map(str::to_owned).collect();
    }
    words.push("journalctl");
    words.push(if place.is_own {
        "--user-unit"
    } else {
        "--unit"
    });
    words.extend([UNIT, "--lines", &lines]);
    words.extend(args.follow.then_some("--follow"));
    words.extend(args.json.then_some("--output=json"));
    words.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_that_launchd_does_not_end_is_an_error() {
        let known = wait_gone(&["true".to_owned()], Duration::ZERO).unwrap_err();
        assert!(known.to_string().contains("see `true`"), "{known}");
        wait_gone(&["false".to_owned()], Duration::ZERO).unwrap();
    }

    #[test]
    fn state_of_a_unit_is_parsed() {
        let text = "LoadState=loaded\nActiveState=active\nSubState=running\nUnitFileState=enabled\nMainPID=42\nNRestarts=3\n";
        let expected = UnitState {
            is_installed: true,
            state: "active (running)".into(),
            start: "enabled".into(),
            pid: Some(42),
            restarts: 3,
        };
        assert_eq!(parse_state(text), expected);
        let absent =
            parse_state("LoadState=not-found\nActiveState=inactive\nSubState=dead\nMainPID=0\n");
        assert!(!absent.is_installed && absent.pid.is_none());
        assert_eq!(parse_state("").state, UNKNOWN);
    }
}
