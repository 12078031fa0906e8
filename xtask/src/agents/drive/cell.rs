//! One run: an agent in one mode, ended in one way, with or without reaper.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::super::install::Installed;
use super::mock;
use super::process::{self, LEFTOVERS};
use super::spec::Spec;
use super::world::{World, WorldOptions, WorldProcess};
use crate::shell::hex;

/// Time limits until an agent waits for a prompt, and until the tool's result is back.
const READY: Duration = Duration::from_secs(45);
const TURN: Duration = Duration::from_secs(90);
/// Time after which an agent that is still running ignores the signal.
const IGNORES: Duration = Duration::from_secs(10);
/// Time after the ending in which processes may exit.
const LEAVES: Duration = Duration::from_secs(10);
/// The same for an agent without its client: a rule waits until the agent has been idle for a while.
const ABANDONED: Duration = Duration::from_secs(80);
/// Without reaper: time without a change after which the remaining processes are final.
const STAYS: Duration = Duration::from_secs(4);
const STEP: Duration = Duration::from_millis(200);
/// Files of a world that are its log.
const LOGS: &str = "before.txt running.txt left.txt screen.txt client.txt mock.log stream.jsonl explain.jsonl daemon.log \
    daemon.errors";

pub struct Cell<'a> {
    pub spec: &'a Spec,
    pub mode: &'static str,
    pub ending: &'static str,
    pub reaper: Option<&'a Path>,
    pub installed: &'a Installed,
    /// Directories of the world and of its log.
    pub world: PathBuf,
    pub log: PathBuf,
}

impl Cell<'_> {
    /// Runs the cell and returns its entry in the table.
    pub fn run(&self) -> Value {
        let mut outcome = self
            .attempt()
            .unwrap_or_else(|error| json!({"problem": format!("{error:#}")}));
        outcome["log"] = json!(self.keep_logs().unwrap_or_default());
        // Leftover files are removed with the directory of the whole drive.
        let _ = fs::remove_dir_all(&self.world);
        outcome
    }

    fn attempt(&self) -> Result<Value> {
        // Later variables replace earlier ones.
        let mut environment = self.installed.environment.clone();
        environment.extend(self.spec.pairs("env", &self.world));
        let programs = self.installed.command.parent().context("no directory")?;
        let files = self.spec.pairs("files", &self.world);
        let is_turn_held = match self.mode {
            "print" => self.ending != "exit",
            "server" => true,
            _ => false,
        };
        let needs = WorldOptions {
            path: programs,
            environment: &environment,
            files: &files,
            holds: is_turn_held,
        };
        let world = World::start(&self.world, &needs, self.reaper)?;
        let done = self.drive(&world, is_turn_held);
        world.save("screen.txt", &world.screen("agent"));
        world.save("client.txt", &world.screen("client"));
        done
    }

    fn drive(&self, world: &World, is_turn_held: bool) -> Result<Value> {
        let before = world.processes();
        world.save_list("before.txt", &before);
        let shell = world.shell("agent")?;
        let root = self.start(world, &before)?;
        let client = self.prompt(world, &root, &before)?;
        let back = |world: &World| {
            self.answer_dialogs(world);
            world.noted(mock::RESULT) > 0
        };
        self.wait(world, "the tool's result", TURN, back)?;
        if !is_turn_held {
            self.wait(world, "the end of the turn", TURN, |world| {
                world.noted(mock::ANSWERED) > 0
            })?;
            if (self.mode, self.ending) != ("print", "exit") {
                std::thread::sleep(Duration::from_millis(1500));
            }
        }
        let running = world.processes();
        world.save_list("running.txt", &running);
        world.save("screen.txt", &world.screen("agent"));
        let ended = self.end(world, &root, client.as_ref())?;
        let is_client_killed = self.ending == "killed client";
        let is_over = || !world.processes().iter().any(|process| process.is(&ended));
        let is_ignored = !until(
            if self.ending == "exit" {
                TURN / 2
            } else {
                IGNORES
            },
            is_over,
        );
        let others = [Some(&before[..]), client.as_ref().map(std::slice::from_ref)];
        let others: Vec<&WorldProcess> = others.into_iter().flatten().flatten().collect();
        let left = || {
            let all = world.processes();
            all.into_iter()
                .filter(|process| !others.iter().any(|other| other.is(process)))
                .collect::<Vec<_>>()
        };
        let limit = match self.reaper {
            Some(_) if is_client_killed && self.mode == "acp" => ABANDONED,
            Some(_) => LEAVES,
            None => STAYS,
        };
        let mut stays = left();
        let (start, mut changed) = (Instant::now(), Instant::now());
        while !stays.is_empty() && changed.elapsed() < limit && start.elapsed() < ABANDONED {
            std::thread::sleep(STEP);
            let now = left();
            if now != stays {
                (stays, changed) = (now, Instant::now());
            }
        }
        world.save_list("left.txt", &stays);
        let now = world.processes();
        let touched = before
            .iter()
            .filter(|process| !now.iter().any(|other| other.is(process)));
        let touched = touched.filter(|process| self.ending != "closed pane" || !process.is(&shell));
        let touched: Vec<String> = touched.map(WorldProcess::label).collect();
        let mut left: Vec<Value> = stays.iter().map(|process| name(world, process)).collect();
        left.sort_by_key(Value::to_string);
        let mut outcome = json!({"left": left, "touched": touched});
        if is_ignored {
            outcome["ignored"] = json!(true);
        }
        let of_tool = |role: &&str| running.iter().any(|process| process.role() == Some(role));
        let ended_by_agent: Vec<&str> = LEFTOVERS
            .iter()
            .copied()
            .filter(|role| !of_tool(role))
            .collect();
        if !ended_by_agent.is_empty() && (self.mode, self.ending) != ("print", "exit") {
            outcome["ended by the agent before"] = json!(ended_by_agent);
        }
        Ok(outcome)
    }

    /// Starts the agent in the person's shell, and returns its root process.
    fn start(&self, world: &World, before: &[WorldProcess]) -> Result<WorldProcess> {
        let command = self
            .spec
            .text(self.mode, "command", &self.world)
            .context("no command")?;
        let command = match self.mode {
            "acp" => {
                let protocol = self.spec.text(self.mode, "protocol", &self.world);
                let editor = self.world.join("bin/editor");
                let protocol = protocol.as_deref().unwrap_or("acp");
                format!(
                    "{} {} editor {protocol} {command}",
                    editor.display(),
                    process::COMMAND
                )
            }
            _ => command,
        };
        world.type_line("agent", &command)?;
        let shell = world.shell("agent")?;
        if self.mode == "acp" {
            let editor = child(world, &shell, before)?;
            return child(world, &editor, before);
        }
        child(world, &shell, before)
    }

    /// Enters the prompt. Returns the client if the mode has one.
    fn prompt(
        &self,
        world: &World,
        root: &WorldProcess,
        before: &[WorldProcess],
    ) -> Result<Option<WorldProcess>> {
        match self.mode {
            "acp" => {
                let all = world.processes();
                Ok(all.into_iter().find(|process| process.pid == root.parent))
            }
            "server" => {
                self.wait_for_screen(world)?;
                let client = self
                    .spec
                    .text("server", "client", &self.world)
                    .context("no client")?;
                world.type_line("client", &client)?;
                child(world, &world.shell("client")?, before).map(Some)
            }
            "interactive" => {
                self.wait_for_screen(world)?;
                std::thread::sleep(Duration::from_secs(1));
                world.type_line("agent", &format!("{} now", mock::PROMPT))?;
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Waits until the screen shows that the agent is ready, and answers dialogs meanwhile.
    fn wait_for_screen(&self, world: &World) -> Result<()> {
        let ready = self
            .spec
            .text(self.mode, "ready", &self.world)
            .context("no ready")?;
        self.wait(world, "the prompt", READY, |world| {
            self.answer_dialogs(world);
            world.screen("agent").contains(&ready)
        })
    }

    /// Answers the agent's questions on the screen.
    fn answer_dialogs(&self, world: &World) {
        let dialogs = self.spec.list(self.mode, "dialogs");
        if dialogs.is_empty() {
            return;
        }
        let screen = world.screen("agent");
        for dialog in dialogs.chunks(2) {
            if let [text, key] = dialog
                && screen.contains(text)
            {
                // If it fails, the agent does not continue, and the run times out.
                let _ = world.keys("agent", &[key]);
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }

    fn wait(
        &self,
        world: &World,
        what: &str,
        limit: Duration,
        is_there: impl Fn(&World) -> bool,
    ) -> Result<()> {
        if until(limit, || is_there(world)) {
            return Ok(());
        }
        world.save_list("running.txt", &world.processes());
        bail!("{what} does not come within {} s", limit.as_secs())
    }

    /// Ends the agent, and returns the process that should exit.
    fn end(
        &self,
        world: &World,
        root: &WorldProcess,
        client: Option<&WorldProcess>,
    ) -> Result<WorldProcess> {
        let keys = |name: &str| -> Result<()> {
            for key in self.spec.list(self.mode, name) {
                world.keys("agent", &[&key])?;
                std::thread::sleep(Duration::from_millis(700));
            }
            Ok(())
        };
        let signal = match self.ending {
            "exit" if self.mode == "acp" => {
                fs::write(self.world.join("project").join(process::CLOSE), "")?;
                return Ok(root.clone());
            }
            "exit" | "quit" => {
                keys(self.ending)?;
                return Ok(root.clone());
            }
            "closed pane" => {
                world.tmux(&["kill-pane", "-t", "person:agent"])?;
                return Ok(root.clone());
            }
            "killed client" => {
                let client = client.context("no client")?;
                client.signal(Signal::SIGKILL)?;
                return Ok(client.clone());
            }
            "INT" if self.mode == "interactive" => {
                for _ in 0..2 {
                    world.keys("agent", &["C-c"])?;
                    std::thread::sleep(Duration::from_millis(500));
                }
                return Ok(root.clone());
            }
            "killed server" => {
                let server = self.spec.text(self.mode, "server", &self.world);
                let all = world.processes();
                let is_server = |process: &&WorldProcess| match &server {
                    Some(text) => process.argv.join(" ").contains(text.as_str()),
                    None => process.is(root),
                };
                let server = all.iter().find(is_server).context("no server")?;
                server.signal(Signal::SIGKILL)?;
                return Ok(server.clone());
            }
            "INT" => Signal::SIGINT,
            "TERM" => Signal::SIGTERM,
            "HUP" => Signal::SIGHUP,
            _ => Signal::SIGKILL,
        };
        root.signal(signal)?;
        Ok(root.clone())
    }

    /// Copies the logs of the run, and returns their hash.
    fn keep_logs(&self) -> Result<String> {
        fs::create_dir_all(&self.log)?;
        let mut hash = Sha256::new();
        for name in LOGS.split_whitespace() {
            if let Ok(content) = fs::read(self.world.join(name)) {
                hash.update(name);
                hash.update(&content);
                fs::write(self.log.join(name), content)?;
            }
        }
        Ok(hex(&hash.finalize()))
    }
}

impl World {
    fn save(&self, name: &str, text: &str) {
        // A closed window shows nothing; keep its last content.
        if !text.is_empty() {
            let _ = fs::write(self.dir.join(name), text);
        }
    }

    fn save_list(&self, name: &str, all: &[WorldProcess]) {
        let line = |process: &WorldProcess| {
            format!(
                "{} {} {}\n",
                process.pid,
                process.parent,
                process.argv.join(" ")
            )
        };
        self.save(name, &all.iter().map(line).collect::<String>());
    }
}

/// Waits for a new child of a process.
fn child(world: &World, parent: &WorldProcess, before: &[WorldProcess]) -> Result<WorldProcess> {
    let end = Instant::now() + READY;
    loop {
        let mut all = world
            .processes()
            .into_iter()
            .filter(|process| process.parent == parent.pid);
        // Before its exec, a child has its parent's arguments.
        let found = all.find(|process| {
            process.argv != parent.argv && !before.iter().any(|other| other.is(process))
        });
        if let Some(found) = found {
            return Ok(found);
        }
        ensure!(Instant::now() < end, "{} starts no agent", parent.label());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn until(limit: Duration, mut is_there: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !is_there() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(STEP);
    }
    true
}

/// Returns a process that is left, with the reason that reaper reports.
fn name(world: &World, process: &WorldProcess) -> Value {
    match world.explain(process) {
        Some(why) => json!({"process": process.label(), "why": why}),
        None => json!({"process": process.label()}),
    }
}
