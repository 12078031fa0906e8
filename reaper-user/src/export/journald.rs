//! Output to the systemd journal. It adds the time to each line, and reads a priority from the start of the line
//! (sd-daemon(3)).

use std::os::fd::AsFd;

use nix::sys::stat::fstat;
use tracing::Level;

/// Returns whether a file descriptor is connected to the journal. The service manager names that connection by device
/// and inode number in `JOURNAL_STREAM` (systemd.exec(5)).
pub fn is_journal(output: impl AsFd) -> bool {
    std::env::var("JOURNAL_STREAM").is_ok_and(|stream| is_stream(&stream, output))
}

/// Returns whether a file descriptor is the one that `stream` names as `DEVICE:INODE`.
fn is_stream(stream: &str, output: impl AsFd) -> bool {
    fstat(output).is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}

/// Returns the prefix of a line with the priority of this level, as in `<4>`.
pub fn prefix(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        Level::DEBUG | Level::TRACE => "<7>",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_stream_is_recognised_by_device_and_inode() {
        let file = tempfile::tempfile().unwrap();
        let stat = fstat(&file).unwrap();
        let stream = format!("{}:{}", stat.st_dev, stat.st_ino);
        assert!(is_stream(&stream, &file));
        assert!(!is_stream(&stream, tempfile::tempfile().unwrap()));
        for other in ["", ":", "8:1", &format!("{stream}0")] {
            assert!(!is_stream(other, &file), "{other}");
        }
    }
}
