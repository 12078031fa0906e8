//! Builds programs and documents.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Arch;
use crate::shell::{cargo, executables, find_program, install, line, output, read_executables};
use crate::shell::{run, target_dir, workspace};
use crate::targets::{build_library, standard_library};

/// Shells with completions, and the names of the files there.
pub const SHELLS: [(&str, &str); 3] = [
    ("bash", "reaper"),
    ("fish", "reaper.fish"),
    ("zsh", "_reaper"),
];

/// Man pages and completions.
#[derive(Clone)]
pub struct Documents {
    /// Development build of the program, for this host.
    pub reaper: PathBuf,
    /// Names and texts of the man pages.
    pub man: Vec<(String, Vec<u8>)>,
    /// Completions, in the order of [`SHELLS`].
    pub completions: Vec<Vec<u8>>,
}

impl Documents {
    /// Writes the documents with a development build, which needs neither optimisation nor another processor.
    ///
    /// # Errors
    /// The build fails, or a file cannot be written or read.
    pub fn write(directory: &Path, day: &str) -> Result<Documents> {
        // With the whole workspace, features and so artifacts are those of the tests.
        let built = executables(&["build", "--workspace", "--bin=reaper", "--example=man"])?;
        let find = |name: &str| {
            let found = built
                .iter()
                .find(|(_, message)| message["target"]["name"] == name);
            found
                .map(|(path, _)| path)
                .with_context(|| format!("cargo built no executable named {name}"))
        };
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        run(Command::new(find("man")?).arg(directory).arg(day))?;
        let mut man = Vec::new();
        for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            man.push((name, fs::read(entry.path())?));
        }
        man.sort();
        let reaper = find("reaper")?;
        let completions = SHELLS.iter().map(|(shell, _)| {
            let script = output(Command::new(reaper).args(["completions", shell]))?;
            Ok(script.into_bytes())
        });
        Ok(Documents {
            reaper: reaper.clone(),
            man,
            completions: completions.collect::<Result<_>>()?,
        })
    }
}

/// Builds `reaper` for a target. `commit` replaces the commit that the build script finds.
///
/// # Errors
/// The standard library or the C compiler of the target is not available, or the build fails.
pub fn program(target: &str, arch: Arch, profile: &str, commit: Option<&str>) -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.args(["build", "--locked", "--package=reaper-user", "--bin=reaper"]);
    cargo.args(["--profile", profile]);
    cargo.arg("--message-format=json-render-diagnostics");
    // Without a target, the build shares its artifacts with a plain `cargo build`.
    let is_plain = arch.is_host() && target.ends_with("-gnu");
    if !is_plain {
        cargo.args(["--target", target]);
        if let Some(rustc) = standard_library(&[target])? {
            ensure!(
                !target.ends_with("-musl"),
                "{target}: the standard library of static programs comes only from rustup: \
                 see https://rustup.rs"
            );
            build_library(&mut cargo, &rustc);
        }
        set_c_compiler(&mut cargo, target, arch)?;
    }
    if let Some(commit) = commit {
        cargo.env("REAPER_COMMIT", commit);
    }
    println!("$ {}", line(&cargo));
    let built = read_executables(&output(&mut cargo)?).pop();
    let (program, _) = built.with_context(|| format!("cargo built no program for {target}"))?;
    Ok(program)
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
        let lists = directory.join("lists");
        let partial = lists.join("partial");
        fs::create_dir_all(&partial).with_context(|| partial.display().to_string())?;
        // Separate lists and status: those of this host are for its own processor.
        let apt = |arguments: &[&str]| {
            let mut apt = Command::new("apt-get");
            for option in [
                format!("APT::Architecture={}", arch.in_debian()),
                format!("APT::Architectures={}", arch.in_debian()),
                format!("Dir::State::Lists={}", lists.display()),
                format!("Dir::Cache={}", directory.join("cache").display()),
                "Dir::State::Status=/dev/null".to_owned(),
                "APT::Sandbox::User=root".to_owned(),
            ] {
                apt.arg("-o").arg(option);
            }
            run(apt.arg("--quiet=2").args(arguments).current_dir(&directory))
        };
        apt(&["update"])?;
        apt(&["download", "musl-dev"])?;
        let mut packages = fs::read_dir(&directory)?.filter_map(|entry| Some(entry.ok()?.path()));
        let package = packages.find(|path| path.extension().is_some_and(|name| name == "deb"));
        let package = package.context("apt-get downloaded no musl-dev")?;
        let mut unpack = Command::new("dpkg-deb");
        run(unpack.arg("--extract").arg(package).arg(&directory))?;
    }
    let own = output(Command::new(compiler).arg("-print-file-name=include"))?;
    let (headers, own) = (headers.display(), own.trim());
    Ok(format!("-nostdinc -isystem {headers} -isystem {own}"))
}

/// Returns the commit with a remark if the checkout differs from it. The build script finds a clean one itself.
pub fn modified_commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.args(["-c", "safe.directory=*"]).args(arguments);
        output(git.current_dir(workspace())).ok()
    };
    let changes = git(&["status", "--porcelain"])?;
    let commit = git(&["rev-parse", "HEAD"])?;
    (!changes.is_empty()).then(|| format!("{} (modified)", commit.trim()))
}
