//! `cargo xtask docs-output`: the output of commands in the README, from a small tree under a daemon that observes.
//!
//! A comment such as `<!-- output: tree -->` stands before each block of text that is replaced.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::shell::{as_root, built_reaper, output, say, workspace};

/// Where the stand-in for an agent is, below a temporary directory. A built-in rule recognises the path.
const AGENT: &str = "node_modules/@anthropic-ai/claude-code/bin/claude.exe";

/// What the stand-in runs: a detached process, a kept one, and a shell with a child. All exit by themselves.
const WORK: &str = "\
(sleep 31 &)
REAPER_KEEP=1 sleep 32 &
bash -c 'sleep 33 & wait' &
wait
";

#[derive(clap::Args)]
pub struct Args {
    /// Run this executable instead of building one
    #[arg(long, value_name = "FILE")]
    reaper: Option<PathBuf>,
}

/// Runs the tree and replaces the blocks.
///
/// # Errors
/// The build, the daemon or a command fails, or the README lacks a block.
pub fn refresh(args: Args) -> Result<()> {
    let reaper = match args.reaper {
        Some(reaper) => reaper,
        None => built_reaper(&["--release"])?,
    };
    let dir = std::env::temp_dir().join(format!("reaper-docs-{}", std::process::id()));
    let agent = dir.join(AGENT);
    fs::create_dir_all(agent.parent().unwrap_or(&dir))?;
    fs::copy("/bin/bash", &agent).context("cannot copy bash")?;
    fs::write(dir.join("work.sh"), WORK)?;
    say("watching a small tree for 20 s; nothing is signalled by the daemon");
    let result = samples(&reaper, &dir);
    fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let readme = workspace().join("README.md");
    let mut text = fs::read_to_string(&readme)?;
    for (name, sample) in result? {
        text = replaced(&text, name, &sample)
            .with_context(|| format!("README.md has no block after <!-- output: {name} -->"))?;
    }
    fs::write(&readme, text)?;
    say("wrote README.md");
    Ok(())
}

/// Returns the output of each command, by its name in the README.
fn samples(reaper: &Path, dir: &Path) -> Result<Vec<(&'static str, String)>> {
    let mut root = Command::new("bash")
        .args(["-c", "read go; exec -a claude \"$0\" work.sh"])
        .arg(dir.join(AGENT))
        .current_dir(dir)
        .stdin(Stdio::piped())
        .spawn()?;
    let mut daemon = as_root("timeout")?;
    daemon.arg("20").arg(reaper).args(["daemon", "--observe"]);
    daemon.args(["--no-pin", "--scope", &root.id().to_string()]);
    daemon.arg("--runtime-dir").arg(dir.join("run"));
    daemon.arg("--journal-dir").arg(dir.join("journal"));
    let mut daemon = daemon.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    sleep(Duration::from_secs(2));
    let mut input = root.stdin.take().context("no pipe")?;
    input.write_all(b"go\n")?;
    sleep(Duration::from_secs(3));
    let socket = fs::read_dir(dir.join("run"))?.flatten();
    let mut socket = socket.map(|entry| entry.path());
    let socket = socket.find(|path| path.extension().is_some_and(|e| e == "sock"));
    let socket = socket.context("the daemon has no socket")?;
    // Hints repeat the option, which the default service does not need.
    let option = format!(" --socket {}", socket.display());
    let ask = |words: &[&str]| {
        let mut command = as_root(reaper)?;
        let said = output(command.args(words).arg("--socket").arg(&socket))?;
        anyhow::Ok(said.replace(&option, ""))
    };
    let (status, tree) = (ask(&["status"])?, ask(&["tree"])?);
    let groups: Value = serde_json::from_str(&ask(&["tree", "--json"])?)?;
    let groups = groups["groups"].as_array().into_iter().flatten();
    let mut processes =
        groups.flat_map(|group| group["processes"].as_array().into_iter().flatten());
    let detached = processes.find(|process| process["detached"] == true);
    let pid = detached.context("no process is detached")?["pid"].to_string();
    let explain: Vec<String> = ask(&["explain", &pid])?
        .lines()
        .take(3)
        .map(str::to_owned)
        .collect();
    let keep = ask(&["keep", &pid, "--for", "2h"])?;
    // Its pid is not reused before `wait`.
    root.kill()?;
    root.wait()?;
    sleep(Duration::from_secs(1));
    let history = ask(&["history"])?;
    ensure!(daemon.wait()?.code() == Some(124), "the daemon ended early");
    Ok(vec![
        ("status", status),
        ("tree", tree),
        ("explain", explain.join("\n")),
        ("keep", keep),
        ("history", history),
    ])
}

/// Returns the text with another content of the block after a comment.
fn replaced(text: &str, name: &str, sample: &str) -> Option<String> {
    let comment = format!("<!-- output: {name} -->\n```text\n");
    let start = text.find(&comment)? + comment.len();
    let end = start + text[start..].find("```")?;
    Some(format!(
        "{}{}\n{}",
        &text[..start],
        sample.trim_end(),
        &text[end..]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_changes_only_the_named_block() {
        let text = "<!-- output: a -->\n```text\nold\n```\n<!-- output: b -->\n```text\nold\n```\n";
        let changed = replaced(text, "b", "new\n").expect("a block");
        assert!(
            changed.starts_with("<!-- output: a -->\n```text\nold\n```\n"),
            "{changed}"
        );
        assert!(changed.ends_with("b -->\n```text\nnew\n```\n"), "{changed}");
        assert_eq!(replaced(text, "c", "new"), None);
    }
}
