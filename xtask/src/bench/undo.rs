//! Clean-up actions that run on drop and on SIGINT, SIGTERM and SIGHUP.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

type Action = Box<dyn FnOnce() + Send>;

/// Registered actions, in order of registration. They run in reverse order.
static ACTIONS: Mutex<Vec<(u64, Action)>> = Mutex::new(Vec::new());

/// Action that runs once, on drop or on a termination signal.
#[must_use]
pub struct Undo(u64);

impl Undo {
    pub fn later(action: impl FnOnce() + Send + 'static) -> Undo {
        let mut actions = ACTIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let number = actions.last().map_or(0, |(number, _)| number + 1);
        actions.push((number, Box::new(action)));
        Undo(number)
    }

    /// Registers the removal of a directory.
    pub fn removes(dir: &Path) -> Undo {
        let dir = dir.to_owned();
        Undo::later(move || {
            if let Err(error) = fs::remove_dir_all(&dir) {
                eprintln!("cannot remove {}: {error}", dir.display());
            }
        })
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let mut actions = ACTIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let place = actions.iter().position(|(number, _)| *number == self.0);
        let action = place.map(|place| actions.remove(place).1);
        drop(actions);
        if let Some(action) = action {
            action();
        }
    }
}

/// Makes SIGINT, SIGTERM and SIGHUP run all actions before they end this program.
///
/// # Errors
/// A pipe, signal handler or thread cannot be created.
pub fn at_signals() -> Result<()> {
    let (mut reader, writer) = std::io::pipe().context("cannot create a pipe")?;
    super::raw::write_on_termination(writer).context("cannot catch SIGINT")?;
    std::thread::Builder::new()
        .name("undo".into())
        .spawn(move || {
            if reader.read_exact(&mut [0]).is_ok() {
                // Locked until the exit: the main thread may run an action at the same time, because the signal also
                // interrupted what it waited for. It then waits here.
                let mut actions = ACTIONS.lock().unwrap_or_else(PoisonError::into_inner);
                while let Some((_, action)) = actions.pop() {
                    action();
                }
                std::process::exit(130);
            }
        })
        .context("cannot start a thread")?;
    Ok(())
}
