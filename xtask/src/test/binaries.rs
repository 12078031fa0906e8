//! Builds all tests at once and finds the executables.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cross::{Arch, build_for};
use crate::shell::{as_root, built, cargo, executables, output};

/// Name of the test target with the real process trees.
const REAL: &str = "real";

/// Executable with tests.
#[derive(Debug)]
pub struct TestBinary {
    /// Name of its package.
    pub package: String,
    /// Directory of its package, where cargo would start it.
    directory: PathBuf,
    path: PathBuf,
}

/// Results of one build.
pub struct Binaries {
    /// Unit, table and property tests.
    pub unit: Vec<TestBinary>,
    /// Real process trees.
    pub real: TestBinary,
    /// The program under test.
    pub reaper: PathBuf,
}

impl Binaries {
    /// Builds library, programs and all tests with one set of features, to compile nothing twice.
    ///
    /// # Errors
    /// The build fails, or an executable is missing.
    pub fn build() -> Result<Binaries> {
        Binaries::read(executables(&["test", "--workspace", "--no-run"])?)
    }

    /// Builds the real trees and the program under test for a processor, and for that of this host all tests.
    ///
    /// # Errors
    /// The standard library or the C compiler of the processor is not available, the build fails, or an executable is
    /// missing.
    pub fn build_for(arch: Arch) -> Result<Binaries> {
        if arch.is_host() {
            return Binaries::build();
        }
        let mut cargo = cargo();
        cargo.args(["test", "--no-run", "--package=reaper-user", "--test", REAL]);
        build_for(&mut cargo, arch, "gnu")?;
        Binaries::read(built(&mut cargo)?)
    }

    fn read(executables: Vec<(PathBuf, Value)>) -> Result<Binaries> {
        let (mut unit, mut real, mut reaper) = (Vec::new(), None, None);
        for (path, message) in executables {
            let target = &message["target"];
            if message["profile"]["test"] != true {
                if target["name"] == "reaper" {
                    reaper = Some(path);
                }
                continue;
            }
            let manifest = Path::new(message["manifest_path"].as_str().unwrap_or_default());
            let directory = manifest.parent().unwrap_or(Path::new("/")).to_path_buf();
            let package = directory.file_name().unwrap_or_default();
            let binary = TestBinary {
                package: package.to_string_lossy().into_owned(),
                directory,
                path,
            };
            if target["name"] == REAL {
                real = Some(binary);
            } else {
                unit.push(binary);
            }
        }
        match (real, reaper) {
            (Some(real), Some(reaper)) => Ok(Binaries { unit, real, reaper }),
            _ => bail!("cargo built no test target `{REAL}` or no program `reaper`"),
        }
    }
}

impl TestBinary {
    /// Returns a command that runs the executable as this user.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.directory);
        command
    }

    /// Returns a command that runs the executable as root.
    ///
    /// # Errors
    /// This process is not root and there is no sudo.
    pub fn command_as_root(&self) -> Result<Command> {
        let mut command = as_root(&self.path)?;
        command.current_dir(&self.directory);
        Ok(command)
    }

    /// Returns the path of the executable.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of the tests.
    ///
    /// # Errors
    /// The executable cannot be run.
    pub fn tests(&self) -> Result<Vec<String>> {
        let listed = output(self.command().arg("--list"))
            .with_context(|| format!("tests of {}", self.path.display()))?;
        let names = listed
            .lines()
            .filter_map(|line| line.strip_suffix(": test"));
        // libtest-mimic pads the name behind the kind of the test.
        Ok(names.map(|name| name.trim().to_owned()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::read_executables;

    fn artifact(target: &str, test: bool, path: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","manifest_path":"/w/p/Cargo.toml","target":{{"name":"{target}"}},"profile":{{"test":{test}}},"executable":{path}}}"#
        )
    }

    #[test]
    fn executables_are_found_among_cargo_messages() {
        let messages = [
            artifact("reaper", false, "null"),
            artifact("reaper", false, r#""/t/reaper""#),
            artifact("reaper", true, r#""/t/reaper-1""#),
            artifact("real", true, r#""/t/real-2""#),
            "not JSON".to_owned(),
        ];
        let found = Binaries::read(read_executables(&messages.join("\n"))).unwrap();
        assert_eq!(found.reaper, Path::new("/t/reaper"));
        assert_eq!(found.real.path, Path::new("/t/real-2"));
        assert_eq!(found.unit[0].path, Path::new("/t/reaper-1"));
        assert_eq!(found.unit[0].package, "p");
        assert_eq!(found.unit.len(), 1);
        assert!(Binaries::read(Vec::new()).is_err());
    }
}
