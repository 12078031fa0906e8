//! Debian packages of any suite and processor, unpacked into a directory. Lists and packages of the host do not change.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cross::Arch;
use crate::shell::{find_program, install, output, run, say};

/// Archive of Debian, and its suite for programs and libraries.
pub const ARCHIVE: &str = "http://deb.debian.org/debian";
pub const SUITE: &str = "trixie";

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Arguments of apt-get that download these packages alone, or also all that they depend on.
pub const ALONE: &[&str] = &["download"];
pub const WITH_DEPENDENCIES: &[&str] = &[
    "install",
    "--yes",
    "--no-install-recommends",
    "--download-only",
];

/// Packages of a suite for one processor.
pub struct Suite {
    /// Directory of configuration, lists and downloads.
    dir: PathBuf,
}

impl Suite {
    /// Returns the suite that was read into a directory below `dir`.
    pub fn known(dir: &Path, name: &str) -> Suite {
        Suite {
            dir: dir.join(name),
        }
    }

    /// Downloads the list of a suite's packages into a directory below `dir`.
    ///
    /// # Errors
    /// There is no apt-get, the list cannot be downloaded, or a file cannot be written.
    pub fn read(dir: &Path, name: &str, archive: &str, arch: Arch) -> Result<Suite> {
        ensure!(find_program("apt-get").is_some(), "there is no apt-get");
        if !Path::new(KEYRING).is_file() {
            install(&["debian-archive-keyring"], "Debian's packages are signed")?;
        }
        let suite = Suite::known(dir, name);
        for directory in ["archives/partial", "lists/partial"] {
            let path = suite.dir.join(directory);
            fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        }
        let arch = arch.in_debian();
        let own = suite.dir.display();
        let source = format!(
            "deb [arch={arch} lang=none target=Packages signed-by={KEYRING}] {archive} {name} main\n"
        );
        // apt-get puts its locks beside the list of installed packages.
        let configuration = format!(
            "APT::Architecture \"{arch}\";\n\
             APT::Architectures \"{arch}\";\n\
             APT::Sandbox::User \"root\";\n\
             Dir::Cache \"{own}\";\n\
             Dir::Etc::SourceList \"{own}/sources.list\";\n\
             Dir::Etc::SourceParts \"/dev/null\";\n\
             Dir::State::Lists \"{own}/lists\";\n\
             Dir::State::Status \"{own}/status\";\n"
        );
        for (file, text) in [
            ("sources.list", source),
            ("apt.conf", configuration),
            ("status", String::new()),
        ] {
            let path = suite.dir.join(file);
            fs::write(&path, text).with_context(|| path.display().to_string())?;
        }
        say(format_args!(
            "reading the list of {name}'s packages for {arch}"
        ));
        // Without `error-on`, apt-get ignores download errors.
        let mut update = suite.apt("apt-get");
        run(update.args(["--quiet=2", "--error-on=any", "update"]))?;
        Ok(suite)
    }

    /// Returns the descriptions of all packages.
    ///
    /// # Errors
    /// apt-cache fails.
    pub fn packages(&self) -> Result<String> {
        output(self.apt("apt-cache").arg("dumpavail"))
    }

    /// Downloads packages with these arguments of apt-get, [`ALONE`] or [`WITH_DEPENDENCIES`], and unpacks them into a
    /// new directory.
    ///
    /// # Errors
    /// The download fails, or a package cannot be unpacked.
    pub fn unpack(&self, how: &[&str], packages: &[&str], to: &Path) -> Result<()> {
        let archives = self.dir.join("archives");
        for directory in [to, &archives] {
            let _ = fs::remove_dir_all(directory);
            fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        }
        let partial = archives.join("partial");
        fs::create_dir_all(&partial).with_context(|| partial.display().to_string())?;
        let mut download = self.apt("apt-get");
        download.arg("--quiet=2").args(how).args(packages);
        run(download.current_dir(&archives))?;
        let extract = "for deb in *.deb; do dpkg-deb --extract \"$deb\" \"$1\"; done";
        let mut shell = Command::new("sh");
        shell.args(["-ec", extract, "sh"]).arg(to);
        run(shell.current_dir(&archives))?;
        fs::remove_dir_all(&archives).with_context(|| archives.display().to_string())
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let configuration = self.dir.join("apt.conf");
        command.arg(format!("--config-file={}", configuration.display()));
        command
    }
}
