//! `reaper wait`: waits for a run.

use super::runs::{open, print_survivors, shown_here};
use super::{Failure, OWN_FAILURE, ps};
use crate::export::print;

pub(super) const HELP: &str = "\
Examples:
  # Wait for a run by its name
  reaper wait web && echo success

  # Start a run in the background, and wait for it
  id=$(reaper run --detach -- make); reaper wait $id; echo $?

Exit status:
  the status that `reaper run` exits with, see `reaper run --help`; of a stopped run, that of its command, such as 143
  1    `reaper run` was killed before it ended the run
  125  there is no such run, or it cannot be waited for

With --json, the object has the keys of `reaper ps --json`.";

/// Waits for the run and returns its exit status.
pub(super) fn run(name: &str, json: bool) -> Result<u8, Failure> {
    let runs = open()?;
    let recorded = shown_here(runs.wait(&runs.find(name)?)?);
    if json {
        print(ps::to_json(&recorded)).map_err(Failure::stdout)?;
    }
    let Some(result) = &recorded.record.result else {
        return Ok(OWN_FAILURE);
    };
    print_survivors(&recorded, &result.left);
    Ok(result.status)
}
