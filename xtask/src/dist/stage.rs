//! Directory with the files of a package, each at its place below the root.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::build::SHELLS;
use super::{Release, packaging};
use crate::cross::Arch;
use crate::shell::{find_program, output, run, workspace};

/// Line of the example config, and the line with which packages replace it.
const MODE: (&str, &str) = ("#mode = \"enforce\"", "mode = \"observe\"");

pub struct Stage {
    pub root: PathBuf,
}

impl Stage {
    /// Creates an empty directory.
    ///
    /// # Errors
    /// The directory cannot be created, or its previous content cannot be removed.
    pub fn create(root: PathBuf) -> Result<Stage> {
        renew(&root)?;
        Ok(Stage { root })
    }

    /// Creates a directory with the files that `.deb` and `.rpm` have in common. `zsh` is the directory of zsh's
    /// completions below `/usr/share`, which differs between distributions.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn common(root: PathBuf, release: &Release, zsh: &str) -> Result<Stage> {
        let stage = Stage::create(root)?;
        stage.program("usr/bin/reaper", &release.program, release.arch)?;
        stage.copy(
            "usr/lib/systemd/system/reaper.service",
            &packaging("reaper.service"),
        )?;
        stage.copy(
            "usr/lib/systemd/user/reaper.service",
            &packaging("reaper-user.service"),
        )?;
        stage.add("etc/reaper/config.toml", config()?.as_bytes())?;
        for (name, text) in &release.documents.man {
            let place = format!("usr/share/man/man1/{name}.gz");
            stage.add(&place, &compressed(text)?)?;
        }
        stage.completions("usr/share", zsh, release)?;
        stage.add(
            "usr/share/doc/reaper/reaper.cdx.json",
            release.sbom.as_bytes(),
        )?;
        Ok(stage)
    }

    /// Adds the completions of all shells below a directory; those of zsh below `zsh` there.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn completions(&self, directory: &str, zsh: &str, release: &Release) -> Result<()> {
        let places = [
            "bash-completion/completions",
            "fish/vendor_completions.d",
            zsh,
        ];
        let scripts = SHELLS.iter().zip(&release.documents.completions);
        for (place, ((_, name), script)) in places.iter().zip(scripts) {
            self.add(&format!("{directory}/{place}/{name}"), script)?;
        }
        Ok(())
    }

    /// Writes a file with mode 0644.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(&self, place: &str, content: &[u8]) -> Result<()> {
        let path = self.root.join(place);
        let parent = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        fs::write(&path, content).with_context(|| path.display().to_string())?;
        set_mode(&path, 0o644)
    }

    /// Copies a file, with mode 0644.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn copy(&self, place: &str, from: &Path) -> Result<()> {
        let content = fs::read(from).with_context(|| from.display().to_string())?;
        self.add(place, &content)
    }

    /// Writes a file with mode 0755.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn executable(&self, place: &str, content: &[u8]) -> Result<()> {
        self.add(place, content)?;
        set_mode(&self.root.join(place), 0o755)
    }

    /// Copies a program without its symbols, with mode 0755.
    ///
    /// # Errors
    /// The file cannot be read or written, or no `strip` for its processor is installed.
    pub fn program(&self, place: &str, from: &Path, arch: Arch) -> Result<()> {
        let content = fs::read(from).with_context(|| from.display().to_string())?;
        self.executable(place, &content)?;
        let cross = format!("{}-linux-gnu-strip", arch.name());
        let strip = match find_program(&cross) {
            Some(strip) => strip,
            None => find_program("strip").context("there is no strip: install binutils")?,
        };
        run(Command::new(strip).arg(self.root.join(place)))
    }

    /// Sets the modes of all directories to 0755, whatever the umask.
    ///
    /// # Errors
    /// `find` or `chmod` fails.
    pub fn finish(&self) -> Result<()> {
        let mut find = Command::new("find");
        let find = find.arg(&self.root).args(["-type", "d"]);
        run(find.args(["-exec", "chmod", "0755", "{}", "+"]))
    }
}

/// Returns the config of packages: that of `reaper config init`, in observe mode.
///
/// # Errors
/// The example cannot be read, or has another default mode.
pub fn config() -> Result<String> {
    let path = workspace().join("reaper-user/src/config/example.toml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let (from, to) = MODE;
    ensure!(
        text.lines().any(|line| line == from),
        "{} has no line `{from}`",
        path.display()
    );
    Ok(text.replace(from, to))
}

/// Creates an empty directory, or empties it.
///
/// # Errors
/// The directory cannot be created or emptied.
pub fn renew(directory: &Path) -> Result<()> {
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())
}

/// Compresses a text so that the same text always gives the same bytes.
///
/// # Errors
/// gzip fails.
pub fn compressed(text: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = Command::new("gzip")
        .args(["-9", "--no-name"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start gzip")?;
    let mut input = gzip.stdin.take().context("gzip has no input")?;
    // The pages are smaller than the buffers of the pipes.
    input.write_all(text)?;
    drop(input);
    let output = gzip.wait_with_output()?;
    ensure!(output.status.success(), "gzip failed: {}", output.status);
    Ok(output.stdout)
}

/// Returns the newest version of glibc whose symbols a program uses, as in `2.34`.
///
/// # Errors
/// readelf fails, or the program uses no glibc.
pub fn glibc(program: &Path) -> Result<String> {
    let mut readelf = Command::new("readelf");
    let text = output(readelf.args(["--wide", "--version-info"]).arg(program))?;
    newest_glibc(&text).with_context(|| format!("{} uses no glibc", program.display()))
}

fn newest_glibc(versions: &str) -> Option<String> {
    let versions = versions.split("GLIBC_").skip(1);
    let versions = versions.filter_map(|rest| {
        let end = rest.find(|c: char| c != '.' && !c.is_ascii_digit());
        let version = &rest[..end.unwrap_or(rest.len())];
        let numbers: Option<Vec<u32>> = version.split('.').map(|n| n.parse().ok()).collect();
        Some((numbers?, version))
    });
    Some(versions.max()?.1.to_owned())
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    file.set_permissions(Permissions::from_mode(mode))
        .with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glibc_versions_are_compared_numerically() {
        let text = "0x00: Name: GLIBC_2.9  Flags: none\n0x10: Name: GLIBC_2.34  Flags: none\n\
                    0x20: Name: GLIBC_2.3.4  Flags: none\n0x30: Name: GLIBC_PRIVATE";
        assert_eq!(newest_glibc(text).as_deref(), Some("2.34"));
        assert_eq!(newest_glibc("Name: GCC_3.0"), None);
    }

    #[test]
    fn config_of_packages_only_observes() {
        let config = config().unwrap();
        assert!(config.contains("\nmode = \"observe\"\n"));
        assert!(!config.contains("enforce\"\n"));
    }
}
