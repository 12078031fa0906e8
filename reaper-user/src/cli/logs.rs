//! `reaper logs`: prints the output of a detached run.

use std::io;

use super::Failure;
use super::runs::open;

pub(super) const HELP: &str = "\
A log is kept as long as the record of its run: for the last 100 finished runs, up to 30 days. Its size has no limit. \
    A run with much output should write to a file of its own.

Examples:
  reaper logs web

  # Follow the output until the run ends
  reaper logs -f web";

pub(super) fn run(name: &str, follow: bool) -> Result<(), Failure> {
    let runs = open()?;
    let recorded = runs.find(name)?;
    let copied = runs.logs(&recorded, &mut io::stdout().lock(), follow);
    copied.map_err(|error| match error.kind() {
        io::ErrorKind::Other => {
            Failure::Refused(format!("run {} has no log: {error}", recorded.id()))
        }
        io::ErrorKind::NotFound => Failure::Refused(format!(
            "run {} has no log: the file {} was removed",
            recorded.id(),
            recorded.log().display()
        )),
        _ => Failure::Other(anyhow::Error::new(error).context(format!(
            "cannot copy the log {} of run {} to stdout",
            recorded.log().display(),
            recorded.id()
        ))),
    })
}
