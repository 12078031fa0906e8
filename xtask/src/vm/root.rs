//! What is in the machine besides the kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cpio::Archive;
use crate::shell::{built, find_program, install, workspace};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Cargo's configuration for a program that needs nothing around it. Not by RUSTFLAGS, so that what is built for this
/// host stays built; without what only debuggers read, as it is copied into memory at each boot.
const STATIC: &str = "\
[target.x86_64-unknown-linux-gnu]
rustflags = ['-Ctarget-feature=+crt-static']
[profile.dev]
strip = 'debuginfo'
";

/// Debian packages, and which of their programs tests and the demo call.
const PROGRAMS: &[(&str, &[&str])] = &[
    ("dash", &["sh"]),
    ("bash", &["bash"]),
    (
        "coreutils",
        &[
            "cat", "chmod", "cut", "date", "dd", "env", "false", "head", "id", "ln", "ls", "mkdir",
            "mkfifo", "mv", "nice", "nohup", "readlink", "rm", "seq", "sleep", "sort", "stty",
            "tail", "touch", "tr", "true", "tty", "wc", "yes",
        ],
    ),
    ("git", &["git"]),
    ("grep", &["grep"]),
    ("less", &["less"]),
    ("mount", &["mount", "umount"]),
    ("openssh-client", &["ssh-agent"]),
    ("sed", &["sed"]),
    ("tmux", &["tmux"]),
    ("util-linux", &["nsenter", "setpriv", "setsid", "unshare"]),
];

/// The tests look for it at its path in the workspace.
const OBJECT: &str = "reaper-user/src/source/ebpf/reaper.bpf.o";

/// tmux asks who it is and takes nothing but UTF-8.
const PASSWD: &str =
    "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n";
const LOCALE: &str = "/usr/lib/locale/C.utf8/LC_CTYPE";

/// Writes the archive that the kernel unpacks and starts `/init` in.
///
/// # Errors
/// The build fails or makes no static programs, or a program is missing and cannot be installed.
pub fn build(path: &Path) -> Result<()> {
    let config = path.with_file_name("static.toml");
    fs::write(&config, STATIC).with_context(|| config.display().to_string())?;
    let (target, config) = (
        format!("--target={TARGET}"),
        format!("--config={}", config.display()),
    );
    let ours = ["--package=reaper-user", &target, &config];
    let reaper = built(&[&["build", "--bin=reaper"], &ours[..]].concat(), "reaper")?;
    let tests = built(
        &[&["test", "--no-run", "--test=real"], &ours[..]].concat(),
        "real",
    )?;
    let mut archive = Archive::create(path)?;
    for (program, place) in [(&tests, Path::new("/init")), (&reaper, &reaper)] {
        let libraries = libraries(program)?;
        if !libraries.is_empty() {
            bail!(
                "{} is not static: the rustflags of {TARGET} are overridden, unset RUSTFLAGS",
                program.display()
            );
        }
        // `reaper` at its path here: that is compiled into the tests.
        archive.copy(program, place)?;
    }
    let object = workspace().join(OBJECT);
    archive.copy(&object, &object)?;
    let all = PROGRAMS.iter();
    for (package, name) in all.flat_map(|(package, names)| names.iter().map(move |n| (package, n)))
    {
        if find_program(name).is_none() {
            install(&[package], &format!("tests drive {name}"))?;
        }
        let program = find_program(name).with_context(|| format!("{name} is not on PATH"))?;
        archive.copy(&program, &Path::new("/bin").join(name))?;
        for library in libraries(&program)? {
            archive.copy(&library, &library)?;
        }
    }
    archive.file(Path::new("/etc/passwd"), 0o644, PASSWD.as_bytes())?;
    let locale = Path::new(LOCALE);
    if locale.exists() {
        archive.copy(locale, locale)?;
    }
    archive.directory(Path::new("/tmp"))?;
    archive.finish()
}

/// The shared libraries of a program, its loader included.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let ldd = Command::new("ldd")
        .arg(program)
        .output()
        .context("cannot start `ldd`")?;
    // For what is not dynamic it fails, and says so.
    let lines = String::from_utf8_lossy(&ldd.stdout).into_owned();
    Ok(paths(&lines))
}

/// `libc.so.6 => /lib/libc.so.6 (0x7f…)` and `/lib64/ld-linux.so.2 (0x7f…)`, but not `linux-vdso.so.1 (0x7f…)`.
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
    fn libraries_are_where_ldd_says() {
        let lines = "\tlinux-vdso.so.1 (0x7f1)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f2)\n\t/lib64/ld.so.2 (0x7f3)\n";
        assert_eq!(
            paths(lines),
            ["/lib/libc.so.6", "/lib64/ld.so.2"].map(PathBuf::from)
        );
        assert!(paths("\tstatically linked\n").is_empty());
    }
}
