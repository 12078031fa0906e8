//! The script that an interpreter was told to run: its first argument that is no option.

use crate::model::event::Image;

/// Options of node, bun and python whose value is an argument of its own.
const WITH_VALUE: [&[u8]; 12] = [
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
    b"-W",
    b"-X",
];

/// Options of node, bun and python after which no script comes.
const INSTEAD: [&[u8]; 7] = [b"-e", b"--eval", b"-p", b"--print", b"-pe", b"-c", b"-m"];

/// File names of node, bun and python, but for the version.
pub(super) const INTERPRETERS: [&[u8]; 4] = [b"node", b"nodejs", b"bun", b"python"];

/// What versions consist of.
pub(super) const VERSION: &[u8] = b"0123456789.-";

/// Whether a program of this file name is node, bun or python, in whatever version.
pub(super) fn is_interpreter(exe_name: &[u8]) -> bool {
    let end = exe_name
        .iter()
        .rposition(|b| !VERSION.contains(b))
        .map_or(0, |last| last + 1);
    INTERPRETERS.contains(&&exe_name[..end])
}

/// The place of the script among the arguments, and its path as it was given. Returns `None` if the program is no
/// interpreter or runs no script.
pub(super) fn of<'a>(exe_name: &[u8], image: &'a Image) -> Option<(usize, &'a [u8])> {
    if !is_interpreter(exe_name) {
        return None;
    }
    let mut args = image.args().enumerate().skip(1);
    while let Some((at, arg)) = args.next() {
        if arg == b"--" {
            return args.next();
        } else if INSTEAD.contains(&arg) {
            return None;
        } else if WITH_VALUE.contains(&arg) {
            args.next();
        } else if !arg.starts_with(b"-") {
            return Some((at, arg));
        }
    }
    None
}
