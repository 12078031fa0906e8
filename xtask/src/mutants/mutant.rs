//! Mutants: their list, a sample of it, and how one gets into a file.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::Original;
use crate::shell::output;

/// A replacement of one piece of a file, as cargo-mutants lists it.
#[derive(Clone, Debug, Deserialize)]
pub struct Mutant {
    /// File, relative to the root of the workspace.
    pub file: String,
    /// `file:line:column: description`.
    pub name: String,
    replacement: String,
    span: Span,
}

/// A piece of a file; `end` is the first place after it.
#[derive(Clone, Debug, Deserialize)]
struct Span {
    start: Place,
    end: Place,
}

/// A character of a file; line and column begin at 1.
#[derive(Clone, Debug, Deserialize)]
struct Place {
    line: usize,
    column: usize,
}

/// Lists the mutants of these packages in files that match the globs.
///
/// # Errors
/// cargo-mutants fails.
pub fn list(tool: &Path, tree: &Path, packages: &[&str], globs: &[String]) -> Result<Vec<Mutant>> {
    let mut command = Command::new(tool);
    command.args(["mutants", "--list", "--json", "--no-config", "--dir"]);
    command.arg(tree).current_dir(tree);
    for package in packages {
        command.args(["--package", package]);
    }
    for glob in globs {
        command.args(["--file", glob]);
    }
    let list = output(&mut command)?;
    serde_json::from_str(&list).context("the list of cargo-mutants")
}

/// Returns `count` mutants, or all if there are fewer, in the order of their files.
///
/// The choice depends on what a mutant changes and not on its line: most of a sample stays the same when the code
/// around it changes.
pub fn sample(mut all: Vec<Mutant>, count: usize, seed: u64) -> Vec<Mutant> {
    let in_order = |a: &Mutant, b: &Mutant| {
        (&a.file, a.span.start.line, a.span.start.column, &a.name).cmp(&(
            &b.file,
            b.span.start.line,
            b.span.start.column,
            &b.name,
        ))
    };
    all.sort_by(in_order);
    let mut equal: HashMap<(String, String), u64> = HashMap::new();
    let mut ranked: Vec<_> = all
        .into_iter()
        .map(|mutant| {
            let description = mutant.description().to_owned();
            let nth = equal
                .entry((mutant.file.clone(), description.clone()))
                .or_default();
            *nth += 1;
            let key = format!("{seed}\0{}\0{description}\0{nth}", mutant.file);
            (Sha256::digest(key), mutant)
        })
        .collect();
    ranked.sort_by_key(|(hash, _)| *hash);
    let mut chosen: Vec<Mutant> = ranked.into_iter().take(count).map(|(_, m)| m).collect();
    chosen.sort_by(in_order);
    chosen
}

impl Mutant {
    pub fn lies_in(&self, directory: &str) -> bool {
        Path::new(&self.file).starts_with(directory)
    }

    /// Returns the name without its file, line and column.
    fn description(&self) -> &str {
        self.name
            .split_once(": ")
            .map_or(&self.name, |(_, description)| description)
    }

    /// Returns `file:line: description`.
    pub fn place_and_description(&self) -> String {
        format!(
            "{}:{}: {}",
            self.file,
            self.span.start.line,
            self.description()
        )
    }

    /// Writes the mutant into its file below `tree`.
    ///
    /// # Errors
    /// The file cannot be read or written, or is too short.
    pub fn put_into(&self, tree: &Path) -> Result<Original> {
        let file = tree.join(&self.file);
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let changed = self
            .applied(&text)
            .with_context(|| format!("{}: no such place", self.name))?;
        fs::write(&file, changed).with_context(|| file.display().to_string())?;
        Ok(Original { file, text })
    }

    /// Returns the text with the replacement in it, or `None` if the text has no such place.
    fn applied(&self, text: &str) -> Option<String> {
        let (start, end) = (self.span.start.offset(text)?, self.span.end.offset(text)?);
        // Spaces, so that the replacement joins no word beside it.
        Some(format!(
            "{} {} {}",
            text.get(..start)?,
            self.replacement,
            text.get(end..)?
        ))
    }
}

impl Place {
    /// Returns the byte offset of the place.
    fn offset(&self, text: &str) -> Option<usize> {
        let mut lines = text.split_inclusive('\n');
        let before: usize = lines.by_ref().take(self.line - 1).map(str::len).sum();
        let line = lines.next().unwrap_or_default();
        let mut columns = line.char_indices().map(|(at, _)| at).chain([line.len()]);
        Some(before + columns.nth(self.column - 1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(file: &str, line: usize, columns: (usize, usize), replacement: &str) -> Mutant {
        let place = |column| Place { line, column };
        Mutant {
            file: file.to_owned(),
            name: format!("{file}:{line}:{}: replace with {replacement}", columns.0),
            replacement: replacement.to_owned(),
            span: Span {
                start: place(columns.0),
                end: place(columns.1),
            },
        }
    }

    #[test]
    fn mutant_replaces_its_span_counted_in_characters() {
        let text = "// ä\nlet ü = a && b;\n";
        let changed = mutant("a.rs", 2, (11, 13), "||").applied(text);
        assert_eq!(changed.as_deref(), Some("// ä\nlet ü = a  ||  b;\n"));
        assert_eq!(mutant("a.rs", 9, (11, 13), "||").applied(text), None);
    }

    #[test]
    fn sample_is_the_same_for_a_seed_and_survives_moved_lines() {
        let all = |shift: usize| -> Vec<Mutant> {
            (1..50)
                .map(|line| mutant("a.rs", line + shift, (1, 2), &(line % 7).to_string()))
                .collect()
        };
        let names = |shift, seed| -> Vec<usize> {
            let chosen = sample(all(shift), 5, seed);
            chosen.iter().map(|m| m.span.start.line - shift).collect()
        };
        assert_eq!(names(0, 1).len(), 5);
        assert_eq!(names(0, 1), names(100, 1));
        assert_ne!(names(0, 1), names(0, 2));
        assert_eq!(sample(all(0), 100, 1).len(), 49);
    }
}
