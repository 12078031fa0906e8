//! `cargo xtask dist`: builds packages with cargo and with the packaging tools of Debian.
//!
//! The program in the `.deb` and the `.rpm` uses the C library of the host, because users may come from a name service
//! such as LDAP. The tarball has a static program for hosts with another C library or an older one.

mod build;
mod check;
mod deb;
mod image;
mod rpm;
mod sbom;
mod stage;
mod tarball;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::cross::Arch;
use crate::shell::{find_program, hex, install, output, say, target_dir, workspace};
use build::Documents;

const EXAMPLES: &str = "\
Examples:
  # Packages for this machine's processor, in target/dist
  cargo xtask dist
  # For both processors
  cargo xtask dist --arch x86_64 --arch aarch64
  # Also install, upgrade, remove and purge them in a directory with a small Debian
  cargo xtask dist --check
  # Check the packaging quickly, with programs that are not optimised
  cargo xtask dist --check --profile dev";

/// Debian packages of the programs that every call needs.
const TOOLS: &[(&str, &str)] = &[
    ("dpkg-deb", "dpkg"),
    ("gzip", "gzip"),
    ("readelf", "binutils"),
    ("rpmbuild", "rpm"),
    ("tar", "tar"),
];

/// Directory of the files that only packages need.
const PACKAGING: &str = "reaper-user/packaging";

/// Cargo profile of programs that are only for checks.
const DEVELOPMENT: &str = "dev";

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Directory for the packages [default: dist in the target directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Processor to build for; can be repeated [default: that of this machine]
    #[arg(long, value_enum)]
    arch: Vec<Arch>,
    /// Cargo profile of the programs
    #[arg(long, value_name = "NAME", default_value = "release")]
    profile: String,
    /// Check the packages; those of this machine's processor are installed in a directory with a small Debian
    #[arg(long)]
    check: bool,
    /// Also build a container image, with podman
    #[arg(long)]
    image: bool,
}

impl Args {
    /// Returns the arguments with which `cargo xtask test` checks the packaging.
    pub fn of_tests() -> Args {
        Args {
            out: Some(target_dir().join("dist-check")),
            arch: Vec::new(),
            profile: DEVELOPMENT.to_owned(),
            check: true,
            image: false,
        }
    }
}

/// Programs and documents of one processor, and what identifies them.
#[derive(Clone)]
struct Release {
    version: String,
    /// Time of the commit, in seconds since 1970. No file in a package is newer, so that a build can be repeated.
    time: u64,
    arch: Arch,
    /// Program that uses the host's C library.
    program: PathBuf,
    /// Program that contains all that it needs.
    static_program: PathBuf,
    documents: Documents,
    /// Bill of materials, in CycloneDX JSON.
    sbom: String,
    /// Level of xz: packages of a development build are only for checks.
    compression: u8,
    /// Directory for temporary files.
    work: PathBuf,
    out: PathBuf,
}

/// Packages of one release.
struct Packages {
    deb: PathBuf,
    rpm: PathBuf,
    tarball: PathBuf,
    sbom: PathBuf,
}

/// Builds all packages, and with `--check` checks them.
///
/// # Errors
/// A build, a tool or a check fails.
pub fn dist(args: &Args) -> Result<()> {
    require(TOOLS, "to build packages")?;
    let out = args.out.clone();
    let out = out.unwrap_or_else(|| target_dir().join("dist"));
    let out = std::path::absolute(out)?;
    fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let arches = match &args.arch[..] {
        [] => &[Arch::of_host()],
        some => some,
    };
    let is_release = args.profile != DEVELOPMENT;
    let commit = is_release.then(build::modified_commit).flatten();
    let mut files = Vec::new();
    for &arch in arches {
        let release = Release::build(arch, &args.profile, commit.as_deref(), &out)?;
        let packages = release.pack(&release.version)?;
        if args.check {
            check::check(&release, &packages)?;
        }
        let Packages {
            deb,
            rpm,
            tarball,
            sbom,
        } = packages;
        files.extend([deb, rpm, tarball, sbom]);
        if args.image {
            files.push(image::build(&release)?);
        }
    }
    let sums = sums(&files)?;
    let path = out.join("SHA256SUMS");
    fs::write(&path, &sums).with_context(|| path.display().to_string())?;
    say(format_args!("packages in {}:", out.display()));
    print!("{sums}");
    Ok(())
}

impl Release {
    fn build(arch: Arch, profile: &str, commit: Option<&str>, out: &Path) -> Result<Release> {
        let time = commit_time()?;
        let work = target_dir().join("dist-work").join(arch.name());
        stage::renew(&work)?;
        let documents = Documents::write(&work.join("documents"), &day(time)?)?;
        let program = |libc: &str| build::program(arch, libc, profile, commit);
        Ok(Release {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            time,
            arch,
            program: match profile == DEVELOPMENT && arch.is_host() {
                true => documents.reaper.clone(),
                false => program("gnu")?,
            },
            static_program: program("musl")?,
            documents,
            sbom: sbom::sbom(arch, time)?,
            compression: if profile == DEVELOPMENT { 1 } else { 6 },
            work,
            out: out.to_owned(),
        })
    }

    /// Builds all packages with this version.
    fn pack(&self, version: &str) -> Result<Packages> {
        let sbom = format!("reaper-{version}-{}.cdx.json", self.arch.name());
        let sbom = self.out.join(sbom);
        fs::write(&sbom, &self.sbom).with_context(|| sbom.display().to_string())?;
        Ok(Packages {
            deb: deb::build(self, version)?,
            rpm: rpm::build(self, version)?,
            tarball: tarball::build(self, version)?,
            sbom,
        })
    }
}

/// Builds the `.deb` with each of these versions from a development build, and returns the paths.
///
/// # Errors
/// A build or a tool fails.
pub fn debs(out: &Path, versions: &[&str]) -> Result<Vec<PathBuf>> {
    require(TOOLS, "to build packages")?;
    let (arch, time) = (Arch::of_host(), commit_time()?);
    let work = out.join("work");
    stage::renew(&work)?;
    let documents = Documents::write(&work.join("documents"), &day(time)?)?;
    let release = Release {
        version: String::new(),
        time,
        arch,
        program: documents.reaper.clone(),
        static_program: documents.reaper.clone(),
        documents,
        sbom: sbom::sbom(arch, time)?,
        compression: 1,
        work,
        out: out.to_owned(),
    };
    let build = versions.iter().map(|version| deb::build(&release, version));
    build.collect()
}

/// Installs the packages of missing programs.
fn require(programs: &[(&str, &str)], why: &str) -> Result<()> {
    let missing = programs
        .iter()
        .filter(|(program, _)| find_program(program).is_none());
    let mut packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    packages.dedup();
    match packages.is_empty() {
        true => Ok(()),
        false => install(&packages, why),
    }
}

/// Returns the path of a file for packages.
fn packaging(name: &str) -> PathBuf {
    workspace().join(PACKAGING).join(name)
}

/// Returns the time of the commit, or of now without git.
fn commit_time() -> Result<u64> {
    let mut git = Command::new("git");
    git.args(["-c", "safe.directory=*", "log", "-1", "--format=%ct"]);
    let time = output(git.current_dir(workspace()));
    let time = time.or_else(|_| output(Command::new("date").arg("+%s")))?;
    time.trim().parse().context("time of the commit")
}

/// Returns the day of a time, as in 2026-11-25.
fn day(time: u64) -> Result<String> {
    format_time(time, "+%Y-%m-%d")
}

fn format_time(time: u64, format: &str) -> Result<String> {
    let mut date = Command::new("date");
    date.args(["--utc", &format!("--date=@{time}"), format]);
    Ok(output(date.env("LC_ALL", "C"))?.trim().to_owned())
}

/// Returns the content of SHA256SUMS, in the format of `sha256sum`.
fn sums(files: &[PathBuf]) -> Result<String> {
    let mut text = String::new();
    for file in files {
        let bytes = fs::read(file).with_context(|| file.display().to_string())?;
        let name = file.file_name().unwrap_or_default().display();
        text += &format!("{}  {name}\n", hex(&Sha256::digest(&bytes)));
    }
    Ok(text)
}
