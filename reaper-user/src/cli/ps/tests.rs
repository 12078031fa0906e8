use super::*;
use crate::run::RecordedProcess;

fn listed_run(id: &str) -> ListedRun<'static> {
    ListedRun {
        start: RunHeader {
            schema: 1,
            id: id.to_owned(),
            name: None,
            session: None,
            agent: None,
            boot_id: String::new(),
            pid_namespace: 0,
            supervisor: RecordedProcess {
                pid: Some(7),
                start_ns: 0,
            },
            uid: 0,
            command: vec!["make".to_owned(), "all".to_owned()],
            truncated: false,
            cwd: "/".to_owned(),
            started: Timestamp::UNIX_EPOCH,
            timeout_ms: None,
            idle_ms: None,
            grace_ms: 5000,
            signal: 15,
            leader_first: false,
            limit: None,
            cgroup: None,
            detached: false,
        },
        state: "running",
        pid: Some(8),
        age_ms: 61_000,
        remaining_ms: None,
        log: None,
        result: None,
    }
}

fn plain(runs: &[ListedRun<'_>], width: Option<usize>) -> String {
    anstream::adapter::strip_str(&table(runs, false, width)).to_string()
}

#[test]
fn table_omits_columns_without_values() {
    assert_eq!(
        plain(&[listed_run("abcdef")], None),
        "1 run: 1 running\n\n\
         ID      NAME  PID  STATE    AGE    COMMAND\nabcdef  -     8    running  1m 1s  make all\n"
    );
    let mut other = listed_run("bcdefg");
    (other.remaining_ms, other.pid) = (Some(600_000), None);
    other.start.session = Some("turn 17".to_owned());
    other.start.name = Some("web".to_owned());
    other.state = "waiting";
    let text = plain(&[listed_run("abcdef"), other], None);
    assert_eq!(
        text,
        "2 runs: 1 running, 1 waiting\n\n\
         ID      NAME  PID  STATE    AGE    LEFT  SESSION  COMMAND\n\
         abcdef  -     8    running  1m 1s  -     -        make all\n\
         bcdefg  web   -    waiting  1m 1s  10m   turn 17  make all\n"
    );
    assert!(plain(&[], None).contains("--all"));
}
