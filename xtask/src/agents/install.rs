//! Installs packages without their install scripts, as an unprivileged user.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::unistd::Uid;
use sha2::{Digest, Sha256, Sha512};

use super::packages::{self, Package, Registry};
use crate::shell::{self, say};

/// Environment variables that package clients need to reach their registries.
const REGISTRY_VARIABLES: &str = "HTTPS_PROXY HTTP_PROXY NODE_EXTRA_CA_CERTS NO_PROXY PIP_CERT PIP_INDEX_URL \
    REQUESTS_CA_BUNDLE SSL_CERT_FILE";
/// Environment variables of these clients: no install scripts, little output, no caches.
const QUIET: &str = "npm_config_ignore_scripts=true npm_config_update_notifier=false npm_config_audit=false \
    npm_config_fund=false npm_config_loglevel=error PIP_ONLY_BINARY=:all: PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_QUIET=1 PIP_NO_CACHE_DIR=1";

pub struct Installed {
    pub folder: PathBuf,
    /// Absolute path of the command, such as FOLDER/bin/gemini. Its interpreter, `node` or `python`, is in the same folder.
    pub command: PathBuf,
    /// Environment variables that the command needs besides HOME and PATH.
    pub environment: Vec<(String, String)>,
}

/// Installs a package into `folder`, which must belong to the user. Checks the hash of its archive first.
///
/// # Errors
/// The package cannot be downloaded, has another hash, or cannot be installed.
pub fn install(package: &Package, folder: &Path, user: Uid) -> Result<Installed> {
    let home = folder.join("home");
    fs::create_dir_all(&home)?;
    for (name, contents) in &package.home {
        fs::write(home.join(name), contents)?;
        chown(home.join(name), Some(user.as_raw()), Some(user.as_raw()))?;
    }
    chown(&home, Some(user.as_raw()), Some(user.as_raw()))?;
    let place = Installer { folder, user };
    match package.registry {
        Registry::Npm => place.npm(package),
        Registry::PyPi => place.pypi(package),
    }
}

/// Returns a command that runs as the user, with a minimal environment.
///
/// Directories in `path` come first in PATH.
pub fn as_user(folder: &Path, user: Uid, path: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user.to_string(), "--regid", &user.to_string()]);
    command.args(["--clear-groups", "--no-new-privs", "env", "-i"]);
    command.arg(format!("HOME={}", folder.join("home").display()));
    command.arg(format!(
        "PATH={}:/usr/local/bin:/usr/bin:/bin",
        path.display()
    ));
    command.args(["LANG=C.UTF-8", "TERM=xterm-256color"]);
    command
}

struct Installer<'a> {
    folder: &'a Path,
    user: Uid,
}

impl Installer<'_> {
    fn command(&self, bin: &str) -> Command {
        let mut command = as_user(self.folder, self.user, &self.folder.join(bin));
        command.current_dir(self.folder);
        command.args(QUIET.split_whitespace());
        for name in REGISTRY_VARIABLES.split_whitespace() {
            if let Ok(value) = std::env::var(name) {
                command.arg(format!("{name}={value}"));
            }
        }
        command
    }

    fn npm(&self, package: &Package) -> Result<Installed> {
        let node = self.npm_archive(&packages::node()?)?;
        let mut unpack = self.command("bin");
        unpack.args(["tar", "--extract", "--strip-components=1", "--file"]);
        // As npm does: in the same place as global packages.
        run(unpack.arg(node).arg("package/bin/node"))?;
        let archive = self.npm_archive(package)?;
        let mut install = self.command("bin");
        install
            .args(["npm", "install", "--global", "--prefix"])
            .arg(self.folder);
        run(install.arg(archive).args(&package.with))?;
        for setup in &package.setup {
            let folder = self.folder.join("lib/node_modules").join(&setup.folder);
            let mut command = Command::new("unshare");
            command.args(["--net", "--"]);
            let user = as_user(self.folder, self.user, &self.folder.join("bin"));
            command.arg(user.get_program()).args(user.get_args());
            command
                .args(["sh", "-c", &setup.command])
                .current_dir(folder);
            run(&mut command)?;
        }
        self.installed("bin", package, Vec::new())
    }

    /// Downloads the archive of an npm package and checks its hash.
    fn npm_archive(&self, package: &Package) -> Result<PathBuf> {
        let mut pack = self.command("bin");
        pack.args(["npm", "pack", "--silent"]);
        pack.arg(format!("{}@{}", package.name, package.version));
        let name = shell::output(&mut pack)?;
        let archive = self.folder.join(name.trim());
        check(package, &archive)?;
        Ok(archive)
    }

    fn pypi(&self, package: &Package) -> Result<Installed> {
        let version = package.python.as_deref().unwrap_or("3");
        let (python, environment) = self.python(version)?;
        let command = |bin: &str| {
            let mut command = self.command(bin);
            command.args(
                environment
                    .iter()
                    .map(|(name, value)| format!("{name}={value}")),
            );
            command
        };
        run(command("").arg(python).args(["-m", "venv", "venv"]))?;
        let mut download = command("venv/bin");
        download.args(["pip", "download", "--no-deps", "--dest", "wheel"]);
        run(download.arg(format!("{}=={}", package.name, package.version)))?;
        let wheel = fs::read_dir(self.folder.join("wheel"))?.next();
        let wheel = wheel.context("pip has downloaded nothing")??.path();
        check(package, &wheel)?;
        run(command("venv/bin").args(["pip", "install"]).arg(wheel))?;
        self.installed("venv/bin", package, environment)
    }

    /// Returns a Python interpreter that the user can run, and the environment variables that it needs.
    fn python(&self, version: &str) -> Result<(PathBuf, Vec<(String, String)>)> {
        let name = format!("python{version}");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
        let pyenv = fs::read_dir(home.join(".pyenv/versions"))
            .into_iter()
            .flatten();
        let pyenv = pyenv.flatten().map(|version| version.path().join("bin"));
        let (program, prefix) = std::env::split_paths(&path)
            .chain(pyenv)
            .map(|directory| directory.join(&name))
            .find_map(|program| {
                let asked = Command::new(&program)
                    .args(["-c", "import sys; print(sys.base_prefix, end='')"])
                    .output();
                // A shim of pyenv fails for a version that is not selected.
                let output = asked.ok().filter(|output| output.status.success())?;
                Some((
                    program,
                    PathBuf::from(String::from_utf8(output.stdout).ok()?),
                ))
            })
            .with_context(|| format!("no {name} on PATH or in ~/.pyenv: install it"))?;
        if prefix.starts_with("/usr") {
            return Ok((program, Vec::new()));
        }
        // The user cannot read root's home directory.
        let copy = self.folder.join("python");
        run(Command::new("cp").arg("-a").arg(prefix).arg(&copy))?;
        let libraries = copy.join("lib").display().to_string();
        Ok((
            copy.join("bin").join(name),
            vec![("LD_LIBRARY_PATH".to_owned(), libraries)],
        ))
    }

    fn installed(
        &self,
        bin: &str,
        package: &Package,
        mut environment: Vec<(String, String)>,
    ) -> Result<Installed> {
        let command = self.folder.join(bin).join(&package.bin);
        ensure!(
            command.exists(),
            "{} has no command {}",
            package.name,
            package.bin
        );
        environment.extend(package.environment.clone());
        Ok(Installed {
            folder: self.folder.to_path_buf(),
            command,
            environment,
        })
    }
}

/// Prints the last arguments of a command (the first ones are always the same) and runs it without output.
fn run(command: &mut Command) -> Result<()> {
    let shown: Vec<_> = command
        .get_args()
        .map(|argument| argument.to_string_lossy())
        .collect();
    let from = shown
        .iter()
        .rposition(|argument| argument.contains('=') && !argument.contains("=="))
        .map_or(0, |at| at + 1);
    let line = shown[from..].join(" ");
    say(&line);
    let output = command
        .output()
        .with_context(|| format!("cannot start `{line}`"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "`{line}` failed: {}",
        errors.trim()
    );
    Ok(())
}

/// Checks an archive's hash.
fn check(package: &Package, archive: &Path) -> Result<()> {
    let bytes = fs::read(archive).with_context(|| archive.display().to_string())?;
    let hash = if package.integrity.starts_with("sha512-") {
        format!("sha512-{}", base64(&Sha512::digest(bytes)))
    } else {
        format!("sha256-{}", shell::hex(&Sha256::digest(bytes)))
    };
    ensure!(
        hash == package.integrity,
        "{} {} has the hash {hash}, not {}",
        package.name,
        package.version,
        package.integrity
    );
    Ok(())
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let byte = |n: usize| u32::from(*chunk.get(n).unwrap_or(&0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for n in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * n) & 63) as usize];
            text.push(if n <= chunk.len() {
                char::from(digit)
            } else {
                '='
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_pads_to_groups_of_four() {
        let cases = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
        ];
        for (plain, coded) in cases {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }
}
