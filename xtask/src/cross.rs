//! Builds for processors: names, standard libraries and C compilers.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::apt::{self, Suite};
use crate::shell::{find_program, install, output, target_dir};
use crate::targets::{build_library, standard_library};

/// Processor that programs are built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Arch {
    #[value(name = "x86_64", alias = "amd64")]
    X86_64,
    #[value(name = "aarch64", alias = "arm64")]
    Aarch64,
}

impl Arch {
    /// Returns the name in Rust's targets and in RPM.
    pub fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        }
    }

    pub fn in_debian(self) -> &'static str {
        match self {
            Arch::X86_64 => "amd64",
            Arch::Aarch64 => "arm64",
        }
    }

    /// Returns the target of programs that use this C library, `gnu` or `musl`.
    pub fn target(self, libc: &str) -> String {
        format!("{}-unknown-linux-{libc}", self.name())
    }

    pub fn of_host() -> Arch {
        match std::env::consts::ARCH {
            "aarch64" => Arch::Aarch64,
            _ => Arch::X86_64,
        }
    }

    pub fn is_host(self) -> bool {
        self.name() == std::env::consts::ARCH
    }
}

/// Makes a cargo command build for a processor, with this C library.
///
/// # Errors
/// The standard library or the C compiler of the target is not available.
pub fn build_for(cargo: &mut Command, arch: Arch, libc: &str) -> Result<()> {
    // Without a target, the build shares its artifacts with a plain `cargo build`.
    if arch.is_host() && libc == "gnu" {
        return Ok(());
    }
    let target = arch.target(libc);
    cargo.args(["--target", &target]);
    if let Some(rustc) = standard_library(&[&target])? {
        ensure!(
            libc != "musl",
            "{target}: the standard library of static programs comes only from rustup: \
             see https://rustup.rs"
        );
        build_library(cargo, &rustc);
    }
    set_c_compiler(cargo, &target, arch)
}

/// Sets the C compiler of a target, which compiles SQLite, and the linker.
///
/// The linker of musl targets needs no files of musl: Rust has its own.
fn set_c_compiler(cargo: &mut Command, target: &str, arch: Arch) -> Result<()> {
    let is_musl = target.ends_with("-musl");
    let compiler = match (is_musl, arch.is_host()) {
        (true, true) => "musl-gcc".to_owned(),
        _ => format!("{}-linux-gnu-gcc", arch.name()),
    };
    let packages = match (is_musl, arch.is_host()) {
        (true, true) => vec!["musl-tools".to_owned()],
        _ => cross_compiler(arch),
    };
    if find_program(&compiler).is_none() {
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        install(&packages, &format!("a C compiler for {target}"))?;
    }
    let variable = target.replace('-', "_");
    cargo.env(format!("CC_{variable}"), &compiler);
    if !arch.is_host() {
        let linker = format!("CARGO_TARGET_{}_LINKER", variable.to_uppercase());
        cargo.env(linker, &compiler);
        if is_musl {
            let flags = musl_headers(arch, &compiler)?;
            cargo.env(format!("CFLAGS_{variable}"), flags);
        }
    }
    Ok(())
}

fn cross_compiler(arch: Arch) -> Vec<String> {
    let gcc = arch.name().replace('_', "-");
    let library = arch.in_debian();
    vec![
        format!("gcc-{gcc}-linux-gnu"),
        format!("libc6-dev-{library}-cross"),
    ]
}

/// Unpacks the headers of musl for another processor, and returns the options with which the compiler uses them instead
/// of those of glibc. Debian has no compiler that does this.
fn musl_headers(arch: Arch, compiler: &str) -> Result<String> {
    let directory = target_dir()
        .join("tools")
        .join(format!("musl-{}", arch.name()));
    let headers = directory.join(format!("usr/include/{}-linux-musl", arch.name()));
    if !headers.join("stdio.h").is_file() {
        let lists = target_dir().join("tools").join("apt").join(arch.name());
        let suite = Suite::read(&lists, apt::SUITE, apt::ARCHIVE, arch)?;
        suite.unpack(apt::ALONE, &["musl-dev"], &directory)?;
    }
    let own = output(Command::new(compiler).arg("-print-file-name=include"))?;
    let (headers, own) = (headers.display(), own.trim());
    Ok(format!("-nostdinc -isystem {headers} -isystem {own}"))
}
