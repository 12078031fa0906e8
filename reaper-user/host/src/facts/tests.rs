//! Tests on a simulated /proc, where a FIFO without a writer blocks its reader, and on real processes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
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

/// Owner of the processes.
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
    /// Creates a process with a listening socket, a marker and a unit. Its start time in ticks is its pid.
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
    /// Working directory of the processes.
    fn work(&self) -> PathBuf {
        self.root().join("work/app")
    }
    fn file_of(&self, pid: u32, fd: u32, link: &str) {
        symlink(link, self.root().join(format!("{pid}/fd/{fd}"))).unwrap();
    }
    /// Creates a process whose environment blocks its reader, and returns its FIFO too.
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

/// Returns rules that ask for `REAPER_KEEP=1`, and for `Daemon` in a command line.
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

/// Waits until an answer for a decision has arrived, and returns all answers.
fn wait(reader: &mut FactPool) -> Vec<FactAnswer> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let limit = Duration::from_secs(30);
    let waited = runtime.block_on(async { tokio::time::timeout(limit, reader.ready()).await });
    waited.expect("every request is answered in time");
    reader.take()
}

/// Requests facts and waits for them.
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
fn facts_of_a_process_are_read() {
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
        local_sockets: Fact::Unread,
    };
    let key = fake.process(40);
    assert_eq!(ask(&mut reader, key, needs(&ALL_BUT_CPU)), expected);
    assert!(reader.timers.is_empty() && reader.open_ids.is_empty());
    // A connected socket, and a socket of another type.
    fs::remove_file(fake.root().join("40/fd/4")).unwrap();
    fake.file_of(40, 4, "socket:[778]");
    fake.file_of(40, 5, "socket:[999]");
    let facts = ask(&mut reader, key, FactSet::LISTENING);
    assert_eq!(facts.listening, Fact::Known(false));
    // Standard input that is not a terminal, and no standard input.
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
    let env_markers = EnvMarkers::of(environ.as_bytes(), true);
    let directory = directory.map(Arc::from);
    Fact::Known(Arc::new(InheritedFacts {
        env_markers,
        directory,
        ..InheritedFacts::default()
    }))
}

#[test]
fn inherited_facts_are_read() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let (work, place) = (fake.work(), fake.root().join("45/cwd"));
    let key = fake.process(45);
    let mut has = |environ: &str| {
        fake.file("45/environ".into(), environ);
        ask(&mut reader, key, FactSet::INHERITED).inherited
    };
    let markers = "CLAUDECODE=1\0CLAUDE_PID=12\0TMUX=/tmp/t,7,0\0";
    assert_eq!(has(markers), inherited(markers, Some(&work)));
    // A home directory and those above it are not distinctive; directories inside of it are.
    for (home, is_distinctive) in [
        (work.clone(), false),
        (work.join("me"), false),
        (fake.root().join("work/me"), true),
    ] {
        let environ = format!("HOME={}\0", home.display());
        assert_eq!(
            has(&environ),
            inherited("", is_distinctive.then_some(&*work)),
            "{environ}"
        );
    }
    fs::set_permissions(&work, fs::Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(
        has("A=1\0"),
        inherited("", None),
        "all users may write there"
    );
    fs::remove_file(&place).unwrap();
    symlink("/", &place).unwrap();
    assert_eq!(has("A=1\0"), inherited("", None));
    // An unreadable directory is not the same as a directory that is not distinctive.
    fs::remove_file(&place).unwrap();
    assert_eq!(has("A=1\0"), Fact::Unreadable);
    symlink("/nowhere/at/all", &place).unwrap();
    assert_eq!(has("A=1\0"), Fact::Unreadable);
}

#[test]
fn facts_of_missing_files_are_unreadable() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let all = needs(&ALL_BUT_CPU)
        | FactSet::CPU
        | FactSet::CONVERSATIONS
        | FactSet::ACTIVITY
        | FactSet::STDIO
        | FactSet::ARGUMENTS
        | FactSet::SCRIPT
        | FactSet::LOCAL_SOCKETS;
    let key = fake.process(41);
    // The pid belongs to another process.
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
    // The marker could be in the part that was cut.
    let key = fake.process(43);
    let long = format!("A={}\0REAPER_KEEP=1\0", "x".repeat(reading::ENVIRON_MAX));
    fake.file("43/environ".into(), &long);
    let facts = ask(&mut reader, key, FactSet::MARKERS);
    assert_eq!(facts.markers, Fact::Unreadable);
}

/// Returns a program whose exec event has only the first 8 KiB of this command line.
fn cut(argv: &str) -> Arc<Image> {
    let len = argv.len().min(8192);
    Arc::new(Image {
        comm: b"x".into(),
        exe: b"/bin/x".into(),
        argv: argv.as_bytes()[..len].into(),
        argv_full_len: argv.len() as u32,
        truncated: len < argv.len(),
        ..Image::default()
    })
}

/// Requests the match of the whole command line with the rules, and returns the names of the matching rules.
fn matching_rules(reader: &mut FactPool, key: ProcessKey, image: &Arc<Image>) -> Fact<Vec<String>> {
    reader.request(key, Some(image), USER, FactSet::ARGUMENTS, Urgency::Urgent);
    let [answer] = &wait(reader)[..] else {
        panic!("one answer");
    };
    assert_eq!((answer.key, answer.requested), (key, FactSet::ARGUMENTS));
    let rules = rules();
    match &answer.found.arguments {
        Fact::Unread => panic!("the fact was requested"),
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
fn rules_match_the_whole_command_line() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let key = fake.process(44);
    let argv = |len: usize, last: &str| format!("x\0{}\0{last}\0", "y".repeat(len));
    let daemon = || Fact::Known(vec!["daemon".to_owned()]);
    let most = reading::ARGUMENTS_MAX - argv(0, "Daemon").len();
    for (known, found, expected) in [
        (argv(100_000, "Daemon"), None, daemon()),
        (argv(100_000, "Main"), None, Fact::Known(vec![])),
        (argv(most, "Daemon"), None, daemon()),
        (argv(most + 1, "Daemon"), None, Fact::Unreadable),
        // Another command line, one that the process has overwritten, and a part of it.
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
        fake.file("44/cmdline".into(), &found.unwrap_or_else(|| known.clone()));
        assert_eq!(matching_rules(&mut reader, key, &cut(&known)), expected);
    }
    // The program is not known, or cannot be read.
    let facts = ask(&mut reader, key, FactSet::ARGUMENTS);
    assert_eq!(facts.arguments, Fact::Unreadable);
    let cmdline = fake.root().join("44/cmdline");
    fs::remove_file(&cmdline).unwrap();
    let image = cut(&argv(9_000, "Main"));
    assert_eq!(matching_rules(&mut reader, key, &image), Fact::Unreadable);
    nix::unistd::mkfifo(&cmdline, Mode::S_IRWXU).unwrap();
    assert_eq!(matching_rules(&mut reader, key, &image), Fact::Unreadable);
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
    assert_eq!(matching_rules(&mut reader, key, &cut(&argv)), daemon);
    let table = scan_processes(&Procfs::default()).unwrap();
    let image = &table.rows[&key.pid].entry.image;
    assert_eq!(image.argv, argv.as_bytes());
    assert!(!image.truncated);
}

#[test]
fn stuck_threads_are_replaced_up_to_the_limit_of_a_user() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let stuck: Vec<_> = (50..64).map(|pid| fake.stuck(pid)).collect();
    // As many stuck requests as a user has threads, and another one behind them.
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
    // More stuck requests than replacements: requests of this user are still answered, as unreadable.
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
    // Once the reads return, their results are discarded.
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
            "no thread reads requests any more"
        );
        for (_, pipe) in &stuck {
            drop(fs::OpenOptions::new().read(true).write(true).open(pipe));
        }
    }
}

#[test]
fn prefetch_does_not_wake_the_reader() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let (first, second) = (fake.process(80), fake.process(81));
    for _ in 0..3 {
        reader.request(first, None, USER, FactSet::UNIT, Urgency::Prefetch);
    }
    assert_eq!(reader.open.len(), 1, "the request is repeated");
    let mut answers = Vec::new();
    while answers.is_empty() {
        answers = reader.take();
    }
    assert!(!reader.ready && answers.len() == 1 && answers[0].requested == FactSet::UNIT);
    // A prefetch waits behind a stuck one. An urgent request for the same fact follows.
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
    // The stuck thread delays no other request.
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
        // The program runs once it has written this line.
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
fn facts_of_real_processes_are_read() {
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
    // The socket is inherited, as by a server below a shell.
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
    assert_eq!(facts.listening, Fact::Known(true));
}

#[test]
fn cpu_use_takes_two_readings() {
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
    // The share of the processor depends on the load of the host.
    assert!(matches!(found[&busy], Fact::Known(5..=120)), "{found:?}");
}

#[test]
fn activity_includes_usage_and_connections() {
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
        // The clients of 802 and 778 are not in the tables.
        clients: [0, 0].into(),
        sockets: [803].into(),
    };
    let activity = ask(&mut reader, key, FactSet::ACTIVITY).activity;
    assert_eq!(activity, Fact::Known(expected.into()));
}

/// A real process that only passes bytes on has more I/O at the second reading, and little CPU time.
#[test]
fn activity_includes_io_without_cpu_time() {
    const BYTES: usize = 64 << 10;
    let mut reader = FactPool::new("/proc", rules());
    let mut command = Command::new("cat");
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut cat = Own(command.spawn().unwrap());
    let pid = cat.0.id();
    let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
    let mut activity = || match ask(&mut reader, ProcessKey { pid, start }, FactSet::ACTIVITY) {
        Facts {
            activity: Fact::Known(activity),
            ..
        } => activity,
        other => panic!("activity was not read: {other:?}"),
    };
    let mut pass_on = |bytes: usize| {
        let input = cat.0.stdin.as_mut().unwrap();
        input.write_all(&vec![b'x'; bytes]).unwrap();
        let output = cat.0.stdout.as_mut().unwrap();
        output.read_exact(&mut vec![0; bytes]).unwrap();
    };
    // Its own files are read by then.
    pass_on(1);
    let before = activity();
    pass_on(BYTES);
    let after = activity();
    let io = after.io_bytes - before.io_bytes;
    assert!(
        (2 * BYTES as u64..4 * BYTES as u64).contains(&io),
        "{io} bytes"
    );
    assert!(after.cpu_ns - before.cpu_ns <= 5 * TICK_NS, "{after:?}");
}

#[test]
fn client_on_this_host_is_found_by_its_socket() {
    let fake = Fake::new();
    let mut reader = fake.reader();
    let key = fake.process(47);
    fake.file("47/io".into(), "rchar: 0\nwchar: 0\n");
    fake.file("47/status".into(), "VmRSS: 1 kB\n");
    fake.file_of(47, 5, "socket:[778]");
    fake.file_of(47, 6, "socket:[779]");
    // The client uses IPv6 with an IPv4-mapped address.
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

/// Real processes, because only the kernel knows the other end of a pipe or a socket.
#[test]
fn stdio_is_hung_up_once_both_other_ends_are_closed() {
    let mut reader = FactPool::new("/proc", rules());
    let sleep = |input: Stdio, output: Stdio| {
        let mut command = Command::new("sleep");
        // Returns once the program has been executed.
        let child = command.arg("60").stdin(input).stdout(output).spawn();
        let own = Own(child.unwrap());
        let pid = own.0.id();
        let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
        (own, ProcessKey { pid, start })
    };
    let mut stdio = |key| ask(&mut reader, key, FactSet::STDIO).stdio;
    let is_connected =
        |stdio| matches!(stdio, Fact::Known(facts::Stdio::Connected(inode)) if inode > 0);

    let (mut piped, key) = sleep(Stdio::piped(), Stdio::piped());
    assert!(is_connected(stdio(key)));
    let input = piped.0.stdin.take();
    drop(piped.0.stdout.take());
    assert!(is_connected(stdio(key)));
    drop(input);
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::HungUp));

    let (client, theirs) = UnixStream::pair().unwrap();
    let both = || Stdio::from(OwnedFd::from(theirs.try_clone().unwrap()));
    let (_socket, key) = sleep(both(), both());
    drop(theirs);
    assert!(is_connected(stdio(key)));
    drop(client);
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::HungUp));

    let (mut echo, key) = sleep(Stdio::piped(), Stdio::null());
    drop(echo.0.stdin.take());
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::Other));
    let (_null, key) = sleep(Stdio::null(), Stdio::null());
    assert_eq!(stdio(key), Fact::Known(facts::Stdio::Other));
}
