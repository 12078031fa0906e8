//! Shows a long text in a pager.

use std::io;

use crate::export;

/// Part of a text that a pager shows first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstPage {
    Start,
    End,
}

/// Prints a text. On a terminal that is too small for it, shows it in a pager, unless `plain` is set or there is no
/// pager. A pager other than `less` always begins at the start.
///
/// The pager replaces this program, so that it alone handles the keys and Ctrl-C. This function then does not return.
///
/// # Errors
/// Standard output cannot be written to.
pub(super) fn print(text: &[u8], plain: bool, first: FirstPage) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if !plain {
        // Without a pager, the text is printed as it is.
        let _ = linux::exec_pager(text, first);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (plain, first);
    export::print(text)
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ffi::OsString;
    use std::fs::File;
    use std::io::{self, IsTerminal, Seek, Write};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::process::CommandExt;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use nix::sys::memfd::{MFdFlags, memfd_create};
    use terminal_size::{Height, terminal_size_of};

    use super::FirstPage;
    use crate::export;

    /// Options of `less`: pass colours, leave the text on the screen, and exit on Ctrl-C.
    const LESS: &str = "-RXK";
    /// Option of `less` to begin at the end.
    const AT_END: &str = "+G";

    /// Replaces this program by a pager with the text. Returns if no pager is wanted or found, or on an error.
    pub(super) fn exec_pager(text: &[u8], first: FirstPage) -> io::Result<()> {
        let lines = text.iter().filter(|byte| **byte == b'\n').count();
        let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
        let height = terminal_size_of(io::stdout()).map_or(0, |(_, Height(rows))| rows);
        if !is_terminal || height == 0 || lines < usize::from(height) {
            return Ok(());
        }
        let Some(mut pager) = pager(first) else {
            return Ok(());
        };
        let mut file = File::from(memfd_create(c"reaper", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(&export::for_terminal(text)?)?;
        file.rewind()?;
        Err(pager.stdin(Stdio::from(file)).exec())
    }

    /// Returns the pager of the user: `$PAGER`, or `less`. `None` if that is empty or `cat`, or none exists.
    ///
    /// With more rights than the user that called it, only the system's `less` is used, in its secure mode: another
    /// `$PAGER` and commands from within a pager would run with these rights.
    fn pager(first: FirstPage) -> Option<Command> {
        let at_end = (first == FirstPage::End).then_some(AT_END);
        let chosen = std::env::var("PAGER").ok();
        let chosen = chosen.as_deref().map(str::trim);
        if matches!(chosen, Some("" | "cat")) {
            return None;
        }
        if nix::unistd::geteuid().is_root() || nix::unistd::geteuid() != nix::unistd::getuid() {
            let less = ["/usr/bin/less", "/bin/less"].into_iter();
            let mut less = Command::new(less.map(Path::new).find(|path| path.exists())?);
            less.arg(LESS).args(at_end);
            secure(&mut less, std::env::vars_os().map(|(name, _)| name));
            return Some(less);
        }
        match chosen {
            None | Some("less") => {
                let mut less = Command::new("less");
                less.arg(LESS).args(at_end);
                Some(less)
            }
            Some(other) => {
                // Without that program, the shell exits with 127 and has read nothing.
                let script = format!("{other}\n[ $? -ne 127 ] || exec cat\n");
                let mut shell = Command::new("/bin/sh");
                shell.arg("-c").arg(script);
                if std::env::var_os("LESS").is_none() {
                    shell.env("LESS", "RX");
                }
                Some(shell)
            }
        }
    }

    /// Prepares `less` for its secure mode. Removes those of `variables` that begin with `LESS` from its environment: one
    /// of them, `LESSSECURE_ALLOW`, permits what the secure mode forbids.
    fn secure(less: &mut Command, variables: impl Iterator<Item = OsString>) {
        for name in variables.filter(|name| name.as_bytes().starts_with(b"LESS")) {
            less.env_remove(name);
        }
        less.env("LESSSECURE", "1");
    }

    #[test]
    fn secure_pager_gets_no_settings_of_its_caller() {
        let mut less = Command::new("less");
        let variables = [
            "LESS",
            "LESSSECURE_ALLOW",
            "LESSKEY_CONTENT",
            "LESSSECURE",
            "TERM",
        ];
        secure(&mut less, variables.into_iter().map(OsString::from));
        let changed: Vec<_> = less
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_str()?, value)))
            .collect();
        assert_eq!(
            changed,
            [
                ("LESS", None),
                ("LESSKEY_CONTENT", None),
                ("LESSSECURE", Some("1".as_ref())),
                ("LESSSECURE_ALLOW", None),
            ]
        );
    }
}
