//! `reaper run` in a terminal (tmux), under a shell with job control.

use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use nix::pty::openpty;

use super::{RunWorld, ScenarioFn, Started, command_line};
use crate::cli;
use crate::report;
use crate::world::eventually;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("terminal-interrupt", interrupt),
    ("terminal-interrupt-of-a-loop", interrupt_of_a_loop),
    (
        "terminal-interrupt-right-after-start",
        interrupt_right_after_start,
    ),
    ("terminal-stop", stop),
    ("terminal-full-screen", full_screen),
    ("terminal-shell-inside", shell_inside),
    ("terminal-pipeline", pipeline),
    ("terminal-background", background),
    ("terminal-size", size),
    ("terminal-closed", closed),
    ("terminal-idle", idle),
    ("terminal-not-idle", not_idle),
];

/// Prompt of the shell, without its trailing space.
const PROMPT: &str = ">";

/// Last content of a window. It is added to the report if the test fails.
#[derive(Default)]
struct Seen(String);

impl Drop for Seen {
    fn drop(&mut self) {
        if std::thread::panicking() {
            report::add(&format!("--- screen as it was read\n{}", self.0));
        }
    }
}

/// Window with a shell.
struct Terminal<'a>(&'a RunWorld);

impl Terminal<'_> {
    fn new(place: &RunWorld) -> Terminal<'_> {
        let terminal = Terminal(place);
        terminal.tmux(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            "100",
            "-y",
            "30",
            "env PS1='> ' bash --norc --noprofile -i",
        ]);
        terminal.await_prompt(PROMPT);
        terminal
    }

    fn tmux(&self, words: &[&str]) -> String {
        let mut tmux = self.0.command("tmux");
        // The client must not find an outer tmux.
        tmux.env_remove("TMUX").args(["-S", "tmux"]).args(words);
        let said = cli::run(self.0.dir.path(), &mut tmux);
        assert_eq!(said.code, Some(0), "tmux {words:?}: {}", said.err);
        said.out
    }

    fn say(&self, line: &str) {
        self.tmux(&["send-keys", "-l", line]);
        self.key("Enter");
    }

    fn key(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    fn await_screen(&self, what: &str, like: impl Fn(&str) -> bool) -> String {
        let mut seen = Seen::default();
        eventually(&format!("on the screen: {what}"), || {
            seen.0 = self.tmux(&["capture-pane", "-p"]);
            like(&seen.0).then(|| seen.0.clone())
        })
    }

    /// Waits until the screen contains this line.
    fn await_line(&self, line: &str) -> String {
        self.await_screen(line, |screen| {
            screen.lines().any(|content| content.trim_end() == line)
        })
    }

    /// Waits until a shell with this prompt reads a line. Earlier input may be lost: another process may read it, or the shell
    /// discards it when it sets up the terminal.
    fn await_prompt(&self, prompt: &str) {
        self.await_screen("a prompt", |screen| shows_prompt(screen, prompt));
    }

    /// Waits until the shell reports a stopped job and shows its prompt.
    fn await_stopped(&self, prompt: &str) {
        self.await_screen("stopped", |screen| {
            screen.contains("Stopped") && shows_prompt(screen, prompt)
        });
    }

    /// Waits until a job that the shell continues is running. The shell prints the job's line before it hands over the terminal
    /// and sends SIGCONT. All processes sleep once `reaper run` has passed SIGCONT on.
    fn await_continued(&self, like: impl Fn(&str) -> bool) {
        self.await_screen("continued", like);
        eventually("all processes sleep", || {
            let living = self.0.living();
            let mut states = living.iter().filter_map(|one| crate::proc::stat(one.pid));
            states.all(|stat| stat.state == b'S').then_some(())
        });
    }

    /// Waits until `n` processes have this command line.
    fn await_running(&self, line: &str, n: usize) {
        eventually(&format!("{n} × {line}"), || {
            let living = self.0.living();
            let all = living
                .iter()
                .filter(|one| command_line(one.pid).trim_end() == line);
            (all.count() == n).then_some(())
        });
    }
}

/// Returns whether the last line is a prompt without input.
fn shows_prompt(screen: &str, prompt: &str) -> bool {
    let last = screen.trim_end().lines().next_back();
    last.is_some_and(|line| line.trim_end() == prompt)
}

impl Drop for Terminal<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut tmux = self.0.command("tmux");
            let screen = tmux.args(["-S", "tmux", "capture-pane", "-p"]).output();
            let screen = screen.map_or_else(
                |error| error.to_string(),
                |output| String::from_utf8_lossy(&output.stdout).into_owned(),
            );
            report::add(&format!("--- screen at the end\n{screen}"));
        }
    }
}

fn interrupt(place: &RunWorld) {
    let terminal = Terminal::new(place);
    terminal.say("./reaper run -- sh -c 'setsid sleep 61 & exec sleep 60'");
    terminal.await_running("sleep 60", 1);
    terminal.key("C-c");
    terminal.await_prompt(PROMPT);
    terminal.say("echo \"<$?>\"");
    let screen = terminal.await_line("<130>");
    assert!(!screen.contains("reaper:"), "{screen}");
    terminal.await_running("sleep 61", 0);
    // The command catches SIGINT.
    terminal.await_prompt(PROMPT);
    terminal.say("./reaper run -- bash -c 'trap \"echo caught; exit 4\" INT; echo up > up; while :; do sleep 0.05; done'");
    place.await_content("up", |content| !content.is_empty());
    terminal.key("C-c");
    terminal.await_screen("caught", |screen| screen.contains("caught\n"));
    terminal.await_prompt(PROMPT);
    terminal.say("echo \"<$?>\"");
    let screen = terminal.await_line("<4>");
    assert_eq!(screen.matches("caught\n").count(), 1, "{screen}");
}

/// Ctrl-C ends the shell's loop around `reaper run` too.
fn interrupt_of_a_loop(place: &RunWorld) {
    let terminal = Terminal::new(place);
    terminal.say("while :; do ./reaper run -- sleep 60; done");
    terminal.await_running("sleep 60", 1);
    terminal.key("C-c");
    terminal.await_prompt(PROMPT);
    terminal.say("echo '<over>'");
    terminal.await_line("<over>");
    terminal.await_running("sleep 60", 0);
}

/// Ctrl-C right after the start is not lost. That holds even while `reaper run` starts the command.
fn interrupt_right_after_start(place: &RunWorld) {
    for n in 0..400 {
        let pty = openpty(None, None).expect("a terminal");
        let (mut keys, terminal) = (fs::File::from(pty.master), pty.slave);
        let _ = fs::remove_file(place.path("up"));
        let mut command = place.command("setsid");
        command
            .args(["--ctty", "--wait", "sh", "-c"])
            .arg("echo > up; exec ./reaper run -- sleep 60")
            .stdin(terminal)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut run = Started(command.spawn().expect("start the run"));
        place.await_content("up", |content| !content.is_empty());
        std::thread::sleep(Duration::from_micros(250 * n));
        keys.write_all(b"\x03").expect("type Ctrl-C");
        assert_ne!(run.end(), 0);
        place.await_alone();
        // While other tests run, the start takes longer.
        if n >= 40 && !place.ps(&["--all"]).is_empty() {
            break;
        }
    }
    let all = place.ps(&["--all"]);
    assert!(!all.is_empty(), "no run was started");
    assert!(
        all.iter().all(|run| run["outcome"] == "cancelled"),
        "{all:?}"
    );
}

fn stop(place: &RunWorld) {
    let terminal = Terminal::new(place);
    terminal.say("./reaper run -- sh -c 'read line; echo \"<$line>\"; exit 6'");
    terminal.await_running("sh -c read line; echo \"<$line>\"; exit 6", 1);
    for _ in 0..2 {
        terminal.key("C-z");
        terminal.await_stopped(PROMPT);
        terminal.say("clear; fg");
        terminal.await_continued(|screen| {
            screen.contains("./reaper run") && !screen.contains("Stopped")
        });
    }
    terminal.say("heard");
    terminal.await_line("<heard>");
    terminal.await_prompt(PROMPT);
    terminal.say("echo \"<$?>\"");
    terminal.await_line("<6>");
}

/// A full-screen program stops its whole process group itself.
fn full_screen(place: &RunWorld) {
    let terminal = Terminal::new(place);
    fs::write(
        place.path("text"),
        "first\n".to_owned() + &"more\n".repeat(200),
    )
    .expect("write a text");
    let vim = std::process::Command::new("vim")
        .arg("--version")
        .output()
        .is_ok();
    let (program, quit) = if vim {
        ("vim -u NONE -n", ":q")
    } else {
        ("less", "q")
    };
    let shown =
        |screen: &str| screen.starts_with("first\n") && screen.matches("more\n").count() > 20;
    // The prompt may be in any line. A program that stops or quits before it has set up the terminal leaves its text
    // there.
    let prompted = |screen: &str| screen.lines().any(|line| line.starts_with(PROMPT));
    terminal.say(&format!("clear; ./reaper run -- {program} text"));
    terminal.await_screen("the text", shown);
    for _ in 0..2 {
        terminal.key("C-z");
        terminal.await_screen("stopped", |screen| {
            screen.contains("Stopped") && prompted(screen)
        });
        terminal.say("clear; fg");
        terminal.await_screen("the text again", shown);
    }
    terminal.say(quit);
    terminal.await_screen("a prompt", prompted);
    terminal.say("echo \"<$?>\" > left");
    place.await_content("left", |content| content == "<0>\n");
}

fn shell_inside(place: &RunWorld) {
    let terminal = Terminal::new(place);
    terminal.say("PS1='inner: ' ./reaper run -- bash --norc --noprofile -i");
    terminal.await_prompt("inner:");
    terminal.say("sleep 60");
    terminal.await_running("sleep 60", 1);
    terminal.key("C-z");
    terminal.await_stopped("inner:");
    terminal.say("fg");
    terminal.await_continued(|screen| screen.trim_end().ends_with("sleep 60"));
    terminal.key("C-c");
    terminal.await_running("sleep 60", 0);
    terminal.await_prompt("inner:");
    terminal.say("setsid sleep 62 & exit 5");
    terminal.await_prompt(PROMPT);
    terminal.await_running("sleep 62", 0);
    terminal.say("echo \"<$?>\"");
    terminal.await_line("<5>");
}

fn pipeline(place: &RunWorld) {
    let terminal = Terminal::new(place);
    terminal.say("./reaper run -- sh -c 'echo one; exec sleep 60' | ./reaper run -- cat");
    terminal.await_line("one");
    terminal.key("C-z");
    terminal.await_stopped(PROMPT);
    terminal.say("clear; fg");
    terminal
        .await_continued(|screen| screen.contains("./reaper run") && !screen.contains("Stopped"));
    terminal.key("C-c");
    terminal.await_running("sleep 60", 0);
    terminal.await_prompt(PROMPT);
    terminal.say("echo \"<$?>\"");
    terminal.await_line("<130>");
}

/// A background command that reads the terminal is stopped until it is in the foreground.
fn background(place: &RunWorld) {
    let terminal = Terminal::new(place);
    terminal.say("./reaper run -- sh -c 'read line; echo \"$line\" > heard' &");
    terminal.await_screen("stopped", |_| {
        let living = place.living();
        let stopped = living
            .iter()
            .filter(|one| crate::proc::stat(one.pid).is_some_and(|stat| stat.state == b'T'));
        stopped.count() == 2
    });
    terminal.await_prompt(PROMPT);
    terminal.say("clear; fg");
    terminal.await_screen("in the foreground", |screen| {
        screen.lines().any(|line| line.starts_with("./reaper run"))
    });
    terminal.say("words");
    place.await_content("heard", |content| content == "words\n");
}

fn size(place: &RunWorld) {
    let terminal = Terminal::new(place);
    terminal.say("./reaper run -- bash -c 'trap \"tput cols >> cols\" WINCH; echo up > up; while :; do sleep 0.05; done'");
    place.await_content("up", |content| !content.is_empty());
    terminal.tmux(&["resize-window", "-x", "120", "-y", "30"]);
    place.await_content("cols", |content| content == "120\n");
    terminal.key("C-c");
}

/// The kernel sends SIGHUP only to the session leader, here `reaper run`, which passes it to the command.
fn closed(place: &RunWorld) {
    let terminal = Terminal::new(place);
    let script = "trap 'echo x >> hung-up; exit' HUP; echo up > up; while :; do sleep 0.05; done";
    fs::write(place.path("script"), script).expect("write the script");
    terminal.tmux(&["new-window", "exec ./reaper run -- sh ./script"]);
    place.await_content("up", |content| !content.is_empty());
    terminal.tmux(&["kill-window"]);
    place.await_content("hung-up", |content| content == "x\n");
    terminal.await_running("./reaper run -- sh ./script", 0);
}

fn idle(place: &RunWorld) {
    let terminal = Terminal::new(place);
    terminal.say("./reaper run --idle 3s -- sh -c 'tty; exec sleep 60'");
    terminal.await_screen("the command writes to the terminal", |screen| {
        screen.contains("/dev/")
    });
    terminal.await_prompt(PROMPT);
    terminal.await_running("sleep 60", 0);
    terminal.say("echo \"<$?>\"");
    terminal.await_line("<124>");
}

/// Output on stdout and on stderr both reset the idle timer.
fn not_idle(place: &RunWorld) {
    let terminal = Terminal::new(place);
    let script =
        "for i in {1..12}; do sleep 0.3; echo \"at $i\" >&$((i % 2 + 1)); done; exec sleep 60";
    fs::write(place.path("script"), script).expect("write the script");
    terminal.say("./reaper run --idle 3s --report report.json -- bash ./script");
    terminal.await_line("at 12");
    terminal.await_prompt(PROMPT);
    assert_eq!(place.report()["outcome"], "idle");
}
