//! RPM package, built by `rpmbuild`.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::stage::{Stage, renew};
use super::{Release, packaging};
use crate::shell::{run, workspace};

/// Builds the package with this version and returns its path.
///
/// # Errors
/// A file cannot be read or written, or rpmbuild fails.
pub fn build(release: &Release, version: &str) -> Result<PathBuf> {
    let arch = release.arch.name();
    let stage = Stage::common(release.work.join("rpm"), release, "zsh/site-functions")?;
    for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let place = format!("usr/share/licenses/reaper/{license}");
        stage.copy(&place, &workspace().join(license))?;
    }
    stage.finish()?;
    let top = release.work.join("rpmbuild");
    renew(&top)?;
    let mut rpmbuild = Command::new("rpmbuild");
    rpmbuild.env("SOURCE_DATE_EPOCH", release.time.to_string());
    rpmbuild.args(["-bb", "--quiet"]);
    rpmbuild.arg(format!("--target={arch}-linux"));
    let payload = format!("w{}.xzdio", release.compression);
    for (name, value) in [
        ("_binary_payload", payload.as_ref()),
        ("_topdir", top.as_path()),
        ("_rpmdir", &release.out),
        (
            "_build_name_fmt",
            "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm".as_ref(),
        ),
        ("reaper_version", version.as_ref()),
        ("stage", &stage.root),
    ] {
        rpmbuild.arg("--define");
        rpmbuild.arg(format!("{name} {}", value.display()));
    }
    run(rpmbuild.arg(packaging("rpm/reaper.spec")))?;
    Ok(release.out.join(format!("reaper-{version}-1.{arch}.rpm")))
}
