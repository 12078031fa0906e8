//! Debian package, built by `dpkg-deb`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::stage::{Stage, compressed, glibc};
use super::{Release, format_time, packaging};
use crate::shell::{output, run};

/// Revision of the package; the changelog of the package starts again with each version.
pub const REVISION: u32 = 1;

const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// Line of the scripts in place of the content of a common file. dpkg keeps each script alone, also after the files of the
/// package are removed, so no script can read another file.
const COMMON: (&str, &str) = ("#OTHER-UNIT#\n", "deb/other-unit.sh");

/// Builds the package with this version and returns its path.
///
/// # Errors
/// A file cannot be read or written, or dpkg-deb fails.
pub fn build(release: &Release, version: &str) -> Result<PathBuf> {
    let arch = release.arch.in_debian();
    let version = format!("{version}-{REVISION}");
    let stage = Stage::common(release.work.join("deb"), release, "zsh/vendor-completions")?;
    stage.copy(
        "usr/share/doc/reaper/copyright",
        &packaging("deb/copyright"),
    )?;
    stage.add(
        "usr/share/doc/reaper/changelog.Debian.gz",
        &compressed(changelog(release, &version)?.as_bytes())?,
    )?;
    stage.copy(
        "usr/share/lintian/overrides/reaper",
        &packaging("deb/lintian-overrides"),
    )?;
    stage.finish()?;
    let (sums, kib) = (checksums(&stage.root)?, installed_kib(&stage.root)?);
    stage.add("DEBIAN/md5sums", sums.as_bytes())?;
    stage.add("DEBIAN/conffiles", b"/etc/reaper/config.toml\n")?;
    let control = template("deb/control")?
        .replace("{version}", &version)
        .replace("{arch}", arch)
        .replace("{glibc}", &glibc(&release.program)?)
        .replace("{installed_size}", &kib.to_string());
    stage.add("DEBIAN/control", control.as_bytes())?;
    let (line, common) = (COMMON.0, template(COMMON.1)?);
    for script in SCRIPTS {
        let text = template(&format!("deb/{script}"))?.replace(line, &common);
        stage.executable(&format!("DEBIAN/{script}"), text.as_bytes())?;
    }
    stage.finish()?;
    let deb = release.out.join(format!("reaper_{version}_{arch}.deb"));
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.env("SOURCE_DATE_EPOCH", release.time.to_string());
    // xz: dpkg of Debian 11 reads no zstd.
    dpkg.args(["--root-owner-group", "-Zxz"]);
    dpkg.args([&format!("-z{}", release.compression), "--build"]);
    run(dpkg.arg(&stage.root).arg(&deb))?;
    Ok(deb)
}

fn template(name: &str) -> Result<String> {
    let path = packaging(name);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

fn changelog(release: &Release, version: &str) -> Result<String> {
    let date = format_time(release.time, "+%a, %d %b %Y %H:%M:%S +0000")?;
    Ok(format!(
        "reaper ({version}) unstable; urgency=medium\n\n  * Built by `cargo xtask dist`; `reaper --version` names the \
         commit.\n\n -- reaper maintainers <maintainers@reaper.invalid>  {date}\n"
    ))
}

/// Returns the content of `md5sums`: all files but the config, which users change.
fn checksums(root: &Path) -> Result<String> {
    let script = "find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum";
    output(Command::new("sh").args(["-c", script]).current_dir(root))
}

/// Returns the size of all files, in KiB.
fn installed_kib(root: &Path) -> Result<u64> {
    let size = output(
        Command::new("du")
            .args(["-sk", "--apparent-size"])
            .arg(root),
    )?;
    let size = size.split_whitespace().next().unwrap_or_default();
    size.parse().context("output of du")
}
