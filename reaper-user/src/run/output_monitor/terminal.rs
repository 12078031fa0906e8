//! When a terminal was written to.
//!
//! The command keeps its terminal, and all that goes with it. One of this program's own in between would have keys and job
//! control go wrong, as bash(1), less(1) and more(1) look for theirs at stderr. The kernel tells when somebody writes to it, whoever
//! that is (inotify(7)).

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

/// Where nobody tells, the terminal has the time itself, no more exactly than so (`tty_update_time`, drivers/tty/tty_io.c).
const STEP: Duration = Duration::from_secs(8);

/// /dev/tty (Documentation/admin-guide/devices.txt).
const OWN: (u64, u64) = (5, 0);

/// A terminal that the command writes to.
pub(super) struct Terminal {
    file: File,
    /// `None`: nobody tells when it is written to.
    watch: Option<Watch>,
}

/// There as long as somebody listens.
struct Watch {
    inotify: Arc<Inotify>,
    watch: WatchDescriptor,
}

impl Terminal {
    /// Has noted from now on when it is written to.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(super) fn begin(file: File, passed: &Arc<OutputActivity>) -> io::Result<Terminal> {
        let watch = match watch(&file) {
            Ok(watch) => Some(watch),
            // This user watches too much (`fs.inotify.max_user_instances`), or may not watch this, or it is /dev/tty.
            Err(errno) => {
                tracing::debug!(
                    "silence is known to {STEP:?}: the terminal cannot be watched: {errno}"
                );
                None
            }
        };
        if let Some(Watch { inotify, .. }) = &watch {
            let (told, passed) = (inotify.clone(), passed.clone());
            let thread = thread::Builder::new().name("output".to_owned());
            thread.spawn(move || listen(&told, &passed))?;
        }
        Ok(Terminal { file, watch })
    }

    /// How long ago it was written to, at most, where nobody tells of that.
    pub(super) fn written(&self) -> Option<Duration> {
        if self.watch.is_some() {
            return None;
        }
        let at = u64::try_from(self.file.metadata().ok()?.mtime()).ok()?;
        let at = at.saturating_mul(1_000_000_000);
        let ago = Duration::from_nanos(sys::wall_time().saturating_sub(at));
        Some(ago.saturating_sub(STEP))
    }
}

fn watch(terminal: &File) -> nix::Result<Watch> {
    let device = fstat(terminal)?.st_rdev;
    // By that name the terminals of all sessions are written to.
    if (major(device), minor(device)) == OWN {
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
        // That is told too, and then nothing more.
        let _ = self.inotify.rm_watch(self.watch);
    }
}

fn listen(inotify: &Inotify, passed: &OutputActivity) {
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
        passed.shown.store(sys::monotonic(), Ordering::Relaxed);
    }
}
