//! A /proc of files, where a pipe without a writer holds its reader for good, and real processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use nix::sys::stat::Mode;

use super::*;
use crate::source::procfs::Procfs;
use reaper_model::activity::Activity;
use reaper_model::facts::{self, InheritedFacts, KernelSession};
use reaper_model::leftover::EnvMarkers;
use reaper_model::ruleset::{Action, Class, Condition, Field, Matcher, Pattern, Rule};

mod scripts;

const ALL_BUT_CPU: [FactSet; 6] = [
    FactSet::INHERITED,
    FactSet::STDIN,
    FactSet::MARKERS,
    FactSet::UNIT,
    FactSet::LISTENING,
    FactSet::KERNEL_SESSION,
];

/// Owner of the processes that are read.
const USER: u32 = 1000;

struct Fake(tempfile::TempDir);

impl Fake {
    fn new() -> Fake {
        Fake(tempfile::tempdir().unwrap())
    }
    fn root(&self) -> &Path {
        self.0.path()
    }
    fn file(&self, path: String, content: &str) -> PathBuf {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }
    /// A process with a socket that listens, a mark and a unit; its start is its pid in ticks.
    fn process(&self, pid: u32) -> ProcessKey {
        let stat = format!("{pid} (x) S 1 9 8 34816 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 {pid} 0\n");
        self.file(format!("{pid}/stat"), &stat);
        self.file(format!("{pid}/environ"), "A=1\0REAPER_KEEP=1\0");
        self.file(format!("{pid}/cgroup"), "0::/system.slice/x.service\n");
        let rows = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             \x20  0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1 0 100 0 0 10 0\n\
             \x20  1: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 778 1 0 100 0 0 10 0\n";
        self.file(format!("{pid}/net/tcp"), rows);
        fs::create_dir_all(self.root().join(format!("{pid}/fd"))).unwrap();
        fs::create_dir_all(self.work()).unwrap();
        symlink(self.work(), self.root().join(format!("{pid}/cwd"))).unwrap();
        self.file_of(pid, 0, "/dev/pts/3");
        self.file_of(pid, 4, "socket:[777]");
        ProcessKey {
            pid,
            start: u64::from(pid) * TICK_NS + 17,
        }
    }
    /// Where processes work.
    fn work(&self) -> PathBuf {
        self.root().join("work/app")
    }
    fn file_of(&self, pid: u32, fd: u32, link: &str) {
        symlink(link, self.root().join(format!("{pid}/fd/{fd}"))).unwrap();
    }
    /// One whose environment nobody gets to the end of; the pipe.
    fn stuck(&self, pid: u32) -> (ProcessKey, PathBuf) {
        let key = self.process(pid);
        let environ = self.root().join(format!("{pid}/environ"));
        fs::remove_file(&environ).unwrap();
        nix::unistd::mkfifo(&environ, Mode::S_IRWXU).unwrap();
        (key, environ)
    }
    fn reader(&self) -> FactPool {
        FactPool::new(self.root(), rules())
    }
}

/// They ask for `REAPER_KEEP=1`, and for `Daemon` in a command line.
fn rules() -> Ruleset {
    let daemon = Condition {
        field: Field::Argv,
        any_of: vec![Pattern::argv("* Daemon*").unwrap()],
        negative: false,
    };
    let daemon = Matcher::new(vec![daemon]);
    Ruleset::new(vec![Rule::new("daemon", Action::Keep, vec![daemon])])
}

fn needs(all: &[FactSet]) -> FactSet {
    all.iter().fold(FactSet::NONE, |sum, one| sum | *one)
}

/// Waits for what is urgent.
fn wait(reader: &mut FactPool) -> Vec<FactAnswer> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let limit = Duration::from_secs(30);
    let waited = runtime.block_on(async { tokio::time::timeout(limit, reader.ready()).await });
    waited.expect("an answer, be it that there is none");
    reader.take()
}

/// Asks and waits.
fn ask(reader: &mut FactPool, key: ProcessKey, needs: FactSet) -> Facts {
    reader.request(key, None, USER, needs, Urgency::Urgent);
    let mut facts = Facts::default();
    while !reader.open.is_empty() {
        for answer in wait(reader) {
            assert_eq!(answer.key, key);
            facts.update(answer.requested, answer.found);
        }
    }
    facts
}

#[test]
fn all_facts_of_a_process() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let expected = Facts {
        markers: Fact::Known(1),
        unit: Fact::Known("x.service".into()),
        listening: Fact::Known(true),
        cpu: Fact::Unread,
        kernel_session: Fact::Known(KernelSession { sid: 8, tty: 34816 }),
        stdin_is_terminal: Fact::Known(true),
        inherited: inherited("REAPER_KEEP=1\0", Some(&fake.work())),
        conversations: Fact::Unread,
        activity: Fact::Unread,
        stdio: Fact::Unread,
        arguments: Fact::Unread,
        script: Fact::Unread,
    };
    let key = fake.process(40);
    assert_eq!(ask(&mut reader, key, needs(&ALL_BUT_CPU)), expected);
    // Nothing is left to wake up for.
    assert!(reader.timers.is_empty() && reader.about.is_empty());
    // The other end of a connection, and a socket of another kind.
    fs::remove_file(fake.root().join("40/fd/4")).unwrap();
    fake.file_of(40, 4, "socket:[778]");
    fake.file_of(40, 5, "socket:[999]");
    let facts = ask(&mut reader, key, FactSet::LISTENING);
    assert_eq!(facts.listening, Fact::Known(false));
    // What it reads from: something else, and nothing.
    for file in ["pipe:[12]", "/dev/null"] {
        fs::remove_file(fake.root().join("40/fd/0")).unwrap();
        fake.file_of(40, 0, file);
        assert_eq!(
            ask(&mut reader, key, FactSet::STDIN).stdin_is_terminal,
            Fact::Known(false),
            "{file}"
        );
    }
    fs::remove_file(fake.root().join("40/fd/0")).unwrap();
    assert_eq!(
        ask(&mut reader, key, FactSet::STDIN).stdin_is_terminal,
        Fact::Known(false)
    );
}

fn inherited(environ: &str, directory: Option<&Path>) -> Fact<Arc<InheritedFacts>> {
    let trace = EnvMarkers::of(environ.as_bytes(), true);
    let directory = directory.map(Arc::from);
    Fact::Known(Arc::new(InheritedFacts {
        env_markers: trace,
        directory,
    }))
}

#[test]
fn what_a_process_has_from_its_makers() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let (work, place) = (fake.work(), fake.root().join("45/cwd"));
    let key = fake.process(45);
    let mut has = |environ: &str| {
        fake.file("45/environ".into(), environ);
        ask(&mut reader, key, FactSet::INHERITED).inherited
    };
    let marks = "CLAUDECODE=1\0CLAUDE_PID=12\0TMUX=/tmp/t,7,0\0";
    assert_eq!(has(marks), inherited(marks, Some(&work)));
    // A home, and what is above it, is everybody's; what is in it is not.
    for (home, tells) in [
        (work.clone(), false),
        (work.join("me"), false),
        (fake.root().join("work/me"), true),
    ] {
        let environ = format!("HOME={}\0", home.display());
        assert_eq!(
            has(&environ),
            inherited("", tells.then_some(&*work)),
            "{environ}"
        );
    }
    fs::set_permissions(&work, fs::Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(
        has("A=1\0"),
        inherited("", None),
        "everybody may write there"
    );
    fs::remove_file(&place).unwrap();
    symlink("/", &place).unwrap();
    assert_eq!(has("A=1\0"), inherited("", None));
    // Not known is neither here nor there.
    fs::remove_file(&place).unwrap();
    assert_eq!(has("A=1\0"), Fact::Unreadable);
    symlink("/nowhere/at/all", &place).unwrap();
    assert_eq!(has("A=1\0"), Fact::Unreadable);
}

#[test]
fn what_cannot_be_read_is_unreadable() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let all = needs(&ALL_BUT_CPU)
        | FactSet::CPU
        | FactSet::CONVERSATIONS
        | FactSet::ACTIVITY
        | FactSet::STDIO
        | FactSet::ARGUMENTS
        | FactSet::SCRIPT;
    let key = fake.process(41);
    // Whoever has the pid now.
    let before = ProcessKey { start: 1, ..key };
    assert_eq!(ask(&mut reader, before, all), Facts::unreadable());
    let absent = ProcessKey { pid: 9, start: 0 };
    assert_eq!(ask(&mut reader, absent, all), Facts::unreadable());
    let zombie = "41 (x) Z 1 9 8 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 41 0\n";
    fake.file("41/stat".into(), zombie);
    assert_eq!(ask(&mut reader, key, all), Facts::unreadable());
    let key = fake.process(42);
    for file in ["42/environ", "42/cgroup", "42/net/tcp"] {
        fs::remove_file(fake.root().join(file)).unwrap();
    }
    let facts = ask(&mut reader, key, needs(&ALL_BUT_CPU));
    assert_eq!(facts.markers, Fact::Unreadable);
    assert_eq!(facts.unit, Fact::Unreadable);
    assert_eq!(facts.listening, Fact::Unreadable);
    assert!(matches!(facts.kernel_session, Fact::Known(_)), "{facts:?}");
    // The mark may stand behind the bound.
    let key = fake.process(43);
    let long = format!("A={}\0REAPER_KEEP=1\0", "x".repeat(reading::ENVIRON_MAX));
    fake.file("43/environ".into(), &long);
    let facts = ask(&mut reader, key, FactSet::MARKERS);
    assert_eq!(facts.markers, Fact::Unreadable);
}

/// A program of which an exec has told the first 8 KiB of this command line.
fn cut(argv: &str) -> Arc<Image> {
    let told = argv.len().min(8192);
    Arc::new(Image {
        comm: b"x".into(),
        exe: b"/bin/x".into(),
        argv: argv.as_bytes()[..told].into(),
        argv_full_len: argv.len() as u32,
        truncated: told < argv.len(),
        ..Image::default()
    })
}

/// Asks what the rules say of the whole command line; the names of those that judge it.
fn judged(reader: &mut FactPool, key: ProcessKey, image: &Arc<Image>) -> Fact<Vec<String>> {
    reader.request(key, Some(image), USER, FactSet::ARGUMENTS, Urgency::Urgent);
    let [answer] = &wait(reader)[..] else {
        panic!("one answer");
    };
    assert_eq!((answer.key, answer.requested), (key, FactSet::ARGUMENTS));
    let rules = rules();
    match &answer.found.arguments {
        Fact::Unread => panic!("it was asked for"),
        Fact::Unreadable => Fact::Unreadable,
        Fact::Known(whole) => {
            assert!(Arc::ptr_eq(&whole.image, image));
            assert_eq!(whole.class, Class::Plain);
            let names = whole
                .member_rules
                .iter()
                .map(|id| rules.name(*id).to_string());
            Fact::Known(names.collect())
        }
    }
}

#[test]
fn rules_are_asked_about_the_whole_command_line() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let key = fake.process(44);
    let argv = |len: usize, last: &str| format!("x\0{}\0{last}\0", "y".repeat(len));
    let daemon = || Fact::Known(vec!["daemon".to_owned()]);
    let most = reading::ARGUMENTS_MAX - argv(0, "Daemon").len();
    for (told, found, expected) in [
        (argv(100_000, "Daemon"), None, daemon()),
        (argv(100_000, "Main"), None, Fact::Known(vec![])),
        (argv(most, "Daemon"), None, daemon()),
        (argv(most + 1, "Daemon"), None, Fact::Unreadable),
        // Another one, what a process has written over it, and a part of it.
        (
            argv(9_000, "Main"),
            Some(argv(9_001, "Main")),
            Fact::Unreadable,
        ),
        (
            argv(9_000, "Main"),
            Some("x: idle\0".into()),
            Fact::Unreadable,
        ),
        (argv(9_000, "Main"), Some(argv(9_000, "")), Fact::Unreadable),
    ] {
        fake.file("44/cmdline".into(), &found.unwrap_or_else(|| told.clone()));
        assert_eq!(judged(&mut reader, key, &cut(&told)), expected);
    }
    // Nothing is known of what it runs, or nothing can be read.
    let facts = ask(&mut reader, key, FactSet::ARGUMENTS);
    assert_eq!(facts.arguments, Fact::Unreadable);
    let cmdline = fake.root().join("44/cmdline");
    fs::remove_file(&cmdline).unwrap();
    let image = cut(&argv(9_000, "Main"));
    assert_eq!(judged(&mut reader, key, &image), Fact::Unreadable);
    nix::unistd::mkfifo(&cmdline, Mode::S_IRWXU).unwrap();
    assert_eq!(judged(&mut reader, key, &image), Fact::Unreadable);
}

#[test]
fn whole_command_line_of_a_real_process_is_read() {
    let mut reader = FactPool::new("/proc", rules());
    let long = "y".repeat(100_000);
    let (_own, key) = Own::start(
        shell("read x")
            .stdin(Stdio::piped())
            .args([&long, "Daemon"]),
    );
    let argv = format!("sh\0-c\0echo up; read x\0{long}\0Daemon\0");
    let daemon = Fact::Known(vec!["daemon".to_owned()]);
    assert_eq!(judged(&mut reader, key, &cut(&argv)), daemon);
    let table = scan_processes(&Procfs::default()).unwrap();
    let image = &table.rows[&key.pid].entry.image;
    assert_eq!(image.argv, argv.as_bytes());
    assert!(!image.truncated);
}

#[test]
fn a_thread_that_is_stuck_costs_only_itself() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let stuck: Vec<_> = (50..64).map(|pid| fake.stuck(pid)).collect();
    // As many as there are threads at first, and one more behind them.
    let fine = fake.process(70);
    for (key, _) in &stuck[..2] {
        reader.request(*key, None, USER, FactSet::MARKERS, Urgency::Urgent);
    }
    reader.request(fine, None, USER, FactSet::MARKERS, Urgency::Urgent);
    let mut answers = Vec::new();
    while answers.len() < 3 {
        answers.extend(wait(&mut reader));
    }
    for answer in &answers {
        let read = answer.key == fine;
        let expected = if read {
            Fact::Known(1)
        } else {
            Fact::Unreadable
        };
        assert_eq!(answer.found.markers, expected, "{:?}", answer.key);
    }
    // More than there can be threads: even then there is an answer.
    for (key, _) in &stuck[2..] {
        reader.request(*key, None, USER, FactSet::MARKERS, Urgency::Urgent);
    }
    reader.request(fine, None, USER, FactSet::MARKERS, Urgency::Urgent);
    // Another user has threads left.
    let other = fake.process(71);
    reader.request(other, None, USER + 1, FactSet::MARKERS, Urgency::Urgent);
    answers.clear();
    while answers.len() < stuck.len() {
        answers.extend(wait(&mut reader));
    }
    for answer in &answers {
        let is_read = answer.found.markers == Fact::Known(1);
        assert_eq!(is_read, answer.key == other, "{:?}", answer.key);
    }
    // They come loose, and what they have read by then is nobody's any more.
    let held: Vec<_> = stuck
        .iter()
        .map(|(_, pipe)| {
            fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(pipe)
                .unwrap()
        })
        .collect();
    drop(held);
    let loose = Instant::now();
    while ask(&mut reader, fine, FactSet::MARKERS).markers != Fact::Known(1) {
        assert!(
            loose.elapsed() < Duration::from_secs(60),
            "nobody reads any more"
        );
        for (_, pipe) in &stuck {
            drop(fs::OpenOptions::new().read(true).write(true).open(pipe));
        }
    }
}

#[test]
fn what_nobody_waits_for_wakes_nobody() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let (first, second) = (fake.process(80), fake.process(81));
    for _ in 0..3 {
        reader.request(first, None, USER, FactSet::UNIT, Urgency::Prefetch);
    }
    assert_eq!(reader.open.len(), 1, "asked twice");
    let mut answers = Vec::new();
    while answers.is_empty() {
        answers = reader.take();
    }
    assert!(!reader.ready && answers.len() == 1 && answers[0].requested == FactSet::UNIT);
    // One is asked for ahead, and then somebody waits for it: behind one that is stuck.
    let (stuck, _pipe) = fake.stuck(82);
    reader.request(stuck, None, USER, FactSet::MARKERS, Urgency::Prefetch);
    reader.request(
        second,
        None,
        USER,
        FactSet::MARKERS | FactSet::UNIT,
        Urgency::Prefetch,
    );
    reader.request(
        second,
        None,
        USER,
        FactSet::MARKERS | FactSet::KERNEL_SESSION,
        Urgency::Urgent,
    );
    let mut known = FactSet::NONE;
    while !known.contains(FactSet::MARKERS | FactSet::UNIT | FactSet::KERNEL_SESSION) {
        for answer in wait(&mut reader) {
            assert_eq!(answer.key, second);
            known |= answer.requested;
        }
    }
    // The thread that is stuck keeps no other request.
    reader.request(
        first,
        None,
        USER,
        FactSet::KERNEL_SESSION,
        Urgency::Prefetch,
    );
    let began = Instant::now();
    while reader.take().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}

/// A child that is killed and waited for when dropped.
struct Own(Child);

impl Own {
    fn start(command: &mut Command) -> (Own, ProcessKey) {
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
        let mut own = Own(child);
        // It has become what it is to be.
        let mut line = String::new();
        let out = own.0.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        (own, ProcessKey { pid, start })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("echo up; {script}")]);
    command
}

#[test]
fn real_processes() {
    let mut reader = FactPool::new("/proc", rules());
    let (_kept, key) = Own::start(
        shell("read x")
            .stdin(Stdio::piped())
            .env("REAPER_KEEP", "1"),
    );
    let facts = ask(&mut reader, key, needs(&ALL_BUT_CPU));
    assert_eq!(facts.markers, Fact::Known(1));
    assert_eq!(facts.listening, Fact::Known(false));
    let sid = nix::unistd::getsid(None).unwrap().as_raw();
    assert!(
        matches!(facts.kernel_session, Fact::Known(now) if now.sid as i32 == sid),
        "{facts:?}"
    );
    let expected = fs::read_to_string("/proc/self/cgroup").unwrap();
    if let Fact::Known(unit) = facts.unit {
        assert!(expected.contains(&*unit), "{unit} {expected}");
    } else {
        panic!("no unit of a living process");
    }
    // Handed on as a file, which is how a server below a shell has it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = shell("exec sleep 60");
    command.stdin(Stdio::from(std::os::fd::OwnedFd::from(listener)));
    let (_server, key) = Own::start(&mut command);
    let facts = ask(&mut reader, key, FactSet::LISTENING);
    assert_eq!(facts.listening, Fact::Known(true));
    let dir = tempfile::tempdir().unwrap();
    let unix = UnixListener::bind(dir.path().join("s")).unwrap();
    let (_local, key) =
        Own::start(shell("exec sleep 60").stdin(Stdio::from(std::os::fd::OwnedFd::from(unix))));
    let facts = ask(&mut reader, key, FactSet::LISTENING);
    assert_eq!(facts.listening, Fact::Known(false));
}

#[test]
fn cpu_use_takes_two_looks() {
    let mut reader = FactPool::new("/proc", rules());
    let (_busy, busy) = Own::start(&mut shell("while :; do :; done"));
    let (_idle, idle) = Own::start(shell("read x").stdin(Stdio::piped()));
    let began = Instant::now();
    reader.request(busy, None, USER, FactSet::CPU, Urgency::Urgent);
    reader.request(idle, None, USER, FactSet::CPU, Urgency::Prefetch);
    reader.request(idle, None, USER, FactSet::CPU, Urgency::Urgent);
    let mut found = HashMap::new();
    while found.len() < 2 {
        for answer in wait(&mut reader) {
            found.insert(answer.key, answer.found.cpu);
        }
    }
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(found[&idle], Fact::Known(0));
    // How much it gets depends on who else runs.
    assert!(matches!(found[&busy], Fact::Known(5..=120)), "{found:?}");
}

#[test]
fn activity_has_use_memory_and_connections() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let key = fake.process(46);
    fake.file("46/io".into(), "rchar: 1000\nwchar: 24\nsyscr: 5\n");
    fake.file(
        "46/status".into(),
        "Name:\tx\nVmRSS:\t    12 kB\nVmSwap:\t     3 kB\n",
    );
    fake.file_of(46, 5, "socket:[778]");
    fake.file_of(46, 6, "socket:[801]");
    fake.file_of(46, 7, "socket:[802]");
    fake.file_of(46, 8, "socket:[803]");
    let heading = "Num       RefCount Protocol Flags    Type St Inode Path\n";
    let rows = "0: 00000002 00000000 00010000 0001 01 801 /run/x.sock\n\
                0: 00000003 00000000 00000000 0001 03 802 /run/x.sock\n\
                0: 00000003 00000000 00000000 0001 03 803\n\
                0: 00000003 00000000 00000000 0001 03 999 /run/x.sock\n";
    fake.file("46/net/unix".into(), &format!("{heading}{rows}"));
    let expected = Activity {
        cpu_ns: 3 * TICK_NS,
        io_bytes: 1024,
        rss: 12 << 10,
        swap: 3 << 10,
        // The client of 802 is not in the table, and that of 778 neither.
        clients: [0, 0].into(),
        sockets: [803].into(),
    };
    let activity = ask(&mut reader, key, FactSet::ACTIVITY).activity;
    assert_eq!(activity, Fact::Known(expected.into()));
}

#[test]
fn client_on_this_host_is_known_by_its_socket() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let key = fake.process(47);
    fake.file("47/io".into(), "rchar: 0\nwchar: 0\n");
    fake.file("47/status".into(), "VmRSS: 1 kB\n");
    fake.file_of(47, 5, "socket:[778]");
    fake.file_of(47, 6, "socket:[779]");
    // The client uses IPv6 with the address of an IPv4 server.
    let row = "  0: 0000000000000000FFFF00000100007F:9C40 0000000000000000FFFF00000100007F:1F90 01 \
               00000000:00000000 00:00000000 00000000 0 0 779 1 0 20 0 0 10 -1\n";
    fake.file("47/net/tcp6".into(), &format!("  sl\n{row}"));
    let Fact::Known(activity) = ask(&mut reader, key, FactSet::ACTIVITY).activity else {
        panic!("activity was not read");
    };
    assert_eq!(
        (&activity.clients[..], &activity.sockets[..]),
        (&[779][..], &[779][..])
    );
}

#[test]
fn answer_that_a_decision_waits_for_wakes_the_reader() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let key = fake.process(48);
    reader.request(key, None, USER, FactSet::UNIT, Urgency::Normal);
    let answers = wait(&mut reader);
    assert_eq!(answers[0].found.unit, Fact::Known("x.service".into()));
    assert!(reader.open.is_empty() && reader.timers.is_empty());
}

/// Real processes: what is at the other end of a pipe or a socket only the kernel knows.
#[test]
fn stdio_is_hung_up_once_both_other_ends_are_closed() {
    let mut reader = FactPool::new("/proc", rules());
    let sleep = |input: Stdio, output: Stdio| {
        let mut command = Command::new("sleep");
        // Returns once the program runs.
        let child = command.arg("60").stdin(input).stdout(output).spawn();
        let own = Own(child.unwrap());
        let pid = own.0.id();
        let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
        (own, ProcessKey { pid, start })
    };
    let mut stdio = |key| ask(&mut reader, key, FactSet::STDIO).stdio;

    let (mut piped, key) = sleep(Stdio::piped(), Stdio::piped());
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::Connected));
    let input = piped.0.stdin.take();
    drop(piped.0.stdout.take());
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::Connected));
    drop(input);
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::HungUp));

    let (client, theirs) = UnixStream::pair().unwrap();
    let both = || Stdio::from(OwnedFd::from(theirs.try_clone().unwrap()));
    let (_socket, key) = sleep(both(), both());
    drop(theirs);
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::Connected));
    drop(client);
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::HungUp));

    let (mut echo, key) = sleep(Stdio::piped(), Stdio::null());
    drop(echo.0.stdin.take());
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::Other));
    let (_null, key) = sleep(Stdio::null(), Stdio::null());
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::Other));
}
