//! `reaper wait`

use super::runs::{open, print_survivors};
use super::{Failure, OWN_FAILURE};
use crate::export::message;

pub(super) const HELP: &str = "\
Examples:
  reaper wait web && echo fine
  id=$(reaper run --detach -- make); reaper wait $id; echo $?

Exit status:
  that of the run, as `reaper run` would have left with it; 1 where its owner was killed
  125  there is no such run, or it cannot be waited for";

/// Gives the exit status.
pub(super) fn run(word: &str) -> u8 {
    match wait(word) {
        Ok(status) => status,
        Err(failure) => {
            message!("reaper: {failure:#}");
            OWN_FAILURE
        }
    }
}

fn wait(word: &str) -> Result<u8, Failure> {
    let runs = open()?;
    let known = runs.wait(&runs.find(word)?)?;
    let Some(over) = &known.record.result else {
        return Ok(OWN_FAILURE);
    };
    print_survivors(&known, &over.left);
    Ok(over.status)
}
