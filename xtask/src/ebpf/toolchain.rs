//! Finding and installing what builds the BPF object.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::record::{DEBIAN, Identity, RUSTUP};
use crate::shell::{cargo_tool, fetch_lists, find_program, install, output, say, target_dir};

/// The linker decides about the bytes too, and each version is made for one LLVM.
const BPF_LINKER: &str = "0.10.3";
const LLVM_MAJOR: &str = "22";

/// Debian's packages of a current compiler, its cargo and the sources of `core`.
const DEBIAN_PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];

/// Where they put the compiler.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Programs that are there and fit each other.
pub struct Toolchain {
    pub identity: Identity,
    pub cargo: PathBuf,
    pub rustc: PathBuf,
    /// Directory whose only `libLLVM*` is the compiler's.
    pub llvm: PathBuf,
    linker: PathBuf,
}

impl Toolchain {
    /// rustup's nightly if the user has it with rust-src, else Debian's, installing what is missing.
    pub fn find() -> Result<Toolchain> {
        match Toolchain::rustup() {
            Some(toolchain) => toolchain,
            None => Toolchain::debian(false),
        }
    }

    /// The one that is recorded.
    ///
    /// # Errors
    /// It is not here and cannot be had.
    pub fn recorded(wanted: &Identity) -> Result<Toolchain> {
        let same = |toolchain: &Toolchain| toolchain.identity == *wanted;
        let found = match wanted.0[0].as_str() {
            RUSTUP => Toolchain::rustup().context(
                "the recorded toolchain is rustup's nightly with rust-src and LLVM 22, which is not installed",
            )??,
            DEBIAN => match Toolchain::debian(false)? {
                fits if same(&fits) => fits,
                _ => Toolchain::debian(true)?,
            },
            other => bail!("unknown origin `{other}`"),
        };
        ensure!(
            same(&found),
            "the recorded toolchain cannot be had: the object was built with {wanted}, here is {}; \
             rebuild it with `cargo xtask build-ebpf`",
            found.identity
        );
        Ok(found)
    }

    /// PATH with the linker in front.
    pub fn path(&self) -> Result<OsString> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dir = self.linker.parent().unwrap_or(Path::new("/")).to_path_buf();
        Ok(std::env::join_paths(
            std::iter::once(dir).chain(std::env::split_paths(&path)),
        )?)
    }

    /// `None` where the user has no such nightly; nothing is installed for it.
    fn rustup() -> Option<Result<Toolchain>> {
        let which = |program| {
            let mut rustup = Command::new(find_program("rustup")?);
            rustup.args(["which", "--toolchain=nightly", program]);
            let found = rustup
                .env("RUSTUP_AUTO_INSTALL", "0")
                .stderr(Stdio::null())
                .output()
                .ok()?;
            let path = String::from_utf8(found.stdout).ok()?;
            found.status.success().then(|| PathBuf::from(path.trim()))
        };
        let (rustc, cargo) = (which("rustc")?, which("cargo")?);
        let sysroot = rustc.parent()?.parent()?;
        let llvm = sysroot.join("lib");
        if !sysroot
            .join("lib/rustlib/src/rust/library/core/Cargo.toml")
            .is_file()
        {
            return None;
        }
        let identity = identity(RUSTUP, &rustc).ok()?;
        if !fits_linker(&identity) {
            say(format_args!(
                "not taking {identity}, which is for LLVM {LLVM_MAJOR}"
            ));
            return None;
        }
        let linker = cargo_tool("bpf-linker", BPF_LINKER, "a minute");
        Some(linker.map(|linker| Toolchain {
            identity,
            cargo,
            rustc,
            llvm,
            linker,
        }))
    }

    /// With `upgrade`, brings the packages to the newest version even if they are installed.
    fn debian(upgrade: bool) -> Result<Toolchain> {
        install_debian(upgrade)?;
        let rustc = PathBuf::from(DEBIAN_RUSTC);
        let identity = identity(DEBIAN, &rustc)?;
        ensure!(
            fits_linker(&identity),
            "{identity}, which is for LLVM {LLVM_MAJOR}: \
             this Debian has no compiler that fits, use rustup's nightly with rust-src"
        );
        Ok(Toolchain {
            llvm: llvm_alone(&identity.0[3])?,
            linker: cargo_tool("bpf-linker", BPF_LINKER, "a minute")?,
            identity,
            cargo: PathBuf::from("/usr/bin/cargo"),
            rustc,
        })
    }
}

/// Debian's compiler, which has the sources of the whole standard library: for type-checking, whatever its LLVM.
///
/// # Errors
/// It cannot be installed.
pub fn compiler_with_sources() -> Result<PathBuf> {
    install_debian(false)?;
    Ok(PathBuf::from(DEBIAN_RUSTC))
}

/// With `upgrade`, even what is installed.
fn install_debian(upgrade: bool) -> Result<()> {
    const WHY: &str =
        "a Rust that builds for targets whose library is not at hand, with its sources";
    let missing: Vec<&str> = DEBIAN_PACKAGES
        .into_iter()
        .filter(|package| upgrade || !is_installed(package))
        .collect();
    if !missing.is_empty() {
        install(&missing, WHY)?;
    }
    if is_too_old()? {
        // By lists that are.
        fetch_lists()?;
        install(&DEBIAN_PACKAGES, WHY)?;
    }
    ensure!(
        !is_too_old()?,
        "Debian's newest Rust is older than {}, which the workspace needs",
        env!("CARGO_PKG_RUST_VERSION")
    );
    Ok(())
}

/// Whether Debian's compiler is, for this workspace.
fn is_too_old() -> Result<bool> {
    let version = output(Command::new(DEBIAN_RUSTC).arg("-V"))?;
    Ok(release(&version) < release(env!("CARGO_PKG_RUST_VERSION")))
}

/// The first two numbers of `rustc 1.96.0 (…)`, or of `1.95`.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}

fn is_installed(package: &str) -> bool {
    let status = Command::new("dpkg-query")
        .args(["--show", "--showformat=${db:Status-Status}", package])
        .stderr(Stdio::null())
        .output();
    status.is_ok_and(|output| output.stdout == b"installed")
}

fn fits_linker(identity: &Identity) -> bool {
    identity.0[3].split('.').next() == Some(LLVM_MAJOR)
}

fn identity(origin: &str, rustc: &Path) -> Result<Identity> {
    let text = output(Command::new(rustc).arg("-vV"))?;
    let field = |name| {
        let found = text.lines().find_map(|line| line.strip_prefix(name));
        found
            .map(str::to_owned)
            .with_context(|| format!("{}: -vV says no {name}", rustc.display()))
    };
    let first = text.lines().next().unwrap_or_default().to_owned();
    let (commit, llvm) = (field("commit-hash: ")?, field("LLVM version: ")?);
    Ok(Identity([
        origin.to_owned(),
        first,
        commit,
        llvm,
        BPF_LINKER.to_owned(),
    ]))
}

/// A directory with nothing but a link to Debian's libLLVM of that version: bpf-linker takes the first
/// it finds in a directory, and the system's own may hold several.
fn llvm_alone(version: &str) -> Result<PathBuf> {
    let minor = version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    let name = format!("libLLVM.so.{minor}");
    let library = fs::read_dir("/usr/lib")
        .context("/usr/lib")?
        .filter_map(|entry| Some(entry.ok()?.path().join(&name)))
        .find(|path| path.is_file())
        .with_context(|| format!("{name} of the compiler is not below /usr/lib"))?;
    let dir = target_dir().join("tools").join(format!("llvm-{version}"));
    let link = dir.join(&name);
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    if fs::read_link(&link).ok().as_ref() != Some(&library) {
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(&library, &link).with_context(|| link.display().to_string())?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::release;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        assert_eq!(
            release("rustc 1.96.0 (d9a2 2026-05-01) (built from a source tarball)"),
            Some((1, 96))
        );
        assert!(release("1.95") > release("rustc 1.85.0 (4d91de4e4 2025-02-17)"));
        assert!(release("rustc 1.100.0") > release("1.95"));
        assert_eq!(release("rustc"), None);
    }
}
