//! `reaper logs`

use std::io;

use super::Failure;
use super::runs::open;

pub(super) const HELP: &str = "\
It is kept as long as the run is: the last 100 that are over, for 30 days. What grows without end
fills the disk: a run that says much had better write to a file of its own.

Examples:
  reaper logs web
  reaper logs -f web            until it is over";

pub(super) fn run(word: &str, follow: bool) -> Result<(), Failure> {
    let runs = open()?;
    let known = runs.find(word)?;
    let passed = runs.logs(&known, &mut io::stdout().lock(), follow);
    passed.map_err(|error| match error.kind() {
        io::ErrorKind::Other | io::ErrorKind::NotFound => {
            Failure::Refused(format!("run {} has no log: {error}", known.id()))
        }
        _ => Failure::Other(error.into()),
    })
}
