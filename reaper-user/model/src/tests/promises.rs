//! The section "What it kills, and what it never kills" of the README, by the built-in rules. A test fails if a default
//! changes so that a sentence there is no longer true. `xtask/src/test/promises.rs` names the tests of each sentence.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use reaper_common::MEMBER_DETACHED;
use reaper_common::MEMBER_UNCERTAIN;
use toml::de::DeTable;

use super::idle::set_tree_idle;
use super::rules::{MINUTE, advance, set_facts, world};
use super::scripts::resolve_script;
use super::survival::{exact_row, membership};
use super::world::{INIT, OWN_PID, World};
use crate::activity::Activity;
use crate::event::{ExitStatus, Image, ProcessKey, Uids};
use crate::facts::{Fact, FactSet, Facts, InheritedFacts, KernelSession, LocalSockets, Stdio};
use crate::policy::Verdict;
use crate::rules::Rules;
use crate::ruleset::{Action, SessionCondition};
use crate::user_keep::UserKeep;

const CLAUDE: &str = "/usr/lib/node_modules/@anthropic-ai/claude-code/bin/claude.exe";
const CODEX: &str = "/usr/local/bin/codex";
const REAPED: &str = "reap root_exited";

/// A host with the built-in rules and an agent in a shell. Each process has ordinary facts, unless a test sets others.
pub(super) struct Host {
    pub(super) w: World,
    pub(super) agent: ProcessKey,
    pub(super) facts: HashMap<ProcessKey, Facts>,
}

/// Returns facts of a process without a marker, its own unit, a socket, a client or a terminal.
pub(super) fn ordinary() -> Facts {
    Facts {
        markers: Fact::Known(0),
        unit: Fact::Known("session-1.scope".into()),
        listening: Fact::Known(false),
        cpu: Fact::Known(0),
        kernel_session: Fact::Known(KernelSession { sid: 1, tty: 0 }),
        stdin_is_terminal: Fact::Known(false),
        inherited: Fact::Known(Arc::default()),
        conversations: Fact::Known(Arc::default()),
        activity: Fact::Known(Arc::default()),
        stdio: Fact::Known(Stdio::Other),
        local_sockets: Fact::Known(Arc::default()),
        ..Facts::unreadable()
    }
}

/// Returns facts of a process that listens.
pub(super) fn listening() -> Facts {
    Facts {
        listening: Fact::Known(true),
        ..ordinary()
    }
}

impl Host {
    fn new(agent: &str) -> Host {
        Host::with_rules(agent, "")
    }

    /// Adds rules of a user to the built-in ones.
    pub(super) fn with_rules(agent: &str, rules: &str) -> Host {
        Host::start_with(agent, rules, 1)
    }

    /// Starts the agent with this controlling terminal, 0 for none.
    pub(super) fn with_terminal(agent: &str, tty: u32) -> Host {
        Host::start_with(agent, "", tty)
    }

    fn start_with(agent: &str, rules: &str, tty: u32) -> Host {
        let root = DeTable::parse(rules).unwrap();
        let rules = Rules::read(root.get_ref()).unwrap().in_force;
        let mut host = Host {
            w: world(rules),
            agent: INIT,
            facts: HashMap::new(),
        };
        host.w.tty = tty;
        let shell = host.start(INIT, "/bin/bash");
        host.agent = host.start(shell, agent);
        advance(&mut host.w, 0);
        host
    }

    /// Starts a program, given by its path and arguments.
    pub(super) fn start(&mut self, parent: ProcessKey, command: &str) -> ProcessKey {
        self.start_in_cgroup(parent, command, 7)
    }

    pub(super) fn start_in_cgroup(
        &mut self,
        parent: ProcessKey,
        command: &str,
        cgroup_id: u64,
    ) -> ProcessKey {
        let child = self.w.fork(parent);
        self.exec(child, command, cgroup_id);
        child
    }

    pub(super) fn exec(&mut self, key: ProcessKey, command: &str, cgroup_id: u64) {
        let exe = command.split(' ').next().unwrap_or_default();
        let comm = exe.rsplit('/').next().unwrap_or_default();
        let image = Image {
            comm: comm[..comm.len().min(15)].into(),
            exe: exe.into(),
            argv: format!("{}\0", command.replace(' ', "\0")).into(),
            cgroup_id,
            tty: self.w.tty,
            ..Image::default()
        };
        self.w.exec_image(key, image);
    }

    /// Starts a server of the agent that listens.
    fn start_server(&mut self) -> ProcessKey {
        let server = self.start(self.agent, "/usr/bin/vite");
        self.facts.insert(server, listening());
        server
    }

    /// Returns the decision about a process, after all facts that it needs were read.
    pub(super) fn why(&mut self, key: ProcessKey) -> String {
        for _ in 0..20 {
            let decision = self.w.decide(key);
            if decision.needs.is_empty() {
                return self.w.why(key);
            }
            let of = decision.relative.unwrap_or(key);
            let found = self.facts.get(&of).cloned().unwrap_or_else(ordinary);
            set_facts(&mut self.w, of, decision.needs, found);
        }
        panic!("the decision needs facts again and again");
    }

    fn assert_all(&mut self, keys: &[ProcessKey], expected: &str) {
        for key in keys {
            assert_eq!(self.why(*key), expected, "{}", key.pid);
        }
    }
}

#[test]
fn descendants_are_reaped_once_the_agent_has_exited() {
    for agent in [CLAUDE, CODEX] {
        let mut h = Host::new(agent);
        let shell = h.start(h.agent, "/bin/bash");
        let tool = h.start(shell, "/usr/bin/make");
        let below = h.start(tool, "/usr/bin/cc");
        h.assert_all(&[shell, tool, below], "keep root_alive");
        h.w.kill(h.agent);
        h.assert_all(&[shell, tool, below], REAPED);
        let late = h.w.fork(below);
        h.assert_all(&[late], "reap forked_after_root_exit");
    }
}

#[test]
fn double_fork_and_another_name_do_not_change_descent() {
    let mut h = Host::new(CLAUDE);
    let middle = h.w.fork(h.agent);
    let daemon = h.w.fork(middle);
    h.w.exit(middle);
    h.exec(daemon, "/opt/other/name", 7);
    let sibling = h.w.clone_parent(daemon, INIT);
    h.w.kill(h.agent);
    h.assert_all(&[daemon, sibling], REAPED);
}

#[test]
fn orphan_of_a_living_agent_stays_without_a_time_limit() {
    let mut h = Host::new(CLAUDE);
    let shell = h.start(h.agent, "/bin/bash");
    let [server, busy] = ["/usr/bin/vite", "/usr/bin/yes"].map(|it| h.start(shell, it));
    h.facts.insert(
        busy,
        Facts {
            cpu: Fact::Known(100),
            ..ordinary()
        },
    );
    h.w.exit(shell);
    for days in [0, 1, 30] {
        advance(&mut h.w, days * 24 * 60 * MINUTE);
        h.assert_all(&[server, busy], "keep detached");
    }
}

#[test]
fn only_two_rules_reap_while_the_agent_lives() {
    let rules = crate::rules::built_in();
    let reaps = |session| [SessionCondition::Alive, SessionCondition::Any].contains(&session);
    let all = rules
        .rules()
        .iter()
        .filter(|rule| rule.action == Action::Reap && reaps(rule.when.session));
    let names: Vec<&str> = all.map(|rule| &*rule.name).collect();
    assert_eq!(names, ["agents-without-client", "unused-managed-servers"]);
}

/// Returns the decision about a living root after some time without use.
fn why_idle(h: &mut Host, root: ProcessKey, stdio: Stdio, time: u64) -> String {
    let found = Facts {
        stdio: Fact::Known(stdio),
        ..ordinary()
    };
    h.facts.insert(root, found.clone());
    set_facts(&mut h.w, root, FactSet::STDIO, found);
    set_tree_idle(&mut h.w, &[root]);
    advance(&mut h.w, time);
    set_tree_idle(&mut h.w, &[root]);
    h.why(root)
}

#[test]
fn idle_agent_is_reaped_only_if_its_client_is_gone() {
    for (stdio, command, expected) in [
        (Stdio::HungUp, "acp", "reap reap_rule agents-without-client"),
        (Stdio::Connected(9), "acp", "keep detached"),
        (Stdio::HungUp, "session", "keep root_alive"),
    ] {
        let mut h = Host::new(CLAUDE);
        let client = h.start(INIT, "/usr/bin/editor-client");
        let agent = h.start(client, &format!("/home/u/.local/bin/goose {command}"));
        h.w.exit(client);
        let kept = why_idle(&mut h, agent, stdio, MINUTE / 4);
        assert!(kept.starts_with("keep"), "{kept}");
        let why = why_idle(&mut h, agent, stdio, MINUTE / 2);
        assert!(
            why == expected || !expected.starts_with("reap") && why.starts_with("keep"),
            "{why}"
        );
    }
}

#[test]
fn idle_server_is_reaped_only_if_codex_started_it() {
    for (command, expected) in [
        (
            "app-server --listen unix:// --managed-daemon",
            "reap reap_rule unused-managed-servers",
        ),
        (
            "app-server --listen unix://",
            "report report_rule unused-servers",
        ),
    ] {
        let mut h = Host::new(CODEX);
        let server = h.start(h.agent, &format!("{CODEX} {command}"));
        let kept = why_idle(&mut h, server, Stdio::Other, 29 * MINUTE);
        assert_eq!(kept, "keep root_alive", "{command}");
        assert_eq!(why_idle(&mut h, server, Stdio::Other, MINUTE), expected);
    }
}

#[test]
fn exit_with_another_status_or_a_signal_has_no_patience() {
    let signal = ExitStatus::Signalled {
        signal: 15,
        core: false,
    };
    for status in [ExitStatus::Exited(1), ExitStatus::Exited(143), signal] {
        let mut h = Host::new(CODEX);
        let server = h.start_server();
        h.w.exit_with(h.agent, status, Some(INIT));
        advance(&mut h.w, 0);
        h.assert_all(&[server], REAPED);
    }
}

#[test]
fn server_that_listens_has_10_minutes_after_status_0() {
    for (tty, rule, minutes) in [(1, "asked-for-servers", 10), (0, "unattended-servers", 1)] {
        let mut h = Host::with_terminal(CODEX, tty);
        let server = h.start_server();
        h.w.exit(h.agent);
        advance(&mut h.w, 0);
        h.assert_all(&[server], &format!("wait rule_delay {rule}"));
        advance(&mut h.w, minutes * MINUTE - 1_000_000_000);
        h.assert_all(&[server], &format!("wait rule_delay {rule}"));
        advance(&mut h.w, 1_000_000_000);
        h.assert_all(&[server], &format!("reap root_exited {rule}"));
    }
}

#[test]
fn next_agent_in_the_same_directory_restarts_the_10_minutes() {
    let in_dir = |h: &mut Host, agent, dir: &str| {
        let inherited = InheritedFacts {
            directory: Some(Path::new(dir).into()),
            ..InheritedFacts::default()
        };
        let found = Facts {
            inherited: Fact::Known(inherited.into()),
            ..Facts::default()
        };
        set_facts(&mut h.w, agent, FactSet::INHERITED, found);
    };
    let (same, other) = ("/home/me/project", "/home/me/other");
    for (uid, dir, is_extended) in [(5, same, true), (5, other, false), (6, same, false)] {
        let mut h = Host::new(CODEX);
        h.w.uids.real = 5;
        let shell = h.start(INIT, "/bin/bash");
        let agent = h.start(shell, CODEX);
        in_dir(&mut h, agent, same);
        let server = h.start(agent, "/usr/bin/vite");
        h.facts.insert(server, listening());
        h.w.exit(agent);
        advance(&mut h.w, 0);
        h.assert_all(&[server], "wait rule_delay asked-for-servers");
        advance(&mut h.w, 6 * MINUTE);
        h.w.uids.real = uid;
        let next = h.start(INIT, CODEX);
        in_dir(&mut h, next, dir);
        advance(&mut h.w, 4 * MINUTE);
        let (wait, reap) = (
            "wait rule_delay asked-for-servers",
            "reap root_exited asked-for-servers",
        );
        h.assert_all(&[server], if is_extended { wait } else { reap });
        advance(&mut h.w, 6 * MINUTE);
        h.assert_all(&[server], reap);
    }
}

#[test]
fn helper_is_left_to_a_program_with_grace() {
    let mut h = Host::new(CODEX);
    let terraform = h.start(h.agent, "/usr/bin/terraform apply");
    let shell = h.start(terraform, "/bin/bash");
    let provider = h.start(shell, "/opt/terraform-provider-x");
    let redis = h.start(terraform, "/usr/bin/redis-server");
    let other = h.start(h.agent, "/usr/bin/make");
    h.w.kill(h.agent);
    advance(&mut h.w, 0);
    // All that is missing is whether terraform is kept.
    let all = h.w.decide(provider).needs;
    set_facts(&mut h.w, provider, all, ordinary());
    let decision = h.w.decide(provider);
    assert!(decision.verdict == Verdict::Wait && !decision.needs.is_empty());
    assert_eq!(decision.relative, Some(terraform));
    for (key, above) in [
        (terraform, None),
        (shell, Some(terraform)),
        (provider, Some(terraform)),
        (redis, Some(terraform)),
        (other, None),
    ] {
        h.why(key);
        let decision = h.w.decide(key);
        assert_eq!(decision.needed_by, above, "{key}");
        let has_grace = [terraform, provider, redis].contains(&key);
        assert_eq!(decision.grace_ns > 0, has_grace, "{key}");
        let node = h.w.model.tree.get(key).unwrap();
        assert_eq!(h.w.model.is_kernel_killable(node), key == other, "{key}");
    }
    h.w.exit(terraform);
    assert_eq!(h.w.decide(shell).needed_by, None);
}

#[test]
fn filter_is_kept_while_something_writes_to_it() {
    for (stdio, expected) in [
        (Stdio::Connected(9), "keep keep_rule filters"),
        (Stdio::HungUp, REAPED),
        (Stdio::Other, REAPED),
    ] {
        let mut h = Host::new(CODEX);
        let shell = h.start(h.agent, "/bin/bash");
        let [cat, other] = ["/usr/bin/cat", "/usr/bin/make"].map(|command| h.start(shell, command));
        for key in [cat, other] {
            let facts = Facts {
                stdio: Fact::Known(Stdio::Connected(9)),
                ..ordinary()
            };
            h.facts.insert(key, facts);
        }
        h.w.kill(h.agent);
        advance(&mut h.w, 0);
        h.assert_all(&[cat], "wait rule_delay filters");
        h.assert_all(&[other, shell], REAPED);
        let node = h.w.model.tree.get(cat).unwrap();
        assert!(!h.w.model.is_kernel_killable(node));
        advance(&mut h.w, 2_000_000_000);
        h.w.model.forget_volatile(cat);
        h.facts.get_mut(&cat).unwrap().stdio = Fact::Known(stdio);
        h.assert_all(&[cat], expected);
        if expected == REAPED {
            continue;
        }
        // It is looked at again, in case it does not read its input.
        let until = h.w.decide(cat).until.unwrap();
        let left = until - h.w.now;
        advance(&mut h.w, left);
        h.w.model.forget_volatile(cat);
        h.facts.get_mut(&cat).unwrap().stdio = Fact::Known(Stdio::HungUp);
        h.assert_all(&[cat], REAPED);
    }
}

#[test]
fn package_manager_that_runs_a_program_has_no_grace() {
    for (command, has_grace) in [
        ("/usr/bin/node /usr/bin/npm install", true),
        ("/usr/bin/node /usr/bin/npm run dev", false),
        ("/usr/bin/node /usr/lib/pnpm/bin/pnpm.cjs exec vite", false),
        ("/usr/bin/cargo build", true),
        ("/usr/bin/cargo --quiet test", false),
        ("/usr/bin/uv pip install x", true),
        ("/usr/bin/uv run x", false),
        ("/usr/bin/python3 -m pip install x", true),
    ] {
        let mut h = Host::new(CODEX);
        let manager = h.start(h.agent, command);
        let script = command
            .split(' ')
            .nth(1)
            .filter(|word| word.starts_with('/'));
        if script.is_some() {
            resolve_script(&mut h.w, manager, script);
        }
        h.w.kill(h.agent);
        advance(&mut h.w, 0);
        h.why(manager);
        assert_eq!(h.w.decide(manager).grace_ns > 0, has_grace, "{command}");
    }
}

#[test]
fn command_through_nohup_has_10_minutes_after_status_0() {
    for (tty, rule, minutes) in [(1, "asked-for-commands", 10), (0, "unattended-commands", 1)] {
        for detacher in ["/usr/bin/nohup", "/usr/bin/setsid"] {
            let mut h = Host::with_terminal(CODEX, tty);
            let shell = h.start(h.agent, "/bin/bash");
            let command = h.start(shell, detacher);
            // As a script that begins with `#!/usr/bin/env make`.
            h.exec(command, "/usr/bin/env make all", 7);
            h.exec(command, "/usr/bin/make all", 7);
            let worker = h.start(command, "/usr/bin/vite");
            // The next service finds it in the map.
            let flags = |key| h.w.model.wanted_membership(key).unwrap().flags;
            assert_eq!(
                [flags(command), flags(worker)].map(|flags| flags & MEMBER_DETACHED),
                [MEMBER_DETACHED, 0]
            );
            let other = h.start(shell, "/usr/bin/make");
            advance(&mut h.w, MINUTE);
            h.w.exit(h.agent);
            advance(&mut h.w, 0);
            h.assert_all(
                &[command, worker, shell],
                &format!("wait rule_delay {rule}"),
            );
            h.assert_all(&[other], "reap root_exited");
            advance(&mut h.w, minutes * MINUTE);
            h.assert_all(&[command], &format!("reap root_exited {rule}"));
            h.assert_all(&[worker, shell], "reap root_exited");
        }
    }
}

#[test]
fn agents_server_and_agent_below_it_count_as_having_a_terminal() {
    let mut h = Host::with_terminal("/opt/codex app-server --listen unix://", 0);
    let server = h.agent;
    let agent = h.start(server, CODEX);
    for root in [agent, server] {
        let shell = h.start(root, "/bin/bash");
        let command = h.start(shell, "/usr/bin/nohup");
        h.exec(command, "/usr/bin/make all", 7);
        advance(&mut h.w, MINUTE);
        h.w.exit(root);
        advance(&mut h.w, 0);
        h.assert_all(&[command], "wait rule_delay asked-for-commands");
    }
}

#[test]
fn command_that_the_agent_detached_has_no_10_minutes() {
    let mut h = Host::new(CODEX);
    let command = h.start(h.agent, "/usr/bin/setsid");
    h.exec(command, "/bin/bash", 7);
    let child = h.start(command, "/usr/bin/sleep 600");
    advance(&mut h.w, MINUTE);
    h.w.exit(h.agent);
    advance(&mut h.w, 0);
    h.assert_all(&[command, child], "reap root_exited");
}

#[test]
fn server_in_use_has_10_minutes_again_and_again() {
    let client = Activity {
        clients: [7].into(),
        ..Activity::default()
    };
    let work = Activity {
        cpu_ns: 60_000_000_000,
        ..Activity::default()
    };
    // Nothing but I/O, such as a server of files that reads them.
    let io = Activity {
        io_bytes: 1 << 20,
        ..Activity::default()
    };
    for use_of_it in [client, work, io] {
        let mut h = Host::new(CODEX);
        let npm = h.start(h.agent, "/usr/bin/npm");
        let server = h.start(npm, "/usr/bin/vite");
        h.facts.insert(server, listening());
        h.w.exit(h.agent);
        advance(&mut h.w, 0);
        h.assert_all(&[server], "wait rule_delay asked-for-servers");
        h.assert_all(&[npm], "wait rule_delay young");
        h.facts.get_mut(&server).unwrap().activity = Fact::Known(use_of_it.into());
        for minutes in [10, 9] {
            advance(&mut h.w, minutes * MINUTE);
            h.assert_all(&[server, npm], "wait rule_delay asked-for-servers");
        }
        h.facts.insert(server, listening());
        advance(&mut h.w, MINUTE);
        // CPU time that was used up to the last look is no use since then.
        h.assert_all(&[server], "reap root_exited asked-for-servers");
        h.assert_all(&[npm], "reap root_exited");
    }
}

/// A server with timers uses CPU time and I/O although it has no client.
#[test]
fn heartbeat_of_a_server_is_no_use() {
    let beats = Activity {
        cpu_ns: 6_000_000_000,
        io_bytes: 100 << 10,
        ..Activity::default()
    };
    let mut h = Host::new(CODEX);
    let server = h.start(h.agent, "/usr/bin/vite");
    h.facts.insert(server, listening());
    h.w.exit(h.agent);
    advance(&mut h.w, 0);
    h.assert_all(&[server], "wait rule_delay asked-for-servers");
    h.facts.get_mut(&server).unwrap().activity = Fact::Known(beats.into());
    advance(&mut h.w, 10 * MINUTE);
    h.assert_all(&[server], "reap root_exited asked-for-servers");
}

#[test]
fn process_has_until_it_is_a_minute_old_after_status_0() {
    let mut h = Host::new(CODEX);
    let older = h.start(h.agent, "/usr/bin/make");
    advance(&mut h.w, MINUTE);
    let young = h.start(h.agent, "/usr/bin/npm");
    advance(&mut h.w, MINUTE / 2);
    h.w.exit(h.agent);
    advance(&mut h.w, 0);
    h.assert_all(&[older], "reap root_exited");
    h.assert_all(&[young], "wait rule_delay young");
    let later = h.start(young, "/usr/bin/vite");
    advance(&mut h.w, MINUTE / 2);
    // It listens by now.
    h.w.model.forget_volatile(young);
    h.facts.insert(young, listening());
    h.assert_all(&[young], "wait rule_delay asked-for-servers");
    h.assert_all(&[later], "wait rule_delay young");
    advance(&mut h.w, MINUTE);
    h.assert_all(&[young, later], "wait rule_delay asked-for-servers");
    // A process that starts after the exit of the agent gets no minute for itself.
    let mut h = Host::new(CODEX);
    let young = h.start(h.agent, "/usr/bin/supervise");
    h.w.exit(h.agent);
    advance(&mut h.w, MINUTE - 1_000_000_000);
    let last = h.start(young, "/usr/bin/worker");
    h.assert_all(&[young, last], "wait rule_delay young");
    advance(&mut h.w, 1_000_000_000);
    h.assert_all(&[young], "reap root_exited");
    h.assert_all(&[last], "reap forked_after_root_exit");
}

/// Returns facts of a process with a window on this display.
pub(super) fn window_on(display: &str) -> Facts {
    let local = LocalSockets {
        displays: [display.as_bytes().into()].into(),
        listens: false,
    };
    Facts {
        local_sockets: Fact::Known(local.into()),
        ..ordinary()
    }
}

#[test]
fn program_with_a_window_is_kept_with_its_tree() {
    const KEPT: &str = "keep keep_rule windows";
    for (command, display, expected) in [
        ("/opt/x/viewer", "X0", KEPT),
        ("/opt/x/viewer", "wayland-0", KEPT),
        ("/opt/x/viewer", "X99", REAPED),
        ("/opt/x/viewer", "wayland-7", REAPED),
        ("/opt/x/viewer --headless=new", "X0", REAPED),
        ("/opt/x/viewer --remote-debugging-port=0", "X0", REAPED),
    ] {
        let mut h = Host::new(CLAUDE);
        h.w.model.set_has_display(true);
        let test = h.start(h.agent, "/usr/bin/xvfb-run");
        h.start(test, "/usr/bin/Xvfb :99");
        h.start(test, "/usr/bin/Xephyr :98 -display :0");
        h.start(test, "/usr/bin/weston --socket=wayland-7");
        let shell = h.start(h.agent, "/bin/sh");
        let viewer = h.start(shell, command);
        let helper = h.start(viewer, "/opt/x/helper");
        h.facts.insert(viewer, window_on(display));
        h.w.kill(h.agent);
        h.assert_all(&[viewer], expected);
        let relatives = match expected {
            KEPT => ["keep descendant_kept windows", "keep ancestor_kept windows"],
            _ => [REAPED; 2],
        };
        h.assert_all(&[shell], relatives[0]);
        h.assert_all(&[helper], relatives[1]);
        h.assert_all(&[test], REAPED);
    }
}

#[test]
fn probes_signal_no_member_where_a_display_server_runs() {
    for has_display in [false, true] {
        let mut h = Host::new(CLAUDE);
        let tool = h.start(h.agent, "/usr/bin/make");
        set_facts(&mut h.w, tool, FactSet::MARKERS | FactSet::UNIT, ordinary());
        assert_eq!(h.w.model.set_has_display(has_display), has_display);
        let node = h.w.model.tree.get(tool).unwrap();
        assert_eq!(h.w.model.is_kernel_killable(node), !has_display);
    }
}

#[test]
fn never_list_holds_after_the_agent_has_exited() {
    let mut h = Host::new(CLAUDE);
    let outside = h.start(INIT, "/usr/bin/make");
    let host = h.start(h.agent, "/bin/bash");
    let own = ProcessKey {
        pid: OWN_PID,
        ..h.w.new_key()
    };
    h.w.fork_as(own, host, host);
    let thread = h.w.new_key();
    let parent = h.agent.pid;
    let thread =
        h.w.row_with(thread, parent, "kthread", |row| row.kernel_thread = true);
    h.w.kill(h.agent);
    h.assert_all(&[outside], "keep not_a_member");
    h.assert_all(&[INIT], "keep never_pid1");
    h.assert_all(&[thread], "keep never_kernel_thread");
    h.assert_all(&[own, host], "keep never_self");
}

#[test]
fn boundary_and_what_runs_in_it_is_never_reaped_with_the_agent() {
    for program in [
        "/usr/bin/tmux",
        "/usr/bin/conmon -c x",
        "/usr/share/code/code",
        "/usr/bin/vim notes",
        "/usr/bin/xterm",
        "/opt/google/chrome/chrome",
    ] {
        let mut h = Host::new(CLAUDE);
        let wall = h.start(h.agent, program);
        let shell = h.start(wall, "/bin/bash");
        let tool = h.start(shell, "/usr/bin/make");
        let inner = h.start(shell, CODEX);
        let inner_tool = h.start(inner, "/usr/bin/make");
        h.w.kill(h.agent);
        h.assert_all(&[wall, shell, tool], "keep not_a_member");
        h.assert_all(&[inner, inner_tool], "keep root_alive");
        h.w.kill(inner);
        h.assert_all(&[inner_tool], REAPED);
        h.assert_all(&[wall, shell, tool], "keep not_a_member");
    }
}

#[test]
fn programs_that_the_readme_names_are_kept_by_rules() {
    for (command, expected) in [
        ("/usr/bin/ssh-agent -s", "ssh-agent"),
        (
            "/usr/bin/java x org.gradle.launcher.daemon.bootstrap.GradleDaemon 9",
            "gradle",
        ),
        ("/usr/bin/sccache", "sccache"),
        ("/usr/bin/apt-get install x", "package-managers"),
    ] {
        let mut h = Host::new(CLAUDE);
        let tool = h.start(h.agent, command);
        h.w.kill(h.agent);
        h.assert_all(&[tool], &format!("keep keep_rule {expected}"));
    }
}

#[test]
fn other_users_process_and_systemd_unit_are_kept() {
    let mut h = Host::new(CLAUDE);
    h.w.uids = Uids {
        real: 0,
        effective: 0,
    };
    let other = h.start(h.agent, "/usr/bin/make");
    h.w.uids = super::world::USER;
    let service = h.start_in_cgroup(h.agent, "/usr/bin/make", 8);
    h.facts.insert(
        service,
        Facts {
            unit: Fact::Known("run-u12.service".into()),
            ..ordinary()
        },
    );
    h.w.kill(h.agent);
    h.assert_all(&[other], "keep other_uid other-uid");
    h.assert_all(&[service], "keep keep_rule own-unit");
}

#[test]
fn marker_request_and_rule_of_a_user_keep_a_process() {
    let rule = "[[keep]]\nname = 'mine'\nexe = '**/bin/mine'\n";
    let mut h = Host::with_rules(CLAUDE, rule);
    let [marked, requested, ruled, plain] = ["node1", "node2", "mine", "make"]
        .map(|name| h.start(h.agent, &format!("/opt/bin/{name}")));
    h.facts.insert(
        marked,
        Facts {
            markers: Fact::Known(1),
            ..ordinary()
        },
    );
    let keep = UserKeep {
        until_monotonic_ns: None,
        with_descendants: false,
        by_uid: 1000,
        made_at: 1,
    };
    assert_eq!(h.w.model.keep(requested, keep), 1);
    h.w.kill(h.agent);
    h.assert_all(&[marked], "keep keep_marker");
    h.assert_all(&[requested], "keep kept_by_user");
    h.assert_all(&[ruled], "keep keep_rule mine");
    h.assert_all(&[plain], REAPED);
}

#[test]
fn unknown_facts_and_lost_events_keep_a_process() {
    let mut h = Host::new(CLAUDE);
    let unread = h.start(h.agent, "/usr/bin/make");
    h.facts.insert(unread, Facts::unreadable());
    let lost = h.w.new_key();
    let uncertain = membership(Some(h.agent), MEMBER_UNCERTAIN);
    exact_row(&mut h.w, lost, 1, "make", uncertain);
    h.w.kill(h.agent);
    let why = h.why(unread);
    assert!(why.starts_with("keep unreadable"), "{why}");
    h.assert_all(&[lost], "keep lineage_uncertain");
}

#[test]
fn readme_counts_the_recognised_agents() {
    let rules = crate::rules::built_in();
    let agents = rules
        .rules()
        .iter()
        .filter(|rule| rule.action == Action::Agent);
    // `reaper run` is no agent.
    let names: Vec<&str> = agents
        .map(|rule| &*rule.name)
        .filter(|name| *name != "reaper-run")
        .collect();
    let named = [
        "claude-code",
        "codex",
        "gemini-cli",
        "copilot-cli",
        "opencode",
    ];
    assert_eq!(names[..5], named);
    assert_eq!(names.len() - named.len(), 27);
}
