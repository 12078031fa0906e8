//! Which kernels there are, and getting them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::debian::Debian;
use crate::shell::say;

/// The kernels to be run when none is named: each that a supported Debian has, the first whose exit hook tells of the
/// death of the whole process, and what comes next.
pub const USUAL: [&str; 5] = ["5.10", "6.1", "6.12", "6.16", NEWEST];

const NEWEST: &str = "newest";

/// A kernel that can be booted.
pub struct Kernel {
    /// What the user calls it.
    pub name: String,
    pub image: PathBuf,
    /// Where it is from.
    pub origin: String,
}

/// All that can be had of these, and of the rest the name and why not.
pub fn get_all(
    wanted: &[String],
    dir: &Path,
    update: bool,
) -> (Vec<Kernel>, Vec<(String, String)>) {
    let mut debian = Debian::new(dir);
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut missing = Vec::new();
    for name in wanted {
        match get(name, dir, update, &mut debian) {
            // The newest may be one that is among them by its version.
            Ok(kernel) if kernels.iter().any(|known| known.origin == kernel.origin) => {}
            Ok(kernel) => {
                say(format_args!("{}: {}", kernel.name, kernel.origin));
                kernels.push(kernel);
            }
            Err(error) => {
                say(format_args!("left out: kernel {name}: {error:#}"));
                missing.push((name.clone(), format!("{error:#}")));
            }
        }
    }
    (kernels, missing)
}

fn get(name: &str, dir: &Path, update: bool, debian: &mut Debian) -> Result<Kernel> {
    if name.contains('/') {
        let image = Path::new(name);
        ensure!(image.is_file(), "no such file");
        let file = image.file_name().unwrap_or_default().to_string_lossy();
        return Ok(Kernel {
            name: file.trim_start_matches("vmlinuz-").to_owned(),
            image: image.to_owned(),
            origin: name.to_owned(),
        });
    }
    if name != NEWEST && version(name).is_none() {
        bail!("neither a version as in 6.1, nor `{NEWEST}`, nor a path with a slash in it");
    }
    let kept = dir.join("kernels").join(name);
    let (image, origin) = (kept.join("vmlinuz"), kept.join("package"));
    // Written last, so a kernel whose origin is known is whole.
    if update || !origin.is_file() {
        let package = debian.find(|package| {
            let (major, minor, _) = package.release();
            name == NEWEST || version(name) == Some((major, minor))
        })?;
        fs::create_dir_all(&kept).with_context(|| kept.display().to_string())?;
        let _ = fs::remove_file(&origin);
        debian.fetch(&package, &image)?;
        fs::write(&origin, package.to_string()).with_context(|| origin.display().to_string())?;
    }
    Ok(Kernel {
        name: name.to_owned(),
        image,
        origin: fs::read_to_string(&origin).with_context(|| origin.display().to_string())?,
    })
}

/// `6.1`, and nothing longer: a release is chosen by its version.
fn version(name: &str) -> Option<(u64, u64)> {
    let (major, minor) = name.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Prints which versions there are, and which are run when none is named.
pub fn list(dir: &Path) -> Result<()> {
    let mut debian = Debian::new(dir);
    let newest = debian.find(|_| true)?;
    let mut versions: Vec<(u64, u64)> = debian
        .packages()
        .map(|package| {
            let (major, minor, _) = package.release();
            (major, minor)
        })
        .collect();
    versions.sort_unstable();
    versions.dedup();
    for (major, minor) in versions {
        let name = format!("{major}.{minor}");
        let package = debian.find(|package| {
            let (a, b, _) = package.release();
            (a, b) == (major, minor)
        })?;
        let usual = USUAL.contains(&name.as_str()) || package.name == newest.name;
        let kept = dir.join("kernels").join(&name).join("package").is_file();
        println!(
            "{name:6} {package}{}{}",
            if usual { ", usual" } else { "" },
            if kept { ", fetched" } else { "" }
        );
    }
    debian
        .unreachable()
        .for_each(|why| println!("left out: {why}"));
    Ok(())
}
