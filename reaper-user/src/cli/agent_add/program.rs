//! Program that a user names for `reaper agent add`: of a process, or by its path.

use std::ffi::OsStr;
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

/// First bytes of a program, see elf(5).
const ELF_MAGIC: &[u8] = b"\x7fELF";

/// Bytes of a script that are read for its first line.
const FIRST_LINE_MAX: u64 = 256;

/// Program that the user has named.
pub(super) struct Target {
    /// Process or program, as the user named it.
    pub(super) what: String,
    /// Image of the process, or that a process running the program would have.
    pub(super) image: Arc<Image>,
    /// Whether the file of the interpreter is not the interpreter itself, but chooses one.
    pub(super) is_chosen: bool,
}

/// Returns what the user has named, and its program.
pub(super) fn target(args: &AddArgs) -> Result<Target, Failure> {
    if let Some(pid) = args.pid {
        let process = recognition::read_process(pid, ScriptPaths::Resolved);
        let process = process.map_err(|error| Failure::Refused(error.detail))?;
        let what = format!("process {pid}");
        if pid == 1 || process.kernel_thread {
            let why = if pid == 1 {
                "the init process"
            } else {
                "a kernel thread"
            };
            return Err(Failure::Refused(format!("cannot add {what}: it is {why}")));
        }
        return Ok(Target {
            what,
            image: process.image,
            is_chosen: false,
        });
    }
    let program = args.program.as_deref().unwrap_or(Path::new(""));
    let what = printable(&program.display().to_string(), usize::MAX);
    let found = find(program).ok_or_else(|| {
        if program.is_dir() {
            return Failure::Refused(format!(
                "cannot add {what}: it is a directory; give the path of the program in it"
            ));
        }
        let place = if program.components().count() > 1 {
            ""
        } else {
            " in PATH"
        };
        Failure::Refused(format!(
            "cannot add {what}: there is no such program{place}; give its path"
        ))
    })?;
    let (image, is_chosen) =
        image_of(&found).map_err(|why| Failure::Refused(format!("cannot add {what}: {why}")))?;
    Ok(Target {
        what,
        image: Arc::new(image),
        is_chosen,
    })
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

/// Returns the image that a process running this program would have, and whether the file of its interpreter only chooses
/// one. `path` has its links resolved.
///
/// # Errors
/// The file cannot be read, or is neither a program nor a script with a `#!` line. Or it is a script for an interpreter
/// that rules cannot name.
pub(super) fn image_of(path: &Path) -> Result<(Image, bool), String> {
    let head =
        first_bytes(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
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
        if cfg!(target_os = "linux") && !head.starts_with(ELF_MAGIC) {
            return Err(
                "it is no program and has no `#!` line, so its process runs the program of a shell; add that line, or name \
                 the running agent with --pid"
                    .into(),
            );
        }
        return Ok((image, false));
    };
    let (exe, is_chosen) = file_of(interpreter);
    if !is_interpreter(&exe) {
        let name = String::from_utf8_lossy(&exe).into_owned();
        return Err(format!(
            "it is a script for {name}, whose arguments reaper cannot read; name the program that it starts"
        ));
    }
    let image = Image {
        argv: terminated(&[&exe, own]),
        script: own.into(),
        exe,
        ..image
    };
    Ok((image, is_chosen))
}

/// Returns the path of an interpreter's program. Also returns whether that only chooses an interpreter, as a shim does.
fn file_of(interpreter: Vec<u8>) -> (Vec<u8>, bool) {
    let found = find(Path::new(OsStr::from_bytes(&interpreter)));
    // A link to another program, as `node -> mise`, chooses the interpreter. busybox is itself the shell.
    let is_multi_call = |path: &PathBuf| path.ends_with("busybox") || path.ends_with("toybox");
    let is_known =
        |path: &PathBuf| is_interpreter(path.as_os_str().as_bytes()) || is_multi_call(path);
    let Some(found) = found.filter(is_known) else {
        return (interpreter, true);
    };
    let is_chosen = first_bytes(&found).is_ok_and(|head| head.starts_with(b"#!"));
    (found.into_os_string().into_vec(), is_chosen)
}

/// Returns the beginning of a file, which has the first line of a script.
fn first_bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    fs::File::open(path)?
        .take(FIRST_LINE_MAX)
        .read_to_end(&mut head)?;
    Ok(head)
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
