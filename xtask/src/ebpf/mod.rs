//! `cargo xtask build-ebpf`: builds the checked-in BPF object reproducibly.
//!
//! The object is checked in, so installing reaper needs no BPF toolchain. Anyone can check it against its sources, because
//! each build gives the same bytes: paths are trimmed, debug information (but not BTF) is stripped, and the toolchain is
//! recorded.

mod record;
mod strip;
mod toolchain;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::shell::{hex, run, say, target_dir, workspace};
use record::Record;
use toolchain::Toolchain;
pub use toolchain::compiler_with_sources;

/// Path of the object that the service includes.
const OBJECT: &str = "reaper-user/host/src/source/ebpf/reaper.bpf.o";
/// Path of the record of its toolchain.
const RECORD: &str = "reaper-user/host/src/source/ebpf/reaper.bpf.toolchain";

/// Rebuilds the object and the record of its toolchain in place.
///
/// # Errors
/// No toolchain can be installed, or the build fails.
pub fn build() -> Result<()> {
    let toolchain = Toolchain::find()?;
    say(format_args!(
        "building reaper-ebpf with {}",
        toolchain.identity
    ));
    let object = compile(&toolchain, &target_dir().join("ebpf"))?;
    let record = Record {
        identity: toolchain.identity,
        sha256: sha256(&object),
    };
    write(OBJECT, &object)?;
    write(RECORD, record.to_string().as_bytes())?;
    say(format_args!(
        "wrote {OBJECT}: {} bytes, sha256 {}",
        object.len(),
        record.sha256
    ));
    Ok(())
}

/// Rebuilds the object elsewhere with the recorded toolchain and compares the bytes.
///
/// # Errors
/// The recorded toolchain cannot be installed, or the bytes differ.
pub fn check() -> Result<()> {
    let record = fs::read_to_string(workspace().join(RECORD))
        .with_context(|| format!("cannot read {RECORD}; `cargo xtask build-ebpf` writes it"))?;
    let record: Record = record.parse().context(RECORD)?;
    let checked_in = fs::read(workspace().join(OBJECT)).context(OBJECT)?;
    ensure!(
        sha256(&checked_in) == record.sha256,
        "{OBJECT} has another hash than in {RECORD}: run `cargo xtask build-ebpf` and commit both"
    );

    let toolchain = Toolchain::recorded(&record.identity)?;
    say(format_args!(
        "rebuilding reaper-ebpf with {}",
        toolchain.identity
    ));
    // An empty directory, so that no artifact of an earlier build is used.
    let target = target_dir().join("ebpf-check");
    remove(&target)?;
    let rebuilt = compile(&toolchain, &target)?;
    ensure!(
        rebuilt == checked_in,
        "{OBJECT} ({} bytes) differs from the build of its sources ({} bytes, in {}): \
         run `cargo xtask build-ebpf` and commit the object",
        checked_in.len(),
        rebuilt.len(),
        target.join("reaper.bpf.o").display(),
    );
    say(format_args!(
        "{OBJECT} is identical to the build of its sources"
    ));
    remove(&target)
}

/// Builds and strips the object below `target`, and returns its bytes.
fn compile(toolchain: &Toolchain, target: &Path) -> Result<Vec<u8>> {
    let mut cargo = Command::new(&toolchain.cargo);
    cargo
        .current_dir(workspace())
        .env("RUSTC", &toolchain.rustc)
        // Allows `-Zbuild-std` in a stable compiler.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("PATH", toolchain.path()?)
        // bpf-linker loads the first LLVM that it finds here: that of the compiler.
        .env("LD_LIBRARY_PATH", &toolchain.llvm)
        // Overrides the user's flags, which would change the bytes.
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            "-Cdebuginfo=2\x1f-Clink-arg=--btf",
        )
        .env("CARGO_TARGET_DIR", target)
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .args([
            "build",
            "--package=reaper-ebpf",
            "--bin=reaper-ebpf",
            "--profile=bpf",
        ])
        .args(["--target=bpfel-unknown-none", "-Zbuild-std=core"])
        .args(["-Ztrim-paths", "--config=profile.bpf.trim-paths=\"all\""]);
    run(&mut cargo)?;
    let linked = target.join("bpfel-unknown-none/bpf/reaper-ebpf");
    let linked = fs::read(&linked).with_context(|| linked.display().to_string())?;
    let stripped = strip::debug_sections(&linked)?;
    let object = target.join("reaper.bpf.o");
    fs::write(&object, &stripped).with_context(|| object.display().to_string())?;
    Ok(stripped)
}

fn write(name: &str, bytes: &[u8]) -> Result<()> {
    let path: PathBuf = workspace().join(name);
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir)
        .and_then(|()| fs::write(&path, bytes))
        .with_context(|| name.to_owned())
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| dir.display().to_string())
        }
        _ => Ok(()),
    }
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}
