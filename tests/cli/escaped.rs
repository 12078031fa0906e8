//! Tests of attribution by evidence with the `procfs` source: processes whose parent exited before any scan, and similar
//! processes that no agent started.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use libtest_mimic::Trial;
use serde_json::Value;

use super::run;
use crate::daemon::REAPER;
use crate::trees::trial;
use crate::world::{TempDir, copy, link};

pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "escaped-reported", || {
            let scenario = EscapeScenario::run("", AGENT_LAST);
            for name in ["marked", "placed"] {
                scenario.decision(name, "report", "inferred");
                assert!(scenario.lives(name), "{name}");
            }
        }),
        trial("cli", "escaped-reaped", || {
            let scenario = EscapeScenario::run(REAP, AGENT_LAST);
            for name in ["marked", "placed"] {
                scenario.decision(name, "reap", "root_exited");
                assert!(!scenario.lives(name), "{name}");
            }
        }),
        trial("cli", "escaped-from-an-agent-that-is-gone", || {
            let scenario = EscapeScenario::run(REAP, AGENT_FIRST);
            for name in ["marked", "placed"] {
                let decision = scenario.decision(name, "reap", "root_exited");
                assert!(!scenario.lives(name), "{name}");
                assert!(
                    decision < scenario.closed(),
                    "the session closed before the decision"
                );
            }
        }),
    ]
}

const AGENTS: &str = "grace = \"200ms\"\n[[agent]]\nname = \"claude-code\"\ncomm = \"my-agent\"\n";
const REAP: &str = "[[rule]]\nname = \"escaped\"\naction = \"reap\"\ninferred = true\n";

/// Processes that must not be attributed to the agent.
///
/// `before` is older than the agent. A terminal has a shell and a job. `shared` is an orphan in a directory where two other
/// agents work. `other_uid` is an orphan of another user.
const OTHERS: [&str; 8] = [
    "before",
    "terminal",
    "shell",
    "job",
    "shared",
    "other_uid",
    "other1",
    "other2",
];

/// Start of the script, which is the init process of a PID namespace and adopts all orphans. It leaves the daemon stopped,
/// so that no scan runs until the orphans' parents have exited.
const SETUP: &str = r#"
export HOME=$PWD place=$PWD
until_true() {
    n=0
    until eval "$1"; do
        n=$((n + 1))
        [ $n -lt 200 ] || { echo "timed out: $1"; cat stdout; exit 9; }
        sleep 0.1
    done
}
pid() { cat "pids/$1"; }
. ./escape
(cd app && escape before)
(cd app && exec setsid sh ../terminal) &
# Before the daemon: a scan that finds one before its exec would attribute it to the other agent.
for n in 1 2; do
    (cd shared && exec setsid ../my-agent -c 'echo $$ > ../pids/other'$n'; sleep 1000; :') &
done
until_true '[ -s pids/other1 ] && [ -s pids/other2 ]'
./reaper daemon --scope $$ --source procfs --no-pin --no-journal --runtime-dir "$place/run" \
    --verbose --config config.toml --events events.jsonl > stdout 2>&1 &
daemon=$!
until_true 'grep -q " ready " stdout'
(cd app && exec setsid ../my-agent ../agent) &
works_in() {
    ./reaper explain "$(pid $1)" --json --socket run/*.sock 2> /dev/null | grep -q "\"cwd\": *\"[^\"]*/$2\""
}
until_true '[ -s pids/agent ] && [ -s pids/terminal ]'
until_true 'works_in agent app && works_in other1 shared && works_in other2 shared'
touch typed
until_true '[ -s pids/shell ] && [ -s pids/job ]'
kill -STOP $daemon
touch go
until_true '[ -e escaped ]'
(cd shared && escape shared)
(cd app && setpriv --reuid 61007 --regid 61007 --clear-groups sh -c '. ../escape; escape other_uid')
"#;

/// Shell function that leaves an orphan in a new session, with no living ancestor but init.
const ESCAPE: &str = r#"
escape() { setsid sh -c 'sleep 1000 & echo $! > "$0"' "$place/pids/$1"; }
"#;

const AGENT: &str = r#"
. ../escape
echo $$ > ../pids/agent
until [ -e ../go ]; do sleep 0.05; done
(cd / && CLAUDECODE=1 CLAUDE_PID=$$ escape marked)
escape placed
touch ../escaped
sleep 1000
:
"#;

const TERMINAL: &str = r#"
echo $$ > ../pids/terminal
until [ -e ../typed ]; do sleep 0.05; done
setsid sh -c 'echo $$ > ../pids/shell; sleep 1000; :' &
(sleep 1000 & echo $! > ../pids/job)
wait
"#;

const AGENT_LAST: &str = r#"
kill -CONT $daemon
for name in marked placed; do
    until_true "grep -q '\"event\":\"fork\".*\"process.pid\":$(pid $name),.*\"evidence\"' events.jsonl"
    ./reaper explain "$(pid $name)" --socket run/*.sock
done
kill -KILL "$(pid agent)"
"#;
const AGENT_FIRST: &str = r#"
kill -KILL "$(pid agent)"
kill -CONT $daemon
"#;

const END: &str = r#"
until_true 'grep -q "\"event\":\"session.close\"" events.jsonl'
for name in $(ls pids); do
    kill -0 "$(pid $name)" 2> /dev/null && echo "$name lives"
    echo "$name is $(pid $name)"
done
kill -INT $daemon
wait $daemon
echo "the daemon ended with $?"
cat stdout
"#;

/// Output, pids by name and events of a run.
struct EscapeScenario {
    output: String,
    pids: BTreeMap<String, u64>,
    events: Vec<Value>,
}

impl EscapeScenario {
    /// Runs the script with these rules. `end` is the part that ends the agent and resumes the daemon.
    fn run(rules: &str, end: &str) -> EscapeScenario {
        let dir = TempDir::new();

        link(Path::new(REAPER), &dir.path().join("reaper"));
        copy("/bin/sh", dir.path().join("my-agent"));
        for name in ["app", "shared", "pids"] {
            fs::create_dir(dir.path().join(name)).expect("create a directory");
        }
        for (name, text) in [
            ("script", [SETUP, end, END].concat()),
            ("escape", ESCAPE.into()),
            ("agent", AGENT.into()),
            ("terminal", TERMINAL.into()),
            ("config.toml", [AGENTS, rules].concat()),
        ] {
            fs::write(dir.path().join(name), text).expect("write a file");
        }
        // The other user writes a pid there too.
        let mode = fs::Permissions::from_mode(0o777);
        fs::set_permissions(dir.path().join("pids"), mode)
            .expect("make the directory writable for all users");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["--propagation", "private", "sh", "script"]);
        let said = run(dir.path(), command.current_dir(dir.path()));
        assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
        let output = said.out;
        let pids = output.lines().filter_map(|line| line.split_once(" is "));
        let pids = pids.filter_map(|(name, pid)| Some((name.to_owned(), pid.parse().ok()?)));
        let events = fs::read_to_string(dir.path().join("events.jsonl")).expect("read the events");
        let events = events
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        let (pids, events) = (pids.collect(), events.collect());
        let scenario = EscapeScenario {
            output,
            pids,
            events,
        };
        scenario.assert_common();
        scenario
    }

    /// Asserts what holds in each scenario: the other processes live without evidence, and the evidence of the two orphans.
    fn assert_common(&self) {
        assert!(
            self.output.contains("the daemon ended with 0"),
            "{}",
            self.output
        );
        for name in OTHERS {
            assert!(self.lives(name), "{name}: {}", self.output);
        }
        let events_of = |name: &str| {
            let pid = self.pids[name];
            let is_about = move |event: &&Value| event["process.pid"] == pid;
            self.events.iter().filter(is_about)
        };
        for event in OTHERS.iter().flat_map(|name| events_of(name)) {
            assert_eq!(event["evidence"], Value::Null, "{event}");
        }
        for (name, evidence) in [("marked", "marker"), ("placed", "cwd")] {
            let events: Vec<&Value> = events_of(name).collect();
            assert!(!events.is_empty(), "{name}: {}", self.output);
            for event in events {
                assert_eq!(event["evidence"], evidence, "{event}");
                assert_eq!(event["agent"], "claude-code", "{event}");
                let (variable, directory) = (
                    &event["evidence_variable"],
                    event["evidence_directory"].as_str(),
                );
                assert_eq!(variable == "CLAUDE_PID", name == "marked", "{event}");
                let is_app = directory.is_some_and(|path| path.ends_with("/app"));
                assert_eq!(is_app, name == "placed", "{event}");
            }
        }
        let line = "by the environment marker CLAUDE_PID";
        assert!(self.output.contains(line), "{}", self.output);
    }

    fn lives(&self, name: &str) -> bool {
        self.output
            .lines()
            .any(|line| line == format!("{name} lives"))
    }

    /// Returns the index of the first event for which `is` is true.
    fn position(&self, what: &str, is: impl Fn(&Value) -> bool) -> usize {
        let found = self.events.iter().position(is);
        found.unwrap_or_else(|| panic!("no event: {what}: {}", self.output))
    }

    fn decision(&self, name: &str, decision: &str, reason: &str) -> usize {
        self.position(&format!("{decision} {reason} of {name}"), |event| {
            event["event"] == "decision"
                && event["process.pid"] == self.pids[name]
                && event["decision"] == decision
                && event["reason"] == reason
        })
    }

    fn closed(&self) -> usize {
        self.position("session.close", |event| event["event"] == "session.close")
    }
}
