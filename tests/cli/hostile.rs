//! Tests that every command escapes names and arguments that contain terminal controls, line breaks or text direction
//! marks.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use libtest_mimic::Trial;
use nix::pty::openpty;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};

use super::keeper::Keeper;
use super::service_requests::socket;
use crate::daemon::{JOURNAL, REAPER};
use crate::trees::trial;
use crate::world::{TempDir, World, eventually};

/// Process name with an escape sequence for the window title, a C1 control, a line break and reversed text. It fits the
/// kernel's limit for a comm.
pub const NAME: &str = "\u{1b}]0;\u{7}\u{9b}\u{202e}\nFORG";
/// Argument with the same, with colours, and with a byte that some terminals treat as a control.
pub const ARGUMENT: &[u8] =
    b"\x1b[31m\x1b]0;x\x07\xc2\x9b2J\x9b2J\xe2\x80\xae\xe2\x81\xa6\xe2\x80\xa8\x7f\x08\r\nFORGED";

/// Returns the tests that need neither root nor BPF.
pub fn trials() -> Vec<Trial> {
    vec![
        trial("cli", "hostile_name_in_scan_is_escaped", scan),
        trial("cli", "hostile_path_in_config_error_is_escaped", errors),
    ]
}

/// Returns the tests that need both.
pub fn privileged() -> Vec<Trial> {
    vec![trial(
        "cli",
        "hostile_name_is_escaped_by_each_command",
        requests,
    )]
}

/// Asserts that output contains no control sequence, hidden text or forged line. `colours` allows colour sequences.
pub fn assert_harmless(what: &str, output: &[u8], colours: bool) {
    let shown = output.escape_ascii().to_string();
    let Ok(text) = std::str::from_utf8(output) else {
        panic!("{what}: not UTF-8: {shown}");
    };
    let mut plain = text.to_owned();
    while let (true, Some(at)) = (colours, plain.find("\x1b[")) {
        let after = &plain[at + 2..];
        let end = after.find(|c: char| !c.is_ascii_digit() && c != ';');
        let end = end.filter(|end| after[*end..].starts_with('m'));
        let end = end.unwrap_or_else(|| panic!("{what}: not a colour sequence: {shown}"));
        plain.replace_range(at..at + 3 + end, "");
    }
    // The start of the hostile argument, which is a colour sequence itself.
    assert!(!text.contains("\x1b[31m\x1b"), "{what}: {shown}");
    let hostile = |c: char| {
        c.is_control() && !"\n\t".contains(c)
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
    };
    assert!(!plain.contains(hostile), "{what}: {shown}");
    let forged = plain.lines().any(|line| line.starts_with("FORG"));
    assert!(!forged, "{what}: a forged line: {shown}");
}

/// Runs a command with its output on a terminal. Returns all bytes that are written to the terminal.
pub fn on_terminal(command: &mut Command) -> Vec<u8> {
    let pty = openpty(None, None).expect("a terminal");
    // Copies, because they are close-on-exec and the originals are not. A surviving child would hold the terminal open.
    let copy = |fd: OwnedFd| fd.try_clone().expect("a second descriptor");
    let (master, slave) = (copy(pty.master), copy(pty.slave));
    let mut modes = tcgetattr(&slave).expect("its modes");
    // Raw mode, which does not change line breaks.
    cfmakeraw(&mut modes);
    tcsetattr(&slave, SetArg::TCSANOW, &modes).expect("set its modes");
    let second = slave.try_clone().expect("a second descriptor");
    command.stdin(Stdio::null()).stdout(slave).stderr(second);
    command.env("TERM", "xterm").env_remove("NO_COLOR");
    let mut child = command.spawn().expect("run");
    // The `Command` would keep the terminal open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut master = File::from(master);
    let mut output = Vec::new();
    // Ends with EIO once no process has the terminal open.
    let _ = master.read_to_end(&mut output);
    child.wait().expect("wait for the command");
    output
}

/// Asserts that a command's output is harmless, in a pipe and on a terminal.
pub fn assert_both(what: &str, make: impl Fn() -> Command) {
    let output = make().stdin(Stdio::null()).output().expect("run");
    assert_harmless(what, &[output.stdout, output.stderr].concat(), false);
    let output = on_terminal(&mut make());
    assert!(!output.is_empty(), "{what} prints nothing");
    assert_harmless(&format!("{what} on a terminal"), &output, true);
}

fn reaper(args: &[&str]) -> Command {
    let mut command = Command::new(REAPER);
    command.args(args);
    command
}

/// A service escapes such a process in its answers, its stream and its journal. The answers are text and JSON.
fn requests() {
    let mut world = World::new(true);
    world.start_daemon("grace = \"500ms\"\nevents = \"all\"\n", &JOURNAL);
    world.launch("claude", "agent", "agent", &["forger=forger".into()]);
    let agent = world.await_processes("agent", 1)[0].pid.to_string();
    let forged = world.await_processes("forged", 1)[0].pid.to_string();
    let socket = socket(&world);
    for args in [
        &["tree", "--all"][..],
        &["explain", &forged],
        &["explain", &agent],
        &["agents"],
        &["status"],
        &["keep", &forged],
        &["keep", "--list"],
        &["unkeep", &forged],
        &["scan"],
    ] {
        for more in [&["--socket", &socket][..], &["--socket", &socket, "--json"]] {
            let args = [args, more].concat();
            assert_both(&args.join(" "), || reaper(&args));
        }
    }
    world.kill("agent");
    world.await_gone(&["forger", "forged"]);
    world.await_event("the session is closed", |e| e.event == "session.close");
    world.stop();
    for name in ["events.jsonl", "stdout"] {
        let output = fs::read(world.dir().join(name)).expect("read the output");
        let named = output.windows(4).any(|part| part == b"FORG");
        assert!(named, "{name} does not contain it");
        assert_harmless(name, &output, false);
    }
    let journal = fs::read_dir(world.dir().join("journal")).expect("list the journal");
    let mut journal = journal.map(|entry| entry.expect("an entry").path());
    let journal = journal.find(|path| path.extension().is_some_and(|end| end == "db"));
    let journal = journal.expect("a journal").display().to_string();
    for more in [&[][..], &["--json"]] {
        let args = [&["history", "--file", &journal][..], more].concat();
        assert_both(&args.join(" "), || reaper(&args));
    }
}

/// `reaper scan` without a service escapes a leftover with such a name.
fn scan() {
    const LEFT: &str =
        "CLAUDECODE=1 CLAUDE_PID=$0 setsid sh -c '\"$0\" 3001 & exit' \"$1\"; echo up; read x";
    let dir = TempDir::new();
    let program = dir.path().join(NAME);
    symlink("/bin/sleep", &program).expect("link the program");
    let keeper = Keeper::run(&dir, LEFT, &[program.as_os_str()]);
    let pid = keeper.0.id().to_string();
    let config = dir.path().join("c.toml").display().to_string();
    for more in [&[][..], &["--json"], &["--reap"]] {
        let args = [&["scan", "--config", &config, "--scope", &pid][..], more].concat();
        let scan = || reaper(&args);
        let found = |output: &[u8]| output.windows(4).any(|part| part == b"FORG");
        eventually("the leftover is found", || {
            let output = on_terminal(&mut scan());
            assert_harmless(&args.join(" "), &output, true);
            found(&output).then_some(())
        });
        if !more.contains(&"--reap") {
            assert_both(&args.join(" "), scan);
        }
    }
}

/// Error messages escape hostile paths and config keys.
fn errors() {
    let dir = TempDir::new();
    let hostile = dir.path().join(OsStr::from_bytes(ARGUMENT));
    let config = dir.path().join("c.toml");
    let text = format!(
        "\"{}\" = 1\n[[keep]]\nname = \"a\\u009b\\nFORGED\"\n",
        r"\u001b]0;x\u0007\u009b\nFORGED"
    );
    fs::write(&config, text).expect("write a config");
    let check = |path: &PathBuf| {
        let mut command = reaper(&["config", "check"]);
        command.arg(path);
        command
    };
    assert_both("config check of a path", || check(&hostile));
    assert_both("config check of keys", || check(&config));
    for args in [
        &["tree", "--socket"][..],
        &["history", "--file"],
        &["daemon", "--config"],
        &["no-command"],
        &["unpin", "--pin-dir"],
        &["unpin", "--json", "--pin-dir"],
    ] {
        assert_both(&args.join(" "), || {
            let mut command = reaper(args);
            command.arg(&hostile);
            command
        });
    }
}
