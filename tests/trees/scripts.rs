//! Agents that are recognised by the resolved path of their script or by a module's name.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use super::{CONFIG, ScenarioEntry, ScenarioRun};
use crate::world::World;

pub const SCENARIOS: &[ScenarioEntry] = &[
    ("agents-by-any-name-of-their-script", |view| {
        by_any_name(view, false);
    }),
    ("agents-by-any-name-before-the-daemon", |view| {
        by_any_name(view, true);
    }),
];

pub const ON_FUSE: &[ScenarioEntry] = &[("script-on-a-hung-file-system", on_a_hung_file_system)];

const GEMINI: &str = "node_modules/@google/gemini-cli/bundle/gemini.js";
const AIDER: &str = "venv/bin/aider";

/// Rule for an agent that is a shell script.
const SHELL_RULE: &str =
    "[[agent]]\nname = \"my-shell\"\nexe = \"**/bash\"\nscript = \"/**/my-agent.sh\"\n";

/// Returns whether a FUSE file system that never answers can be mounted.
pub fn has_fuse() -> bool {
    nix::unistd::geteuid().is_root() && Path::new("/dev/fuse").exists()
}

/// Provides the programs of the scenario. Each runs this binary under the name of an interpreter.
fn provide(world: &World) {
    let file = |path: &str| {
        let path = world.dir().join(path);
        fs::create_dir_all(path.parent().expect("a path with a parent")).expect("make a directory");
        fs::write(path, "").expect("write a script");
    };
    ["build.js", "my-agent.sh", GEMINI, AIDER]
        .iter()
        .for_each(|path| file(path));
    for (link, script) in [
        ("my-assistant", GEMINI),
        ("my-helper", AIDER),
        ("my-build", "build.js"),
        ("my-shell", "my-agent.sh"),
    ] {
        symlink(script, world.dir().join(link)).expect("link a script");
    }
    for (name, words) in [
        ("linked", &["bin/node", "{dir}/my-assistant"][..]),
        ("relative", &["bin/node", "--max-old-space-size=99", GEMINI]),
        ("python-linked", &["bin/python3.12", "my-helper"]),
        ("python-script", &["bin/python3.12", "venv/bin/aider"]),
        ("python-module", &["bin/python3.12", "-Im", "aider"]),
        ("shell-script", &["bin/bash", "-eu", "my-shell"]),
        ("build", &["bin/node", "my-build"]),
        ("shell-build", &["bin/bash", "my-build"]),
        ("other-module", &["bin/python3.12", "-m", "aider_tools"]),
    ] {
        let words: Vec<String> = words.iter().map(|word| (*word).into()).collect();
        world.provide(name, &words);
    }
}

fn start(world: &mut World, name: &str) {
    let how = format!("as:{name} agent {name}-tool=env-i+sleep {name}-server=setsid");
    world.spawn(name, &how);
}

fn await_up(world: &World, names: &[&str]) {
    for name in names {
        for role in ["", "-tool", "-server"] {
            world.await_processes(&format!("{name}{role}"), 1);
        }
    }
}

/// Waits until an agent's session is open.
fn await_open(view: &ScenarioRun, world: &World, name: &str) {
    if view.knows_agents() {
        let root = world.process(name);
        world.await_event(&format!("a session of '{name}'"), |e| {
            e.is("session.open", root)
        });
    }
}

fn by_any_name(view: &ScenarioRun, before: bool) {
    let agents = [
        "linked",
        "relative",
        "python-linked",
        "python-script",
        "python-module",
        "shell-script",
    ];
    let others = ["build", "other-module", "shell-build"];
    let all = [&agents[..], &others].concat();
    let mut world = World::new(true);
    provide(&world);
    if before {
        all.iter().for_each(|name| start(&mut world, name));
        await_up(&world, &all);
    }
    view.watch(&mut world, &format!("{CONFIG}{SHELL_RULE}"));
    if !before {
        all.iter().for_each(|name| start(&mut world, name));
        await_up(&world, &all);
    }
    let tools: Vec<String> = agents
        .iter()
        .flat_map(|name| [format!("{name}-tool"), format!("{name}-server")])
        .collect();
    let tools: Vec<&str> = tools.iter().map(String::as_str).collect();
    agents
        .iter()
        .for_each(|name| await_open(view, &world, name));
    if !before {
        view.await_seen(&world, &tools);
    }
    all.iter().for_each(|name| world.kill(name));
    view.await_gone(&world, &tools);
    view.end(
        world,
        &[
            "build-tool",
            "build-server",
            "other-module-tool",
            "other-module-server",
            "shell-build-tool",
            "shell-build-server",
        ],
    );
}

/// FUSE file system whose server never answers. It is not mounted below the test's directory, which is removed recursively.
struct Hung {
    mount_point: TempDir,
    /// Server side of the file system: requests hang until it is closed.
    server: Option<File>,
}

impl Hung {
    fn mount() -> Hung {
        let mount_point = tempfile::tempdir().expect("make a directory");
        let mut options = OpenOptions::new();
        let server = options.read(true).write(true).open("/dev/fuse");
        let server = server.expect("open /dev/fuse");
        let fd = server.as_raw_fd();
        let data = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
        let (source, kind, flags) = (Some("hung"), Some("fuse"), MsFlags::empty());
        mount(source, mount_point.path(), kind, flags, Some(data.as_str())).expect("mount it");
        let server = Some(server);
        Hung {
            mount_point,
            server,
        }
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // Pending requests fail.
        drop(self.server.take());
        let _ = umount2(self.mount_point.path(), MntFlags::MNT_DETACH);
    }
}

/// Programs whose scripts cannot be read occupy the worker threads, but do not delay the recognition of other agents.
fn on_a_hung_file_system(view: &ScenarioRun) {
    let mut world = World::new(true);
    provide(&world);
    let hung = Hung::mount();
    let script = hung.mount_point.path().join("script").display().to_string();
    world.provide("hung", &["bin/node".into(), script]);
    view.watch(&mut world, CONFIG);
    world.spawn(
        "hung",
        "as:hung agent hung-tool=env-i+sleep hung-server=setsid",
    );
    await_up(&world, &["hung"]);
    for name in ["linked", "python-module"] {
        start(&mut world, name);
        await_up(&world, &[name]);
        await_open(view, &world, name);
    }
    let tools = [
        "linked-tool",
        "linked-server",
        "python-module-tool",
        "python-module-server",
    ];
    view.await_seen(&world, &tools);
    ["linked", "python-module", "hung"]
        .iter()
        .for_each(|name| world.kill(name));
    view.await_gone(&world, &tools);
    view.end(world, &["hung-tool", "hung-server"]);
    drop(hung);
}
