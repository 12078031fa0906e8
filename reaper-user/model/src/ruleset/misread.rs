//! Finds conditions on arguments that name an interpreter's script or its own options.

use super::matcher::{Condition, Field, Matcher};
use super::{Pattern, names, script};

/// Endings of scripts.
const ENDINGS: [&str; 14] = [
    ".sh", ".bash", ".zsh", ".ksh", ".fish", ".py", ".js", ".mjs", ".cjs", ".ts", ".pl", ".rb",
    ".php", ".lua",
];

impl Matcher {
    /// Returns a condition on the arguments that seems to be meant for those before or at the script of an interpreter.
    /// Also returns the name of the interpreter.
    ///
    /// It cannot hold there: if an interpreter runs a script, only the arguments after the script count.
    pub fn misread(&self) -> Option<(Field, String)> {
        let of = |field| self.conditions().iter().filter(move |c| c.field == field);
        if of(Field::Script).next().is_some() {
            return None;
        }
        let positive = |field| of(field).find(|c| !c.negative);
        let (one, name) = interpreter(positive(Field::Exe).or(positive(Field::Comm))?)?;
        let args = of(Field::Args).find(|c| c.any_of.first().is_some_and(may_be_script));
        let is_own = |pattern: &Pattern| {
            let text = pattern.text();
            text.starts_with('-') && !text.starts_with("--") && !one.has_instead(text.as_bytes())
        };
        let options = of(Field::Options).find(|c| c.any_of.iter().any(is_own));
        Some((args.or(options)?.field, name))
    }
}

/// Returns the first interpreter that a condition on exe or comm names, and its name there without a version.
fn interpreter(condition: &Condition) -> Option<(&'static script::Interpreter, String)> {
    let texts = condition.any_of.iter().map(|p| p.text().as_bytes());
    let mut globs = texts.filter_map(names::without_braces).flatten();
    globs.find_map(|glob| {
        let name = glob.rsplit(|byte| *byte == b'/').next()?;
        let end = name.iter().rposition(|byte| !b"*?".contains(byte))?;
        let place = script::interpreter(&name[..=end])?;
        let name = String::from_utf8_lossy(script::without_version(&name[..=end]));
        Some((script::interpreters().nth(place)?, name.into_owned()))
    })
}

/// Returns whether a pattern for the first argument may be meant for the path of a script.
fn may_be_script(pattern: &Pattern) -> bool {
    let text = pattern.text();
    let is_file = text.starts_with('*') || text.contains('/');
    let ends = ENDINGS.iter().any(|ending| text.ends_with(ending));
    (is_file || ends) && !text.contains(char::is_whitespace)
}
