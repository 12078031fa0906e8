//! A file of JSON lines that is written whenever that is possible.
//!
//! A write that fails, for example on a full disk, loses only the lines that it was to write. The next write tries
//! again. A file that was renamed or removed, as by logrotate, is created again under its name.

#[cfg(test)]
mod tests;

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use nix::poll::PollFlags;

use reaper_host::sys::{self, owner};

/// Time after which a write to a full pipe is tried again.
const RETRY: Duration = Duration::from_secs(60);
/// Capacity of an empty buffer, in bytes.
const BUFFER: usize = 64 << 10;

/// State of a [`LineFile`] that other threads may read.
#[derive(Debug, Default)]
pub(super) struct LineFileState {
    /// Number of lost lines since the start.
    lost: AtomicU64,
    /// Number of lost lines that the stream has not reported yet.
    unreported: AtomicU64,
    /// Reason why the last write failed; `None` if it succeeded.
    error: Mutex<Option<String>>,
}

impl LineFileState {
    /// Returns the number of lost lines since the start.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Returns why the last write failed; `None` if it succeeded.
    pub(super) fn error(&self) -> Option<String> {
        self.lock_error().clone()
    }

    /// Returns the number of lost lines that are to be reported: 0 while the file cannot be written.
    pub(super) fn unreported(&self) -> u64 {
        match *self.lock_error() {
            None => self.unreported.load(Ordering::Relaxed),
            Some(_) => 0,
        }
    }

    /// Counts lost lines as reported, unless the file cannot be written again.
    pub(super) fn on_reported(&self, lines: u64) {
        if self.lock_error().is_none() {
            self.unreported.fetch_sub(lines, Ordering::Relaxed);
        }
    }

    fn add_lost(&self, lines: u64) {
        self.lost.fetch_add(lines, Ordering::Relaxed);
        self.unreported.fetch_add(lines, Ordering::Relaxed);
    }

    fn lock_error(&self) -> MutexGuard<'_, Option<String>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file to which whole lines are written at each flush.
#[derive(Debug)]
pub(super) struct LineFile {
    /// Path of the file for messages, or `stdout`.
    name: String,
    file: File,
    /// Path under which the file is created again. `None` if it is no regular file, or if other users could put another
    /// file there.
    path: Option<PathBuf>,
    /// Whether a closed pipe is an error for the caller.
    ends_with_reader: bool,
    /// Lines to write.
    buffer: Vec<u8>,
    /// Whether the buffer starts with the rest of a line whose beginning is in the file.
    is_cut: bool,
    state: Arc<LineFileState>,
}

impl LineFile {
    /// Opens a file to append to it. A new file is readable by its owner alone, because it has command lines.
    ///
    /// # Errors
    /// As `open(2)`.
    pub(super) fn open(path: &Path) -> io::Result<LineFile> {
        let file = open(path, 0)?;
        let followed = followed(path, &file.metadata()?);
        Ok(LineFile {
            path: followed,
            ..LineFile::new(path.display().to_string(), file)
        })
    }

    /// Returns standard output. A flush fails if its reader has closed it.
    ///
    /// # Errors
    /// As `dup(2)`.
    pub(super) fn stdout() -> io::Result<LineFile> {
        let stdout = io::stdout().as_fd().try_clone_to_owned()?;
        Ok(LineFile {
            ends_with_reader: true,
            ..LineFile::new("stdout".into(), stdout.into())
        })
    }

    fn new(name: String, file: File) -> LineFile {
        LineFile {
            name,
            file,
            path: None,
            ends_with_reader: false,
            buffer: Vec::new(),
            is_cut: false,
            state: Arc::default(),
        }
    }

    pub(super) fn state(&self) -> Arc<LineFileState> {
        Arc::clone(&self.state)
    }

    /// Opens the file again if another file or none has its path.
    fn follow(&mut self) -> io::Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let current = self.file.metadata()?;
        if fs::symlink_metadata(path).is_ok_and(|found| is_same(&found, &current)) {
            return Ok(());
        }
        // Another user may have created it, where all users may create files. A pipe must not block.
        let file = open(path, O_NOFOLLOW | O_NONBLOCK)?;
        let meta = file.metadata()?;
        if !meta.is_file() || owner::is_writable_by_others(&meta) {
            return Err(io::Error::other(
                "another user can write to the file that has replaced it; remove that file",
            ));
        }
        self.file = file;
        if self.is_cut {
            self.is_cut = false;
            let end = self.buffer.iter().position(|byte| *byte == b'\n');
            self.buffer.drain(..end.map_or(0, |end| end + 1));
            self.state.add_lost(1);
        }
        Ok(())
    }

    /// Writes the buffer. Returns the number of bytes written, and the error that stopped it.
    fn write_buffer(&mut self) -> (usize, io::Result<()>) {
        let mut written = 0;
        while written < self.buffer.len() {
            match self.file.write(&self.buffer[written..]) {
                Ok(0) => return (written, Err(ErrorKind::WriteZero.into())),
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another process may have set O_NONBLOCK on the shared file description.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    sys::wait_for(&self.file, PollFlags::POLLOUT, RETRY);
                }
                Err(error) => return (written, Err(error)),
            }
        }
        (written, Ok(()))
    }

    /// Empties the buffer, of which the first `written` bytes are in the file. Keeps the rest of a line that was
    /// written in part, and counts the other lines as lost.
    fn drop_unwritten(&mut self, written: usize) {
        if let Some(last) = self.buffer[..written].last() {
            self.is_cut = *last != b'\n';
        }
        self.buffer.drain(..written);
        let mut kept = 0;
        if self.is_cut {
            let end = self.buffer.iter().position(|byte| *byte == b'\n');
            kept = end.map_or(self.buffer.len(), |end| end + 1);
        }
        let lost = self.buffer[kept..].iter().filter(|byte| **byte == b'\n');
        self.state.add_lost(lost.count() as u64);
        self.buffer.truncate(kept);
        self.buffer.shrink_to(BUFFER);
    }

    /// Logs when writing begins to fail, and when it works again.
    fn note(&self, result: &io::Result<()>) {
        let (name, mut error) = (&self.name, self.state.lock_error());
        match (result, &*error) {
            (Err(new), None) => tracing::error!(
                "cannot write events to {name}: {new}; lines are dropped and counted until it can be written again"
            ),
            (Ok(()), Some(_)) => tracing::warn!(
                "events are written to {name} again; {} lines were dropped since the start",
                self.state.lost()
            ),
            _ => {}
        }
        *error = result.as_ref().err().map(ToString::to_string);
    }
}

impl Write for LineFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    /// Writes the lines. Fails only if the reader of standard output has closed it.
    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let (written, result) = match self.follow() {
            Ok(()) => self.write_buffer(),
            Err(error) => (0, Err(error)),
        };
        if let Err(error) = &result
            && self.ends_with_reader
            && error.kind() == ErrorKind::BrokenPipe
        {
            self.buffer.clear();
            return result;
        }
        self.drop_unwritten(written);
        self.note(&result);
        Ok(())
    }
}

/// Opens a file to append to it, with more `flags` for open(2). Ends an incomplete last line.
fn open(path: &Path, flags: i32) -> io::Result<File> {
    let mut options = File::options();
    let options = options.create(true).append(true).mode(0o600);
    let file = options.custom_flags(flags).open(path)?;
    if has_incomplete_line(path)? {
        // An earlier service was killed while it wrote. Its successor reports the event again.
        (&file).write_all(b"\n")?;
    }
    Ok(file)
}

/// Returns whether the last line of a file has no line break.
fn has_incomplete_line(path: &Path) -> io::Result<bool> {
    let length = fs::metadata(path)?;
    if !length.is_file() || length.len() == 0 {
        return Ok(false);
    }
    let mut last = [0];
    File::open(path)?.read_exact_at(&mut last, length.len() - 1)?;
    Ok(last != *b"\n")
}

/// Returns the path without symbolic links, for [`LineFile::path`].
fn followed(path: &Path, file: &Metadata) -> Option<PathBuf> {
    let path = path.canonicalize().ok().filter(|_| file.is_file())?;
    let is_fixed = |directory: &Path| {
        fs::metadata(directory).is_ok_and(|meta| !owner::allows_replacement(&meta))
    };
    path.ancestors().skip(1).all(is_fixed).then_some(path)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}
