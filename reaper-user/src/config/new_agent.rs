//! Rule for an agent that a user names by a program or by a running process, for `reaper agent add`.

mod launchers;

use std::borrow::Cow;

use super::show::toml_value;
use reaper_common::RULE_MAX;
use reaper_model::event::Image;
use reaper_model::ruleset::{is_interpreter, script_name, without_version};

/// Names of files and directories that say nothing about the program.
const COMMON: [&str; 18] = [
    "index",
    "cli",
    "main",
    "__main__",
    "run",
    "app",
    "server",
    "start",
    "dist",
    "bin",
    "src",
    "lib",
    "build",
    "bundle",
    "out",
    "current",
    "versions",
    "node_modules",
];

/// Endings of scripts that are no part of a name.
const ENDINGS: [&str; 14] = [
    ".js", ".mjs", ".cjs", ".ts", ".py", ".pyz", ".sh", ".bash", ".zsh", ".pl", ".rb", ".php",
    ".lua", ".exe",
];

/// Rule that recognises an agent by its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewAgent {
    /// Name of the rule.
    pub name: String,
    /// Glob over the path of the program.
    exe: String,
    /// Glob over the script, if the program is an interpreter.
    script: Option<String>,
}

impl NewAgent {
    /// Creates the rule for a program. Versions in its path become `*`, so that the rule outlives an update.
    ///
    /// # Errors
    /// Says why a rule for this program would match too much, or why none can be written.
    pub fn of(image: &Image) -> Result<NewAgent, String> {
        let exe = utf8(&image.exe)?;
        let file = file_name(exe);
        if exe.is_empty() {
            return Err("its program cannot be read: try again as root".into());
        }
        refuse_launcher(exe)?;
        if !is_interpreter(exe.as_bytes()) {
            return Ok(NewAgent {
                name: name_of(exe)?,
                exe: glob(exe),
                script: None,
            });
        }
        let given = script_name(image).ok_or_else(|| {
            format!("{file} runs no script: a rule for it would match every {file}; name the agent's script")
        })?;
        let given = match &image.script[..] {
            [] => given,
            resolved => Cow::Borrowed(resolved),
        };
        let script = utf8(&given)?;
        let is_module = script.strip_prefix("-m ");
        if is_module.is_none() && !script.starts_with('/') {
            return Err(format!(
                "the path of its script {script} cannot be read: give the script itself"
            ));
        }
        if is_interpreter(script.as_bytes()) {
            let shim = file_name(script);
            return Err(format!(
                "it is a script that chooses a {shim}: a rule for it would match whatever {shim} runs"
            ));
        }
        refuse_launcher(script)?;
        let family = String::from_utf8_lossy(without_version(file.as_bytes())).into_owned();
        let version = if family == file { "" } else { "*" };
        Ok(NewAgent {
            name: match is_module {
                Some(module) => name_of(&module.replace('.', "/"))?,
                None => name_of(script)?,
            },
            exe: format!("**/{family}{version}"),
            script: Some(glob(script)),
        })
    }

    /// Returns the rule for any version of its interpreter, which another program will choose.
    pub fn in_any_version(self) -> NewAgent {
        let is_exact = self.script.is_none() || self.exe.ends_with('*');
        let version = if is_exact { "" } else { "*" };
        let exe = self.exe + version;
        NewAgent { exe, ..self }
    }

    /// Returns the rule as a table for the end of a config file.
    pub fn toml(&self) -> String {
        let mut out = String::from("[[agent]]\n");
        let keys = [
            ("name", Some(&self.name)),
            ("exe", Some(&self.exe)),
            ("script", self.script.as_ref()),
        ];
        for (key, value) in keys {
            let value = value.map(|value| toml_value(&value.as_str().into()));
            out.extend(value.map(|value| format!("{key} = {value}\n")));
        }
        out
    }
}

fn utf8(path: &[u8]) -> Result<&str, String> {
    let what = "its path is not UTF-8, as a config file is: give it another name";
    std::str::from_utf8(path).map_err(|_| what.into())
}

fn refuse_launcher(path: &str) -> Result<(), String> {
    match launchers::launcher(path) {
        None => Ok(()),
        Some(name) => Err(format!(
            "{name} runs other programs: a rule for it would match them all"
        )),
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// Returns whether a part of a path is only a version, such as `v2.1.197`.
fn is_version(part: &str) -> bool {
    let digits = part.strip_prefix('v').unwrap_or(part);
    let is_dotted = digits.contains('.') && digits.starts_with(|c: char| c.is_ascii_digit());
    is_dotted && digits.chars().all(|c| c.is_ascii_digit() || c == '.')
}

/// Returns a glob that matches a path, and the same path with other versions.
fn glob(path: &str) -> String {
    let part = |part: &str| match is_version(part) {
        true => "*".to_owned(),
        false => escaped(part),
    };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

fn escaped(part: &str) -> String {
    let mut out = String::new();
    for c in part.chars() {
        out.extend("*?[]{}\\".contains(c).then_some('\\'));
        out.push(c);
    }
    out
}

/// Returns a name for a rule: the last distinctive part of a path.
fn name_of(path: &str) -> Result<String, String> {
    let stem = |part: &str| {
        let ending = ENDINGS.iter().find_map(|ending| part.strip_suffix(ending));
        ending.unwrap_or(part).to_owned()
    };
    let is_distinctive = |part: &String| !COMMON.contains(&part.as_str()) && !is_version(part);
    let name = path
        .rsplit('/')
        .map(stem)
        .find(is_distinctive)
        .unwrap_or_default();
    let allowed = |c: char| {
        if c.is_ascii_alphanumeric() || "-_.".contains(c) {
            c
        } else {
            '-'
        }
    };
    let name: String = name.chars().map(allowed).take(RULE_MAX - 1).collect();
    let name = name.trim_matches(['-', '.']);
    match name {
        "" => Err("no name can be made from its path: give one with --name".into()),
        name => Ok(name.into()),
    }
}

#[cfg(test)]
mod tests;
