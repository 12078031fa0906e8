//! Finds the script or module in the arguments of an interpreter, such as bash, node, perl or python.

use std::borrow::Cow;

use crate::event::Image;

/// Interpreter, and the options that may stand before its script.
///
/// Letters are options of one letter. Several may share an argument, as in `-euo pipefail`.
pub(super) struct Interpreter {
    /// File names without a version.
    names: &'static [&'static str],
    /// Whole options whose value is the next argument.
    with_value: &'static [&'static str],
    /// Whole options that replace the script.
    instead: &'static [&'static str],
    /// Whole options with one `-` that are no letters.
    words: &'static [&'static str],
    /// Whether `-` ends the options, and `+` followed by letters is an option, as in a POSIX shell.
    is_shell: bool,
    /// Letters whose value is the rest of the argument or, without a rest, the next argument.
    value: &'static [u8],
    /// Letters that each take one of the next arguments as their value, also before other letters.
    next: &'static [u8],
    /// Letters whose value is the rest of the argument, which may be empty.
    rest: &'static [u8],
    /// Letters that replace the script.
    code: &'static [u8],
    /// Letters whose value names a module that replaces the script.
    module: &'static [u8],
}

/// Interpreter without options before the script.
const PLAIN: Interpreter = Interpreter {
    names: &[],
    with_value: &[],
    instead: &[],
    words: &[],
    is_shell: false,
    value: b"",
    next: b"",
    rest: b"",
    code: b"",
    module: b"",
};

/// Interpreters whose scripts rules can match.
///
/// Sources: the manual pages, `python --help` and Python/getopt.c. V8 accepts long options with one `-`, so node and bun
/// have no letters.
const INTERPRETERS: [Interpreter; 9] = [
    Interpreter {
        names: &["node", "nodejs", "bun"],
        with_value: &[
            "-r",
            "--require",
            "--import",
            "--preload",
            "--loader",
            "--experimental-loader",
            "-C",
            "--conditions",
            "--env-file",
            "--cwd",
        ],
        instead: &["-e", "--eval", "-p", "--print", "-pe"],
        ..PLAIN
    },
    Interpreter {
        names: &["python", "pypy"],
        with_value: &["--check-hash-based-pycs"],
        value: b"WX",
        code: b"c",
        module: b"m",
        ..PLAIN
    },
    Interpreter {
        names: &["sh", "bash", "dash", "ash"],
        with_value: &["--rcfile", "--init-file", "-rcfile", "-init-file"],
        words: &[
            "-login",
            "-noediting",
            "-noprofile",
            "-norc",
            "-posix",
            "-restricted",
            "-verbose",
        ],
        is_shell: true,
        next: b"oO",
        code: b"cs",
        ..PLAIN
    },
    Interpreter {
        names: &["ksh", "mksh", "zsh"],
        with_value: &["--emulate"],
        is_shell: true,
        value: b"o",
        code: b"cs",
        ..PLAIN
    },
    Interpreter {
        names: &["fish"],
        with_value: &["--init-command", "--features"],
        instead: &["--command"],
        value: b"CdfDo",
        code: b"c",
        ..PLAIN
    },
    Interpreter {
        names: &["perl"],
        value: b"I",
        rest: b"CDFiMmVx",
        code: b"eE",
        ..PLAIN
    },
    Interpreter {
        names: &["ruby"],
        value: b"CEIrX",
        rest: b"FiKTWx",
        code: b"e",
        ..PLAIN
    },
    Interpreter {
        names: &["php"],
        value: b"cdzt",
        code: b"aBEFrRS",
        ..PLAIN
    },
    Interpreter {
        names: &["lua", "luajit"],
        value: b"elj",
        rest: b"O",
        ..PLAIN
    },
];

/// Characters of a version at the end of a file name.
pub(super) const VERSION: &[u8] = b"0123456789.-";
/// Length from which the file name of an interpreter may end with a version: with one, it fills a prefix of the name
/// table. `sh5` is no shell.
const VERSIONED: usize = reaper_common::PREFIX_LEN - 1;

/// Script or module that an interpreter runs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Script<'a> {
    /// Index of the argument that names the script. The arguments after it are the script's own.
    pub(crate) at: usize,
    /// Path as it was given, or `-m NAME` for a python module.
    pub(crate) name: Cow<'a, [u8]>,
}

/// Returns the interpreters.
pub(super) fn interpreters() -> impl Iterator<Item = &'static Interpreter> {
    INTERPRETERS.iter()
}

/// Returns the place among the interpreters of the one with this file name, in any version.
pub(super) fn interpreter(exe_name: &[u8]) -> Option<usize> {
    let unversioned = without_version(exe_name);
    let is_it = |name: &str| {
        let name = name.as_bytes();
        name == exe_name || name == unversioned && name.len() >= VERSIONED
    };
    interpreters().position(|one| one.names.iter().any(|name| is_it(name)))
}

/// Returns whether the path is that of an interpreter that reaper knows, in any version.
pub fn is_interpreter(exe: &[u8]) -> bool {
    let name = exe.rsplit(|byte| *byte == b'/').next();
    name.is_some_and(|name| interpreter(name).is_some())
}

/// Returns the file name of an interpreter without a version at its end.
pub fn without_version(exe_name: &[u8]) -> &[u8] {
    let last = exe_name.iter().rposition(|b| !VERSION.contains(b));
    &exe_name[..last.map_or(0, |last| last + 1)]
}

/// Returns the script that a program runs, as it was given, or `-m NAME` for a python module.
pub fn name(image: &Image) -> Option<Cow<'_, [u8]>> {
    let exe_name = image.exe.rsplit(|byte| *byte == b'/').next()?;
    Some(of(exe_name, image)?.name)
}

/// Returns the path of the script that a program runs, as it was given.
///
/// Returns `None` if the program is no interpreter, runs no script, or runs a python module (`-m`).
pub fn path(image: &Image) -> Option<&[u8]> {
    match name(image)? {
        Cow::Borrowed(path) => Some(path).filter(|path| !path.is_empty()),
        Cow::Owned(_) => None,
    }
}

/// Returns what an interpreter runs, `None` if the program is no interpreter or runs no script.
pub(crate) fn of<'a>(exe_name: &[u8], image: &'a Image) -> Option<Script<'a>> {
    INTERPRETERS[interpreter(exe_name)?].script(image)
}

fn given((at, path): (usize, &[u8])) -> Script<'_> {
    let name = Cow::Borrowed(path);
    Script { at, name }
}

impl Interpreter {
    /// Returns the file names that the interpreter can have: whole names, and names before a version.
    pub(super) fn file_names(&self) -> impl Iterator<Item = (&'static [u8], bool)> {
        let names = self.names.iter().map(|name| name.as_bytes());
        names.map(|name| (name, name.len() >= VERSIONED))
    }

    /// Returns the first of several one-letter options in an argument that is the last one, because the rest is its value,
    /// and that rest. The rest can be empty.
    fn last_letter<'a>(&self, letters: &'a [u8]) -> Option<(&'a u8, &'a [u8])> {
        let sets = [self.value, self.rest, self.code, self.module];
        let ends = |letter: &u8| sets.iter().any(|set| set.contains(letter));
        letters[letters.iter().position(ends)?..].split_first()
    }

    /// Returns whether the option, as `-c` of a shell, replaces the script.
    pub(super) fn has_instead(&self, option: &[u8]) -> bool {
        let letters = option.strip_prefix(b"-").unwrap_or_default();
        self.instead.iter().any(|one| one.as_bytes() == option)
            || self.last_letter(letters).is_some_and(|(letter, _)| {
                self.code.contains(letter) || self.module.contains(letter)
            })
    }

    /// Returns the script or module in the arguments.
    fn script<'a>(&self, image: &'a Image) -> Option<Script<'a>> {
        let is_one = |all: &[&str], arg: &[u8]| all.iter().any(|one| one.as_bytes() == arg);
        let mut args = image.args().enumerate().skip(1);
        while let Some((at, arg)) = args.next() {
            let plus = arg.strip_prefix(b"+").filter(|_| self.is_shell);
            let Some(option) = arg.strip_prefix(b"-").or(plus) else {
                return Some(given((at, arg)));
            };
            if arg == b"--" || arg == b"-" && self.is_shell {
                return args.next().map(given);
            } else if arg == b"-" || is_one(self.instead, arg) {
                return None;
            } else if is_one(self.with_value, arg) {
                args.next();
                continue;
            } else if option.starts_with(b"-") || is_one(self.words, arg) {
                continue;
            }
            for _ in option.iter().filter(|letter| self.next.contains(letter)) {
                args.next();
            }
            let Some((letter, rest)) = self.last_letter(option) else {
                continue;
            };
            if self.code.contains(letter) {
                return None;
            } else if self.rest.contains(letter) {
                continue;
            }
            let value = match rest {
                [] => args.next(),
                rest => Some((at, rest)),
            };
            if self.module.contains(letter) {
                let (at, name) = value?;
                let name = Cow::Owned([b"-m ", name].concat());
                return Some(Script { at, name });
            }
        }
        None
    }
}
