//! Names and arguments that would command a terminal, forge a line or reorder text: no command passes them on.

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

/// A title for the window, a C1 control, a line of its own and reversed text. All of it fits the kernel's name for a process.
pub const NAME: &str = "\u{1b}]0;\u{7}\u{9b}\u{202e}\nFORG";
/// The same as an argument, with colours, and a byte that some terminals take for a control.
pub const ARGUMENT: &[u8] =
    b"\x1b[31m\x1b]0;x\x07\xc2\x9b2J\x9b2J\xe2\x80\xae\xe2\x81\xa6\xe2\x80\xa8\x7f\x08\r\nFORGED";

/// What needs neither root nor probes.
pub fn trials() -> Vec<Trial> {
    vec![
        trial("cli", "hostile_name_in_scan_is_escaped", scanned),
        trial("cli", "hostile_path_in_config_error_is_escaped", refused),
    ]
}

/// What needs them.
pub fn privileged() -> Vec<Trial> {
    vec![trial(
        "cli",
        "hostile_name_is_escaped_by_each_command",
        asked,
    )]
}

/// Nothing of it commands a terminal, hides text or begins a line that is not ours. Colours are fine where they are `wanted`.
pub fn assert_harmless(what: &str, said: &[u8], wanted: bool) {
    let shown = said.escape_ascii().to_string();
    let Ok(text) = std::str::from_utf8(said) else {
        panic!("{what}: no UTF-8: {shown}");
    };
    let mut plain = text.to_owned();
    while let (true, Some(at)) = (wanted, plain.find("\x1b[")) {
        let after = &plain[at + 2..];
        let end = after.find(|c: char| !c.is_ascii_digit() && c != ';');
        let end = end.filter(|end| after[*end..].starts_with('m'));
        let end = end.unwrap_or_else(|| panic!("{what}: no colour: {shown}"));
        plain.replace_range(at..at + 3 + end, "");
    }
    // Red is the forger's.
    assert!(!text.contains("\x1b[31m\x1b"), "{what}: {shown}");
    let hostile = |c: char| {
        c.is_control() && !"\n\t".contains(c)
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
    };
    assert!(!plain.contains(hostile), "{what}: {shown}");
    let forged = plain.lines().any(|line| line.starts_with("FORG"));
    assert!(!forged, "{what}: a forged line: {shown}");
}

/// Runs a command with its output on a terminal; gives all that the terminal is sent.
pub fn on_terminal(command: &mut Command) -> Vec<u8> {
    let pty = openpty(None, None).expect("a terminal");
    // Copies are closed in children, which the originals are not: a survivor would hold the terminal open.
    let copy = |fd: OwnedFd| fd.try_clone().expect("a second descriptor");
    let (master, slave) = (copy(pty.master), copy(pty.slave));
    let mut modes = tcgetattr(&slave).expect("its modes");
    // So that line breaks arrive as they were written.
    cfmakeraw(&mut modes);
    tcsetattr(&slave, SetArg::TCSANOW, &modes).expect("set its modes");
    let second = slave.try_clone().expect("a second descriptor");
    command.stdin(Stdio::null()).stdout(slave).stderr(second);
    command.env("TERM", "xterm").env_remove("NO_COLOR");
    let mut child = command.spawn().expect("run");
    // The command keeps what it was given.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut master = File::from(master);
    let mut said = Vec::new();
    // Ends by EIO once none has the terminal open.
    let _ = master.read_to_end(&mut said);
    child.wait().expect("wait for the command");
    said
}

/// Asserts it of a command's output in a file and on a terminal.
pub fn assert_both(what: &str, make: impl Fn() -> Command) {
    let output = make().stdin(Stdio::null()).output().expect("run");
    assert_harmless(what, &[output.stdout, output.stderr].concat(), false);
    let said = on_terminal(&mut make());
    assert!(!said.is_empty(), "{what} says nothing");
    assert_harmless(&format!("{what} on a terminal"), &said, true);
}

fn reaper(args: &[&str]) -> Command {
    let mut command = Command::new(REAPER);
    command.args(args);
    command
}

/// What a service knows of such a process, in lines, in JSON, in its stream and in its journal.
fn asked() {
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
        let said = fs::read(world.dir().join(name)).expect("read what was told");
        let named = said.windows(4).any(|part| part == b"FORG");
        assert!(named, "{name} does not tell of it");
        assert_harmless(name, &said, false);
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

/// A process that an agent has left behind, found without a service.
fn scanned() {
    const LEFT: &str =
        "CLAUDECODE=1 CLAUDE_PID=$0 setsid sh -c '\"$0\" 3001 & exit' \"$1\"; echo up; read x";
    let dir = TempDir::new();
    let program = dir.path().join(NAME);
    symlink("/bin/sleep", &program).expect("link the program");
    let keeper = Keeper::play(&dir, LEFT, &[program.as_os_str()]);
    let pid = keeper.0.id().to_string();
    let config = dir.path().join("c.toml").display().to_string();
    for more in [&[][..], &["--json"], &["--reap"]] {
        let args = [&["scan", "--config", &config, "--scope", &pid][..], more].concat();
        let scan = || reaper(&args);
        let found = |said: &[u8]| said.windows(4).any(|part| part == b"FORG");
        eventually("it is found", || {
            let said = on_terminal(&mut scan());
            assert_harmless(&args.join(" "), &said, true);
            found(&said).then_some(())
        });
        if !more.contains(&"--reap") {
            assert_both(&args.join(" "), scan);
        }
    }
}

/// Errors that name a file, and one of a config that names what is in the file.
fn refused() {
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
