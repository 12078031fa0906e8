//! Finds and installs the toolchain for the BPF object.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::record::{DEBIAN, Identity, RUSTUP};
use crate::shell::{cargo_tool, fetch_lists, find_program, install, output, say, target_dir};

/// Versions of the linker and of LLVM. The linker's version affects the bytes, and it works with one LLVM only.
const BPF_LINKER: &str = "0.10.3";
const LLVM_MAJOR: &str = "22";

/// Debian packages of a current compiler, its cargo and the sources of `core`.
const DEBIAN_PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];

/// Path of the compiler from these packages.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Installed programs that work together.
pub struct Toolchain {
    pub identity: Identity,
    pub cargo: PathBuf,
    pub rustc: PathBuf,
    /// Directory whose only `libLLVM*` is that of the compiler.
    pub llvm: PathBuf,
    linker: PathBuf,
}

impl Toolchain {
    /// Returns rustup's nightly if it is installed with rust-src, otherwise Debian's toolchain, which it installs.
    ///
    /// # Errors
    /// The installation fails.
    pub fn find() -> Result<Toolchain> {
        match Toolchain::rustup() {
            Some(toolchain) => toolchain,
            None => Toolchain::debian(false),
        }
    }

    /// Returns the recorded toolchain.
    ///
    /// # Errors
    /// The toolchain is not installed and cannot be installed.
    pub fn recorded(wanted: &Identity) -> Result<Toolchain> {
        let same = |toolchain: &Toolchain| toolchain.identity == *wanted;
        let found = match wanted.0[0].as_str() {
            RUSTUP => Toolchain::rustup().context(
                "the recorded toolchain, rustup's nightly with rust-src and LLVM 22, is not installed",
            )??,
            DEBIAN => match Toolchain::debian(false)? {
                fits if same(&fits) => fits,
                _ => Toolchain::debian(true)?,
            },
            other => bail!("unknown origin `{other}`"),
        };
        ensure!(
            same(&found),
            "the recorded toolchain is not available: the object was built with {wanted}, this host has {}; \
             rebuild it with `cargo xtask build-ebpf`",
            found.identity
        );
        Ok(found)
    }

    /// Returns PATH with the linker's directory in front.
    pub fn path(&self) -> Result<OsString> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dir = self.linker.parent().unwrap_or(Path::new("/")).to_path_buf();
        Ok(std::env::join_paths(
            std::iter::once(dir).chain(std::env::split_paths(&path)),
        )?)
    }

    /// Returns rustup's toolchain, `None` if it is not installed or does not fit. Never installs it.
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
                "not using {identity}: bpf-linker needs LLVM {LLVM_MAJOR}"
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

    /// Returns Debian's toolchain. With `upgrade`, upgrades installed packages to the newest version.
    fn debian(upgrade: bool) -> Result<Toolchain> {
        install_debian(upgrade)?;
        let rustc = PathBuf::from(DEBIAN_RUSTC);
        let identity = identity(DEBIAN, &rustc)?;
        ensure!(
            fits_linker(&identity),
            "{identity}: bpf-linker needs LLVM {LLVM_MAJOR}: \
             this Debian has no such compiler, use rustup's nightly with rust-src"
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

/// Returns Debian's compiler with the sources of the standard library, whatever its LLVM. Suitable for type-checking.
///
/// # Errors
/// The compiler cannot be installed.
pub fn compiler_with_sources() -> Result<PathBuf> {
    install_debian(false)?;
    Ok(PathBuf::from(DEBIAN_RUSTC))
}

/// Installs missing packages of the compiler; with `upgrade`, all of them.
fn install_debian(upgrade: bool) -> Result<()> {
    const WHY: &str = "a Rust compiler with the sources of its standard library";
    let missing: Vec<&str> = DEBIAN_PACKAGES
        .into_iter()
        .filter(|package| upgrade || !is_installed(package))
        .collect();
    if !missing.is_empty() {
        install(&missing, WHY)?;
    }
    if is_too_old()? {
        // The package lists may be too old as well.
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

/// Returns whether Debian's compiler is too old for this workspace.
fn is_too_old() -> Result<bool> {
    let version = output(Command::new(DEBIAN_RUSTC).arg("-V"))?;
    Ok(release(&version) < release(env!("CARGO_PKG_RUST_VERSION")))
}

/// Returns the first two numbers of `rustc 1.96.0 (…)` or `1.95`.
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
            .with_context(|| format!("{} -vV prints no {name}", rustc.display()))
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

/// Returns a directory with only a link to Debian's libLLVM of this version. bpf-linker loads the first libLLVM in a
/// directory, and the system's directory may contain several.
fn llvm_alone(version: &str) -> Result<PathBuf> {
    let minor = version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    let name = format!("libLLVM.so.{minor}");
    let library = fs::read_dir("/usr/lib")
        .context("/usr/lib")?
        .filter_map(|entry| Some(entry.ok()?.path().join(&name)))
        .find(|path| path.is_file())
        .with_context(|| format!("no {name} below /usr/lib"))?;
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
    fn releases_are_compared_numerically() {
        assert_eq!(
            release("rustc 1.96.0 (d9a2 2026-05-01) (built from a source tarball)"),
            Some((1, 96))
        );
        assert!(release("1.95") > release("rustc 1.85.0 (4d91de4e4 2025-02-17)"));
        assert!(release("rustc 1.100.0") > release("1.95"));
        assert_eq!(release("rustc"), None);
    }
}
