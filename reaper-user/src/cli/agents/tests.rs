use super::*;
use crate::api::RuleTest;

/// Removes the colours.
fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

fn agent(name: &str, kind: &str, running: &[u32]) -> AgentInfo {
    AgentInfo {
        name: name.into(),
        kind: kind.into(),
        matches: vec![
            "exe **/a | **/b, not options --version".into(),
            "comm x".into(),
        ],
        running: running.to_vec(),
        sessions: Vec::new(),
    }
}

#[test]
fn agents_are_listed_in_one_line_each() {
    let many: Vec<u32> = (1000..1100).collect();
    let all = AgentsResponse {
        agents: vec![
            agent("my-agent", "agent", &[]),
            agent("other", "server", &many),
        ],
    };
    let text = plain(&table(&all, Some(80)));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..2],
        ["AGENT     KIND    RUNNING", "my-agent  agent   -"]
    );
    assert!(
        lines[2].starts_with("other     server  100: 1000 1001 "),
        "{text}"
    );
    assert!(
        lines.iter().all(|line| line.chars().count() <= 80),
        "{text}"
    );
}

#[test]
fn details_list_each_alternative() {
    let all = AgentsResponse {
        agents: vec![agent("my-agent", "agent", &[7])],
    };
    let text = plain(&details(&all, Some(30)));
    let expected =
        "my-agent: 1 process\n    - exe **/a | **/b, not\n      options --version\n    - comm x\n";
    assert_eq!(text, expected);
}

#[test]
fn test_names_the_failed_condition_of_each_rule() {
    let rule = |name: &str, failed: Option<&str>| RuleTest {
        pid: 7,
        name: name.into(),
        kind: "agent".into(),
        matches: failed.is_none(),
        condition: failed.map(|_| "exe".into()),
        patterns: Vec::new(),
        failed: failed.map(Into::into),
    };
    let (near, far) = (
        rule("near", Some("`exe` does not match /x")),
        rule("far-away", Some("`script` does not match /y")),
    );
    let test = RuleTestResponse {
        pid: 7,
        command: "x chat".into(),
        comm: "x".into(),
        exe: "/x".into(),
        script: None,
        rule: None,
        nearest: Some(near.clone()),
        rules: vec![near, far],
    };
    let text = plain(&test_text(&test, Some(80)));
    let expected = "process  7 x chat\nprogram  /x\n\n\
                    near      `exe` does not match /x\nfar-away  `script` does not match /y\n\n\
                    No agent rule matches process 7; nearest: near, whose `exe` does not match /x.\n\
                    If it is an agent, `reaper agent add --pid 7` writes a rule for it.\n";
    assert_eq!(text, expected);
    let matching = RuleTestResponse {
        rule: Some("own".into()),
        rules: vec![rule("own", None)],
        ..test
    };
    assert_eq!(
        summary(&matching),
        "The agent rule \"own\" matches process 7."
    );
}
