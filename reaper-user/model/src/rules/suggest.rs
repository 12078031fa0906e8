//! Suggests a rule that keeps processes like a given one.

use std::fmt::Write as _;

use crate::event::Image;
use crate::ruleset::{is_interpreter, script_of, without_version};

/// Names of shells. A rule with the path of one alone would keep most of what an agent starts.
const SHELLS: [&str; 9] = [
    "ash", "bash", "busybox", "dash", "fish", "ksh", "mksh", "sh", "zsh",
];

/// Maximum number of positional arguments in a suggested rule, and of bytes in each.
const ARGS_MAX: usize = 4;
const ARG_MAX: usize = 60;

/// Maximum length of a rule's name.
const NAME_MAX: usize = 63;

/// Returns a `[[keep]]` table that matches this program with these first positional arguments.
///
/// `is_hidden` says whether a text must not be shown: a rule ends its arguments before the first such one. Returns `None`
/// if the program is unknown or hidden, or if only a shell or an interpreter is known and not what it runs.
pub fn keep_rule(image: &Image, is_hidden: impl Fn(&str) -> bool) -> Option<String> {
    let exe = image.exe.strip_suffix(b" (deleted)").unwrap_or(&image.exe);
    let exe = std::str::from_utf8(exe).ok()?;
    let exe_name = exe.rsplit('/').next().unwrap_or_default();
    let script = script_of(exe_name.as_bytes(), image);
    let skipped = script.as_ref().map_or(1, |script| script.at + 1);
    let args = positional(image, skipped, &is_hidden);
    let needs_args =
        script.is_none() && (SHELLS.contains(&exe_name) || is_interpreter(exe_name.as_bytes()));
    if needs_args && args.is_empty() {
        return None;
    }
    let (key, known) = match (&script, exe, &*image.comm) {
        (Some(script), ..) => ("script", std::str::from_utf8(&script.name).ok()?),
        (None, "", comm) => ("comm", std::str::from_utf8(comm).ok()?),
        (None, exe, _) => ("exe", exe),
    };
    if known.is_empty() || known.chars().any(char::is_control) || is_hidden(known) {
        return None;
    }
    let pattern = match key {
        "script" => script_pattern(known),
        // A path that was cut at its start.
        "exe" if known.starts_with('…') => format!("**/{}", escape(exe_name)),
        _ => escape(known),
    };
    let mut conditions = String::new();
    if script.is_some() {
        // Without it, the scripts of all interpreters would have to be read.
        let family = String::from_utf8_lossy(without_version(exe_name.as_bytes()));
        let _ = writeln!(
            conditions,
            "exe = {}",
            quote(&format!("**/{}*", escape(&family)))
        );
    }
    let _ = writeln!(conditions, "{key} = {}", quote(&pattern));
    if !args.is_empty() {
        let args: Vec<String> = args.iter().map(|arg| quote(&escape(arg))).collect();
        let _ = writeln!(conditions, "args = [{}]", args.join(", "));
    }
    let name = quote(&name(known, &conditions));
    Some(format!("[[keep]]\nname = {name}\n{conditions}"))
}

/// Returns the first positional arguments after the first `skipped` arguments. Stops before one that is long, cut,
/// hidden or not plain text.
fn positional(image: &Image, skipped: usize, is_hidden: impl Fn(&str) -> bool) -> Vec<&str> {
    let mut args: Vec<&[u8]> = image.args().collect();
    if image.truncated {
        args.pop();
    }
    let mut options_ended = false;
    let is_positional = |arg: &&[u8]| {
        let is_option = !options_ended && arg.starts_with(b"-") && *arg != b"-";
        options_ended |= *arg == b"--";
        !is_option
    };
    let args = args.into_iter().skip(skipped).filter(is_positional);
    let plain = args.map_while(|arg| {
        let arg = std::str::from_utf8(arg).ok()?;
        let is_plain = arg.len() <= ARG_MAX && !arg.chars().any(char::is_control);
        (is_plain && !arg.is_empty() && !is_hidden(arg)).then_some(arg)
    });
    plain.take(ARGS_MAX).collect()
}

/// Returns a pattern for a script as it was given. A relative path matches in every directory.
fn script_pattern(name: &str) -> String {
    if name.starts_with('/') || name.starts_with("-m ") {
        return escape(name);
    }
    let name = name.trim_start_matches("./");
    let tail = name.rsplit("../").next().unwrap_or(name);
    format!("**/{}", escape(tail))
}

/// Returns a name for a rule with these conditions, after the last part of a path or name. It ends with a hash of the
/// conditions, so that the rules of two programs differ in their names. No built-in rule has a name that begins with `my-`,
/// so the rule replaces none.
fn name(known: &str, conditions: &str) -> String {
    let last = known.rsplit(['/', ' ']).next().unwrap_or_default();
    let is_allowed = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
    let last: String = last.chars().filter(is_allowed).collect();
    let last: String = last.chars().take(NAME_MAX - "my--0000".len()).collect();
    format!("my-{last}-{:04x}", hash(conditions))
}

/// Returns a hash of 16 bits (FNV-1a) that is the same in each version.
fn hash(text: &str) -> u32 {
    let add = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    let hash = text.bytes().fold(0x811c_9dc5, add);
    (hash >> 16) ^ (hash & 0xffff)
}

/// Returns a glob that matches only this text.
fn escape(text: &str) -> String {
    let mut glob = String::with_capacity(text.len());
    for c in text.chars() {
        if "*?[]{}\\".contains(c) {
            glob.push('\\');
        }
        glob.push(c);
    }
    glob
}

/// Returns a TOML string. The text has no control characters.
fn quote(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{escaped}\"")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use toml::de::DeTable;

    use super::*;
    use crate::rules::Rules;

    fn image(exe: &str, argv: &[&str]) -> Image {
        Image {
            comm: b"comm".into(),
            exe: exe.into(),
            argv: argv
                .iter()
                .flat_map(|arg| [arg.as_bytes(), &[0]].concat())
                .collect(),
            ..Image::default()
        }
    }

    fn suggested(image: &Image) -> Option<String> {
        keep_rule(image, |arg| arg.contains("[redacted]"))
    }

    #[test]
    fn suggested_rule_names_program_and_arguments() {
        let long = "x".repeat(ARG_MAX + 1);
        for (exe, argv, expected) in [
            (
                "/usr/bin/sleep",
                &["sleep", "100"][..],
                Some(("my-sleep", "exe = \"/usr/bin/sleep\"\nargs = [\"100\"]\n")),
            ),
            (
                "/usr/bin/node",
                &["node", "--inspect", "./src/server.js", "--port", "80"],
                Some((
                    "my-server.js",
                    "exe = \"**/node*\"\nscript = \"**/src/server.js\"\nargs = [\"80\"]\n",
                )),
            ),
            (
                "/usr/bin/node",
                &["node", "/app/node_modules/.bin/vite", "dev"],
                Some((
                    "my-vite",
                    "exe = \"**/node*\"\nscript = \"/app/node_modules/.bin/vite\"\nargs = [\"dev\"]\n",
                )),
            ),
            (
                "/usr/bin/python3.12",
                &["python3", "-m", "http.server", "8000"],
                Some((
                    "my-http.server",
                    "exe = \"**/python*\"\nscript = \"-m http.server\"\nargs = [\"8000\"]\n",
                )),
            ),
            (
                "/usr/bin/node",
                &["node", "../../x/a.js"],
                Some(("my-a.js", "exe = \"**/node*\"\nscript = \"**/x/a.js\"\n")),
            ),
            (
                "/bin/bash",
                &["bash", "-c", "sleep 33 & wait"],
                Some((
                    "my-bash",
                    "exe = \"/bin/bash\"\nargs = [\"sleep 33 & wait\"]\n",
                )),
            ),
            (
                "/usr/lib/postgres (deleted)",
                &["postgres", "-D", "/data"],
                Some((
                    "my-postgres",
                    "exe = \"/usr/lib/postgres\"\nargs = [\"/data\"]\n",
                )),
            ),
            (
                "/opt/a[1]*/x\"y",
                &["x", "a*{b}"],
                Some((
                    "my-xy",
                    "exe = \"/opt/a\\\\[1\\\\]\\\\*/x\\\"y\"\nargs = [\"a\\\\*\\\\{b\\\\}\"]\n",
                )),
            ),
            (
                "…/deep/tool",
                &["tool"],
                Some(("my-tool", "exe = \"**/tool\"\n")),
            ),
            ("", &[], Some(("my-comm", "comm = \"comm\"\n"))),
            (
                "/usr/bin/curl",
                &["curl", "[redacted]", "x"],
                Some(("my-curl", "exe = \"/usr/bin/curl\"\n")),
            ),
            (
                "/usr/bin/rg",
                &["rg", &long, "x"],
                Some(("my-rg", "exe = \"/usr/bin/rg\"\n")),
            ),
            // Only the shell or the interpreter is known.
            ("/bin/bash", &["bash", "-c", &long], None),
            ("/bin/sh", &["sh"], None),
            ("/usr/bin/node", &["node"], None),
        ] {
            let image = image(exe, argv);
            let expected = expected.map(|(name, conditions)| {
                let hash = hash(conditions);
                format!("[[keep]]\nname = \"{name}-{hash:04x}\"\n{conditions}")
            });
            assert_eq!(suggested(&image), expected, "{argv:?}");
        }
    }

    #[test]
    fn suggested_rules_of_two_programs_can_be_used_together() {
        let long = format!("/usr/bin/{}", "x".repeat(NAME_MAX));
        let texts = [
            image("/usr/bin/sleep", &["sleep", "100"]),
            image("/usr/bin/sleep", &["sleep", "200"]),
            image("/usr/bin/node", &["node", "/a/server.js"]),
            image("/usr/bin/node", &["node", "/b/server.js"]),
            image(&long, &["x", "1"]),
            image(&long, &["x", "2"]),
        ]
        .map(|image| suggested(&image).expect("a rule"));
        let text = texts.concat();
        let root = DeTable::parse(&text).expect("TOML");
        let rules = Rules::read(root.get_ref()).expect("valid rules").in_force;
        let rules = rules.rules().iter();
        let own = rules.filter(|rule| rule.name.starts_with("my-"));
        assert_eq!(own.count(), texts.len(), "{text}");
    }

    #[test]
    fn suggested_rule_keeps_its_own_process() {
        for (exe, argv) in [
            ("/usr/bin/sleep", &["sleep", "100"][..]),
            (
                "/usr/bin/node",
                &["node", "./src/server.js", "--port", "80"],
            ),
            (
                "/usr/bin/python3.12",
                &["python3", "-m", "http.server", "8000"],
            ),
            ("/bin/bash", &["bash", "-c", "sleep 33 & wait"]),
            ("/opt/a[1]*/x\"y", &["x", "a*{b}\\"]),
            ("/usr/bin/ninja", &["ninja", "-C", "out", "--", "-all"]),
        ] {
            let image = Arc::new(image(exe, argv));
            let text = suggested(&image).expect("a rule");
            let root = DeTable::parse(&text).expect("TOML");
            let rules = Rules::read(root.get_ref()).expect("a valid rule").in_force;
            let matching = rules.matching_member_rules(&image);
            let matches = matching
                .iter()
                .any(|id| rules.rule(*id).name.starts_with("my-"));
            assert!(matches, "{argv:?}: {text}");
        }
    }
}
