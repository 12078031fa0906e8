//! Finds the script or module in the arguments of an interpreter (node, bun or python).

use std::borrow::Cow;

use crate::event::Image;

/// Options of node and bun whose value is the next argument.
const WITH_VALUE: [&[u8]; 10] = [
    b"-r",
    b"--require",
    b"--import",
    b"--preload",
    b"--loader",
    b"--experimental-loader",
    b"-C",
    b"--conditions",
    b"--env-file",
    b"--cwd",
];

/// Options of node and bun that replace the script.
const INSTEAD: [&[u8]; 5] = [b"-e", b"--eval", b"-p", b"--print", b"-pe"];

const PYTHON: &[u8] = b"python";

/// File names of node, bun and python, without a version.
pub(super) const INTERPRETERS: [&[u8]; 4] = [b"node", b"nodejs", b"bun", PYTHON];

/// Characters of a version at the end of a file name.
pub(super) const VERSION: &[u8] = b"0123456789.-";

/// Script or module that an interpreter runs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Script<'a> {
    /// Index of the argument that names the script. The arguments after it are the script's own.
    pub(crate) at: usize,
    /// Path as it was given, or `-m NAME` for a python module.
    pub(crate) name: Cow<'a, [u8]>,
}

/// Returns the file name of an interpreter without its version.
fn unversioned(exe_name: &[u8]) -> &[u8] {
    let last = exe_name.iter().rposition(|b| !VERSION.contains(b));
    &exe_name[..last.map_or(0, |last| last + 1)]
}

/// Returns whether the file name is that of node, bun or python, in any version.
pub(crate) fn is_interpreter(exe_name: &[u8]) -> bool {
    INTERPRETERS.contains(&unversioned(exe_name))
}

/// Returns the path of the script that a program runs, as it was given.
///
/// Returns `None` if the program is no interpreter, runs no script, or runs a python module (`-m`).
pub fn path(image: &Image) -> Option<&[u8]> {
    let exe_name = image.exe.rsplit(|byte| *byte == b'/').next()?;
    match of(exe_name, image)?.name {
        Cow::Borrowed(path) => Some(path).filter(|path| !path.is_empty()),
        Cow::Owned(_) => None,
    }
}

/// Returns what an interpreter runs, `None` if the program is no interpreter or runs no script.
pub(crate) fn of<'a>(exe_name: &[u8], image: &'a Image) -> Option<Script<'a>> {
    match unversioned(exe_name) {
        PYTHON => of_python(image),
        name if INTERPRETERS.contains(&name) => of_node(image),
        _ => None,
    }
}

fn given((at, path): (usize, &[u8])) -> Script<'_> {
    let name = Cow::Borrowed(path);
    Script { at, name }
}

fn of_node(image: &Image) -> Option<Script<'_>> {
    let mut args = image.args().enumerate().skip(1);
    while let Some((at, arg)) = args.next() {
        if arg == b"--" {
            return args.next().map(given);
        } else if INSTEAD.contains(&arg) {
            return None;
        } else if WITH_VALUE.contains(&arg) {
            args.next();
        } else if !arg.starts_with(b"-") {
            return Some(given((at, arg)));
        }
    }
    None
}

/// Returns what python runs.
///
/// Several options may share an argument, as in `-Im`. The last one may have its value there, as in `-Wignore`.
///
/// Source: `python --help` and Python/getopt.c.
fn of_python(image: &Image) -> Option<Script<'_>> {
    let mut args = image.args().enumerate().skip(1);
    while let Some((at, arg)) = args.next() {
        let Some(options) = arg.strip_prefix(b"-") else {
            return Some(given((at, arg)));
        };
        if options == b"-" {
            return args.next().map(given);
        } else if options.is_empty() {
            return None;
        } else if options == b"-check-hash-based-pycs" {
            args.next();
        }
        let is_long = options.starts_with(b"-");
        let takes_value = |byte: &u8| b"cmWX".contains(byte) && !is_long;
        let Some(last) = options.iter().position(takes_value) else {
            continue;
        };
        let (option, value) = (options[last], &options[last + 1..]);
        let value = match value {
            [] => args.next(),
            value => Some((at, value)),
        };
        match (option, value) {
            (b'c', _) => return None,
            (b'm', value) => {
                let (at, name) = value?;
                let name = Cow::Owned([b"-m ", name].concat());
                return Some(Script { at, name });
            }
            _ => {}
        }
    }
    None
}
