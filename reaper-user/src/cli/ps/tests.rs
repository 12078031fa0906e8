use super::*;
use crate::run::RecordedProcess;

fn shown(id: &str) -> Shown<'static> {
    Shown {
        start: RunHeader {
            schema: 1,
            id: id.to_owned(),
            name: None,
            session: None,
            agent: None,
            boot_id: String::new(),
            pid_namespace: 0,
            wrapper: RecordedProcess {
                pid: 7,
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
        over: None,
    }
}

fn plain(runs: &[Shown<'_>], width: Option<usize>) -> String {
    anstream::adapter::strip_str(&table(runs, false, width)).to_string()
}

#[test]
fn a_table_has_the_columns_that_say_something() {
    assert_eq!(
        plain(&[shown("abcdef")], None),
        "id      name  pid  state    age  command\nabcdef  -     8    running  61s  make all\n"
    );
    let mut other = shown("bcdefg");
    (other.remaining_ms, other.pid) = (Some(600_000), None);
    other.start.session = Some("turn 17".to_owned());
    other.start.name = Some("web".to_owned());
    other.state = "waiting";
    let said = plain(&[shown("abcdef"), other], None);
    assert_eq!(
        said,
        "id      name  pid  state    age  remaining  session  command\n\
         abcdef  -     8    running  61s  -          -        make all\n\
         bcdefg  web   -    waiting  61s  10m        turn 17  make all\n"
    );
    assert!(plain(&[], None).contains("--all"));
}
