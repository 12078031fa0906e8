//! Tests of `reaper service` below another root directory: nothing of this machine is installed, started or removed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::Trial;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;

use super::{CommandOutput, run};
use crate::daemon::REAPER;
use crate::trees::trial;
use crate::world::TempDir;

/// Files of the service below the root.
const UNIT: &str = "etc/systemd/system/reaper.service";
const MODE: &str = "etc/systemd/system/reaper.service.d/10-mode.conf";
const LINK: &str = "etc/systemd/system/multi-user.target.wants/reaper.service";
const PROGRAM: &str = "usr/local/bin/reaper";
/// Unit of a package.
const PACKAGED: &str = "usr/lib/systemd/system/reaper.service";

/// Returns the tests that need no root.
pub fn trials() -> Vec<Trial> {
    vec![
        trial("cli", "service-installed", installed),
        trial("cli", "service-mode-kept", mode_kept),
        trial("cli", "service-dry-run", dry_run),
        trial("cli", "service-edited", edited),
        trial("cli", "service-other-program", other_program),
        trial("cli", "service-of-package", packaged),
        trial("cli", "service-of-user", of_user),
        trial("cli", "service-links-of-image", links_of_image),
        trial("cli", "service-not-root", not_root),
    ]
}

/// Returns the tests that mount file systems.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "service-read-only", || {
            no_room(MsFlags::MS_RDONLY, None, "read-only file system")
        }),
        trial("cli", "service-disk-full", || {
            no_room(MsFlags::empty(), Some("size=64k"), "no space left")
        }),
    ]
}

/// Returns an empty root directory in `dir`.
fn image(dir: &TempDir) -> PathBuf {
    let root = dir.path().join("root");
    fs::create_dir(&root).expect("create the root directory");
    root
}

/// Runs `reaper service` with these words, below `root`. Its output is written beside that.
fn service(root: &Path, words: &[&str]) -> CommandOutput {
    let mut command = Command::new(REAPER);
    command.arg("service").args(words).arg("--root").arg(root);
    command
        .env("HOME", "/home/user")
        .env_remove("XDG_CONFIG_HOME");
    run(root.parent().expect("a parent"), &mut command)
}

/// The same, and asserts success.
fn done(root: &Path, words: &[&str]) -> String {
    let said = service(root, words);
    assert_eq!(said.code, Some(0), "{words:?}: {}", said.err);
    said.out
}

/// Asserts that the command is refused in one line with `reason`, and changes no file.
fn refused(root: &Path, words: &[&str], reason: &str) {
    let before = files(root);
    let said = service(root, words);
    assert_eq!(said.code, Some(2), "{words:?}: {}", said.out);
    assert!(said.err.contains(reason), "no '{reason}' in: {}", said.err);
    assert_eq!(said.err.trim_end().lines().count(), 1, "{}", said.err);
    assert_eq!(files(root), before);
}

/// Returns the files and links below a directory with their contents, in order.
fn files(root: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("list a directory") {
            let path = entry.expect("an entry").path();
            let meta = path.symlink_metadata().expect("stat");
            if meta.is_dir() {
                directories.push(path);
            } else if meta.is_symlink() {
                let target = path.read_link().expect("a link").into_os_string();
                all.push((path, target.into_encoded_bytes()));
            } else {
                let content = fs::read(&path).expect("read a file");
                all.push((path, content));
            }
        }
    }
    all.sort();
    all
}

fn text(root: &Path, path: &str) -> String {
    fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// An installation observes, and a removal leaves no file of it.
fn installed() {
    let dir = TempDir::new();
    let root = &image(&dir);
    let out = done(root, &["install"]);
    for path in [PROGRAM, UNIT, LINK] {
        assert!(out.contains(path), "no {path} in: {out}");
    }
    let program = fs::read(root.join(PROGRAM)).expect("the program");
    assert!(program == fs::read(REAPER).expect("the program under test"));
    let unit = text(root, UNIT);
    for line in [
        "ExecStart=/usr/local/bin/reaper daemon --source ebpf $REAPER_MODE",
        "Environment=REAPER_MODE=--observe",
    ] {
        assert!(unit.lines().any(|found| found == line), "no {line}: {unit}");
    }
    assert!(!root.join(MODE).exists());
    // A drop-in of the administrator stays.
    let other = "etc/systemd/system/reaper.service.d/mine.conf";
    fs::create_dir_all(root.join(other).parent().expect("a parent")).expect("a directory");
    fs::write(root.join(other), "[Service]\n").expect("write a drop-in");
    let out = done(root, &["uninstall"]);
    assert!(out.contains("drop-ins that reaper did not write"), "{out}");
    let left: Vec<PathBuf> = files(root).into_iter().map(|(path, _)| path).collect();
    assert_eq!(left, [root.join(other)]);
    refused(root, &["uninstall"], "nothing is installed");
}

/// A later installation keeps the mode, and `--observe` ends `--enforce`.
fn mode_kept() {
    let dir = TempDir::new();
    let root = &image(&dir);
    done(root, &["install", "--enforce"]);
    let mode = text(root, MODE);
    assert!(
        mode.contains("\nEnvironment=REAPER_MODE=--enforce\n"),
        "{mode}"
    );
    done(root, &["install"]);
    assert_eq!(text(root, MODE), mode);
    done(root, &["install", "--observe"]);
    assert!(!root.join(MODE).exists());
}

/// `--dry-run` lists the steps, and changes nothing.
fn dry_run() {
    let dir = TempDir::new();
    let root = &image(&dir);
    let out = done(root, &["install", "--dry-run"]);
    assert!(out.contains("would write") && out.contains(UNIT), "{out}");
    assert!(out.contains("\nmode observe: "), "{out}");
    let out = done(root, &["install", "--enforce", "--dry-run"]);
    assert!(out.contains("\nmode enforce: "), "{out}");
    assert!(files(root).is_empty());
    done(root, &["install"]);
    let before = files(root);
    let said = done(root, &["uninstall", "--dry-run", "--json"]);
    let report: Value = serde_json::from_str(&said).expect("one JSON object");
    assert_eq!(report["dry_run"], true);
    assert!(
        report["done"]
            .as_array()
            .is_some_and(|done| done.len() >= 3),
        "{report}"
    );
    assert_eq!(files(root), before);
}

/// A unit or drop-in that was edited by hand is replaced or removed only with `--force`.
fn edited() {
    let dir = TempDir::new();
    let root = &image(&dir);
    for path in [UNIT, MODE] {
        done(root, &["install", "--enforce"]);
        let edited = format!("{}# mine\n", text(root, path));
        fs::write(root.join(path), edited).expect("edit the file");
        refused(root, &["install"], "was edited by hand");
        let said = service(root, &["install", "--dry-run"]);
        assert_eq!(said.code, Some(2), "{}", said.err);
        assert!(
            said.out.contains("\nwould fail: ") && said.out.contains("was edited by hand"),
            "{}",
            said.out
        );
        refused(root, &["uninstall"], "was edited by hand");
        done(root, &["install", "--force"]);
        assert!(!text(root, path).contains("# mine"));
    }
    // The seal of an edited unit still names the program that belongs to it.
    let edited = format!("{}# mine\n", text(root, UNIT));
    fs::write(root.join(UNIT), edited).expect("edit the unit");
    done(root, &["uninstall", "--force"]);
    assert!(files(root).is_empty());
}

/// Absolute links of an image lead to its own files, and a link in place of a file counts as edited.
fn links_of_image() {
    let dir = TempDir::new();
    let root = &image(&dir);
    let outside = dir.path().join("outside");
    for (target, link) in [
        (outside.clone(), "etc"),
        (outside.join("bin"), "usr/local/bin"),
        ("../../../outside/share".into(), "var/lib"),
    ] {
        let link = root.join(link);
        fs::create_dir_all(link.parent().expect("a parent")).expect("a directory");
        symlink(target, link).expect("a link");
    }
    fs::create_dir(&outside).expect("a directory");
    fs::write(outside.join("canary"), "").expect("a file");
    let canary = files(&outside);
    let links = files(root);
    done(root, &["install", "--enforce"]);
    let below = root.join(outside.strip_prefix("/").expect("an absolute path"));
    let written = files(&below);
    for path in ["systemd/system/reaper.service", "bin/reaper"] {
        let path = below.join(path);
        assert!(
            written.iter().any(|(file, _)| *file == path),
            "no {}",
            path.display()
        );
    }
    assert_eq!(files(&outside), canary);
    done(root, &["uninstall", "--purge"]);
    assert!(files(root) == links, "files are left");
    assert_eq!(files(&outside), canary);

    let unit = below.join("systemd/system/reaper.service");
    fs::create_dir_all(unit.parent().expect("a parent")).expect("a directory");
    symlink("/dev/null", &unit).expect("a link");
    refused(root, &["install"], "is a symbolic link");
    done(root, &["install", "--force"]);
    assert!(unit.symlink_metadata().expect("the unit").is_file());
}

/// A program that `install` did not write is replaced only with `--force`, and is not run.
fn other_program() {
    let dir = TempDir::new();
    let root = &image(&dir);
    let program = root.join(PROGRAM);
    fs::create_dir_all(program.parent().expect("a parent")).expect("a directory");
    let ran = root.join("ran");
    let script = format!("#!/bin/sh\n>{}\necho reaper 99.1.0\n", ran.display());
    fs::write(&program, script).expect("write another program");
    refused(root, &["install"], "has not written it");
    done(root, &["install", "--force"]);
    assert!(!ran.exists());
    assert!(fs::read(program).expect("the program") == fs::read(REAPER).expect("the program"));
}

/// The unit and the program of a package are used as they are.
fn packaged() {
    let dir = TempDir::new();
    let root = &image(&dir);
    let packaged = root.join(PACKAGED);
    fs::create_dir_all(packaged.parent().expect("a parent")).expect("a directory");
    fs::write(&packaged, "[Service]\n").expect("write a unit");
    done(root, &["install", "--enforce"]);
    assert!(!root.join(UNIT).exists() && !root.join(PROGRAM).exists());
    let target = root.join(LINK).read_link().expect("a link");
    assert_eq!(target, Path::new("/").join(PACKAGED));
    assert!(root.join(MODE).exists());
    let out = done(root, &["uninstall"]);
    assert!(out.contains("a package has installed it"), "{out}");
    assert!(packaged.exists() && !root.join(MODE).exists());
}

/// A user's own service is in the user's directories.
fn of_user() {
    let dir = TempDir::new();
    let root = &image(&dir);
    done(root, &["install", "--user"]);
    let unit = text(root, "home/user/.config/systemd/user/reaper.service");
    let start = "ExecStart=/home/user/.local/bin/reaper daemon --user $REAPER_MODE";
    assert!(unit.lines().any(|line| line == start), "{unit}");
    done(root, &["uninstall", "--user"]);
    assert!(files(root).is_empty());
}

/// Without root or systemd, nothing is installed on this machine.
fn not_root() {
    let dir = TempDir::new();
    let install = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        if nix::unistd::geteuid().is_root() {
            command.args(["--reuid", "65534", "--clear-groups", REAPER]);
        } else {
            command = Command::new(REAPER);
        }
        let said = run(dir.path(), command.args(["service", "install"]).args(words));
        assert_eq!(said.code, Some(2), "{}{}", said.out, said.err);
        said
    };
    let said = install(&[]);
    assert!(said.err.contains("needs root"), "{}", said.err);
    let said = install(&["--dry-run"]);
    assert!(said.out.contains("would write"), "{}", said.out);
    let reasons: Vec<&str> = said
        .out
        .lines()
        .filter_map(|line| line.strip_prefix("would fail: "))
        .collect();
    assert!(reasons[0].contains("needs root"), "{reasons:?}");
    let has_systemd = Path::new("/run/systemd/system").is_dir();
    let names_it = reasons
        .iter()
        .any(|why| why.starts_with("systemd does not run this host"));
    assert!(has_systemd || names_it, "{reasons:?}");
}

/// A file system without room refuses the installation, and nothing of it remains.
fn no_room(flags: MsFlags, options: Option<&str>, reason: &str) {
    let dir = TempDir::new();
    let root = image(&dir);
    let local = root.join("usr/local");
    fs::create_dir_all(&local).expect("a directory");
    mount(Some("none"), &local, Some("tmpfs"), flags, options).expect("mount a tmpfs");
    let said = service(&root, &["install"]);
    let left = files(&root);
    umount2(&local, MntFlags::MNT_DETACH).expect("unmount it");
    assert_eq!(said.code, Some(2), "{}", said.out);
    assert!(said.err.contains("nothing was installed"), "{}", said.err);
    assert!(said.err.contains(reason), "{}", said.err);
    assert_eq!(left, []);
}
