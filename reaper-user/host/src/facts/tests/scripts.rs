//! Script paths, resolved below the root directory of the process.

use super::*;

/// Processes with a root directory that contains a script of an agent and links to it.
impl Fake {
    fn script_process(&self, pid: u32) -> ProcessKey {
        let key = self.process(pid);
        let at = |path: &str| self.root().join(format!("box/{path}"));
        if !at("lib").exists() {
            self.file("box/lib/gemini.js".into(), "");
            self.file("box/lib/other.js".into(), "");
            fs::create_dir_all(at("work")).unwrap();
            symlink("/lib/gemini.js", at("absolute")).unwrap();
            symlink("../lib/gemini.js", at("work/relative")).unwrap();
            symlink("/absolute", at("work/chain")).unwrap();
            symlink("../../../lib/gemini.js", at("work/above")).unwrap();
            symlink("loop", at("work/loop")).unwrap();
            symlink("gone", at("work/dangling")).unwrap();
            symlink("/lib", at("directory")).unwrap();
            nix::unistd::mkfifo(&at("work/pipe"), Mode::S_IRWXU).unwrap();
        }
        let link = |name: &str| self.root().join(format!("{pid}/{name}"));
        symlink(self.root().join("box"), link("root")).unwrap();
        fs::remove_file(link("cwd")).unwrap();
        symlink(at("work"), link("cwd")).unwrap();
        key
    }

    /// Creates a process whose root directory is a FIFO, so that opening files below it blocks.
    fn hung(&self, pid: u32) -> ProcessKey {
        let key = self.process(pid);
        let root = self.root().join(format!("{pid}/root"));
        nix::unistd::mkfifo(&root, Mode::S_IRWXU).unwrap();
        key
    }

    fn script_reader(&self) -> FactPool {
        script_reader(self.root())
    }
}

/// Returns a reader below this directory, with a rule for an agent's script.
fn script_reader(root: impl Into<PathBuf>) -> FactPool {
    let script = Condition {
        field: Field::Script,
        any_of: vec![Pattern::exe("**/lib/gemini.js").unwrap()],
        negative: false,
    };
    let rule = Rule::new("gemini", Action::Agent, vec![Matcher::new(vec![script])]);
    FactPool::new(root, Ruleset::new(vec![rule]))
}

fn node(script: &str) -> Arc<Image> {
    Arc::new(Image {
        exe: b"/usr/bin/node".into(),
        argv: format!("node\0--flag\0{script}\0").into(),
        ..Image::default()
    })
}

fn request(reader: &mut FactPool, key: ProcessKey, script: &str, uid: u32) {
    let image = node(script);
    reader.request(key, Some(&image), uid, FactSet::SCRIPT, Urgency::Normal);
}

/// Returns whether the script of a process belongs to the agent.
fn is_agent(reader: &mut FactPool, key: ProcessKey, script: &str) -> Fact<bool> {
    request(reader, key, script, USER);
    let [answer] = &wait(reader)[..] else {
        panic!("one answer");
    };
    assert_eq!((answer.key, answer.requested), (key, FactSet::SCRIPT));
    match &answer.found.script {
        Fact::Known(matched) => Fact::Known(matches!(matched.class, Class::Agent(_))),
        Fact::Unreadable => Fact::Unreadable,
        Fact::Unread => Fact::Unread,
    }
}

#[test]
fn links_and_relative_paths_are_resolved_below_the_own_root() {
    let fake = Fake::new();
    let mut reader = fake.script_reader();
    let key = fake.script_process(40);
    for (script, expected) in [
        ("/lib/gemini.js", Fact::Known(true)),
        ("/absolute", Fact::Known(true)),
        ("relative", Fact::Known(true)),
        ("./chain", Fact::Known(true)),
        ("above", Fact::Known(true)),
        ("../../../../lib/gemini.js", Fact::Known(true)),
        ("/lib/other.js", Fact::Known(false)),
        ("missing", Fact::Known(false)),
        // Removed files keep their name, in the directory that still exists.
        ("../lib/gone/lib/gemini.js", Fact::Known(true)),
        ("/directory/gemini.js", Fact::Known(true)),
        ("/directory/gone.js", Fact::Known(false)),
        ("/directory/gone/lib/gemini.js", Fact::Known(true)),
        ("gone/../lib/gemini.js", Fact::Unreadable),
        ("dangling", Fact::Unreadable),
        ("loop", Fact::Unreadable),
        ("pipe", Fact::Unreadable),
        ("/lib", Fact::Unreadable),
    ] {
        assert_eq!(is_agent(&mut reader, key, script), expected, "{script}");
    }
    assert!(reader.timers.is_empty() && reader.open_ids.is_empty());
}

#[test]
fn process_outside_of_its_root_has_no_relative_script() {
    let fake = Fake::new();
    let mut reader = fake.script_reader();
    let key = fake.script_process(40);
    let cwd = fake.root().join("40/cwd");
    fs::remove_file(&cwd).unwrap();
    symlink("/", cwd).unwrap();
    assert_eq!(is_agent(&mut reader, key, "relative"), Fact::Unreadable);
    assert_eq!(is_agent(&mut reader, key, "/absolute"), Fact::Known(true));
}

#[test]
fn removed_script_of_a_real_process_keeps_its_path() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path().join("work/lib");
    fs::create_dir_all(&work).unwrap();
    let (_own, key) = Own::start(shell("exec sleep 300").current_dir(&work));
    let mut reader = script_reader("/proc");
    assert_eq!(is_agent(&mut reader, key, "./gemini.js"), Fact::Known(true));
    fs::remove_dir_all(directory.path().join("work")).unwrap();
    assert_eq!(is_agent(&mut reader, key, "./gemini.js"), Fact::Known(true));
    assert_eq!(is_agent(&mut reader, key, "./other.js"), Fact::Known(false));
}

#[test]
fn script_of_a_real_process_is_resolved() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("lib")).unwrap();
    let at = |path: &str| directory.path().join(path);
    fs::write(at("lib/gemini.js"), "").unwrap();
    // `sleep`, copied to the name `node`, takes the script's name as a number of seconds.
    symlink("lib/gemini.js", at("300")).unwrap();
    fs::copy("/bin/sleep", at("node")).unwrap();
    let (_own, key) = Own::start(shell("exec ./node 300").current_dir(&directory));
    let deadline = Instant::now() + Duration::from_secs(30);
    let found = loop {
        let table = scan_processes(&Procfs::default()).unwrap();
        let image = &table.rows[&key.pid].entry.image;
        if image.exe.ends_with(b"/node") {
            break image.script.clone();
        }
        assert!(Instant::now() < deadline, "the process does not run node");
    };
    let given = scan_pids(&Procfs::default(), vec![key.pid], ScriptPaths::Given).unwrap();
    assert_eq!(given.rows[&key.pid].entry.image.script, b"");
    let script = at("lib/gemini.js").canonicalize().unwrap();
    assert_eq!(found, script.into_os_string().into_encoded_bytes());
    let mut reader = FactPool::new("/proc", rules());
    request(&mut reader, key, "300", USER);
    let answers = wait(&mut reader);
    assert!(matches!(answers[0].found.script, Fact::Known(_)));
}

#[test]
fn hung_file_system_of_one_user_does_not_delay_others() {
    let fake = Fake::new();
    let mut reader = fake.script_reader();
    // Many more than there are threads.
    let hung: Vec<ProcessKey> = (50..90).map(|pid| fake.hung(pid)).collect();
    for key in &hung {
        request(&mut reader, *key, "x", USER);
    }
    let fine = fake.script_process(100);
    request(&mut reader, fine, "relative", USER + 1);
    let mut answers = Vec::new();
    while !answers.iter().any(|answer: &FactAnswer| answer.key == fine) {
        answers.extend(wait(&mut reader));
    }
    let found = answers.iter().find(|answer| answer.key == fine).unwrap();
    assert!(matches!(found.found.script, Fact::Known(_)));
    // The others are open until their time limit.
    assert_eq!(reader.open.len(), hung.len());
    // Facts for decisions have their own threads.
    let markers = markers_of(&mut reader, fine);
    assert_eq!(markers, Fact::Known(1));
}

fn markers_of(reader: &mut FactPool, key: ProcessKey) -> Fact<u64> {
    reader.request(key, None, USER, FactSet::MARKERS, Urgency::Urgent);
    loop {
        let answers = wait(reader);
        let mut matching = answers.iter().filter(|answer| answer.key == key);
        if let Some(answer) = matching.next() {
            return answer.found.markers;
        }
    }
}
