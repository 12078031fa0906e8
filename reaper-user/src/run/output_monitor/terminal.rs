//! Detects writes to the terminal of a command.
//!
//! The command keeps its terminal. A pseudoterminal in between would break keys and job control, because bash(1),
//! less(1) and more(1) look for their terminal at stderr. Instead inotify(7) reports each write, by any process.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::sys::stat::{fstat, major, minor};

use super::OutputActivity;
use reaper_host::sys;

/// Resolution of a terminal's mtime, which is used if the terminal cannot be watched (`tty_update_time` in
/// drivers/tty/tty_io.c).
const MTIME_STEP: Duration = Duration::from_secs(8);

/// Major and minor number of /dev/tty (Documentation/admin-guide/devices.txt).
const DEV_TTY: (u64, u64) = (5, 0);

/// A terminal that the command writes to.
pub(super) struct Terminal {
    file: File,
    /// `None` if the terminal cannot be watched.
    watch: Option<Watch>,
}

/// An inotify watch on a terminal. Its drop ends the thread that listens.
struct Watch {
    inotify: Arc<Inotify>,
    watch: WatchDescriptor,
}

impl Terminal {
    /// Starts to record writes to a terminal.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn begin(file: File, activity: &Arc<OutputActivity>) -> io::Result<Terminal> {
        let watch = match watch(&file) {
            Ok(watch) => Some(watch),
            // The user has too many watches (`fs.inotify.max_user_instances`) or no permission, or it is /dev/tty.
            Err(errno) => {
                tracing::debug!(
                    "cannot watch the terminal: {errno}; idle time is accurate to {MTIME_STEP:?}"
                );
                None
            }
        };
        if let Some(Watch { inotify, .. }) = &watch {
            let (inotify, activity) = (inotify.clone(), activity.clone());
            let thread = thread::Builder::new().name("output".to_owned());
            thread.spawn(move || listen(&inotify, &activity))?;
        }
        Ok(Terminal { file, watch })
    }

    /// Returns the time since the last write, by the terminal's mtime. Returns `None` if the terminal is watched or its
    /// mtime cannot be read.
    ///
    /// The mtime lags by up to [`MTIME_STEP`], so that much is subtracted.
    pub(super) fn unwatched_idle(&self) -> Option<Duration> {
        if self.watch.is_some() {
            return None;
        }
        let at = u64::try_from(self.file.metadata().ok()?.mtime()).ok()?;
        let at = at.saturating_mul(1_000_000_000);
        let ago = Duration::from_nanos(sys::wall_time().saturating_sub(at));
        Some(ago.saturating_sub(MTIME_STEP))
    }
}

fn watch(terminal: &File) -> nix::Result<Watch> {
    let device = fstat(terminal)?.st_rdev;
    // /dev/tty is one inode for the terminals of all sessions.
    if (major(device), minor(device)) == DEV_TTY {
        return Err(Errno::EXDEV);
    }
    let path = format!("/proc/self/fd/{}", terminal.as_raw_fd());
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC)?;
    let watch = inotify.add_watch(path.as_str(), AddWatchFlags::IN_MODIFY)?;
    let inotify = Arc::new(inotify);
    Ok(Watch { inotify, watch })
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Sends `IN_IGNORED`, at which the thread ends.
        let _ = self.inotify.rm_watch(self.watch);
    }
}

/// Records the time of each write in `activity`, until the watch is removed.
fn listen(inotify: &Inotify, activity: &OutputActivity) {
    loop {
        let events = match inotify.read_events() {
            Ok(events) => events,
            Err(Errno::EINTR) => continue,
            Err(_) => return,
        };
        let is_last = |mask: AddWatchFlags| mask.contains(AddWatchFlags::IN_IGNORED);
        if events.iter().any(|event| is_last(event.mask)) {
            return;
        }
        activity
            .terminal_ns
            .store(sys::monotonic(), Ordering::Relaxed);
    }
}
