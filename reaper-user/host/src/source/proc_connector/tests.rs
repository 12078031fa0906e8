//! Tests of the translation of messages, with a simulated /proc.

use std::os::unix::fs::symlink;
use std::sync::{Arc, Mutex};

use hashbrown::HashMap;

use super::parse::ConnectorEvent;
use super::*;
use reaper_model::event::{EventKind, ExitStatus, ProcessKey, Provenance, TICK_NS, Uids};

mod bytes;
mod socket;
mod successors;
mod unread;

const START: u64 = 500 * TICK_NS;

/// A directory that stands for /proc, and a translator that reads it.
struct World {
    dir: tempfile::TempDir,
    translator: Translator,
    /// Inode numbers of pidfds by pid. Other processes have none.
    inodes: Arc<Mutex<HashMap<u32, u64>>>,
    /// Pids of processes that have run another program since the message that is translated.
    execed: Vec<u32>,
}

impl World {
    /// Creates a world with a pre-existing init.
    fn new() -> World {
        World::with_read_timeout(Duration::from_secs(20))
    }
    fn with_read_timeout(timeout: Duration) -> World {
        let dir = tempfile::tempdir().unwrap();
        let inodes = Arc::<Mutex<HashMap<u32, u64>>>::default();
        let shared = Arc::clone(&inodes);
        let read = move |pid: u32| shared.lock().unwrap().get(&pid).copied().unwrap_or(0);
        let translator = Translator::new(Procfs::new(dir.path()), Box::new(read), timeout);
        let mut world = World {
            dir,
            translator,
            inodes,
            execed: Vec::new(),
        };
        world.process(1, 0, 0);
        world.reconcile();
        world
    }

    /// Adds a living process that started in a tick.
    fn process(&self, pid: u32, parent: u32, tick: u64) {
        self.stat(pid, parent, tick, 'S', 1);
        self.file(pid, "status", "Uid:\t1000\t1001\t0\t0\nNSpid:\t7\n");
        self.file(pid, "cmdline", "prog\0--flag\0");
        self.file(pid, "cgroup", "");
        let exe = self.dir.path().join(pid.to_string()).join("exe");
        drop(symlink("/usr/bin/prog", exe));
    }
    fn stat(&self, pid: u32, parent: u32, tick: u64, state: char, threads: u32) {
        let zeros = " 0".repeat(25);
        let stat = format!(
            "{pid} (prog) {state} {parent} 4 5 0 -1 0 0 0 0 0 1 2 0 0 20 0 {threads} 0 {tick}{zeros} 0 0\n"
        );
        self.file(pid, "stat", &stat);
    }
    fn file(&self, pid: u32, name: &str, content: &str) {
        let dir = self.dir.path().join(pid.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(name), content).unwrap();
    }
    fn set_inode(&self, pid: u32, inode: u64) {
        self.inodes.lock().unwrap().insert(pid, inode);
    }
    fn vanish(&self, pid: u32) {
        std::fs::remove_dir_all(self.dir.path().join(pid.to_string())).unwrap();
    }

    /// Translates an event, and returns the resulting events in short form.
    fn translate(&mut self, time: u64, what: ConnectorEvent) -> String {
        self.events_of(|translator, out| translator.translate(time, what, out))
            .0
    }
    fn events_of<T>(
        &mut self,
        work: impl FnOnce(&mut Translator, &mut Output<'_>) -> T,
    ) -> (String, T) {
        let mut events = Vec::new();
        let mut out = Output {
            may_have_execed: &mut |pid| self.execed.contains(&pid),
            sink: &mut |event| events.push(short(&event)),
        };
        let result = work(&mut self.translator, &mut out);
        (events.join(", "), result)
    }
    fn reconcile(&mut self) {
        self.translator.reconcile().unwrap();
    }
    fn fork(&mut self, time: u64, parent: u32, child: u32) -> String {
        self.translate(time, ConnectorEvent::Fork { parent, child })
    }
    fn exec(&mut self, time: u64, process: u32) -> String {
        self.translate(time, ConnectorEvent::Exec { process })
    }
    fn exit(&mut self, time: u64, thread: u32, process: u32, status: u32) -> String {
        let parent = 1;
        let what = ConnectorEvent::Exit {
            thread,
            process,
            status,
            parent,
        };
        self.translate(time, what)
    }
}

/// Returns the pid and the start in ns since [`START`].
fn name(key: ProcessKey) -> String {
    match key.start.checked_sub(START) {
        Some(after) => format!("{}+{after}", key.pid),
        None => format!("{}", key.pid),
    }
}

fn short(event: &Event) -> String {
    let by = match event.provenance {
        Provenance::Kernel => "",
        Provenance::Procfs => " seen",
        Provenance::Inferred => " inferred",
    };
    let of = |parent: &Option<ProcessKey>| parent.map_or("none".into(), name);
    let told = match &event.kind {
        EventKind::Fork {
            child,
            parent,
            creator,
            uids,
            namespace_init,
            ..
        } => {
            assert_eq!(parent, creator);
            let init = if *namespace_init { " init" } else { "" };
            format!(
                "fork {} of {} uid {}{init}",
                name(*child),
                of(parent),
                uids.real
            )
        }
        EventKind::Exec {
            key,
            parent,
            uids,
            image,
            ..
        } => {
            let exe = String::from_utf8_lossy(&image.exe);
            let exe = if image.is_unread() { "?" } else { &exe };
            format!(
                "exec {} of {} uid {} {exe}",
                name(*key),
                of(parent),
                uids.real
            )
        }
        EventKind::Exit {
            key,
            exit_status: ended,
            ..
        } => match ended {
            ExitStatus::Exited(code) => format!("exit {} {code}", name(*key)),
            ExitStatus::Signalled { signal, .. } => format!("exit {} by {signal}", name(*key)),
            ExitStatus::Unknown => format!("exit {} ?", name(*key)),
        },
        EventKind::Discovered(seen) => {
            let exact = if seen.exact { " exact" } else { "" };
            format!("row {} uid {}{exact}", name(seen.key), seen.uids.real)
        }
        other => panic!("{other:?}"),
    };
    told + by
}

#[test]
fn process_is_reported_from_fork_to_exit() {
    let mut w = World::new();
    w.process(10, 1, 500);
    assert_eq!(w.fork(START + 7, 1, 10), "fork 10+7 of 1 uid 1000");
    assert_eq!(
        w.exec(START + 8, 10),
        "exec 10+7 of 1 uid 1000 /usr/bin/prog"
    );
    w.stat(10, 1, 500, 'Z', 1);
    assert_eq!(w.exit(START + 9, 10, 10, 3 << 8), "exit 10+7 3");
    assert_eq!(w.translator.len(), 1);
}

#[test]
fn process_that_exits_before_it_is_read_is_reported() {
    let mut w = World::new();
    w.process(10, 1, 400);
    assert_eq!(w.fork(START + 7, 10, 11), "fork 11+7 of 10 uid 0");
    assert_eq!(w.exec(START + 8, 11), "exec 11+7 of none uid 0 ");
    assert_eq!(w.exit(START + 9, 11, 11, 9), "exit 11+7 by 9");
    // Once the parent's user ids are known, the child has them.
    assert_eq!(
        w.exec(START + 10, 10),
        "exec 10 of 1 uid 1000 /usr/bin/prog"
    );
    assert_eq!(w.fork(START + 11, 10, 11), "fork 11+11 of 10 uid 1000");
    // The parent is unknown.
    assert_eq!(w.fork(START + 12, 77, 12), "fork 12+12 of none uid 0");
    assert_eq!(w.exit(START + 13, 77, 77, 0), "");
}

#[test]
fn start_lies_in_the_tick_that_proc_shows() {
    for (tick, time, start) in [
        // The time of the event was taken after the next tick had begun.
        (499, START + 20, START - 1),
        (500, START + 20, START + 20),
        // The tick is that of a later process with the same pid.
        (501, START + 20, START + 20),
    ] {
        let mut w = World::new();
        w.process(10, 1, tick);
        w.fork(time, 1, 10);
        let known = w.translator.key(10).unwrap();
        assert_eq!(known, ProcessKey { pid: 10, start }, "{tick}");
    }
}

#[test]
fn processes_with_the_same_pid_and_tick_are_distinguished() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    // Its exit is reported late: another process has its pid, so it looks alive.
    assert_eq!(w.exit(START + 2, 10, 10, 5 << 8), "");
    assert_eq!(
        w.fork(START + 3, 1, 10),
        "exit 10+1 5 inferred, fork 10+3 of 1 uid 1000"
    );
    // Its exit was not reported.
    assert_eq!(
        w.fork(START + 4, 1, 10),
        "exit 10+3 ? inferred, fork 10+4 of 1 uid 1000"
    );
    w.vanish(10);
    assert_eq!(w.exit(START + 5, 10, 10, 0), "exit 10+4 0");
}

#[test]
fn process_found_before_its_fork_message_is_not_duplicated() {
    for vanished in [false, true] {
        let mut w = World::new();
        w.process(10, 1, 500);
        w.reconcile();
        let uid = if vanished { 0 } else { 1000 };
        if vanished {
            w.vanish(10);
        }
        let forked = w.fork(START + TICK_NS - 1, 1, 10);
        assert_eq!(forked, format!("fork 10+9999999 of 1 uid {uid}"));
        // A process known since long before is another one.
        let mut w = World::new();
        w.process(10, 1, 300);
        w.reconcile();
        w.process(10, 1, 500);
        if vanished {
            w.vanish(10);
        }
        let forked = w.fork(START + 7, 1, 10);
        assert_eq!(
            forked,
            format!("exit 10 ? inferred, fork 10+7 of 1 uid {uid}")
        );
    }
}

#[test]
fn messages_about_an_earlier_owner_of_the_pid_are_ignored() {
    let mut w = World::new();
    w.process(10, 1, 510);
    w.reconcile();
    let fork = w.fork(START + 1, 1, 10);
    assert_eq!(fork, "fork 10+1 of 1 uid 0");
    assert_eq!(w.exec(START + 2, 10), "");
    assert_eq!(w.exit(START + 3, 10, 10, 0), "");
    let key = w.translator.key(10).unwrap();
    assert_eq!(key.start, 510 * TICK_NS);
}

#[test]
fn process_with_exited_leader_is_not_dead() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    w.stat(10, 1, 500, 'S', 3);
    assert_eq!(w.exit(START + 2, 11, 10, 0), "", "a thread");
    w.stat(10, 1, 500, 'Z', 2);
    assert_eq!(w.exit(START + 3, 10, 10, 0), "", "its leader");
    assert_eq!(w.exit(START + 4, 12, 10, 0), "", "not the last one");
    w.stat(10, 1, 500, 'Z', 1);
    assert_eq!(w.exit(START + 5, 13, 10, 9), "exit 10+1 by 9");
    assert_eq!(w.exit(START + 6, 14, 10, 9), "", "already reported");
}

#[test]
fn thread_that_execs_becomes_the_leader() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    assert_eq!(w.exit(START + 2, 10, 10, 7 << 8), "");
    w.exec(START + 3, 10);
    // The exit of another thread is not checked any more.
    w.vanish(10);
    assert_eq!(w.exit(START + 4, 11, 10, 0), "");
    assert_eq!(w.exit(START + 5, 10, 10, 0), "exit 10+1 0");
}

#[test]
fn unreadable_program_is_reported_as_unread_or_unknown() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    // The process exists but cannot be read, so the facts of its previous program no longer hold.
    w.file(10, "status", "Uid:\tinvalid\n");
    assert_eq!(w.exec(START + 2, 10), "exec 10+1 of none uid 1000 ?");
    // Another process has its pid, so the first program stays unknown as well.
    w.process(10, 1, 501);
    let unknown = "exec 10+1 of none uid 1000 ";
    assert_eq!(w.exec(START + 3, 10), format!("{unknown}, {unknown}"));
    w.stat(10, 1, 500, 'Z', 1);
    assert_eq!(w.exec(START + 4, 10), unknown);
}

/// A client may exit before its program is read. Its server then runs the same program without another exec.
#[test]
fn child_of_an_unknown_program_is_read_itself() {
    let mut w = World::new();
    w.process(10, 1, 400);
    w.process(12, 11, 500);
    assert_eq!(w.fork(START + 1, 10, 11), "fork 11+1 of 10 uid 0");
    assert_eq!(w.exec(START + 2, 11), "exec 11+1 of none uid 0 ");
    assert_eq!(
        w.fork(START + 3, 11, 12),
        "fork 12+3 of 11+1 uid 1000, exec 12+3 of 11+1 uid 1000 /usr/bin/prog"
    );
    // From then on its program is known.
    w.process(13, 12, 500);
    assert_eq!(w.fork(START + 4, 12, 13), "fork 13+4 of 12+3 uid 1000");
}

/// In `sh -c 'server & exec agent'` the messages may be read when the agent already runs. The server is not its child.
#[test]
fn later_program_is_not_reported_for_an_earlier_exec() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    w.execed.push(10);
    assert_eq!(w.exec(START + 2, 10), "exec 10+1 of none uid 1000 ");
    let uids = Uids {
        real: 5,
        effective: 5,
    };
    let (thread, process) = (10, 10);
    let changed = ConnectorEvent::Uids {
        thread,
        process,
        uids,
    };
    assert_eq!(w.translate(START + 3, changed), "");
    w.process(11, 10, 500);
    w.execed.push(11);
    assert_eq!(
        w.fork(START + 4, 10, 11),
        "fork 11+4 of 10+1 uid 1000, exec 11+4 of none uid 1000 "
    );
    w.execed.clear();
    assert_eq!(
        w.exec(START + 5, 10),
        "exec 10+1 of 1 uid 1000 /usr/bin/prog"
    );
}

#[test]
fn new_uids_are_reported_as_a_row() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    let becomes = |thread, real| ConnectorEvent::Uids {
        thread,
        process: 10,
        uids: Uids {
            real,
            effective: 1001,
        },
    };
    assert_eq!(w.translate(START + 2, becomes(10, 1000)), "", "unchanged");
    w.file(10, "status", "Uid:\t5\t1001\t0\t0\n");
    assert_eq!(w.translate(START + 3, becomes(11, 5)), "", "a thread");
    assert_eq!(
        w.translate(START + 4, becomes(10, 5)),
        "row 10+1 uid 5 exact seen"
    );
    // Children inherit them.
    assert_eq!(w.fork(START + 5, 10, 11), "fork 11+5 of 10+1 uid 5");
}

#[test]
fn fork_of_a_pid_namespace_init_is_marked() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.file(10, "status", "Uid:\t5\t5\t0\t0\nNSpid:\t10\t1\n");
    assert_eq!(w.fork(START + 1, 1, 10), "fork 10+1 of 1 uid 5 init");
}

#[test]
fn reconciliation_adds_processes_and_keeps_exited_ones_once() {
    let mut w = World::new();
    for pid in [10, 11, 12, 13] {
        w.process(pid, 1, 500);
        w.fork(START + 1, 1, pid);
    }
    w.vanish(11);
    w.stat(12, 1, 500, 'Z', 1);
    w.process(13, 1, 600);
    w.process(14, 1, 600);
    w.stat(10, 1, 500, 'Z', 2);
    w.reconcile();
    let starts = [10, 13, 14].map(|pid| w.translator.key(pid).unwrap().start);
    assert_eq!(starts, [START + 1, 600 * TICK_NS, 600 * TICK_NS]);
    assert_eq!(w.exit(START + 2, 11, 11, 9), "exit 11+1 by 9");
    // The exit of this process's leader was lost.
    w.stat(10, 1, 500, 'Z', 1);
    assert_eq!(w.exit(START + 2, 15, 10, 9), "exit 10+1 by 9");
    // The fork of this process was lost, but its zombie still shows its key.
    w.stat(16, 1, 500, 'Z', 1);
    assert_eq!(w.exit(START + 3, 16, 16, 0), "exit 16+0 0");
    // A process whose exit is lost is removed by the second reconciliation.
    w.vanish(12);
    w.vanish(13);
    w.vanish(14);
    w.reconcile();
    assert_eq!(w.translator.len(), 3);
    w.reconcile();
    assert_eq!(w.translator.len(), 1);
}
