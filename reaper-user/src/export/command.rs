//! Short forms of command lines, by which people can tell programs apart.

use super::redact;
use reaper_model::event::Image;

/// Limit of arguments that are read.
const ARGUMENTS_MAX: usize = 64;
/// Part of the command line of Claude Code's shell for a tool call.
const SNAPSHOT: &str = "/shell-snapshots/snapshot-";
const SHELLS: &[&str] = &["bash", "zsh", "sh", "dash", "busybox"];
/// Programs whose script says more than their own name.
const INTERPRETERS: &[&str] = &[
    "node", "nodejs", "bun", "deno", "python", "python3", "ruby", "perl", "php", "bash", "zsh",
    "sh", "dash",
];
/// Names of files and directories that say nothing about a program.
const GENERIC: &[&str] = &[
    "index", "cli", "main", "__main__", "run", "start", "bin", "dist", "build", "lib", "src",
    "out", "bundle", "versions", "current",
];

/// Returns a command line with secrets redacted, without the directories of the program and its script. A shell for a
/// tool call is shown by what it runs: `tool shell: npm run dev`. Without arguments, returns `[comm]`.
pub fn short_command(image: &Image) -> String {
    let args = redact::arguments(image.args()).take(ARGUMENTS_MAX);
    let mut args: Vec<String> = args
        .map(|arg| String::from_utf8_lossy(&arg).into_owned())
        .collect();
    let Some((program, rest)) = args.split_first_mut() else {
        return format!("[{}]", String::from_utf8_lossy(&image.comm));
    };
    *program = program_name(program);
    if SHELLS.contains(&program.trim_start_matches('-'))
        && let Some(script) = rest.iter().find(|arg| arg.contains(SNAPSHOT))
    {
        return match evaluated(script) {
            Some(command) => format!("tool shell: {command}"),
            None => "tool shell".into(),
        };
    }
    if INTERPRETERS.contains(&program.as_str())
        && let Some(script) = rest.iter_mut().find(|arg| !arg.starts_with('-'))
        && script.starts_with('/')
        && !script.contains(char::is_whitespace)
    {
        *script = program_name(script);
    }
    args.join(" ")
}

/// Returns the file name of a program. If that is as general as `index.js` or `2.1.197`, it is named by the nearest
/// directory that is not: `server-github/dist/index.js`, `claude`.
fn program_name(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let (Some(last), true) = (parts.last(), path.contains('/')) else {
        return path.to_owned();
    };
    let named = parts.iter().rposition(|part| !is_generic(part));
    match named {
        Some(at) if is_version(last) => parts[at].to_owned(),
        Some(at) => parts[at..].join("/"),
        None => (*last).to_owned(),
    }
}

fn is_generic(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default();
    is_version(name) || GENERIC.contains(&stem)
}

fn is_version(name: &str) -> bool {
    let name = name.strip_prefix('v').unwrap_or(name);
    !name.is_empty() && name.chars().all(|c| c.is_ascii_digit() || c == '.')
}

/// Returns the word after `eval` in a shell script, without its quotes. Returns `None` without `eval`.
fn evaluated(script: &str) -> Option<String> {
    let (_, command) = script.split_once(" eval ")?;
    let (mut word, mut quote) = (String::new(), None);
    let mut rest = command.trim_start().chars();
    while let Some(c) = rest.next() {
        match (quote, c) {
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (None | Some('"'), '\\') => word.extend(rest.next()),
            (None, c) if c.is_whitespace() => break,
            (_, c) => word.push(c),
        }
    }
    Some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shortened_to_distinguishing_words() {
        let snapshot = "source /home/u/.claude/shell-snapshots/snapshot-zsh-17-ab.sh && ";
        let shell = |script: &str| format!("/bin/zsh\0-c\0{snapshot}{script}\0");
        for (argv, expected) in [
            (
                "/home/u/.local/bin/claude\0-p\0fix it\0",
                "claude -p fix it",
            ),
            (
                "/home/u/.local/share/claude/versions/2.1.197\0-p\0x\0",
                "claude -p x",
            ),
            (
                "/usr/bin/node\0/usr/lib/node_modules/@anthropic-ai/claude-code/cli.js\0-p\0x\0",
                "node claude-code/cli.js -p x",
            ),
            (
                "node\0--inspect\0/w/node_modules/@mcp/server-github/dist/index.js\0",
                "node --inspect server-github/dist/index.js",
            ),
            ("python3\0-c\0import x\0", "python3 -c import x"),
            ("/usr/bin/cat\0/etc/hosts\0", "cat /etc/hosts"),
            ("./run\0", "run"),
            ("-bash\0", "-bash"),
            ("/bin/sh\0-c\0sleep 1\0", "sh -c sleep 1"),
            ("curl\0--token\0hunter2\0", "curl --token [redacted]"),
            (
                &shell("eval 'npm run dev &' && pwd -P >| /tmp/claude-9f-cwd"),
                "tool shell: npm run dev &",
            ),
            (
                &shell("shopt -u extglob || true && eval 'echo '\"'\"'a b'\"'\"'' < /dev/null"),
                "tool shell: echo 'a b'",
            ),
            (
                &shell("eval \"echo \\\"\\$HOME\\\" it's\" && pwd"),
                "tool shell: echo \"$HOME\" it's",
            ),
            (&shell("eval 'echo '\\''a'\\''"), "tool shell: echo 'a'"),
            (&shell("eval 'cut off"), "tool shell: cut off"),
            (&shell("pwd"), "tool shell"),
            ("", "[x]"),
        ] {
            let image = Image {
                argv: argv.into(),
                comm: b"x".into(),
                ..Image::default()
            };
            assert_eq!(short_command(&image), expected, "{argv:?}");
        }
    }
}
