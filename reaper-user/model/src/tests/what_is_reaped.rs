//! Writes `docs/what-is-reaped.md`: what the built-in rules do with examples of each kind of process.
//!
//! The test fails if the page does not say what the rules do. `REAPER_WRITE_DOCS=1` writes it again.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use super::promises::{Host, listening, ordinary, window_on};
use super::rules::{MINUTE, advance};
use super::world::INIT;
use crate::event::{ExitStatus, ProcessKey, Uids};
use crate::facts::{Fact, Facts, LocalSockets, Stdio};
use crate::policy::Verdict;
use crate::rules::catalogue;
use crate::ruleset::{Action, Class, Rule};

/// Property of an example besides its program. With one, an example may match other rules.
#[derive(Clone, Copy, PartialEq, Eq)]
enum With {
    Nothing,
    /// A listening TCP socket.
    Port,
    /// A listening Unix socket, shared with others.
    UnixSocket,
    Window,
    /// Its own systemd unit.
    Unit,
    OtherUser,
    /// An agent that root has started.
    Root,
    /// An age of less than a minute when its agent exits.
    Youth,
    /// A pipe to read from, with a living writer.
    Pipe,
    /// `nohup`, with which the shell of a tool started it.
    Nohup,
}

use With::{Nohup, Nothing, OtherUser, Pipe, Port, Root, Unit, UnixSocket, Window, Youth};

/// Examples: kind of process, its program with arguments, and what else it has. There is one for each built-in rule.
const EXAMPLES: &[(&str, &str, With)] = &[
    (
        "a command, a test, a watcher",
        "/usr/bin/make test",
        Nothing,
    ),
    (
        "what is younger than a minute",
        "/usr/bin/curl -T log",
        Youth,
    ),
    ("a server that listens", "/usr/bin/vite", Port),
    ("a command through nohup or setsid", "/usr/bin/make", Nohup),
    ("the reader of a kept process", "/usr/bin/tee log", Pipe),
    ("an MCP server", "/usr/bin/mcp-server", Nothing),
    (
        "a headless browser",
        "/opt/google/chrome/chrome --headless",
        Nothing,
    ),
    ("a person's browser", "/opt/google/chrome/chrome", Nothing),
    ("a program with a window", "/opt/x/viewer", Window),
    ("a terminal window", "/usr/bin/xterm", Nothing),
    ("an editor with windows", "/usr/share/code/code", Nothing),
    ("an editor in the terminal", "/usr/bin/nvim notes", Nothing),
    ("a document viewer", "/usr/bin/evince a.pdf", Nothing),
    ("an office program", "/usr/bin/gimp a.png", Nothing),
    ("a mail or chat program", "/usr/bin/evolution", Nothing),
    ("a media player", "/usr/bin/vlc a.mkv", Nothing),
    ("tmux and what runs in it", "/usr/bin/tmux new -d", Nothing),
    ("screen", "/usr/bin/screen -dmS x", Nothing),
    ("zellij", "/usr/bin/zellij --server x", Nothing),
    ("dtach, abduco, shpool", "/usr/bin/dtach -n x sh", Nothing),
    ("a container and its shim", "/usr/bin/conmon -c x", Nothing),
    (
        "docker logs, exec, attach, wait, events, stats, top; kubectl logs, exec, attach",
        "/usr/bin/docker logs -f web",
        Nothing,
    ),
    (
        "docker run --rm -i",
        "/usr/bin/docker run --rm -i mcp/fetch",
        Nothing,
    ),
    (
        "kubectl port-forward, proxy",
        "/usr/bin/kubectl port-forward svc/web 8080:80",
        Port,
    ),
    (
        "docker compose up, other clients",
        "/usr/bin/docker compose up",
        Nothing,
    ),
    (
        "a container of docker run -d",
        "/usr/bin/docker run -d nginx",
        Nothing,
    ),
    (
        "a virtual machine of a service",
        "/usr/sbin/libvirtd",
        Nothing,
    ),
    (
        "the service manager of a user",
        "/usr/lib/systemd/systemd --user",
        Nothing,
    ),
    ("a unit of systemd-run", "/usr/bin/work", Unit),
    ("a process of another user", "/usr/bin/work", OtherUser),
    ("a database", "/usr/bin/redis-server", Nothing),
    ("a database that listens", "/usr/bin/redis-server", Port),
    ("terraform, ansible", "/usr/bin/terraform apply", Nothing),
    ("pip, npm, cargo", "/usr/bin/cargo build", Nothing),
    ("git", "/usr/bin/git rebase main", Nothing),
    ("apt, dnf, pacman", "/usr/bin/apt-get install x", Nothing),
    (
        "npm install -g",
        "/usr/bin/node /usr/bin/npm install -g x",
        Nothing,
    ),
    (
        "a Gradle daemon",
        "/usr/bin/java -cp x org.gradle.launcher.daemon.bootstrap.GradleDaemon 9",
        Nothing,
    ),
    ("a Bazel server", "/x/java -jar /x/A-server.jar", Nothing),
    (
        "servers of other build tools",
        "/x/bin/turbo daemon",
        Nothing,
    ),
    ("a compiler cache", "/usr/bin/sccache", Nothing),
    ("watchman", "/usr/bin/watchman", Nothing),
    (
        "adb's server",
        "/usr/bin/adb -L tcp:5037 fork-server server",
        Nothing,
    ),
    (
        "git's file monitor",
        "/usr/bin/git fsmonitor--daemon run --detach",
        Nothing,
    ),
    (
        "git's credential cache",
        "/usr/lib/git-core/git-credential-cache--daemon x",
        Nothing,
    ),
    (
        "an ssh tunnel or command",
        "/usr/bin/ssh -N -L 8080:web:80 host",
        Nothing,
    ),
    (
        "an ssh connection that others share",
        "/usr/bin/ssh -M host",
        UnixSocket,
    ),
    ("ssh-agent", "/usr/bin/ssh-agent", Nothing),
    ("gpg-agent", "/usr/bin/gpg-agent --daemon", Nothing),
    ("a D-Bus daemon", "/usr/bin/dbus-daemon --session", Nothing),
    ("a sound server", "/usr/bin/pipewire", Nothing),
    ("a window manager", "/usr/bin/sway", Nothing),
    (
        "a mounted file system",
        "/usr/bin/sshfs host:/x /mnt",
        Nothing,
    ),
    ("pm2", "/usr/bin/node /x/pm2/lib/Daemon.js", Nothing),
    ("supervisord", "/usr/bin/supervisord", Nothing),
    (
        "forever, process-compose -D",
        "/usr/bin/process-compose up -t=false",
        Nothing,
    ),
    ("cron, sshd, nginx of root", "/usr/sbin/cron", Root),
    (
        "Codex's own daemon",
        "/usr/local/bin/codex app-server daemon",
        Nothing,
    ),
    (
        "Cursor's worker",
        "/x/cursor-agent/versions/1/node /x/cursor-agent/versions/1/index.js worker",
        Nothing,
    ),
];

/// Rules that no example can show, because they act under a living agent.
const UNDER_LIVING: [&str; 5] = [
    "agents-without-client",
    "unused-managed-servers",
    "unused-servers",
    "idle-tool-shells",
    "busy-loops",
];

/// Text about what happens to an example, and the rule that decides it.
struct Fate {
    words: String,
    rule: Option<Arc<str>>,
}

/// Returns what happens to an example after this exit of its agent.
fn fate((_, command, with): (&str, &str, With), status: ExitStatus, tty: u32) -> Fate {
    let mut h = Host::with_terminal("/usr/local/bin/codex", tty);
    h.w.model.set_has_display(with == Window);
    if with == OtherUser {
        h.w.uids = Uids {
            real: 5,
            effective: 5,
        };
    }
    if with == Root {
        h.w.uids = Uids {
            real: 0,
            effective: 0,
        };
        h.agent = h.start_in_cgroup(INIT, "/usr/local/bin/codex", 7);
    }
    let key = match with {
        Nohup => {
            let shell = h.start_in_cgroup(h.agent, "/bin/bash", 7);
            let key = h.start_in_cgroup(shell, "/usr/bin/nohup", 7);
            h.exec(key, command, 7);
            key
        }
        _ => h.start_in_cgroup(h.agent, command, if with == Unit { 8 } else { 7 }),
    };
    h.facts.insert(key, facts_with(with));
    if with != Youth {
        advance(&mut h.w, 2 * MINUTE);
    }
    h.w.exit_with(h.agent, status, Some(INIT));
    advance(&mut h.w, 0);
    let class =
        h.w.model
            .rules
            .classify(&h.w.model.tree.get(key).unwrap().image);
    if let Class::Boundary(rule) = class {
        let rule = Some(Arc::clone(h.w.model.rules.name(rule)));
        return Fate {
            words: "lives on".into(),
            rule,
        };
    }
    if let Some(rule) =
        h.w.model
            .rules
            .note(&h.w.model.tree.get(key).unwrap().image)
    {
        let rule = Some(Arc::clone(h.w.model.rules.name(rule)));
        return Fate {
            words: "lives on, and is reported".into(),
            rule,
        };
    }
    ends_or_stays(&mut h, key)
}

/// Returns the facts of an example.
fn facts_with(with: With) -> Facts {
    match with {
        Port => listening(),
        Window => window_on("X0"),
        UnixSocket => {
            let local = LocalSockets {
                displays: Box::default(),
                listens: true,
            };
            Facts {
                local_sockets: Fact::Known(local.into()),
                ..listening()
            }
        }
        Pipe => Facts {
            stdio: Fact::Known(Stdio::Connected(9)),
            ..ordinary()
        },
        Unit => Facts {
            unit: Fact::Known("work.service".into()),
            ..ordinary()
        },
        Nothing | OtherUser | Root | Youth | Nohup => ordinary(),
    }
}

/// Lets time pass until the process is reaped or kept.
fn ends_or_stays(h: &mut Host, key: ProcessKey) -> Fate {
    let (begin, mut rule) = (h.w.now, None);
    loop {
        h.why(key);
        let decision = h.w.decide(key);
        rule = decision.rule.clone().or(rule);
        let until = match (decision.verdict, decision.until) {
            (Verdict::Wait, Some(until)) => until,
            (Verdict::Reap, _) => {
                // Events take some time of this host too.
                let minutes = (h.w.now - begin + MINUTE / 2) / MINUTE;
                let named = |one: &&Rule| Some(&one.name) == rule.as_ref();
                let again =
                    h.w.model
                        .rules
                        .rules()
                        .iter()
                        .find(named)
                        .is_some_and(|rule| rule.while_used);
                let mut words = match (minutes, again) {
                    (0, _) => "ends at once".to_owned(),
                    (_, true) => format!("ends after {minutes} min without use"),
                    (_, false) => format!("ends {minutes} min later"),
                };
                if decision.grace_ns > 0 {
                    let _ = write!(words, ", SIGKILL after {} min", decision.grace_ns / MINUTE);
                }
                return Fate { words, rule };
            }
            (Verdict::Report, _) => {
                return Fate {
                    words: "stays, and is reported".into(),
                    rule,
                };
            }
            _ => {
                return Fate {
                    words: "stays".into(),
                    rule,
                };
            }
        };
        // The clocks of this host agree.
        let left = until - h.w.now;
        advance(&mut h.w, left);
        h.w.model.forget_volatile(key);
    }
}

/// Returns the reason that the catalogue gives for a rule: the comment above it, or that above the rules before it.
fn comment_of(name: &str) -> String {
    let mut comment: Vec<&str> = Vec::new();
    let mut is_over = false;
    for line in catalogue::TEXT.lines() {
        match line.strip_prefix('#') {
            Some(text) if !text.contains("----") => {
                if std::mem::take(&mut is_over) {
                    comment.clear();
                }
                comment.push(text.trim());
            }
            _ if line == format!("name = \"{name}\"") => return comment.join(" "),
            _ if line.starts_with("[[") => is_over = true,
            _ if line.is_empty() && !is_over => comment.clear(),
            _ if line.is_empty() => comment.clear(),
            _ => {}
        }
    }
    String::new()
}

/// Returns the page, and the rules that it shows.
fn page() -> (String, BTreeSet<String>) {
    let mut shown = BTreeSet::new();
    let mut page = String::from(HEAD);
    let crash = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    for example in EXAMPLES {
        let exits = [
            fate(*example, ExitStatus::Exited(0), 1),
            fate(*example, ExitStatus::Exited(0), 0),
            fate(*example, ExitStatus::Exited(1), 1),
            fate(*example, crash, 1),
        ];
        assert_eq!(exits[2].words, exits[3].words, "{}", example.0);
        let rules: BTreeSet<&str> = exits
            .iter()
            .filter_map(|exit| exit.rule.as_deref())
            .collect();
        shown.extend(rules.iter().map(|rule| rule.to_string()));
        let names: Vec<String> = rules.iter().map(|rule| format!("`{rule}`")).collect();
        let [peaceful, unattended, failed, _] = &exits;
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} |",
            example.0,
            peaceful.words,
            unattended.words,
            failed.words,
            names.join(", ")
        );
    }
    page += REASONS;
    for rule in catalogue::rules()
        .iter()
        .filter(|rule| !rule.action.opens_session())
    {
        let comment = comment_of(&rule.name);
        if !comment.is_empty() {
            let _ = writeln!(page, "- `{}`: {comment}", rule.name);
        }
    }
    (page, shown)
}

const HEAD: &str = "\
# What is reaped

What the built-in rules do with each kind of process that an agent has started, when the agent exits. A test derives this
page from the rules, by examples that are at least a minute old.

\"In a terminal\" means that the agent had a terminal, or ran below an editor or a terminal emulator. \"Fails\" is any status
other than 0, or a death by a signal.

| process | agent exits with 0, in a terminal | exits with 0, without a terminal | agent fails | rules |
|---|---|---|---|---|
";

const REASONS: &str = "
While the agent lives, its processes stay, except an idle agent whose client is gone and an idle server that Codex itself
started. `reaper explain PID` shows the same for one process, before and after.

## Why

";

#[test]
fn page_says_what_the_rules_do() {
    let (page, shown) = page();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/what-is-reaped.md");
    if std::env::var_os("REAPER_WRITE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let rules = catalogue::rules();
    let of_members = rules
        .iter()
        .filter(|rule| !matches!(rule.action, Action::Agent | Action::Server));
    let missing = of_members
        .filter(|rule| !shown.contains(&*rule.name) && !UNDER_LIVING.contains(&&*rule.name));
    let missing: Vec<&str> = missing.map(|rule| &*rule.name).collect();
    assert!(
        missing.is_empty(),
        "add an example to EXAMPLES for {missing:?}"
    );
    let is_current = std::fs::read_to_string(path).is_ok_and(|text| text == page);
    assert!(
        is_current,
        "docs/what-is-reaped.md is not what the rules do; write it anew: \
         REAPER_WRITE_DOCS=1 cargo test -p reaper-model what_is_reaped"
    );
}
