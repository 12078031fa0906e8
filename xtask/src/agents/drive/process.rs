//! Processes of a drive other than agents: this program under other names.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MsFlags, mount};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::waitpid;
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use serde_json::{Value, json};

use super::mock;

/// Hidden subcommand that runs a role.
pub const COMMAND: &str = "agents-process";
/// Unprivileged uid of agents.
pub const USER: u32 = 65534;
/// Roles of the processes that a tool call leaves behind.
pub const LEFTOVERS: [&str; 4] = ["plain", "setsid", "nohup", "listen"];
/// Roles of the processes that a person has started before the agent.
pub const CANARIES: [&str; 3] = ["canary-sleep", "canary-listen", "canary-job"];
/// File in an editor's directory that makes it close the agent's input.
pub const CLOSE: &str = "close";

/// Runs a role until it exits.
///
/// # Errors
/// There is no such role, or a system call fails.
pub fn run_role(role: &[String]) -> Result<()> {
    match role.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["init", world] => init(Path::new(world)),
        ["mock", log, command] => mock::serve(Path::new(log), command, None),
        ["mock", log, command, held_until] => {
            mock::serve(Path::new(log), command, Some(held_until.into()))
        }
        ["listen" | "canary-listen"] => listen(),
        ["plain" | "setsid" | "nohup" | "canary-sleep" | "canary-job"] => sleep(),
        ["mcp-polite"] => answer_mcp(),
        ["mcp-deaf"] => {
            answer_mcp()?;
            sleep()
        }
        ["editor", protocol, ref agent @ ..] => edit(protocol, agent),
        _ => bail!("unknown role: {}", role.join(" ")),
    }
}

fn sleep() -> Result<()> {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn listen() -> Result<()> {
    let _socket = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
    sleep()
}

/// Runs as the init of a world. It sets up the world as root and switches to [`USER`]. Then it starts the mock and the
/// person's terminal, and waits for orphans.
fn init(world: &Path) -> Result<()> {
    ensure!(
        std::process::id() == 1,
        "only for the init of a PID namespace"
    );
    let status = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status();
    ensure!(
        status.context("cannot start ip")?.success(),
        "cannot bring up the loopback device"
    );
    // Agents create sockets at fixed paths there.
    let none: Option<&str> = None;
    mount(
        Some(&world.join("tmp")),
        "/tmp",
        none,
        MsFlags::MS_BIND,
        none,
    )
    .context("cannot mount /tmp")?;
    setgroups(&[])?;
    setgid(Gid::from_raw(USER))?;
    setuid(Uid::from_raw(USER))?;
    // setuid(2) clears it, so set it again. The namespace ends with its init.
    set_pdeathsig(Signal::SIGKILL)?;
    std::env::set_current_dir(world.join("project"))?;
    let script = std::fs::read_to_string(world.join("tool-command"))?;
    let mut mock = Command::new(world.join("bin/mock-model"));
    mock.args([COMMAND, "mock"])
        .arg(world.join("mock.log"))
        .arg(script.trim());
    if world.join("hold").exists() {
        mock.arg(world.join("release"));
    }
    mock.stdin(Stdio::null())
        .spawn()
        .context("cannot start the mock model")?;
    let status = Command::new("tmux")
        .arg("-S")
        .arg(world.join("tmux.sock"))
        .args("-f /dev/null new-session -d -s person -n agent -x 150 -y 50".split(' '))
        .args(["bash", "--norc", "--noprofile"])
        .stdin(Stdio::null())
        .status();
    ensure!(
        status.context("cannot start tmux")?.success(),
        "cannot start a terminal"
    );
    std::fs::write(world.join("ready"), "")?;
    loop {
        // There is no child, or a signal interrupted the wait.
        if waitpid(None, None).is_err() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Acts as an MCP server without tools until its input ends.
fn answer_mcp() -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?).unwrap_or_default();
        let result = match request["method"].as_str() {
            Some("initialize") => json!({
                "protocolVersion": request["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "drive", "version": "1"},
            }),
            Some("tools/list") => json!({"tools": []}),
            _ => json!({}),
        };
        if !request["id"].is_null() {
            let answer = json!({"jsonrpc": "2.0", "id": request["id"], "result": result});
            // The client may be gone.
            let _ = writeln!(std::io::stdout(), "{answer}");
        }
    }
    Ok(())
}

/// Client (editor) side of a protocol over the agent's standard input and output.
struct Editor {
    agent: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    last: u64,
}

/// Starts an agent, runs one prompt, and keeps the connection open until the file [`CLOSE`] exists.
fn edit(protocol: &str, command: &[&str]) -> Result<()> {
    let (program, arguments) = command.split_first().context("no agent")?;
    let mut agent = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let input = agent.stdin.take().context("no input")?;
    let output = BufReader::new(agent.stdout.take().context("no output")?);
    let mut editor = Editor {
        agent,
        input,
        output,
        last: 0,
    };
    let here = std::env::current_dir()?;
    let text = json!([{"type": "text", "text": format!("{} now", mock::PROMPT)}]);
    match protocol {
        "acp" => {
            editor.call("initialize", json!({
                "protocolVersion": 1,
                "clientCapabilities": {"fs": {"readTextFile": false, "writeTextFile": false}, "terminal": false},
                "clientInfo": {"name": "drive", "version": "1"},
            }))?;
            let own = here.join("../bin/mcp");
            let servers = ["mcp-polite", "mcp-deaf"].map(
                |role| json!({"name": role, "command": own, "args": [COMMAND, role], "env": []}),
            );
            let session =
                editor.call("session/new", json!({"cwd": here, "mcpServers": servers}))?;
            editor.call(
                "session/prompt",
                json!({"sessionId": session["sessionId"], "prompt": text}),
            )?;
        }
        _ => {
            editor.call(
                "initialize",
                json!({"clientInfo": {"name": "drive", "title": "drive", "version": "1"}}),
            )?;
            editor.send(json!({"method": "initialized"}))?;
            let start =
                json!({"cwd": here, "approvalPolicy": "never", "sandbox": "danger-full-access"});
            let thread = editor.call("thread/start", start)?;
            editor.call(
                "turn/start",
                json!({"threadId": thread["thread"]["id"], "input": text}),
            )?;
        }
    }
    let Editor {
        mut agent,
        input,
        mut output,
        ..
    } = editor;
    std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    while !here.join(CLOSE).exists() {
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(input);
    agent.wait()?;
    Ok(())
}

impl Editor {
    fn send(&mut self, mut message: Value) -> Result<()> {
        message["jsonrpc"] = json!("2.0");
        writeln!(self.input, "{message}").context("the agent has closed its input")
    }

    /// Sends a request and waits for its result. Grants the agent's permission requests meanwhile.
    fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last += 1;
        let id = self.last;
        self.send(json!({"id": id, "method": method, "params": params}))?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line)? == 0 {
                bail!("{method}: the agent exited: {}", self.agent.wait()?);
            }
            println!("{}", line.chars().take(300).collect::<String>().trim_end());
            let message: Value = serde_json::from_str(&line).unwrap_or_default();
            if message["method"].is_string() && !message["id"].is_null() {
                let options = message["params"]["options"]
                    .as_array()
                    .into_iter()
                    .flatten();
                let mut allowing =
                    options.filter(|option| option["kind"].to_string().contains("allow"));
                let result = match allowing.next() {
                    Some(option) => {
                        json!({"outcome": {"outcome": "selected", "optionId": option["optionId"]}})
                    }
                    None => json!({"decision": "accept"}),
                };
                self.send(json!({"id": message["id"], "result": result}))?;
            } else if message["id"] == id {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].clone());
            }
        }
    }
}
