//! A keep with `uid = "other-login"`: what `sudo` of the agent's login started is judged like the agent's own processes.

use std::sync::Arc;

use reaper_common::MEMBER_BY_SUDO;

use super::promises::{Host, ordinary};
use super::rules::{advance, set_facts};
use crate::event::ProcessKey;
use crate::facts::{Fact, FactSet, Facts, InheritedFacts};

const RULE: &str = "[[keep]]\nname = \"other-uid\"\nuid = \"other-login\"\n";
const CLAUDE: &str = "/usr/bin/claude";
const KEPT: &str = "keep other_uid other-uid";
const REAPED: &str = "reap root_exited";

/// Returns facts of a process with this login uid.
fn of_login(login_uid: Option<u32>) -> Facts {
    let inherited = InheritedFacts {
        login_uid,
        ..InheritedFacts::default()
    };
    Facts {
        inherited: Fact::Known(Arc::new(inherited)),
        ..ordinary()
    }
}

/// Starts an agent with this login uid.
fn host(login_uid: Option<u32>) -> Host {
    let mut h = Host::with_rules(CLAUDE, RULE);
    let agent = h.agent;
    set_facts(&mut h.w, agent, FactSet::INHERITED, of_login(login_uid));
    h
}

/// Starts `sudo`, which forks a child that executes `command` as root. Returns both.
fn sudo(h: &mut Host, command: &str, login_uid: Option<u32>) -> [ProcessKey; 2] {
    let user = h.w.uids;
    h.w.uids.real += 1;
    h.w.uids.effective += 1;
    let sudo = h.start(h.agent, "/usr/bin/sudo x");
    let child = h.w.fork(sudo);
    h.exec(child, command, 7);
    h.w.uids = user;
    for key in [sudo, child] {
        h.facts.insert(key, of_login(login_uid));
    }
    [sudo, child]
}

#[test]
fn command_of_sudo_is_reaped_only_in_the_login_of_its_agent() {
    for (agent, own, expected) in [
        (Some(1000), Some(1000), REAPED),
        (Some(1000), Some(1001), KEPT),
        (Some(1000), None, KEPT),
        (None, None, KEPT),
    ] {
        let mut h = host(agent);
        let [sudo, command] = sudo(&mut h, "/usr/bin/make", own);
        let below = h.start(command, "/usr/bin/cc");
        h.facts.insert(below, of_login(own));
        let flags = |key| h.w.model.wanted_membership(key).unwrap().flags & MEMBER_BY_SUDO;
        let expected_flags = [0, MEMBER_BY_SUDO, MEMBER_BY_SUDO];
        assert_eq!([sudo, command, below].map(flags), expected_flags);
        let node = h.w.model.tree.get(command).unwrap();
        assert!(!h.w.model.is_kernel_killable(node));
        h.w.kill(h.agent);
        advance(&mut h.w, 0);
        // Its descent is known after the exit of sudo, too.
        assert_eq!(h.why(sudo), expected, "{agent:?} {own:?}");
        h.w.exit(sudo);
        assert_eq!(h.why(command), expected, "{agent:?} {own:?}");
        let kept = "keep ancestor_kept other-uid";
        let below_it = if expected == REAPED { REAPED } else { kept };
        assert_eq!(h.why(below), below_it, "{agent:?} {own:?}");
    }
}

#[test]
fn other_ways_to_another_user_keep_the_process() {
    let mut h = host(Some(1000));
    let [.., apt] = sudo(&mut h, "/usr/bin/apt upgrade", Some(1000));
    // Through su, which is no sudo.
    h.w.uids.real += 1;
    h.w.uids.effective += 1;
    let su = h.start(h.agent, "/usr/bin/make");
    h.facts.insert(su, of_login(Some(1000)));
    // A set-user-ID program below sudo has two uids.
    h.w.uids.real += 1;
    let [.., set_user_id] = sudo(&mut h, "/usr/bin/ping", Some(1000));
    // sudo above the agent does not count.
    let mut above = host(Some(1000));
    let [.., second] = sudo(&mut above, CLAUDE, Some(1000));
    set_facts(
        &mut above.w,
        second,
        FactSet::INHERITED,
        of_login(Some(1000)),
    );
    let other = above.start(second, "/usr/bin/make");
    above.facts.insert(other, of_login(Some(1000)));
    above.w.kill(second);
    advance(&mut above.w, 0);
    assert_eq!(above.why(other), KEPT);
    h.w.kill(h.agent);
    advance(&mut h.w, 0);
    assert_eq!(h.why(apt), "keep keep_rule package-managers");
    assert_eq!(h.why(su), KEPT);
    assert_eq!(h.why(set_user_id), KEPT);
}
