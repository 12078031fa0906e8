//! Starts each agent in several forms and records its processes.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::install::{self, Installed};
use super::packages::{self, Package};
use super::sandbox::{Run, Sandbox, USER};
use crate::bench::undo;
use crate::shell::{self, say, workspace};

/// Replacement for the temporary folder in recorded data.
const FOLDER: &str = "/srv/agents";
/// Maximum number of recorded characters per argument.
const ARGUMENT_LENGTH: usize = 100;
/// Maximum number of recorded arguments.
const ARGUMENTS: usize = 8;

/// Rule for the program that provides the agent's terminal. It makes all processes of the agent members of a session, so
/// that the daemon reports each exec, even of programs that no rule recognises.
const EVERYTHING: &str = "[[agent]]\nname = \"recorder\"\nexe = \"/usr/bin/script\"\n";

/// Recorded data by the name of the agent's rule.
#[derive(Default, Serialize, Deserialize)]
pub struct Recorded(pub BTreeMap<String, RecordedPackage>);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordedPackage {
    Ran {
        date: String,
        package: String,
        version: String,
        integrity: String,
        /// Processes in the order of their execs, by form of start.
        forms: BTreeMap<String, Vec<ExecutedProcess>>,
    },
    Unavailable {
        why: String,
    },
}

/// Program that was executed as part of the agent.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutedProcess {
    pub comm: String,
    pub exe: String,
    /// Script as in the interpreter's arguments, or `-m` and a module.
    pub script: Option<String>,
    /// Absolute path of the script without links.
    pub resolved: Option<String>,
    pub argv: Vec<String>,
    /// Name of the rule that recognised the process.
    pub recognised: Option<String>,
}

impl Recorded {
    fn path() -> PathBuf {
        workspace().join("tests/agents/recorded.json")
    }

    /// Reads the table; returns an empty one if there is no file.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn read() -> Result<Recorded> {
        match fs::read(Recorded::path()) {
            Ok(text) => serde_json::from_slice(&text).context("tests/agents/recorded.json"),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Recorded::default()),
            Err(error) => Err(error).context("tests/agents/recorded.json"),
        }
    }

    fn write(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(Recorded::path(), text).context("tests/agents/recorded.json")
    }
}

/// Records these agents, or all.
///
/// # Errors
/// This process is not root, an agent is unknown, or the table cannot be read or written.
pub fn record(names: &[String]) -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "creating namespaces needs root"
    );
    undo::at_signals()?;
    let agents = packages::read()?;
    for name in names {
        ensure!(
            agents.iter().any(|agent| agent.name == *name),
            "unknown agent: {name}"
        );
    }
    let reaper = shell::built_reaper(&[])?;
    for agent in agents {
        if !names.is_empty() && !names.contains(&agent.name) {
            continue;
        }
        say(format_args!("agent {}", agent.name));
        let ran = agent
            .package
            .map(|package| run(&agent.name, &package, &reaper));
        let row = match ran {
            Some(Ok(row)) => row,
            Some(Err(error)) => RecordedPackage::Unavailable {
                why: format!("{error:#}"),
            },
            None => RecordedPackage::Unavailable {
                why: agent.unavailable.unwrap_or_default(),
            },
        };
        if let RecordedPackage::Unavailable { why } = &row {
            say(format_args!("{} is not available: {why}", agent.name));
        }
        // Read again each time, to keep the results of another process.
        let mut recorded = Recorded::read()?;
        recorded.0.insert(agent.name, row);
        recorded.write()?;
    }
    Ok(())
}

fn run(name: &str, package: &Package, reaper: &Path) -> Result<RecordedPackage> {
    let sandbox = Sandbox::new(name)?;
    let installed = install::install(package, &sandbox.folder, USER)?;
    let mut forms: BTreeMap<String, Vec<ExecutedProcess>> = BTreeMap::new();
    for form in forms_of(package, &installed)? {
        let native = |process: &ExecutedProcess| process.exe.contains("/node_modules/");
        if form.replaced && !forms.values().flatten().any(native) {
            continue;
        }
        let processes = form
            .run(&sandbox, &installed, package, reaper)
            .with_context(|| format!("form {}", form.name))?;
        let recognised = processes
            .iter()
            .any(|p| p.recognised.as_deref() == Some(name));
        say(format_args!(
            "{name}: {}: {} processes, recognised: {recognised}",
            form.name,
            processes.len()
        ));
        if processes.is_empty() {
            say(format_args!("{name} printed: {}", sandbox.last_line()));
        }
        forms.insert(form.name.to_owned(), processes);
    }
    Ok(RecordedPackage::Ran {
        date: shell::date()?,
        package: package.name.clone(),
        version: package.version.clone(),
        integrity: package.integrity.clone(),
        forms,
    })
}

/// Form of start of an agent.
struct Form {
    name: &'static str,
    directory: PathBuf,
    line: String,
    /// Whether the package is replaced before the daemon starts.
    replaced: bool,
}

/// Returns the forms of start that a package has. The last one may delete the package.
fn forms_of(package: &Package, installed: &Installed) -> Result<Vec<Form>> {
    let (folder, command) = (&installed.folder, &installed.command);
    let work = folder.join("work");
    let link = folder.join("my-assistant");
    symlink(command, &link)?;
    let form = |name, directory: &Path, start: &[&str]| Form {
        name,
        directory: directory.to_owned(),
        line: start
            .iter()
            .copied()
            .chain(package.arguments.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" "),
        replaced: false,
    };
    let absolute = command.to_str().context("a path that is not UTF-8")?;
    let relative = Path::new(absolute)
        .strip_prefix(folder)?
        .display()
        .to_string();
    let mut forms = vec![
        form("command", &work, &[absolute]),
        form("path", &work, &[&package.bin]),
        form("renamed-link", &work, &[&link.display().to_string()]),
    ];
    let real = fs::canonicalize(command)?;
    if package.python.is_some() {
        forms.push(form("relative", folder, &["python", &relative]));
        forms.push(form("interpreter", &work, &["python", absolute]));
        if let Some(module) = &package.module {
            forms.push(form("module", &work, &["python", "-m", module]));
        }
    } else if fs::read(&real)?.starts_with(b"#!") {
        let script = real.strip_prefix(folder)?.display().to_string();
        forms.push(form("relative", folder, &["node", &script]));
        forms.push(form(
            "interpreter",
            &work,
            &["node", &real.display().to_string()],
        ));
    } else {
        forms.push(form("relative", folder, &[&format!("./{relative}")]));
    }
    if package.python.is_none() {
        forms.push(Form {
            replaced: true,
            ..form("replaced", &work, &[absolute])
        });
    }
    Ok(forms)
}

impl Form {
    /// Starts the agent and returns its processes.
    fn run(
        &self,
        sandbox: &Sandbox,
        installed: &Installed,
        package: &Package,
        reaper: &Path,
    ) -> Result<Vec<ExecutedProcess>> {
        let reader = Reader {
            folder: &installed.folder,
            directory: &self.directory,
            module: package.module.as_deref(),
        };
        let mut run = sandbox.start(installed, &self.directory, &self.line)?;
        let time = Duration::from_secs(package.seconds);
        if !self.replaced {
            let watch = sandbox.watch(reaper, &run, "watch", "")?;
            // A second daemon, so that its rule does not change what the first one recognises.
            let recorder = sandbox.watch(reaper, &run, "recorder", EVERYTHING)?;
            run.go()?;
            sleep(time);
            drop(run);
            let (all, events) = (recorder.stop()?, watch.stop()?);
            let execs = all.iter().filter(|event| event["event"] == "exec");
            let execs: Vec<&Value> = execs.collect();
            return Ok(reader.processes(&execs, &events));
        }
        run.go()?;
        sleep(time);
        let Some(package) = native_package(&installed.folder) else {
            // The agent has exited, or its program does not run yet.
            return Ok(Vec::new());
        };
        // Replaces the package as npm does.
        let name = package.file_name().context("a package without a name")?;
        let aside = package.with_file_name(format!(".{}-Zx81sQ2k", name.display()));
        fs::rename(&package, &aside).context("cannot rename the package")?;
        fs::remove_dir_all(&aside).context("cannot delete the package")?;
        let watch = sandbox.watch(reaper, &run, "watch", "")?;
        sleep(Duration::from_secs(1));
        let running = running(&run)?;
        let events = watch.stop()?;
        let running: Vec<&Value> = running.iter().collect();
        Ok(reader.processes(&running, &events))
    }
}

/// Returns the running processes of a run in the form of events.
fn running(run: &Run) -> Result<Vec<Value>> {
    let namespace = fs::read_link(format!("/proc/{}/ns/pid_for_children", run.pid()))?;
    let mut processes = Vec::new();
    for (pid, path) in shell::processes() {
        let Ok(exe) = fs::read_link(path.join("exe")) else {
            continue;
        };
        if fs::read_link(path.join("ns/pid")).ok().as_ref() != Some(&namespace) {
            continue;
        }
        let text = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
        let (comm, arguments) = (text("comm"), text("cmdline"));
        processes.push(json!({
            "process.pid": pid,
            "process.comm": comm.trim_end(),
            "process.executable.path": exe.display().to_string(),
            "process.command_args": arguments.split_terminator('\0').collect::<Vec<_>>(),
        }));
    }
    Ok(processes)
}

/// Returns the npm package of a running native program, if there is one.
fn native_package(folder: &Path) -> Option<PathBuf> {
    for (_, process) in shell::processes() {
        let exe = fs::read_link(process.join("exe")).unwrap_or_default();
        let Ok(below) = exe.strip_prefix(folder) else {
            continue;
        };
        let below = below.display().to_string();
        if let Some((modules, rest)) = below.rsplit_once("node_modules/") {
            let parts = if rest.starts_with('@') { 2 } else { 1 };
            let name: PathBuf = rest.split('/').take(parts).collect();
            return Some(folder.join(modules).join("node_modules").join(name));
        }
    }
    None
}

/// Reader of an agent's processes from events.
struct Reader<'a> {
    folder: &'a Path,
    directory: &'a Path,
    module: Option<&'a str>,
}

impl Reader<'_> {
    /// Returns the agent's processes among `programs`, with the rules by which the daemon recognised them.
    fn processes(&self, programs: &[&Value], events: &[Value]) -> Vec<ExecutedProcess> {
        let mut processes = Vec::new();
        for (at, program) in programs.iter().enumerate() {
            let same = |event: &Value| event["process.pid"] == program["process.pid"];
            let time = |event: &Value| event["time_boot_ns"].as_u64();
            // The daemon may recognise a process some time after its exec, when the path of its script is resolved. A
            // session continues when its root executes another program.
            let next = programs[at + 1..].iter().find(|next| same(next));
            let next = next.and_then(|next| time(next)).unwrap_or(u64::MAX);
            let opened = events.iter().rfind(|event| {
                let before = time(event).is_some_and(|time| time < next);
                event["event"] == "session.open" && same(event) && before
            });
            let rule = opened.and_then(|event| event["rule"].as_str());
            if let Some(process) = self.process(program, rule)
                && !processes.contains(&process)
            {
                processes.push(process);
            }
        }
        processes
    }

    /// Returns the process of an event if it belongs to the agent.
    fn process(&self, event: &Value, rule: Option<&str>) -> Option<ExecutedProcess> {
        let text = |key: &str| event[key].as_str().unwrap_or_default();
        let exe = Path::new(text("process.executable.path"));
        let argv: Vec<&str> = event["process.command_args"]
            .as_array()?
            .iter()
            .filter_map(Value::as_str)
            .collect();
        let name = exe.file_name()?.to_str()?;
        let (mut script, mut resolved) = (None, None);
        if name == "node" || name.starts_with("python") {
            let at = 1 + argv
                .iter()
                .skip(1)
                .position(|arg| *arg == "-m" || !arg.starts_with('-') && !arg.is_empty())?;
            if argv[at] == "-m" {
                let module = argv
                    .get(at + 1)
                    .filter(|module| Some(**module) == self.module)?;
                script = Some(format!("-m {module}"));
            } else {
                let real = fs::canonicalize(self.directory.join(argv[at])).ok();
                let real = real.unwrap_or_else(|| self.directory.join(argv[at]));
                // Excludes npm itself.
                if !real.starts_with(self.folder) {
                    return None;
                }
                script = Some(argv[at].to_owned());
                resolved = Some(real.display().to_string());
            }
        } else if !exe.starts_with(self.folder) {
            return None;
        }
        let argv = argv.iter().take(ARGUMENTS).map(|argument| {
            self.stable(argument)
                .chars()
                .take(ARGUMENT_LENGTH)
                .collect()
        });
        Some(ExecutedProcess {
            comm: text("process.comm").to_owned(),
            exe: self.stable(text("process.executable.path")),
            script: script.map(|script| self.stable(&script)),
            resolved: resolved.map(|resolved| self.stable(&resolved)),
            argv: argv.collect(),
            recognised: rule.map(str::to_owned),
        })
    }

    /// Returns a text without the parts that differ from run to run.
    fn stable(&self, text: &str) -> String {
        let text = text.replace(&self.folder.display().to_string(), FOLDER);
        // Codex unpacks its server into a directory with a random name.
        if let Some((before, after)) = text.split_once("/.staging.") {
            let rest = after.split_once('/').map_or("", |(_, rest)| rest);
            return format!("{before}/.staging.random/{rest}");
        }
        // Depends on the memory of the machine.
        if text.starts_with("--max-old-space-size=") {
            return "--max-old-space-size=4096".to_owned();
        }
        text
    }
}
