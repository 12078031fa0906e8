//! Root file system of the machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::cpio::Archive;
use crate::apt::{self, Suite};
use crate::cross::Arch;
use crate::shell::{find_program, install, output, workspace};
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

/// Directories of shared libraries, besides those named after the processor.
const LIBRARIES: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// Programs for the machine, with their libraries.
pub struct Programs {
    arch: Arch,
    /// Root directory of a system with them: of this host, or unpacked packages of another processor.
    root: PathBuf,
}

impl Programs {
    /// Installs missing programs, or unpacks those of another processor below `dir`.
    ///
    /// # Errors
    /// Packages cannot be installed or unpacked.
    pub fn get(arch: Arch, dir: &Path) -> Result<Programs> {
        if arch.is_host() {
            for (package, names) in PROGRAMS {
                if let Some(name) = names.split(' ').find(|name| find_program(name).is_none()) {
                    install(&[package], &format!("tests use {name}"))?;
                }
            }
            let root = PathBuf::from("/");
            return Ok(Programs { arch, root });
        }
        let [root, known] = ["debian", "debian.packages"].map(|name| dir.join(name));
        let mut packages = vec!["base-files", "libc-bin"];
        packages.extend(PROGRAMS.iter().map(|(package, _)| package));
        let wanted = format!("{} {}", apt::SUITE, packages.join(" "));
        if fs::read_to_string(&known).is_ok_and(|known| known == wanted) {
            return Ok(Programs { arch, root });
        }
        let _ = fs::remove_file(&known);
        let suite = Suite::read(&dir.join("apt"), apt::SUITE, apt::ARCHIVE, arch)?;
        suite.unpack(apt::WITH_DEPENDENCIES, &packages, &root)?;
        // Written last: a directory with this file is complete.
        fs::write(&known, wanted).with_context(|| known.display().to_string())?;
        Ok(Programs { arch, root })
    }

    /// Returns the file at a place of the system.
    fn file(&self, place: &Path) -> PathBuf {
        self.root.join(place.strip_prefix("/").unwrap_or(place))
    }

    /// Returns the file of a program in one of the directories of PATH.
    fn find(&self, name: &str) -> Result<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut files = std::env::split_paths(&path).map(|dir| self.file(&dir.join(name)));
        let found = files.find(|file| file.is_file());
        found.with_context(|| format!("{name} is not on PATH in {}", self.root.display()))
    }

    /// Returns the places of the shared libraries of programs, and of their loaders.
    fn libraries(&self, programs: Vec<PathBuf>) -> Result<BTreeSet<PathBuf>> {
        let own = format!("{}-linux-gnu", self.arch.name());
        let mut directories = ["/lib", "/usr/lib"]
            .map(|dir| format!("{dir}/{own}"))
            .to_vec();
        directories.extend(LIBRARIES.map(str::to_owned));
        let mut places = BTreeSet::new();
        let mut unread = programs;
        while let Some(file) = unread.pop() {
            let mut readelf = Command::new("readelf");
            readelf
                .env("LC_ALL", "C")
                .args(["--wide", "--dynamic", "--program-headers"]);
            for name in needed(&output(readelf.arg(&file))?) {
                // An absolute path, as that of the loader, replaces the directory.
                let mut all = directories.iter().map(|dir| Path::new(dir).join(name));
                let place = all.find(|place| self.file(place).is_file());
                let place = place.with_context(|| {
                    format!("{} needs {name}, which is missing", file.display())
                })?;
                if places.insert(place.clone()) {
                    unread.push(self.file(&place));
                }
            }
        }
        Ok(places)
    }
}

/// Writes the initramfs: the tests as `/init`, `reaper`, and other programs, with their shared libraries.
///
/// # Errors
/// A program or library is missing, or a file cannot be read or written.
pub fn build(path: &Path, binaries: &Binaries, programs: &Programs) -> Result<()> {
    let mut archive = Archive::create(path)?;
    let (tests, reaper) = (binaries.real.path(), binaries.reaper.as_path());
    archive.copy(tests, Path::new("/init"))?;
    // At the same path as here, because that path is compiled into the tests.
    archive.copy(reaper, reaper)?;
    let mut files = vec![tests.to_owned(), reaper.to_owned()];
    for name in PROGRAMS.iter().flat_map(|(_, names)| names.split(' ')) {
        let file = programs.find(name)?;
        archive.copy(&file, &Path::new("/bin").join(name))?;
        files.push(file);
    }
    for place in programs.libraries(files)? {
        archive.copy(&programs.file(&place), &place)?;
    }
    let object = workspace().join(OBJECT);
    archive.copy(&object, &object)?;
    archive.file(Path::new("/etc/passwd"), 0o644, PASSWD.as_bytes())?;
    let locale = Path::new(LOCALE);
    if programs.file(locale).exists() {
        archive.copy(&programs.file(locale), locale)?;
    }
    archive.directory(Path::new("/tmp"))?;
    archive.finish()
}

/// Returns the names of the libraries and the path of the loader in the output of `readelf`.
fn needed(lines: &str) -> impl Iterator<Item = &str> {
    lines.lines().filter_map(|line| {
        let marks = ["Shared library: [", "program interpreter: "];
        let rest = marks.iter().find_map(|mark| line.split_once(mark))?.1;
        rest.split(']').next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_loader_are_read_from_readelf_output() {
        let lines = "  INTERP 0x000318 R   0x1\n      [Requesting program interpreter: /lib/ld-linux-aarch64.so.1]\n\
                     0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n\
                     0x000000000000000e (SONAME)             Library soname: [libx.so.1]\n";
        let needed: Vec<&str> = needed(lines).collect();
        assert_eq!(needed, ["/lib/ld-linux-aarch64.so.1", "libc.so.6"]);
        assert_eq!(
            super::needed("There is no dynamic section in this file.\n").count(),
            0
        );
    }
}
