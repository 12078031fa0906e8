//! Reads a target from /proc.

use std::fs;
use std::io;

use super::SignalTarget;
use reaper_host::source::procfs::Procfs;
use reaper_host::sys::proc_file;
use reaper_model::event::{ProcessKey, TICK_NS};

impl SignalTarget {
    /// Reads the process from /proc. Returns `None` for an unused pid.
    ///
    /// # Errors
    /// Its files in /proc cannot be read or parsed.
    pub fn read(pid: u32) -> io::Result<Option<SignalTarget>> {
        let procfs = Procfs::default();
        let Some(start) = procfs.start_ticks(pid) else {
            return Ok(None);
        };
        let status = match fs::read_to_string(format!("/proc/{pid}/status")) {
            Ok(status) => status,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        // The pid may have been reused between the two reads.
        if procfs.start_ticks(pid) != Some(start) {
            return Ok(None);
        }
        let (real, saved) = ids(&status).ok_or(io::ErrorKind::InvalidData)?;
        let key = ProcessKey {
            pid,
            start: start.saturating_mul(TICK_NS),
        };
        let name = status.lines().find_map(|line| line.strip_prefix("Name:"));
        Ok(Some(SignalTarget {
            key,
            real,
            saved,
            comm: name.unwrap_or_default().trim().into(),
        }))
    }
}

/// Returns whether the process with this pid is in the pid namespace of this one. The kernel translates the pid of a
/// client, and gives 0 for a client outside of this namespace. `None` if that is unknown.
pub(super) fn shares_pid_namespace(pid: Option<i32>) -> Option<bool> {
    match pid? {
        0 => Some(false),
        pid => {
            let status = fs::read(format!("/proc/{pid}/status")).ok()?;
            Some(!proc_file::is_nested(&status))
        }
    }
}

/// Returns the real and saved user id from the text of a `status` file, `None` if it is incomplete.
fn ids(status: &str) -> Option<(u32, u32)> {
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
    let number = |word: &str| word.parse::<u32>().ok();
    let mut uids = field("Uid:")?.split_whitespace().map(number);
    let (real, _effective, saved) = (uids.next()??, uids.next()??, uids.next()??);
    Some((real, saved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_client_outside_of_inner_namespaces_shares_pids() {
        let own = i32::try_from(std::process::id()).unwrap();
        for (pid, expected) in [
            (Some(own), Some(true)),
            (Some(0), Some(false)),
            (Some(i32::MAX), None),
            (None, None),
        ] {
            assert_eq!(shares_pid_namespace(pid), expected, "{pid:?}");
        }
    }

    #[test]
    fn incomplete_status_file_has_no_ids() {
        assert_eq!(ids("Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t9"), Some((1, 3)));
        assert_eq!(ids("Name:\tx\nUid:\t1\t2"), None);
        assert_eq!(ids("Uid:\ta\tb\tc"), None);
        assert_eq!(ids(""), None);
    }
}
