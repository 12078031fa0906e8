//! Debian's kernel packages.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::apt::{self, ARCHIVE};
use crate::cross::Arch;

/// Suites with kernels: name and archive.
const SUITES: &[(&str, &str)] = &[
    ("bullseye-security", "http://deb.debian.org/debian-security"),
    ("bookworm-security", "http://deb.debian.org/debian-security"),
    ("trixie-backports", ARCHIVE),
];

/// Part of the names of kernels for virtual machines, whose drivers are built in. The architecture follows it.
const FLAVOUR: &str = "-cloud-";

/// Package with a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    pub name: String,
    version: String,
    suite: &'static str,
}

impl Package {
    /// Returns the version in the package name: major, minor, and the other numbers.
    pub fn release(&self) -> (u64, u64, Vec<u64>) {
        let (release, _) = self.name.rsplit_once(FLAVOUR).unwrap_or((&self.name, ""));
        let mut numbers = release
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|number| number.parse().ok());
        let mut next = || numbers.next().unwrap_or(0);
        (next(), next(), numbers.collect())
    }
}

impl fmt::Display for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({})", self.name, self.version, self.suite)
    }
}

/// Available kernel packages.
pub struct Debian {
    dir: PathBuf,
    arch: Arch,
    /// Suites; `None` until they are needed.
    suites: Option<Vec<Suite>>,
}

struct Suite {
    name: &'static str,
    packages: Result<Vec<Package>>,
}

impl Debian {
    pub fn new(dir: &Path, arch: Arch) -> Debian {
        Debian {
            dir: dir.join("apt"),
            arch,
            suites: None,
        }
    }

    /// Returns the newest release that `which` accepts.
    ///
    /// # Errors
    /// No release matches. The error lists the suites that cannot be read.
    pub fn find(&mut self, which: impl Fn(&Package) -> bool) -> Result<Package> {
        let found = self
            .packages()
            .filter(|package| which(package))
            .max_by_key(|package| package.release())
            .cloned();
        if let Some(found) = found {
            return Ok(found);
        }
        let unreachable: Vec<String> = self.unreachable().collect();
        bail!(
            "not in Debian's packages; {}",
            if unreachable.is_empty() {
                "all suites were read".to_owned()
            } else {
                unreachable.join("; ")
            }
        )
    }

    /// Returns all kernels.
    pub fn packages(&mut self) -> impl Iterator<Item = &Package> {
        let (dir, arch) = (&self.dir, self.arch);
        let suites = self.suites.get_or_insert_with(|| {
            SUITES
                .iter()
                .map(|(name, archive)| Suite {
                    name,
                    packages: read(dir, name, archive, arch),
                })
                .collect()
        });
        suites
            .iter()
            .flat_map(|suite| suite.packages.iter().flatten())
    }

    /// Returns the suites that cannot be read, with the reason.
    pub fn unreachable(&self) -> impl Iterator<Item = String> {
        let suites = self.suites.iter().flatten();
        suites.filter_map(|suite| {
            let error = suite.packages.as_ref().err()?;
            Some(format!("{} cannot be read: {error:#}", suite.name))
        })
    }

    /// Downloads a package and moves its vmlinuz to `image`.
    ///
    /// # Errors
    /// The download fails, or the package contains no kernel.
    pub fn fetch(&self, package: &Package, image: &Path) -> Result<()> {
        let dir = self.dir.join("unpacked");
        let suite = apt::Suite::known(&self.dir, package.suite);
        let exact = format!("{}={}", package.name, package.version);
        suite.unpack(apt::ALONE, &[&exact], &dir)?;
        let modules = file_in(&dir.join("usr/lib/modules"), "");
        let places = [Some(dir.join("boot")), modules];
        let kernel = places
            .iter()
            .flatten()
            .find_map(|dir| file_in(dir, "vmlinuz"));
        let kernel = kernel.with_context(|| format!("no kernel in {package}"))?;
        fs::rename(kernel, image).with_context(|| image.display().to_string())?;
        let _ = fs::remove_dir_all(&dir);
        Ok(())
    }
}

/// Returns the first file whose name contains `part`.
fn file_in(dir: &Path, part: &str) -> Option<PathBuf> {
    let files = fs::read_dir(dir)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()));
    let named = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().contains(part))
    };
    files.into_iter().find(named)
}

/// Reads a suite, and returns its kernels.
fn read(dir: &Path, name: &'static str, archive: &str, arch: Arch) -> Result<Vec<Package>> {
    let suite = apt::Suite::read(dir, name, archive, arch)?;
    Ok(kernels(&suite.packages()?, name, arch))
}

/// Returns the packages with a kernel among all packages of a suite.
fn kernels(all: &str, suite: &'static str, arch: Arch) -> Vec<Package> {
    let flavour = format!("{FLAVOUR}{}", arch.in_debian());
    let packages = all.split("\n\n").filter_map(|stanza| {
        let field = |key: &str| stanza.lines().find_map(|line| line.strip_prefix(key));
        Some(Package {
            name: field("Package: ")?.to_owned(),
            version: field("Version: ")?.to_owned(),
            suite,
        })
    });
    let flavoured = packages.filter(|p| p.name.ends_with(&flavour));
    // Newer releases have the kernel in `linux-binary-*`. Packages without a full version only depend on others.
    let (binary, image): (Vec<_>, Vec<_>) = flavoured
        .filter(|p| !p.release().2.is_empty() && !p.name.contains("unsigned"))
        .partition(|p| p.name.starts_with("linux-binary-"));
    let split = |p: &Package| binary.iter().any(|b| b.release() == p.release());
    let image = image
        .into_iter()
        .filter(|p| p.name.starts_with("linux-image-") && !split(p));
    image.chain(binary.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> String {
        let stanza = |name| format!("Package: {name}\nVersion: 1\nPriority: optional\n");
        names.iter().map(stanza).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn only_packages_with_a_kernel_are_selected() {
        let all = list(&[
            "linux-image-cloud-amd64",
            "linux-image-6.12-cloud-amd64",
            "linux-image-6.12.9+deb12-cloud-amd64",
            "linux-image-6.12.10+deb12-cloud-amd64-unsigned",
            "linux-image-6.12.10+deb12-amd64",
            "linux-image-6.12.9+deb12-cloud-arm64",
            "linux-headers-6.12.10+deb12-cloud-amd64",
            "linux-image-7.2.12+deb13-cloud-amd64",
            "linux-binary-7.2.12+deb13-cloud-amd64",
            "linux-binary-unsigned-7.3.4+deb13-cloud-amd64",
        ]);
        let names: Vec<_> = kernels(&all, "suite", Arch::X86_64)
            .into_iter()
            .map(|p| p.name)
            .collect();
        assert_eq!(
            names,
            [
                "linux-image-6.12.9+deb12-cloud-amd64",
                "linux-binary-7.2.12+deb13-cloud-amd64"
            ]
        );
    }

    #[test]
    fn releases_are_ordered_numerically() {
        let all = list(&[
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-0.deb11.60-cloud-amd64",
        ]);
        let newest = kernels(&all, "suite", Arch::X86_64)
            .into_iter()
            .max_by_key(Package::release)
            .unwrap();
        assert_eq!(newest.name, "linux-image-6.1.0-56-cloud-amd64");
        assert_eq!(newest.release(), (6, 1, vec![0, 56]));
    }
}
