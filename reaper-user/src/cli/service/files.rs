//! Files that `service install` writes. Their last line, the seal, shows whether they were edited since.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc::O_NOFOLLOW;

use super::Failure;
use reaper_host::advice::Advised as _;
use sha2::{Digest, Sha256};

/// Start of the seal, after the start of a comment.
const SEAL: &str = "written by reaper ";
const HASH: &str = ", sha256 ";
const PROGRAM: &str = " with the program ";

/// A file to write.
pub(super) struct NewFile {
    pub path: PathBuf,
    pub content: Vec<u8>,
    pub mode: u32,
}

/// Seal of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seal {
    /// Version of the `reaper` that wrote the file.
    pub version: String,
    /// Program that was installed along with the file.
    pub program: Option<PathBuf>,
}

/// Origin of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Absent,
    /// `reaper` wrote it, and it was not changed since.
    Own(Seal),
    /// It was written or changed by hand, or is a symbolic link. Its seal, if it still has one, names this program.
    Edited(Option<PathBuf>),
}

impl Origin {
    /// Returns the seal, if `reaper` wrote the file.
    pub(super) fn seal(&self) -> Option<&Seal> {
        match self {
            Origin::Own(seal) => Some(seal),
            Origin::Absent | Origin::Edited(_) => None,
        }
    }

    /// Returns the program that was installed along with the file.
    pub(super) fn program(&self) -> Option<&Path> {
        match self {
            Origin::Own(seal) => seal.program.as_deref(),
            Origin::Edited(program) => program.as_deref(),
            Origin::Absent => None,
        }
    }

    pub(super) fn is_edited(&self) -> bool {
        matches!(self, Origin::Edited(_))
    }
}

/// Returns a text with a seal in its last line. `comment` are the start and the end of a comment.
pub(super) fn sealed(text: &str, comment: (&str, &str), seal: &Seal) -> String {
    let (open, close) = comment;
    let program = seal.program.as_ref();
    let program = program.map_or(String::new(), |path| format!("{PROGRAM}{}", path.display()));
    let line = format!("{open}{SEAL}{}{program}", seal.version);
    let hash = hash(text, &line);
    format!("{text}{line}{HASH}{hash}{close}\n")
}

/// Returns the hash of a text and of its seal.
fn hash(text: &str, line: &str) -> String {
    let digest = Sha256::new()
        .chain_update(text)
        .chain_update(line)
        .finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads the origin of a file from its seal.
///
/// # Errors
/// The file exists and cannot be read.
pub(super) fn origin(path: &Path) -> Result<Origin, Failure> {
    if path.is_symlink() {
        return Ok(Origin::Edited(None));
    }
    match read(path) {
        Ok(text) => {
            let seal = str::from_utf8(&text).ok().and_then(read_seal);
            Ok(match seal {
                Some((seal, true)) => Origin::Own(seal),
                seal => Origin::Edited(seal.and_then(|(seal, _)| seal.program)),
            })
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Origin::Absent),
        Err(error) => Err(failed("cannot read", path, &error)),
    }
}

/// Reads a file that is no symbolic link: a link of an image leads to a file of this host.
///
/// # Errors
/// The file cannot be read, or is a symbolic link.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut options = File::options();
    let mut file = options.read(true).custom_flags(O_NOFOLLOW).open(path)?;
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(content)
}

/// Returns the last seal of a text, and whether it is valid.
fn read_seal(text: &str) -> Option<(Seal, bool)> {
    let start = text[..text.rfind(HASH)?].rfind('\n')? + 1;
    let (text, last) = text.split_at(start);
    let (line, rest) = last.split_once(HASH)?;
    let found = rest.split_whitespace().next()?;
    let (_, facts) = line.split_once(SEAL)?;
    let (version, program) = match facts.split_once(PROGRAM) {
        Some((version, program)) => (version, Some(program.into())),
        None => (facts, None),
    };
    let seal = Seal {
        version: version.to_owned(),
        program,
    };
    let is_last = last.trim_end().lines().count() == 1;
    let is_valid = is_last && hash(text, line) == found;
    Some((seal, is_valid))
}

/// Returns whether version `a` is newer than `b`, by the numbers of both.
pub(super) fn is_newer(a: &str, b: &str) -> bool {
    let numbers = |version: &str| -> Vec<u64> {
        let core = version.split(['-', '+']).next().unwrap_or_default();
        core.split('.')
            .map_while(|number| number.parse().ok())
            .collect()
    };
    numbers(a) > numbers(b)
}

/// Writes all files, or none if one cannot be written: each is complete under a temporary name before the first one is
/// replaced.
///
/// # Errors
/// A file or a directory cannot be written.
pub(super) fn write_all(files: &[NewFile]) -> Result<(), Failure> {
    let written = files.iter().try_for_each(|file| {
        let result = write_beside(file);
        result.map_err(|error| {
            failed(
                "nothing was installed, as it cannot write",
                &file.path,
                &error,
            )
        })
    });
    let renamed = written.and_then(|()| {
        files.iter().try_for_each(|file| {
            let result = fs::rename(beside(&file.path), &file.path);
            result.map_err(|error| failed("cannot replace", &file.path, &error))
        })
    });
    if renamed.is_err() {
        for file in files {
            // Absent if it was not reached, or if it was renamed.
            let _ = fs::remove_file(beside(&file.path));
        }
    }
    renamed
}

/// Writes a file under a temporary name in its directory, which is created if it is missing.
fn write_beside(file: &NewFile) -> io::Result<()> {
    let path = beside(&file.path);
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    // Left by an installation that was killed.
    let _ = fs::remove_file(&path);
    let mut options = File::options();
    let options = options.write(true).create_new(true).mode(file.mode);
    let mut new = options.open(&path)?;
    new.write_all(&file.content)?;
    new.sync_all()
}

/// Returns the temporary name of a file.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.reaper-new"))
}

/// Removes a file, or an empty directory. Returns whether it existed and is gone.
///
/// # Errors
/// The file cannot be removed. A directory with other files stays, and is no error.
pub(super) fn remove(path: &Path) -> Result<bool, Failure> {
    let is_directory = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
    let removed = match is_directory {
        true => fs::remove_dir(path),
        false => fs::remove_file(path),
    };
    match removed {
        Ok(()) => Ok(true),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty
            ) =>
        {
            Ok(false)
        }
        Err(error) => Err(failed("cannot remove", path, &error)),
    }
}

/// Returns the error of an operation on a file, with what to do.
pub(super) fn failed(what: &str, path: &Path, error: &io::Error) -> Failure {
    let advice = match error.kind() {
        ErrorKind::ReadOnlyFilesystem => "mount it writable, or install the package of this system",
        ErrorKind::PermissionDenied => "run with sudo",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free some space",
        _ => "check the path",
    };
    Failure::Usage(format!(
        "{what} {}: {}",
        path.display(),
        error.advised_or(advice)
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn seal(version: &str) -> Seal {
        Seal {
            version: version.into(),
            program: Some("/usr/local/bin/reaper".into()),
        }
    }

    #[test]
    fn edited_file_is_recognised_by_its_seal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("unit");
        assert_eq!(origin(&path).unwrap(), Origin::Absent);
        for comment in [("# ", ""), ("<!-- ", " -->")] {
            let text = sealed("[Unit]\nA=b\n", comment, &seal("1.2.3"));
            fs::write(&path, &text).unwrap();
            assert_eq!(origin(&path).unwrap(), Origin::Own(seal("1.2.3")), "{text}");
            let program = seal("1.2.3").program;
            for (edited, program) in [
                (text.replace("A=b", "A=c"), program.clone()),
                (text.replace("1.2.3", "1.2.4"), program.clone()),
                (text.clone() + "B=c\n", program),
                ("[Unit]\n".into(), None),
                (String::new(), None),
            ] {
                fs::write(&path, &edited).unwrap();
                assert_eq!(origin(&path).unwrap(), Origin::Edited(program), "{edited}");
            }
            fs::remove_file(&path).unwrap();
            symlink("/dev/null", &path).unwrap();
            assert_eq!(origin(&path).unwrap(), Origin::Edited(None));
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn versions_are_compared_by_number() {
        for (a, b, newer) in [
            ("0.2.0", "0.1.9", true),
            ("0.10.0", "0.9.0", true),
            ("1.0.0", "1.0.0", false),
            ("0.1.0", "0.2.0", false),
            ("nonsense", "0.1.0", false),
        ] {
            assert_eq!(is_newer(a, b), newer, "{a} {b}");
        }
    }

    #[test]
    fn either_all_files_are_written_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| NewFile {
            path: dir.path().join(name),
            content: name.into(),
            mode: 0o644,
        };
        fs::write(dir.path().join("first"), "old").unwrap();
        fs::write(dir.path().join("blocker"), "").unwrap();
        let failure = write_all(&[file("first"), file("blocker/second")]).unwrap_err();
        assert!(failure.to_string().contains("blocker/second"), "{failure}");
        assert_eq!(fs::read_to_string(dir.path().join("first")).unwrap(), "old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        write_all(&[file("first"), file("new/second")]).unwrap();
        assert_eq!(
            fs::read_to_string(dir.path().join("first")).unwrap(),
            "first"
        );
        assert!(dir.path().join("new/second").exists());
    }
}
