//! Stories of processes over a /proc of files.

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

/// A /proc of files, and what is told over it.
struct World {
    dir: tempfile::TempDir,
    translator: Translator,
    /// By pid; nobody else has one.
    numbers: Arc<Mutex<HashMap<u32, u64>>>,
    /// Who has run another program since what is told.
    moved_on: Vec<u32>,
}

impl World {
    /// With an init, which was there before.
    fn new() -> World {
        World::patient(Duration::from_secs(20))
    }
    fn patient(patience: Duration) -> World {
        let dir = tempfile::tempdir().unwrap();
        let numbers = Arc::<Mutex<HashMap<u32, u64>>>::default();
        let of = Arc::clone(&numbers);
        let number = move |pid: u32| of.lock().unwrap().get(&pid).copied().unwrap_or(0);
        let translator = Translator::new(Procfs::new(dir.path()), Box::new(number), patience);
        let mut world = World {
            dir,
            translator,
            numbers,
            moved_on: Vec::new(),
        };
        world.process(1, 0, 0);
        world.survey();
        world
    }

    /// A process that lives and was started in a tick.
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
    fn number(&self, pid: u32, number: u64) {
        self.numbers.lock().unwrap().insert(pid, number);
    }
    fn vanish(&self, pid: u32) {
        std::fs::remove_dir_all(self.dir.path().join(pid.to_string())).unwrap();
    }

    /// What is told of something, in short.
    fn told(&mut self, time: u64, what: ConnectorEvent) -> String {
        self.translated(|translator, out| translator.take(time, what, out))
            .0
    }
    fn translated<T>(
        &mut self,
        work: impl FnOnce(&mut Translator, &mut Output<'_>) -> T,
    ) -> (String, T) {
        let mut told = Vec::new();
        let mut out = Output {
            has_moved_on: &mut |pid| self.moved_on.contains(&pid),
            sink: &mut |event| told.push(short(&event)),
        };
        let result = work(&mut self.translator, &mut out);
        (told.join(", "), result)
    }
    fn survey(&mut self) {
        self.translator.survey().unwrap();
    }
    fn fork(&mut self, time: u64, parent: u32, child: u32) -> String {
        self.told(time, ConnectorEvent::Fork { parent, child })
    }
    fn exec(&mut self, time: u64, process: u32) -> String {
        self.told(time, ConnectorEvent::Exec { process })
    }
    fn exit(&mut self, time: u64, thread: u32, process: u32, status: u32) -> String {
        let parent = 1;
        let what = ConnectorEvent::Exit {
            thread,
            process,
            status,
            parent,
        };
        self.told(time, what)
    }
}

/// Times are told from [`START`] on.
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
    let of = |parent: &Option<ProcessKey>| parent.map_or("nobody".into(), name);
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
fn a_life() {
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
fn one_that_is_gone_before_it_is_looked_at() {
    let mut w = World::new();
    w.process(10, 1, 400);
    assert_eq!(w.fork(START + 7, 10, 11), "fork 11+7 of 10 uid 0");
    assert_eq!(w.exec(START + 8, 11), "exec 11+7 of nobody uid 0 ");
    assert_eq!(w.exit(START + 9, 11, 11, 9), "exit 11+7 by 9");
    // What it had from its parent, once that is known.
    assert_eq!(
        w.exec(START + 10, 10),
        "exec 10 of 1 uid 1000 /usr/bin/prog"
    );
    assert_eq!(w.fork(START + 11, 10, 11), "fork 11+11 of 10 uid 1000");
    // A parent of whom nothing can be known.
    assert_eq!(w.fork(START + 12, 77, 12), "fork 12+12 of nobody uid 0");
    assert_eq!(w.exit(START + 13, 77, 77, 0), "");
}

#[test]
fn a_start_lies_in_the_tick_that_proc_tells() {
    for (tick, time, start) in [
        // The event's time was taken when the next tick had begun.
        (499, START + 20, START - 1),
        (500, START + 20, START + 20),
        // It is another's: the pid has been given away again.
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
fn successors_in_the_same_tick_are_others() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    // Its end is told late, when another has its pid, and so it looks alive.
    assert_eq!(w.exit(START + 2, 10, 10, 5 << 8), "");
    assert_eq!(
        w.fork(START + 3, 1, 10),
        "exit 10+1 5 inferred, fork 10+3 of 1 uid 1000"
    );
    // Without a word of its end.
    assert_eq!(
        w.fork(START + 4, 1, 10),
        "exit 10+3 ? inferred, fork 10+4 of 1 uid 1000"
    );
    w.vanish(10);
    assert_eq!(w.exit(START + 5, 10, 10, 0), "exit 10+4 0");
}

#[test]
fn one_that_was_found_before_its_fork_was_read_is_the_same() {
    for vanished in [false, true] {
        let mut w = World::new();
        w.process(10, 1, 500);
        w.survey();
        let uid = if vanished { 0 } else { 1000 };
        if vanished {
            w.vanish(10);
        }
        let forked = w.fork(START + TICK_NS - 1, 1, 10);
        assert_eq!(forked, format!("fork 10+9999999 of 1 uid {uid}"));
        // Known since long, it is another.
        let mut w = World::new();
        w.process(10, 1, 300);
        w.survey();
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
fn what_is_told_of_one_whose_successor_is_known() {
    let mut w = World::new();
    w.process(10, 1, 510);
    w.survey();
    let fork = w.fork(START + 1, 1, 10);
    assert_eq!(fork, "fork 10+1 of 1 uid 0");
    assert_eq!(w.exec(START + 2, 10), "");
    assert_eq!(w.exit(START + 3, 10, 10, 0), "");
    let key = w.translator.key(10).unwrap();
    assert_eq!(key.start, 510 * TICK_NS);
}

#[test]
fn a_leader_that_exits_first_is_not_dead() {
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
    assert_eq!(w.exit(START + 6, 14, 10, 9), "", "told once");
}

#[test]
fn a_thread_that_runs_a_program_takes_its_leaders_place() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    assert_eq!(w.exit(START + 2, 10, 10, 7 << 8), "");
    w.exec(START + 3, 10);
    // Not looked at any more.
    w.vanish(10);
    assert_eq!(w.exit(START + 4, 11, 10, 0), "");
    assert_eq!(w.exit(START + 5, 10, 10, 0), "exit 10+1 0");
}

#[test]
fn programs_that_cannot_be_known() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    // It is there, and says nothing: nothing that was known of its program holds.
    w.file(10, "status", "Uid:\tnobody\n");
    assert_eq!(w.exec(START + 2, 10), "exec 10+1 of nobody uid 1000 ?");
    // Somebody else has its pid. The first program will not be known either.
    w.process(10, 1, 501);
    let unknown = "exec 10+1 of nobody uid 1000 ";
    assert_eq!(w.exec(START + 3, 10), format!("{unknown}, {unknown}"));
    w.stat(10, 1, 500, 'Z', 1);
    assert_eq!(w.exec(START + 4, 10), unknown);
}

/// A client that is gone before it is looked at has left a server that runs what it ran, without another exec.
#[test]
fn what_is_forked_by_an_unknown_program_is_looked_at_itself() {
    let mut w = World::new();
    w.process(10, 1, 400);
    w.process(12, 11, 500);
    assert_eq!(w.fork(START + 1, 10, 11), "fork 11+1 of 10 uid 0");
    assert_eq!(w.exec(START + 2, 11), "exec 11+1 of nobody uid 0 ");
    assert_eq!(
        w.fork(START + 3, 11, 12),
        "fork 12+3 of 11+1 uid 1000, exec 12+3 of 11+1 uid 1000 /usr/bin/prog"
    );
    // Which is known from then on.
    w.process(13, 12, 500);
    assert_eq!(w.fork(START + 4, 12, 13), "fork 13+4 of 12+3 uid 1000");
}

/// `sh -c 'server & exec agent'`, of which all is read when the agent runs: the server is not its.
#[test]
fn what_is_seen_is_not_told_of_the_program_before() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    w.moved_on.push(10);
    assert_eq!(w.exec(START + 2, 10), "exec 10+1 of nobody uid 1000 ");
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
    assert_eq!(w.told(START + 3, changed), "");
    w.process(11, 10, 500);
    w.moved_on.push(11);
    assert_eq!(
        w.fork(START + 4, 10, 11),
        "fork 11+4 of 10+1 uid 1000, exec 11+4 of nobody uid 1000 "
    );
    w.moved_on.clear();
    assert_eq!(
        w.exec(START + 5, 10),
        "exec 10+1 of 1 uid 1000 /usr/bin/prog"
    );
}

#[test]
fn new_uids_are_told_as_a_row() {
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
    assert_eq!(w.told(START + 2, becomes(10, 1000)), "", "as it was");
    w.file(10, "status", "Uid:\t5\t1001\t0\t0\n");
    assert_eq!(w.told(START + 3, becomes(11, 5)), "", "a thread");
    assert_eq!(
        w.told(START + 4, becomes(10, 5)),
        "row 10+1 uid 5 exact seen"
    );
    // The children have them too.
    assert_eq!(w.fork(START + 5, 10, 11), "fork 11+5 of 10+1 uid 5");
}

#[test]
fn inits_of_pid_namespaces() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.file(10, "status", "Uid:\t5\t5\t0\t0\nNSpid:\t10\t1\n");
    assert_eq!(w.fork(START + 1, 1, 10), "fork 10+1 of 1 uid 5 init");
}

#[test]
fn after_a_loss_those_who_have_come_are_known_and_an_end_that_is_still_to_be_read_is_told() {
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
    w.survey();
    let starts = [10, 13, 14].map(|pid| w.translator.key(pid).unwrap().start);
    assert_eq!(starts, [START + 1, 600 * TICK_NS, 600 * TICK_NS]);
    assert_eq!(w.exit(START + 2, 11, 11, 9), "exit 11+1 by 9");
    // The leader of the first has exited unseen.
    w.stat(10, 1, 500, 'Z', 1);
    assert_eq!(w.exit(START + 2, 15, 10, 9), "exit 10+1 by 9");
    // Of a zombie the fork was lost: it has a name yet.
    w.stat(16, 1, 500, 'Z', 1);
    assert_eq!(w.exit(START + 3, 16, 16, 0), "exit 16+0 0");
    // Whose end is lost is forgotten by the second look.
    w.vanish(12);
    w.vanish(13);
    w.vanish(14);
    w.survey();
    assert_eq!(w.translator.len(), 3);
    w.survey();
    assert_eq!(w.translator.len(), 1);
}
