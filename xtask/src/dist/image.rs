//! Container image, built by podman from no other image.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::stage::{Stage, config};
use super::{Release, packaging, require};
use crate::shell::{run, workspace};

/// Builds the image and returns the path of its OCI archive.
///
/// # Errors
/// A file cannot be read or written, or podman fails.
pub fn build(release: &Release) -> Result<PathBuf> {
    require(&[("podman", "podman")], "to build a container image")?;
    let stage = Stage::create(release.work.join("image"))?;
    stage.program("reaper", &release.static_program, release.arch)?;
    stage.add("config.toml", config()?.as_bytes())?;
    stage.add("reaper.cdx.json", release.sbom.as_bytes())?;
    for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
        stage.copy(license, &workspace().join(license))?;
    }
    let Release { version, arch, .. } = release;
    let name = format!("localhost/reaper:{version}");
    let archive = format!("reaper-{version}-{}.oci.tar", arch.name());
    let archive = release.out.join(archive);
    // podman does not write over an archive.
    if archive.exists() {
        fs::remove_file(&archive).with_context(|| archive.display().to_string())?;
    }
    // Separate storage: the images of this host stay untouched.
    let storage = release.work.join("podman");
    let podman = || {
        let mut podman = Command::new("podman");
        podman.arg("--root").arg(storage.join("root"));
        podman.arg("--runroot").arg(storage.join("run"));
        podman.args(["--storage-driver", "vfs"]);
        podman
    };
    let mut build = podman();
    build.args(["build", "--quiet", "--format=oci"]);
    build.arg(format!("--timestamp={}", release.time));
    build.arg(format!("--platform=linux/{}", arch.in_debian()));
    build.arg("--label");
    build.arg(format!("org.opencontainers.image.version={version}"));
    build.args(["--tag", &name, "--file"]);
    run(build.arg(packaging("Containerfile")).arg(&stage.root))?;
    let mut save = podman();
    save.args(["save", "--quiet", "--format=oci-archive", "--output"]);
    run(save.arg(&archive).arg(&name))?;
    Ok(archive)
}
