//! Root file system of the machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::cpio::Archive;
use crate::shell::{find_program, install, workspace};
use crate::test::Binaries;

/// Debian packages, and their programs that tests and the demo call.
const PROGRAMS: &[(&str, &str)] = &[
    ("dash", "sh"),
    ("bash", "bash"),
    (
        "coreutils",
        "cat chmod cut date dd env false head id ln ls mkdir mkfifo mv nice nohup readlink rm seq sleep sort stty tail \
         touch tr true tty wc yes",
    ),
    ("git", "git"),
    ("grep", "grep"),
    ("less", "less"),
    ("mount", "mount umount"),
    ("openssh-client", "ssh-agent"),
    ("sed", "sed"),
    ("tmux", "tmux"),
    ("util-linux", "nsenter setpriv setsid unshare"),
];

/// Path of the BPF object in the workspace. The tests read it there.
pub const OBJECT: &str = "reaper-user/host/src/source/ebpf/reaper.bpf.o";

/// Content of /etc/passwd, and a UTF-8 locale: tmux needs both.
const PASSWD: &str =
    "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n";
const LOCALE: &str = "/usr/lib/locale/C.utf8/LC_CTYPE";

/// Writes the initramfs: the tests as `/init`, `reaper`, and programs of this host, each with its shared libraries.
///
/// # Errors
/// A program is missing and cannot be installed, or a file cannot be read or written.
pub fn build(path: &Path, binaries: &Binaries) -> Result<()> {
    let mut archive = Archive::create(path)?;
    let (tests, reaper) = (binaries.real.path(), binaries.reaper.as_path());
    let mut add = |program: &Path, place: &Path| -> Result<()> {
        archive.copy(program, place)?;
        let mut libraries = libraries(program)?.into_iter();
        libraries.try_for_each(|library| archive.copy(&library, &library))
    };
    // `reaper` at the same path as here, because that path is compiled into the tests.
    add(tests, Path::new("/init"))?;
    add(reaper, reaper)?;
    for (package, names) in PROGRAMS {
        for name in names.split(' ') {
            if find_program(name).is_none() {
                install(&[package], &format!("tests use {name}"))?;
            }
            let program = find_program(name).with_context(|| format!("{name} is not on PATH"))?;
            add(&program, &Path::new("/bin").join(name))?;
        }
    }
    let object = workspace().join(OBJECT);
    archive.copy(&object, &object)?;
    archive.file(Path::new("/etc/passwd"), 0o644, PASSWD.as_bytes())?;
    let locale = Path::new(LOCALE);
    if locale.exists() {
        archive.copy(locale, locale)?;
    }
    archive.directory(Path::new("/tmp"))?;
    archive.finish()
}

/// Returns the shared libraries of a program, and its loader.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let ldd = Command::new("ldd")
        .arg(program)
        .output()
        .context("cannot start `ldd`")?;
    // ldd fails for a static executable, and prints no path.
    let lines = String::from_utf8_lossy(&ldd.stdout).into_owned();
    Ok(paths(&lines))
}

/// Returns the paths in lines such as `libc.so.6 => /lib/libc.so.6 (0x7f…)` and `/lib64/ld-linux.so.2 (0x7f…)`, but not
/// `linux-vdso.so.1 (0x7f…)`.
fn paths(lines: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let mut words = line.split_whitespace().filter(|word| word.starts_with('/'));
        words.next().map(PathBuf::from)
    };
    lines.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_ldd_output() {
        let lines = "\tlinux-vdso.so.1 (0x7f1)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f2)\n\t/lib64/ld.so.2 (0x7f3)\n";
        assert_eq!(
            paths(lines),
            ["/lib/libc.so.6", "/lib64/ld.so.2"].map(PathBuf::from)
        );
        assert!(paths("\tstatically linked\n").is_empty());
    }
}
