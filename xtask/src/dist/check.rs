//! Checks packages. Only the directory of a small Debian has them installed, never this host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::build::SHELLS;
use super::stage::renew;
use super::{Packages, Release, deb, require, rpm};
use crate::shell::{as_root, output, run, say, target_dir};

/// Programs of the checks, and their Debian packages.
const TOOLS: &[(&str, &str)] = &[
    ("lintian", "lintian"),
    ("man", "man-db"),
    ("mandoc", "mandoc"),
    ("mmdebstrap", "mmdebstrap"),
    ("rpm", "rpm"),
    ("rpm2cpio", "rpm2cpio"),
    ("cpio", "cpio"),
    ("unshare", "util-linux"),
    ("fish", "fish"),
    ("zsh", "zsh"),
];

/// Version of the packages from which the checks upgrade.
const OLD: &str = "0.0.1";

/// Debian release in which the packages are installed.
const SUITE: &str = "bookworm";

/// Runs all checks. Those that run programs of a foreign processor use QEMU, and install no packages.
///
/// # Errors
/// The first check that fails.
pub fn check(release: &Release, packages: &Packages) -> Result<()> {
    let began = Instant::now();
    require(TOOLS, "to check packages")?;
    processor(release)?;
    documents(release)?;
    lintian(&packages.deb)?;
    list_rpm(&packages.rpm)?;
    tarball(release, packages)?;
    if release.arch.is_host() {
        installation(release, packages)?;
    } else {
        say("left out: installing the packages, which are for another processor");
    }
    let seconds = began.elapsed().as_secs();
    say(format_args!("checked the packages in {seconds} s"));
    Ok(())
}

/// Checks that both programs are for the processor that the packages name.
fn processor(release: &Release) -> Result<()> {
    for program in [&release.program, &release.static_program] {
        let mut readelf = Command::new("readelf");
        let header = output(readelf.arg("--file-header").arg(program))?;
        let machine = header.lines().find(|line| line.contains("Machine:"));
        let machine = machine.unwrap_or_default().to_lowercase().replace('-', "_");
        let expected = release.arch.name();
        ensure!(
            machine.contains(expected),
            "{}: {machine}",
            program.display()
        );
    }
    Ok(())
}

/// Checks man pages with two formatters, and completions in each shell.
fn documents(release: &Release) -> Result<()> {
    let directory = release.work.join("documents");
    for (name, _) in &release.documents.man {
        let mut man = Command::new("man");
        man.args(["--warnings", "--local-file", "-Tutf8", "-Z"]);
        let printed = man
            .arg(directory.join(name))
            .env("LC_ALL", "C.UTF-8")
            .output()?;
        let warnings = String::from_utf8_lossy(&printed.stderr);
        ensure!(
            printed.status.success() && warnings.is_empty(),
            "man page {name}: {warnings}"
        );
    }
    let mut mandoc = Command::new("mandoc");
    mandoc.args(["-Tlint", "-Werror"]);
    let names = release.documents.man.iter().map(|(name, _)| name);
    run(mandoc.args(names).current_dir(&directory))?;
    let count = release.documents.man.len();
    ensure!(count > 20, "{count} man pages");
    say(format_args!("{count} man pages have no warnings"));

    let directory = release.work.join("completions");
    renew(&directory)?;
    for ((shell, name), script) in SHELLS.iter().zip(&release.documents.completions) {
        fs::write(directory.join(name), script)?;
        let mut command = Command::new("timeout");
        command.args(["60", shell]);
        match *shell {
            "bash" => command.args(["--norc", "-c", BASH]),
            "fish" => command.args(["--no-config", "-c", FISH]),
            _ => command.args(["-f", "-c", ZSH]),
        };
        let offered = output(command.current_dir(&directory))?;
        ensure!(
            offered.contains("reaper config") && offered.contains("reaper run --timeout"),
            "completions of {shell} offer {offered:?}"
        );
    }
    say("completions work in bash, fish and zsh");
    Ok(())
}

/// Completes a command and an option, and prints both lines.
const BASH: &str = r#"
. ./reaper
COMP_WORDS=(reaper conf) COMP_CWORD=1
_reaper reaper conf reaper
echo "reaper ${COMPREPLY[0]}"
COMP_WORDS=(reaper run --timeo) COMP_CWORD=2
_reaper reaper --timeo run
echo "reaper run ${COMPREPLY[0]}"
"#;

const FISH: &str = r#"
source reaper.fish
echo "reaper "(complete --do-complete "reaper conf" | string split --fields 1 \t)
echo "reaper run "(complete --do-complete "reaper run --timeo" | string split --fields 1 \t)
"#;

/// zsh completes only on a terminal. Ctrl-U (0x15) empties the line.
const ZSH: &str = r#"
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; unset zle_bracketed_paste; stty -echo; reaper() {}; fpath=($PWD \$fpath)"
zpty -w shell "autoload -U compinit; compinit -u -D; echo DO''NE"
zpty -r -m shell line '*DONE*'
zpty -w -n shell $'reaper conf\t'
zpty -r -m shell line '*config*'
print -r -- $line
zpty -w -n shell $'\x15reaper run --timeo\t'
zpty -r -m shell line '*timeout*'
print -r -- $line
zpty -d shell
"#;

fn lintian(deb: &Path) -> Result<()> {
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on=error,warning", "--tag-display-limit=0"]);
    run(lintian.arg(deb))
}

/// Prints files and scripts of the `.rpm`, and checks that it has those that matter.
fn list_rpm(rpm: &Path) -> Result<()> {
    let mut query = Command::new("rpm");
    query.args([
        "--query",
        "--nosignature",
        "--scripts",
        "--requires",
        "--package",
    ]);
    print!("{}", output(query.arg(rpm))?);
    let pipe = r#"rpm2cpio "$0" | cpio --list --quiet"#;
    let files = output(Command::new("sh").args(["-c", pipe]).arg(rpm))?;
    for file in [
        "./usr/bin/reaper",
        "./usr/lib/systemd/system/reaper.service",
        "./etc/reaper/config.toml",
        "./usr/share/licenses/reaper/LICENSE-MIT",
    ] {
        ensure!(
            files.lines().any(|line| line == file),
            "no {file} in the .rpm"
        );
    }
    Ok(())
}

/// Runs the static program in a directory without any other file.
fn tarball(release: &Release, packages: &Packages) -> Result<()> {
    let root = release.work.join("empty");
    renew(&root)?;
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(&packages.tarball);
    run(tar.args(["--strip-components=1", "--directory"]).arg(&root))?;
    let program = root.join("bin/reaper");
    let mut readelf = Command::new("readelf");
    let headers = output(
        readelf
            .args(["--wide", "--program-headers", "--dynamic"])
            .arg(&program),
    )?;
    let needs = headers
        .lines()
        .find(|line| line.contains("(NEEDED)") || line.contains("INTERP"));
    ensure!(
        needs.is_none(),
        "the static program needs a library: {needs:?}"
    );
    for arguments in [
        &["--version"][..],
        &["config", "init", "/config.toml"],
        &["config", "check", "/config.toml"],
    ] {
        let mut command = if release.arch.is_host() {
            let mut chroot = as_root("chroot")?;
            chroot.arg(&root).arg("/bin/reaper");
            chroot
        } else if arguments == ["--version"] {
            let qemu = format!("qemu-{}-static", release.arch.name());
            require(
                &[(&qemu, "qemu-user-static")],
                "to run programs of another processor",
            )?;
            let mut emulator = Command::new(qemu);
            emulator.arg(&program);
            emulator
        } else {
            break;
        };
        run(command.args(arguments))?;
    }
    Ok(())
}

/// Installs, upgrades and removes the packages in a directory with a small Debian.
fn installation(release: &Release, packages: &Packages) -> Result<()> {
    let version = &release.version;
    let root = debian(&release.work)?;
    // Older packages of the same files, below the work directory: they are not for users.
    let old = Release {
        out: release.work.join("old"),
        compression: 1,
        ..release.clone()
    };
    renew(&old.out)?;
    let script = release.work.join("check.sh");
    fs::write(&script, include_str!("check.sh")).with_context(|| script.display().to_string())?;
    let inside = root.join("packages");
    for (from, name) in [
        (&deb::build(&old, OLD)?, "old.deb"),
        (&packages.deb, "new.deb"),
        (&rpm::build(&old, OLD)?, "old.rpm"),
        (&packages.rpm, "new.rpm"),
        (&script, "check.sh"),
    ] {
        let mut install = as_root("install")?;
        run(install
            .args(["-D", "--mode=0644"])
            .arg(from)
            .arg(inside.join(name)))?;
    }
    let mut shell = isolated()?;
    shell.arg("chroot").arg(&root);
    shell.args(["env", &format!("DEB_VERSION={version}-{}", deb::REVISION)]);
    run(shell.args(["sh", "/packages/check.sh"]))?;
    install_rpm(&root)?;
    let mut remove = as_root("rm")?;
    run(remove.args(["--recursive", "--one-file-system"]).arg(&root))
}

/// Returns a command that runs another one without a network, and without the mounts and processes of this host.
fn isolated() -> Result<Command> {
    let mut unshare = as_root("unshare")?;
    unshare.args([
        "--mount",
        "--pid",
        "--net",
        "--ipc",
        "--uts",
        "--fork",
        "--kill-child",
        "--",
    ]);
    Ok(unshare)
}

/// Unpacks a small Debian, which is downloaded once.
fn debian(work: &Path) -> Result<PathBuf> {
    let archive = target_dir().join("tools").join(format!("{SUITE}.tar"));
    if !archive.is_file() {
        let parent = archive.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        say(format_args!(
            "downloading a small Debian ({SUITE}), about a minute"
        ));
        let partial = archive.with_extension("partial.tar");
        let mut mmdebstrap = as_root("mmdebstrap")?;
        mmdebstrap.args(["--quiet", "--mode=root", "--variant=essential", SUITE]);
        run(mmdebstrap.arg(&partial))?;
        fs::rename(&partial, &archive).with_context(|| archive.display().to_string())?;
    }
    let root = work.join("debian");
    if root.exists() {
        run(as_root("rm")?
            .args(["--recursive", "--one-file-system"])
            .arg(&root))?;
    }
    fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
    let mut tar = as_root("tar")?;
    tar.args(["--extract", "--numeric-owner", "--file"])
        .arg(&archive);
    run(tar.arg("--directory").arg(&root))?;
    Ok(root)
}

/// Runs the scripts of the `.rpm`. Its dependencies are not in the database of a Debian.
fn install_rpm(root: &Path) -> Result<()> {
    let config = root.join("etc/reaper/config.toml");
    let rpm = |arguments: &[&str]| {
        let mut rpm = isolated()?;
        rpm.arg("rpm").arg("--root").arg(root);
        rpm.args(["--dbpath=/var/lib/rpm", "--nosignature", "--nodeps"]);
        if Path::new("/etc/debian_version").exists() {
            // Debian's rpm refuses to install anything without it.
            rpm.arg("--force-debian");
        }
        run(rpm.args(arguments))
    };
    let package = |name: &str| root.join("packages").join(name).display().to_string();
    rpm(&["--install", &package("old.rpm")])?;
    let edit = format!("echo '# edited' >>'{}'", config.display());
    run(as_root("sh")?.args(["-c", &edit]))?;
    rpm(&["--upgrade", &package("new.rpm")])?;
    let text = fs::read_to_string(&config).with_context(|| config.display().to_string())?;
    ensure!(
        text.ends_with("# edited\n"),
        "the upgrade of the .rpm replaced the edited config"
    );
    ensure!(
        root.join("usr/bin/reaper").exists(),
        "no program after the upgrade of the .rpm"
    );
    rpm(&["--erase", "reaper"])?;
    for left in [
        "usr/bin/reaper",
        "usr/lib/systemd/system/reaper.service",
        "usr/share/doc/reaper",
    ] {
        if root.join(left).exists() {
            bail!("{left} is left after the removal of the .rpm");
        }
    }
    say("the .rpm was installed, upgraded and removed");
    Ok(())
}
