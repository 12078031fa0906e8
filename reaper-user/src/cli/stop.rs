//! `reaper stop`

use super::Failure;
use super::runs::{called, open, print_survivors};
use crate::export::{message, print, printable};
use crate::run::RunOutcome;

pub(super) const HELP: &str = "\
It is ended as its own time limits would end it: --signal, and SIGKILL after the --grace it was
started with; a second `stop` cuts that short. Recorded it is as cancelled, which is neither a
success nor a failure, and its hooks are not run. One that has come to its own end by then keeps
that; all who stop it at once are told the same. Waits until nothing is left.

Only what `reaper run` has started is ever touched, and only where the process that has the pid is
still that one.

Of several each is seen to, whatever becomes of the others.

Examples:
  reaper stop web              by name
  reaper stop k4               by the beginning of an id

Exit status:
  0  it is over    2  wrong usage
  1  there is no such run, or something of it could not be ended, which is named";

/// Gives the exit status. One that cannot be stopped keeps none of the others.
pub(super) fn run(words: &[String]) -> Result<u8, Failure> {
    let runs = open()?;
    let mut status = 0;
    let mut told = |failure: Failure| {
        message!("reaper: {failure:#}");
        status = status.max(failure.status());
    };
    let mut all = Vec::new();
    for word in words {
        match runs.find(word).map_err(Failure::from) {
            Ok(known) => all.push(known),
            Err(failure) => told(failure),
        }
    }
    // All of them are asked before any is waited for.
    all.retain(|known| {
        let stopped = match known.record.result {
            None => runs.stop(known),
            Some(_) => Ok(()),
        };
        stopped.map_err(|error| told(error.into())).is_ok()
    });
    let mut left = false;
    for known in all {
        let before = known.record.result.is_some();
        let known = match runs.wait(&known) {
            Ok(known) => known,
            Err(error) => {
                told(error.into());
                continue;
            }
        };
        let Some(over) = &known.record.result else {
            continue;
        };
        let outcome = over.outcome.as_str();
        let said = match over.outcome {
            _ if before => format!("was over: {outcome}"),
            RunOutcome::Cancelled => "stopped".to_owned(),
            _ => format!("came to its own end: {outcome}"),
        };
        let line = printable(&format!("{} {said}", called(&known)), usize::MAX);
        print(line + "\n").map_err(|error| Failure::Other(error.into()))?;
        print_survivors(&known, &over.left);
        left |= !over.left.is_empty() && !before;
    }
    Ok(status.max(u8::from(left)))
}
