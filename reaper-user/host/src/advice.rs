//! Advice for errors of the operating system whose remedy follows from the errno.

use std::fmt::Display;
use std::io;

use nix::errno::Errno;

/// Error of the operating system, which can be shown with advice.
pub trait Advised: Display {
    /// Returns the errno, if there is one.
    fn errno(&self) -> Option<Errno>;

    /// Returns the error, and what the user can do if that follows from the errno.
    fn advised(&self) -> String {
        match self.errno().and_then(advice) {
            Some(advice) => format!("{self}; {advice}"),
            None => self.to_string(),
        }
    }

    /// Returns the error, and what the user can do: `otherwise` if that does not follow from the errno.
    fn advised_or(&self, otherwise: &str) -> String {
        let advice = self.errno().and_then(advice);
        format!("{self}; {}", advice.unwrap_or(otherwise))
    }
}

impl Advised for Errno {
    fn errno(&self) -> Option<Errno> {
        Some(*self)
    }
}

impl Advised for io::Error {
    fn errno(&self) -> Option<Errno> {
        self.raw_os_error().map(Errno::from_raw)
    }
}

/// Returns what the user can do about a lack of resources, `None` for all other errors. `EAGAIN` is taken for that of
/// a new thread.
fn advice(errno: Errno) -> Option<&'static str> {
    Some(match errno {
        Errno::EMFILE => "raise the limit on open files (ulimit -n, or LimitNOFILE= of the unit)",
        Errno::ENFILE => "raise the system's limit on open files (sysctl fs.file-max)",
        Errno::EAGAIN => {
            "raise the limit on processes and threads (ulimit -u, or TasksMax= of the unit)"
        }
        Errno::ENOMEM => "free memory on this machine",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_from_the_errno() {
        let files = io::Error::from_raw_os_error(Errno::EMFILE as i32);
        assert!(files.advised().ends_with("LimitNOFILE= of the unit)"));
        assert!(
            Errno::ENOMEM
                .advised_or("ask root")
                .ends_with("; free memory on this machine")
        );
        assert_eq!(Errno::EACCES.advised(), Errno::EACCES.to_string());
        assert!(Errno::EACCES.advised_or("ask root").ends_with("; ask root"));
        assert_eq!(io::Error::other("no").advised(), "no");
    }
}
