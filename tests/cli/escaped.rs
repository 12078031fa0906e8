//! Those who have lost their makers before anybody looked: what a scan concludes from what they have from them, and
//! who is left alone though he looks alike.

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
use crate::world::{TempDir, link};

pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "escaped-reported", || {
            let scenario = EscapeScenario::play("", AGENT_LAST);
            for name in ["marked", "placed"] {
                scenario.decided(name, "report", "inferred");
                assert!(scenario.lives(name), "{name}");
            }
        }),
        trial("cli", "escaped-reaped", || {
            let scenario = EscapeScenario::play(REAP, AGENT_LAST);
            for name in ["marked", "placed"] {
                scenario.decided(name, "reap", "root_exited");
                assert!(!scenario.lives(name), "{name}");
            }
        }),
        trial("cli", "escaped-from-an-agent-that-is-gone", || {
            let scenario = EscapeScenario::play(REAP, AGENT_FIRST);
            for name in ["marked", "placed"] {
                let decided = scenario.decided(name, "reap", "root_exited");
                assert!(!scenario.lives(name), "{name}");
                assert!(decided < scenario.closed(), "it is over after that");
            }
        }),
    ]
}

const AGENTS: &str = "grace = \"200ms\"\n[[agent]]\nname = \"claude-code\"\ncomm = \"my-agent\"\n";
const REAP: &str = "[[rule]]\nname = \"escaped\"\naction = \"reap\"\ninferred = true\n";

/// Who is never anybody's: there before the agent, a terminal's shell and what was typed there, where two agents work,
/// and another user's.
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

/// In a pid namespace of its own, where this is the init that adopts. While the daemon is stopped, nobody looks.
const BEGIN: &str = r#"
export HOME=$PWD place=$PWD
until_true() {
    n=0
    until eval "$1"; do
        n=$((n + 1))
        [ $n -lt 200 ] || { echo "not so: $1"; cat told; exit 9; }
        sleep 0.1
    done
}
pid() { cat "pids/$1"; }
. ./escape
(cd app && escape before)
(cd app && exec setsid sh ../terminal) &
# Before the daemon: whoever is seen as `setsid` still would be taken for work of the other.
for n in 1 2; do
    (cd shared && exec setsid ../my-agent -c 'echo $$ > ../pids/other'$n'; sleep 1000; :') &
done
until_true '[ -s pids/other1 ] && [ -s pids/other2 ]'
./reaper daemon --scope $$ --source procfs --no-pin --no-journal --runtime-dir "$place/run" \
    --config config.toml --events events.jsonl > told 2>&1 &
daemon=$!
until_true 'grep -q " ready " told'
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

/// What both agents and others leave behind: nothing tells of its maker.
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
cat told
"#;

/// What came of it.
struct EscapeScenario {
    said: String,
    pids: BTreeMap<String, u64>,
    events: Vec<Value>,
}

impl EscapeScenario {
    /// Plays it by these rules; `end` is how the agent ends.
    fn play(rules: &str, end: &str) -> EscapeScenario {
        let dir = TempDir::new();
        let place = dir.path();
        link(Path::new(REAPER), &place.join("reaper"));
        fs::copy("/bin/sh", place.join("my-agent")).expect("copy a shell");
        for name in ["app", "shared", "pids"] {
            fs::create_dir(place.join(name)).expect("create a directory");
        }
        for (name, text) in [
            ("script", [BEGIN, end, END].concat()),
            ("escape", ESCAPE.into()),
            ("agent", AGENT.into()),
            ("terminal", TERMINAL.into()),
            ("config.toml", [AGENTS, rules].concat()),
        ] {
            fs::write(place.join(name), text).expect("write a file");
        }
        // The other user writes there too.
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(place.join("pids"), open).expect("open the directory to all");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["--propagation", "private", "sh", "script"]);
        let said = run(place, command.current_dir(place));
        assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
        let said = said.out;
        let pids = said.lines().filter_map(|line| line.split_once(" is "));
        let pids = pids.filter_map(|(name, pid)| Some((name.to_owned(), pid.parse().ok()?)));
        let events = fs::read_to_string(place.join("events.jsonl")).expect("read the events");
        let events = events
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        let (pids, events) = (pids.collect(), events.collect());
        let scenario = EscapeScenario { said, pids, events };
        scenario.check();
        scenario
    }

    /// What holds however it ends.
    fn check(&self) {
        assert!(
            self.said.contains("the daemon ended with 0"),
            "{}",
            self.said
        );
        for name in OTHERS {
            assert!(self.lives(name), "{name}: {}", self.said);
        }
        let about = |name: &str| {
            let pid = self.pids[name];
            let of = move |event: &&Value| event["process.pid"] == pid;
            self.events.iter().filter(of)
        };
        for event in OTHERS.iter().flat_map(|name| about(name)) {
            assert_eq!(event["evidence"], Value::Null, "{event}");
        }
        for (name, evidence) in [("marked", "marker"), ("placed", "cwd")] {
            let told: Vec<&Value> = about(name).collect();
            assert!(!told.is_empty(), "{name}: {}", self.said);
            for event in told {
                assert_eq!(event["evidence"], evidence, "{event}");
                assert_eq!(event["agent"], "claude-code", "{event}");
                let (variable, directory) = (
                    &event["evidence_variable"],
                    event["evidence_directory"].as_str(),
                );
                assert_eq!(variable == "CLAUDE_PID", name == "marked", "{event}");
                let works_there = directory.is_some_and(|path| path.ends_with("/app"));
                assert_eq!(works_there, name == "placed", "{event}");
            }
        }
        let line = "by the environment marker CLAUDE_PID";
        assert!(self.said.contains(line), "{}", self.said);
    }

    fn lives(&self, name: &str) -> bool {
        self.said
            .lines()
            .any(|line| line == format!("{name} lives"))
    }

    /// Number of the first line that says this.
    fn line(&self, what: &str, is: impl Fn(&Value) -> bool) -> usize {
        let found = self.events.iter().position(is);
        found.unwrap_or_else(|| panic!("{what} is not told: {}", self.said))
    }

    fn decided(&self, name: &str, decision: &str, reason: &str) -> usize {
        self.line(&format!("{decision} {reason} of {name}"), |event| {
            event["event"] == "decision"
                && event["process.pid"] == self.pids[name]
                && event["decision"] == decision
                && event["reason"] == reason
        })
    }

    fn closed(&self) -> usize {
        self.line("the end", |event| event["event"] == "session.close")
    }
}
