//! Code of README.md and reaper-user/docs, for the tests that check it. `reaper-user` and `xtask` include this file.

use std::fs;
use std::path::Path;

/// Programs in shell snippets that do not belong to this project. Their arguments are not checked.
const OTHER_PROGRAMS: &str = "cargo cp curl git jq mount npm podman rm systemctl touch";

/// A block or span of code.
pub struct Snippet {
    /// File and line.
    pub place: String,
    /// Word behind the fence; empty for a span.
    pub language: String,
    pub text: String,
}

/// Returns the text of a page, by its path in the repository.
pub fn page(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns README.md and all pages of reaper-user/docs, by path and text.
pub fn pages() -> Vec<(String, String)> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../reaper-user/docs");
    let names = fs::read_dir(docs).expect("list the docs");
    let names = names.map(|entry| entry.expect("read the docs").file_name());
    let mut paths: Vec<String> = names
        .filter_map(|name| name.into_string().ok())
        .filter(|name| name.ends_with(".md"))
        .map(|name| format!("reaper-user/docs/{name}"))
        .collect();
    paths.push("README.md".to_owned());
    paths.sort();
    paths
        .into_iter()
        .map(|path| (path.clone(), page(&path)))
        .collect()
}

/// Returns all fenced blocks of code.
pub fn blocks() -> Vec<Snippet> {
    let mut blocks = Vec::new();
    for (path, text) in pages() {
        let mut open: Option<Snippet> = None;
        for (index, line) in text.lines().enumerate() {
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(language), None) => {
                    open = Some(Snippet {
                        place: format!("{path}:{}", index + 1),
                        language: language.trim().to_owned(),
                        text: String::new(),
                    });
                }
                (None, Some(block)) => block.text.extend([line, "\n"]),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{path}: a block of code is not closed");
    }
    blocks
}

/// Returns all spans of code, outside of blocks.
fn spans() -> Vec<Snippet> {
    let mut spans = Vec::new();
    for (path, text) in pages() {
        let mut in_block = false;
        for (index, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_block = !in_block;
            } else if !in_block {
                let codes = line.split('`').skip(1).step_by(2);
                spans.extend(codes.map(|code| Snippet {
                    place: format!("{path}:{}", index + 1),
                    language: String::new(),
                    text: code.to_owned(),
                }));
            }
        }
    }
    spans
}

/// Returns the arguments of each call of `program` in the docs, with its place: in shell blocks, in units of systemd and,
/// if `from_spans`, in spans. Words in capitals in spans stand for values.
pub fn calls(program: &[&str], from_spans: bool) -> Vec<(String, Vec<String>)> {
    let mut calls = Vec::new();
    let mut add = |snippet: &Snippet, line: &str, values: bool| {
        for mut words in commands(line) {
            if values {
                words.iter_mut().for_each(fill_in);
            }
            let words = without_wrappers(&words);
            let own = words
                .first()
                .map(|word| word.rsplit('/').next().unwrap_or(word));
            let rest = words.iter().skip(1).map(String::as_str);
            let is_called = own
                .into_iter()
                .chain(rest)
                .zip(program)
                .filter(|(a, b)| a == *b);
            if is_called.count() == program.len() {
                calls.push((snippet.place.clone(), words[program.len()..].to_vec()));
            }
        }
    };
    for block in blocks() {
        match block.language.as_str() {
            "sh" => add(&block, &block.text, false),
            "ini" => {
                for line in block.text.lines() {
                    if let Some((key, command)) = line.split_once('=')
                        && key.starts_with("Exec")
                    {
                        add(&block, command, false);
                    }
                }
            }
            _ => {}
        }
    }
    for span in spans().iter().filter(|_| from_spans) {
        let text = span.text.trim_start_matches("sudo ");
        if text.starts_with(&(program.join(" ") + " ")) {
            add(span, text, true);
        }
    }
    calls
}

/// Returns the calls in shell blocks of programs that are neither of this project nor known.
pub fn unknown_programs() -> Vec<(String, String)> {
    let mut unknown = Vec::new();
    for block in blocks().iter().filter(|block| block.language == "sh") {
        for words in commands(&block.text) {
            let words = without_wrappers(&words);
            let Some(program) = words.first() else {
                continue;
            };
            let name = program.rsplit('/').next().unwrap_or(program);
            if name != "reaper" && !OTHER_PROGRAMS.split(' ').any(|known| known == name) {
                unknown.push((block.place.clone(), program.clone()));
            }
        }
    }
    unknown
}

/// Replaces a placeholder in capitals, such as PID, by a value.
fn fill_in(word: &mut String) {
    let is_placeholder = word.len() > 1 && word.chars().all(|c| c.is_ascii_uppercase());
    if is_placeholder {
        *word = match word.as_str() {
            "PID" | "N" => "4242",
            "TIME" | "DURATION" => "10min",
            "SIGNAL" => "TERM",
            _ => "x",
        }
        .to_owned();
    }
}

/// Skips sudo, assignments, and systemd-run with its options.
fn without_wrappers(words: &[String]) -> &[String] {
    let mut words = words;
    loop {
        let Some((first, rest)) = words.split_first() else {
            return words;
        };
        words = match first.as_str() {
            "sudo" => rest,
            "systemd-run" => {
                let mut rest = rest;
                while let Some((option, more)) =
                    rest.split_first().filter(|(o, _)| o.starts_with('-'))
                {
                    rest = if option == "-p" { &more[1..] } else { more };
                }
                rest
            }
            word if word.split_once('=').is_some_and(|(name, _)| {
                !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
            }) =>
            {
                rest
            }
            _ => return words,
        };
    }
}

/// Splits shell text into commands, each a list of words. Knows quotes, comments, pipes, lists and redirections.
fn commands(text: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word) = (Vec::new(), Vec::new(), None::<String>);
    let mut characters = text.chars().chain(['\n']).peekable();
    while let Some(c) = characters.next() {
        match c {
            '\'' | '"' => {
                let quoted = word.get_or_insert_default();
                quoted.extend(characters.by_ref().take_while(|next| *next != c));
            }
            '\\' => {
                let next = characters.next();
                word.get_or_insert_default()
                    .extend(next.filter(|next| *next != '\n'));
            }
            '#' if word.is_none() => {
                while characters.peek().is_some_and(|next| *next != '\n') {
                    characters.next();
                }
            }
            ' ' | '\t' => words.extend(word.take()),
            '\n' | ';' | '|' | '&' => {
                words.extend(word.take());
                if !words.is_empty() {
                    commands.push(std::mem::take(&mut words));
                }
            }
            '>' | '<' => {
                words.extend(word.take());
                // The file is no argument.
                while characters.peek().is_some_and(|next| " >&".contains(*next)) {
                    characters.next();
                }
                while characters.peek().is_some_and(|next| !next.is_whitespace()) {
                    characters.next();
                }
            }
            c => word.get_or_insert_default().push(c),
        }
    }
    commands
}
