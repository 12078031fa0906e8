//! Lists and downloads kernels.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::debian::Debian;
use crate::cross::Arch;
use crate::shell::say;

/// Kernels that are used if none is named: those of supported Debian releases, the first whose exit tracepoint reports the
/// exit of the whole process, and the newest.
pub const USUAL: [&str; 5] = ["5.10", "6.1", "6.12", "6.16", NEWEST];

const NEWEST: &str = "newest";

/// Kernel image.
pub struct Kernel {
    /// Name that the user specified.
    pub name: String,
    pub arch: Arch,
    pub image: PathBuf,
    /// Package or path of the kernel.
    pub origin: String,
}

/// Returns the available kernels, and the names of the others with the reason.
pub fn get_all(
    wanted: &[String],
    dir: &Path,
    arch: Arch,
    update: bool,
) -> (Vec<Kernel>, Vec<(String, String)>) {
    let mut debian = Debian::new(dir, arch);
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut missing = Vec::new();
    for name in wanted {
        match get(name, dir, arch, update, &mut debian) {
            // The newest may be in the list by its version, too.
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

fn get(name: &str, dir: &Path, arch: Arch, update: bool, debian: &mut Debian) -> Result<Kernel> {
    if name.contains('/') {
        let image = Path::new(name);
        ensure!(image.is_file(), "no such file");
        let file = image.file_name().unwrap_or_default().to_string_lossy();
        return Ok(Kernel {
            name: file.trim_start_matches("vmlinuz-").to_owned(),
            arch,
            image: image.to_owned(),
            origin: name.to_owned(),
        });
    }
    if name != NEWEST && version(name).is_none() {
        bail!("not a version such as 6.1, not `{NEWEST}`, and not a path with a slash");
    }
    let kept = dir.join("kernels").join(name);
    let (image, origin) = (kept.join("vmlinuz"), kept.join("package"));
    // Written last: a kernel with this file is complete.
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
        arch,
        image,
        origin: fs::read_to_string(&origin).with_context(|| origin.display().to_string())?,
    })
}

/// Parses a version such as `6.1`; `None` for anything longer.
fn version(name: &str) -> Option<(u64, u64)> {
    let (major, minor) = name.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Prints the available versions, which are usual, and which are downloaded.
///
/// # Errors
/// There is no kernel.
pub fn list(dir: &Path, arch: Arch) -> Result<()> {
    let mut debian = Debian::new(dir, arch);
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
            if kept { ", downloaded" } else { "" }
        );
    }
    debian
        .unreachable()
        .for_each(|why| println!("left out: {why}"));
    Ok(())
}
