//! `reaper config init`: writes an example of a config file.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use serde_json::json;

use super::Failure;
use super::show::{width, wrap};
use super::user::ConfigOwner;
use crate::config::EXAMPLE;
use crate::export::{print, printable, to_json};
use reaper_host::advice::Advised as _;

pub(super) const HELP: &str = "\
Every setting in the file is a comment with its default, so the new file changes nothing. An existing file is left alone.

Examples:
  # Write /etc/reaper/config.toml
  sudo reaper config init

  # Write the config of your own service (`reaper daemon --user`)
  reaper config init

  # Write another file
  reaper config init my.toml";

pub(super) fn run(file: Option<&Path>, json: bool) -> Result<(), Failure> {
    let path = match file {
        Some(file) => file.to_owned(),
        None => ConfigOwner::this_user().path()?,
    };
    write(&path).map_err(|error| refusal(&path, &error))?;
    if json {
        let file = path.to_string_lossy();
        return print(to_json(&json!({ "file": file }))).map_err(Failure::stdout);
    }
    let shown = printable(&path.to_string_lossy(), usize::MAX);
    let text = format!("Wrote {shown}; edit it, then run `reaper config check {shown}`.");
    print(wrap(&text, 0, width())).map_err(Failure::stdout)
}

/// Creates the file, and the directories above it. Only its owner may write to them.
fn write(path: &Path) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o755).create(directory)?;
    }
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(path)?;
    file.write_all(EXAMPLE.as_bytes()).inspect_err(|_| {
        // The file is not complete, and this process has created it.
        let _ = fs::remove_file(path);
    })
}

fn refusal(path: &Path, error: &io::Error) -> Failure {
    let path = path.display();
    Failure::Usage(match error.kind() {
        ErrorKind::AlreadyExists => {
            format!("{path} exists already and was left alone; edit it, or name another file")
        }
        ErrorKind::PermissionDenied => {
            format!("cannot write {path}: permission denied; run with sudo, or name another file")
        }
        _ => {
            let error = error.advised_or("name another file");
            format!("cannot write {path}: {error}")
        }
    })
}
