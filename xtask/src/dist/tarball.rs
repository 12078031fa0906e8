//! Tarball with the static program, for hosts without a package manager or with another C library.
//!
//! It can be unpacked over `/usr/local`. The program is in `bin` there too: the built-in rule `reaper-run` knows it by that path.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::stage::Stage;
use super::{Release, packaging};
use crate::shell::{run, workspace};

/// Builds the tarball with this version and returns its path.
///
/// # Errors
/// A file cannot be read or written, or tar fails.
pub fn build(release: &Release, version: &str) -> Result<PathBuf> {
    let name = format!("reaper-{version}-{}-linux", release.arch.name());
    let parent = release.work.join("tarball");
    let stage = Stage::create(parent.join(&name))?;
    stage.program("bin/reaper", &release.static_program, release.arch)?;
    let doc = |file: &str| format!("share/doc/reaper/{file}");
    stage.copy(&doc("reaper.service"), &packaging("reaper.service"))?;
    stage.add(&doc("reaper.cdx.json"), release.sbom.as_bytes())?;
    for file in ["README.md", "LICENSE-APACHE", "LICENSE-MIT"] {
        stage.copy(&doc(file), &workspace().join(file))?;
    }
    for (page, text) in &release.documents.man {
        stage.add(&format!("share/man/man1/{page}"), text)?;
    }
    stage.completions("share", "zsh/site-functions", release)?;
    stage.finish()?;
    let tarball = release.out.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=root:0", "--group=root:0"]);
    tar.arg(format!("--mtime=@{}", release.time));
    // Without a name and a time in the header, so that the same files give the same bytes.
    tar.arg("--use-compress-program=gzip --best --no-name");
    tar.arg("--create").arg("--file").arg(&tarball);
    run(tar.arg("--directory").arg(&parent).arg(&name))?;
    Ok(tarball)
}
