//! Sessions that another agent, the successor, continues after the exit of their root.

use std::sync::Arc;

use super::world::{INIT, USER, World};
use crate::conversation::{ConversationSource, Conversations};
use crate::event::{ExitStatus, ProcessKey, TICK_NS, Uids};
use crate::facts::{Fact, FactSet, Facts};
use crate::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, Ruleset};
use crate::session::{SessionId, Succession, SuccessorSearch};

const OLD: &str = "4a28933f-46b2-4a2b-9061-21982e33bea2";
const NEW: &str = "22ab6b57-9254-4a06-8f04-56c08376a054";

/// Returns a world in which `claude` can hand over its conversation and `codex` cannot.
fn world() -> World {
    let agent = |name: &str| {
        let condition = Condition {
            field: Field::Comm,
            any_of: vec![Pattern::comm(name).unwrap()],
            negative: false,
        };
        Rule::new(name, Action::Agent, vec![Matcher::new(vec![condition])])
    };
    let mut claude = agent("claude");
    claude.conversation = Some(Arc::new(ConversationSource {
        variable: "CLAUDE_CODE_SESSION_ID".into(),
        registry: None,
    }));
    let mut w = World::new();
    w.model
        .set_rules(Ruleset::new(vec![claude, agent("codex")]));
    w
}

fn session(w: &World, root: ProcessKey) -> SessionId {
    w.model
        .sessions
        .by_root(root)
        .expect("the process is a root")
        .id
}

/// Delivers the conversations of a process.
fn set_conversations(w: &mut World, key: ProcessKey, change: impl FnOnce(&mut Conversations)) {
    let mut found = Conversations::default();
    change(&mut found);
    set_conversations_fact(w, key, Fact::Known(Arc::new(found)));
}

fn set_conversations_fact(w: &mut World, key: ProcessKey, conversations: Fact<Arc<Conversations>>) {
    let facts = Facts {
        conversations,
        ..Facts::default()
    };
    let now = w.now;
    w.model.set_facts(key, FactSet::CONVERSATIONS, facts, now);
}

fn set_inherited_id(w: &mut World, key: ProcessKey, id: &str) {
    set_conversations(w, key, |all| all.inherited.insert_from(id.as_bytes()));
}

/// Returns an agent, a job that inherited the id of its conversation, and another agent of the same user.
fn two_agents(w: &mut World) -> (ProcessKey, ProcessKey, ProcessKey) {
    let agent = w.spawn(INIT, "claude");
    let job = w.spawn(agent, "server");
    let other = w.spawn(INIT, "claude");
    set_inherited_id(w, job, OLD);
    (agent, job, other)
}

#[test]
fn nothing_is_due_while_a_successor_is_awaited() {
    let mut w = world();
    let (agent, job, _) = two_agents(&mut w);
    let id = session(&w, agent);
    let nested = w.spawn(job, "codex");
    let tool = w.spawn(nested, "npm");
    w.exit(agent);
    let exit = w.now;
    assert_eq!(w.model.succession(id), Some(Succession::Awaited));
    for key in [job, nested, tool] {
        assert_eq!(w.why(key), "wait successor_awaited");
    }
    let deadline = w.decide(job).until.unwrap();
    assert!(deadline >= 2_000_000_000 && deadline <= exit + 2_000_000_000);
    w.model.set_succession(id, Succession::Excluded);
    for key in [job, nested, tool] {
        assert_eq!(w.why(key), "reap root_exited");
    }
}

#[test]
fn members_of_a_killed_nested_agent_are_due_meanwhile() {
    let mut w = world();
    let (agent, job, _) = two_agents(&mut w);
    let nested = w.spawn(job, "codex");
    let tool = w.spawn(nested, "npm");
    w.exit(agent);
    w.kill(nested);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(w.why(job), "wait successor_awaited");
}

#[test]
fn successor_is_awaited_only_after_status_0_or_unknown() {
    for (program, status, expected) in [
        ("claude", ExitStatus::Exited(0), Succession::Awaited),
        ("claude", ExitStatus::Unknown, Succession::Awaited),
        ("claude", ExitStatus::Exited(1), Succession::Excluded),
        (
            "claude",
            ExitStatus::Signalled {
                signal: 9,
                core: false,
            },
            Succession::Excluded,
        ),
        ("codex", ExitStatus::Exited(0), Succession::Excluded),
    ] {
        let mut w = world();
        let agent = w.spawn(INIT, program);
        let job = w.spawn(agent, "server");
        let id = session(&w, agent);
        w.exit_with(agent, status, Some(INIT));
        assert_eq!(
            w.model.succession(id),
            Some(expected),
            "{program} {status:?}"
        );
        let due = w.why(job) == "reap root_exited";
        assert_eq!(
            due,
            expected == Succession::Excluded,
            "{program} {status:?}"
        );
    }
}

#[test]
fn unknown_exit_status_leaves_no_time_for_a_successor() {
    let mut w = world();
    let (agent, job, _) = two_agents(&mut w);
    w.exit_with(agent, ExitStatus::Unknown, Some(INIT));
    assert!(w.decide(job).until.unwrap() <= w.now);
}

#[test]
fn agent_that_resumes_the_conversation_is_the_new_root() {
    let mut w = world();
    let (agent, job, _) = two_agents(&mut w);
    let id = session(&w, agent);
    let worker = w.fork(INIT);
    w.exec(
        worker,
        &format!("claude --fork-session --resume /h/{OLD}.jsonl"),
    );
    w.exit(agent);
    for key in w.model.sessions.iter().map(|s| s.root).collect::<Vec<_>>() {
        set_conversations(&mut w, key, |_| {});
    }
    assert_eq!(w.model.find_successor(id), SuccessorSearch::Found(worker));
    assert_eq!(w.model.set_successor(id, worker).len(), 1);
    assert_eq!(w.why(job), "keep detached");
    w.kill(worker);
    assert_eq!(w.why(job), "reap root_exited");
}

#[test]
fn registry_of_a_living_agent_names_the_successor() {
    let by_id = |all: &mut Conversations, _: ProcessKey| all.registered.insert_from(OLD.as_bytes());
    let by_job = |all: &mut Conversations, job: ProcessKey| {
        let start = job.start - job.start % TICK_NS;
        all.adopt(ProcessKey { start, ..job });
    };
    for names in [by_id as fn(&mut Conversations, ProcessKey), by_job] {
        let mut w = world();
        let (agent, job, other) = two_agents(&mut w);
        let id = session(&w, agent);
        w.exit(agent);
        set_conversations(&mut w, other, |all| names(all, job));
        assert_eq!(w.model.find_successor(id), SuccessorSearch::Found(other));
    }
}

#[test]
fn marker_in_the_environment_of_an_agent_names_no_successor() {
    let mut w = world();
    let (agent, _, other) = two_agents(&mut w);
    let id = session(&w, agent);
    w.exit(agent);
    set_inherited_id(&mut w, other, OLD);
    assert_eq!(w.model.find_successor(id), SuccessorSearch::NotFound);
}

#[test]
fn agent_that_names_another_conversation_is_no_successor() {
    let mut w = world();
    let (agent, job, other) = two_agents(&mut w);
    let id = session(&w, agent);
    w.exit(agent);
    set_conversations(&mut w, other, |all| {
        all.registered.insert_from(NEW.as_bytes());
        all.adopt(ProcessKey {
            start: job.start + 2 * TICK_NS,
            ..job
        });
    });
    assert_eq!(w.model.find_successor(id), SuccessorSearch::NotFound);
}

#[test]
fn agent_of_another_user_rule_or_below_is_no_successor() {
    let mut w = world();
    let (agent, job, _) = two_agents(&mut w);
    let id = session(&w, agent);
    let resumes = format!("claude --resume {OLD}");
    w.spawn(job, &resumes);
    w.spawn(INIT, &resumes.replace("claude", "codex"));
    w.uids = Uids {
        real: 1001,
        effective: 1001,
    };
    w.spawn(INIT, &resumes);
    w.uids = USER;
    w.exit(agent);
    for key in w.model.sessions.iter().map(|s| s.root).collect::<Vec<_>>() {
        set_conversations(&mut w, key, |_| {});
    }
    assert_eq!(w.model.find_successor(id), SuccessorSearch::NotFound);
}

#[test]
fn successor_search_requests_unread_facts_once() {
    let mut w = world();
    let (agent, job, other) = two_agents(&mut w);
    let id = session(&w, agent);
    w.exit(agent);
    let needs = vec![(other, FactSet::CONVERSATIONS)];
    assert_eq!(w.model.find_successor(id), SuccessorSearch::Needs(needs));
    set_conversations(&mut w, other, |_| {});
    assert_eq!(w.model.find_successor(id), SuccessorSearch::NotFound);
    w.model.forget_conversations(id);
    let both = vec![
        (job, FactSet::CONVERSATIONS),
        (other, FactSet::CONVERSATIONS),
    ];
    assert_eq!(w.model.find_successor(id), SuccessorSearch::Needs(both));
}

#[test]
fn unreadable_conversations_keep_the_members() {
    let mut w = world();
    let (agent, job, other) = two_agents(&mut w);
    let id = session(&w, agent);
    w.exit(agent);
    set_conversations(&mut w, other, |all| all.registry_unreadable = true);
    assert_eq!(w.model.find_successor(id), SuccessorSearch::Unreadable);
    set_conversations_fact(&mut w, other, Fact::Unreadable);
    assert_eq!(w.model.find_successor(id), SuccessorSearch::Unreadable);
    set_conversations(&mut w, other, |_| {});
    set_conversations(&mut w, job, |all| all.registry_unreadable = true);
    assert_eq!(
        w.model.find_successor(id),
        SuccessorSearch::NotFound,
        "only the registry of an agent matters"
    );
    set_conversations_fact(&mut w, job, Fact::Unreadable);
    assert_eq!(w.model.find_successor(id), SuccessorSearch::Unreadable);
    w.model.set_succession(id, Succession::Unknown);
    assert_eq!(w.why(job), "keep successor_unknown");
}

#[test]
fn successor_search_needs_another_agent() {
    let mut w = world();
    let agent = w.spawn(INIT, "claude");
    let job = w.spawn(agent, "server");
    let id = session(&w, agent);
    w.exit(agent);
    set_conversations_fact(&mut w, job, Fact::Unreadable);
    assert_eq!(w.model.find_successor(id), SuccessorSearch::NotFound);
}

#[test]
fn successor_can_have_a_successor() {
    let mut w = world();
    let (agent, job, other) = two_agents(&mut w);
    let id = session(&w, agent);
    w.exit(agent);
    w.model.set_successor(id, other);
    w.exit(other);
    assert_eq!(w.model.succession(id), Some(Succession::Awaited));
    assert_eq!(w.why(job), "wait successor_awaited");
    let third = w.spawn(INIT, &format!("claude --resume={OLD}"));
    set_conversations(&mut w, third, |_| {});
    assert_eq!(w.model.find_successor(id), SuccessorSearch::Found(third));
}

#[test]
fn successor_is_rejected_if_none_is_awaited() {
    let mut w = world();
    let (agent, job, other) = two_agents(&mut w);
    let id = session(&w, agent);
    w.kill(agent);
    assert!(w.model.set_successor(id, other).is_empty());
    assert_eq!(w.why(job), "reap root_exited");
}
