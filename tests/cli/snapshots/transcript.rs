//! Transcript of commands on a terminal of 80 columns, without what differs from run to run.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use nix::pty::{Winsize, openpty};
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};

use super::mask::{Mask, pattern};
use crate::daemon::REAPER;
use crate::report;

/// Width of the terminal in columns.
pub const WIDTH: usize = 80;
/// Directory with the snapshots.
pub const SNAPSHOTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/cli/snapshots");

/// Commands and their output, in order.
pub struct Transcript<'a> {
    dir: &'a Path,
    entries: Vec<Entry>,
}

/// A command and its output.
struct Entry {
    /// Title, and the command line.
    head: String,
    stdout: String,
    stderr: String,
    status: Option<i32>,
    /// Whether it was written to a terminal, and therefore wrapped.
    is_wrapped: bool,
}

impl<'a> Transcript<'a> {
    /// Creates a transcript of commands that run in `dir`, which is also their home.
    pub fn new(dir: &'a Path) -> Transcript<'a> {
        Transcript {
            dir,
            entries: Vec::new(),
        }
    }

    /// Runs `reaper` with these words.
    pub fn reaper(&mut self, what: &str, words: &[&str]) {
        self.run(what, &words.join(" "), Command::new(REAPER).args(words));
    }

    /// Runs a command that the transcript shows as `reaper WORDS`.
    pub fn run(&mut self, what: &str, words: &str, command: &mut Command) {
        for name in [
            "HOME",
            "XDG_STATE_HOME",
            "XDG_CONFIG_HOME",
            "XDG_RUNTIME_DIR",
        ] {
            command.env(name, self.dir);
        }
        // A pager would wait for a key.
        command.env("PAGER", "cat").env("TERM", "xterm");
        command.env_remove("NO_COLOR").current_dir(self.dir);
        let ([out, stdout], [err, stderr]) = (terminal(), terminal());
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let mut child = command.spawn().expect("run");
        // The `Command` would keep the terminals open.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let stdout = thread::spawn(|| read(out));
        let stderr = read(err);
        let status = child.wait().expect("wait for the command").code();
        self.entries.push(Entry {
            head: format!("# {what}\n$ reaper {words}\n"),
            stdout: stdout.join().expect("read the output"),
            stderr,
            status,
            is_wrapped: true,
        });
    }

    /// Adds output that was written to files.
    pub fn add(&mut self, what: &str, words: &str, [stdout, stderr]: [String; 2]) {
        self.entries.push(Entry {
            head: format!("# {what}\n$ reaper {words}\n"),
            stdout,
            stderr,
            status: Some(0),
            is_wrapped: false,
        });
    }

    /// Asserts that the transcript is as in its snapshot, fits the terminal, and contains no name that only programs read.
    pub fn assert(&self, name: &str, mask: &Mask) {
        let text: String = self.entries.iter().map(|entry| entry.text(mask)).collect();
        let mut settings = insta::Settings::new();
        settings.set_snapshot_path(SNAPSHOTS);
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        report::add("--- to accept it: INSTA_UPDATE=always cargo xtask test snapshots");
        settings.bind(|| insta::assert_snapshot!(name, text));
        let internal = self.entries.iter().filter_map(Entry::internal);
        assert_eq!(internal.collect::<Vec<_>>(), [""; 0], "internal names");
        self.assert_widths();
    }

    /// Asserts only that the transcript fits the terminal.
    pub fn assert_widths(&self) {
        let wide = self.entries.iter().filter_map(Entry::wide);
        assert_eq!(wide.collect::<Vec<_>>(), [""; 0], "wider than the terminal");
    }
}

impl Entry {
    /// Returns the entry without what differs from run to run.
    fn text(&self, mask: &Mask) -> String {
        let mut text = self.head.clone();
        for output in [&self.stdout, &self.stderr] {
            match self.is_wrapped {
                true => text += &mask.wrapped(output),
                false => output
                    .lines()
                    .for_each(|line| text += &format!("{}\n", mask.line(line))),
            }
        }
        if self.has_flexible_columns() {
            text = pattern("([^ \n]) {2,}")
                .replace_all(&text, "$1  ")
                .into_owned();
        }
        text + &match self.status {
            Some(0) => "\n".to_owned(),
            Some(status) => format!("(exit status {status})\n\n"),
            None => "(ended by a signal)\n\n".to_owned(),
        }
    }

    /// Returns whether the width of a column depends on the values in it.
    fn has_flexible_columns(&self) -> bool {
        let mut commands = ["$ reaper ps", "$ reaper keep --list"].iter();
        commands.any(|command| self.head.contains(command))
    }

    /// Returns a line that is wider than the terminal.
    fn wide(&self) -> Option<String> {
        let plain = [&self.stdout, &self.stderr]
            .map(|text| anstream::adapter::strip_str(text).to_string())
            .concat();
        let mut lines = plain.lines();
        // A long word, such as a path, stays whole.
        let is_wide = |line: &&str| line.chars().count() > WIDTH && line.trim().contains(' ');
        let wide = lines.find(|line| self.is_wrapped && is_wide(line));
        wide.map(|line| format!("{}{line}", self.head))
    }

    /// Returns a name that is not for people, such as `root_exited`. Paths, quoted settings and patterns of programs contain
    /// others.
    fn internal(&self) -> Option<String> {
        if self.head.contains("$ reaper agents") {
            return None;
        }
        let plain = anstream::adapter::strip_str(&self.stdout).to_string();
        let name = pattern("(?m)(?:^|[ (])([a-z]+(?:_[a-z]+)+)(?:$|[ ,.:;)])");
        let found = name.captures(&plain)?;
        Some(format!("{}{}", self.head, &found[1]))
    }
}

/// Opens a terminal in raw mode, which does not change line breaks. Returns the side that is read, and the command's side.
fn terminal() -> [OwnedFd; 2] {
    let size = Winsize {
        ws_col: WIDTH as u16,
        ws_row: 24,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let pty = openpty(Some(&size), None).expect("a terminal");
    // Copies, because they are close-on-exec and the originals are not. A surviving child would hold the terminal open.
    let ends = [pty.master, pty.slave].map(|fd| fd.try_clone().expect("a second descriptor"));
    let mut modes = tcgetattr(&ends[1]).expect("its modes");
    cfmakeraw(&mut modes);
    tcsetattr(&ends[1], SetArg::TCSANOW, &modes).expect("set its modes");
    ends
}

/// Returns everything that is written to a terminal until no process has it open.
fn read(terminal: OwnedFd) -> String {
    let mut output = Vec::new();
    // Ends with EIO.
    let _ = File::from(terminal).read_to_end(&mut output);
    String::from_utf8_lossy(&output).into_owned()
}
