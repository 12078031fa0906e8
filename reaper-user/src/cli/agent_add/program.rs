//! Program that a user names for `reaper agent add`: of a process, or by its path.

use std::fs;
use std::io::Read as _;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::Failure;
use super::AddArgs;
use crate::api::recognition;
use crate::export::printable;
use reaper_host::facts::ScriptPaths;
use reaper_model::event::Image;
use reaper_model::ruleset::{COMM_MAX, is_interpreter};

/// Bytes of a script that are read for its first line.
const FIRST_LINE_MAX: u64 = 256;

/// Returns what the user has named, and its program.
pub(super) fn target(args: &AddArgs) -> Result<(String, Arc<Image>), Failure> {
    if let Some(pid) = args.pid {
        let process = recognition::read_process(pid, ScriptPaths::Resolved);
        let process = process.map_err(|error| Failure::Refused(error.message))?;
        let what = format!("process {pid}");
        if pid == 1 || process.kernel_thread {
            let why = if pid == 1 {
                "the init process"
            } else {
                "a kernel thread"
            };
            return Err(Failure::Refused(format!("cannot add {what}: it is {why}")));
        }
        return Ok((what, process.image));
    }
    let program = args.program.as_deref().unwrap_or(Path::new(""));
    let what = printable(&program.display().to_string(), usize::MAX);
    let found = find(program).ok_or_else(|| {
        let place = if program.components().count() > 1 {
            ""
        } else {
            " in PATH"
        };
        Failure::Refused(format!(
            "cannot add {what}: there is no such program{place}; give its path"
        ))
    })?;
    let image =
        image_of(&found).map_err(|why| Failure::Refused(format!("cannot add {what}: {why}")))?;
    Ok((what, Arc::new(image)))
}

/// Returns the path of a program, links resolved. A name without a slash is looked up in PATH.
fn find(program: &Path) -> Option<PathBuf> {
    let resolved = |path: PathBuf| path.canonicalize().ok().filter(|path| path.is_file());
    if program.components().count() > 1 || program.starts_with(".") {
        return resolved(program.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).find_map(|directory| resolved(directory.join(program)))
}

/// Returns the image that a process running this program would have. `path` has its links resolved.
///
/// # Errors
/// The file cannot be read, or is a script for an interpreter that rules cannot name.
fn image_of(path: &Path) -> Result<Image, String> {
    let mut head = Vec::new();
    let file =
        fs::File::open(path).and_then(|file| file.take(FIRST_LINE_MAX).read_to_end(&mut head));
    file.map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    let own = path.as_os_str().as_bytes();
    let terminated = |args: &[&[u8]]| {
        args.iter()
            .flat_map(|arg| [arg, &b"\0"[..]].concat())
            .collect()
    };
    let comm = path.file_name().unwrap_or_default().as_bytes();
    let image = Image {
        comm: comm[..comm.len().min(COMM_MAX)].into(),
        exe: own.into(),
        argv: terminated(&[own]),
        ..Image::default()
    };
    let Some(interpreter) = interpreter(&head) else {
        return Ok(image);
    };
    let given = PathBuf::from(std::ffi::OsString::from_vec(interpreter.clone()));
    let found = find(&given).map(|found| found.into_os_string().into_vec());
    let exe = found
        .filter(|exe| is_interpreter(exe))
        .unwrap_or(interpreter);
    if !is_interpreter(&exe) {
        let name = String::from_utf8_lossy(&exe).into_owned();
        return Err(format!(
            "it is a script for {name}, whose arguments reaper cannot read; name the program that it starts"
        ));
    }
    Ok(Image {
        argv: terminated(&[&exe, own]),
        script: own.into(),
        exe,
        ..image
    })
}

/// Returns the interpreter in the first line of a script, also behind `env`.
pub(super) fn interpreter(head: &[u8]) -> Option<Vec<u8>> {
    let line = head
        .strip_prefix(b"#!")?
        .split(|byte| *byte == b'\n')
        .next()?;
    let mut words = line
        .split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty());
    let first = words.next()?;
    if !first.ends_with(b"/env") {
        return Some(first.into());
    }
    words
        .find(|word| !word.starts_with(b"-") && !word.contains(&b'='))
        .map(Into::into)
}
