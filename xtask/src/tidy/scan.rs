//! Finds the paths and words that a source file mentions.
//!
//! It reads tokens: comments and strings do not count, and the arguments of macros do, unlike in a syntax tree.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// Path or word at one place of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mention {
    /// Segments, resolved by the imports of the file. `crate` is the library of the package, `core` and `alloc` count as
    /// `std`, and a glob ends with `*`.
    pub path: Vec<String>,
    pub line: usize,
    /// Whether arguments in parentheses follow.
    pub called: bool,
    /// Whether it is in `#[cfg(test)]`.
    pub test: bool,
}

/// Returns all mentions in a file. Its path determines its module.
///
/// # Errors
/// The source cannot be split into Rust tokens.
pub fn scan(file: &Path, source: &str) -> Result<Vec<Mention>> {
    let tokens = TokenStream::from_str(source)
        .map_err(|error| anyhow!("{}:{}: {error}", file.display(), error.span().start().line))?;
    let inside: PathBuf = file
        .iter()
        .skip_while(|name| *name != "src")
        .skip(1)
        .collect();
    let mut module = module(&inside);
    let test = module.iter().any(|name| name == "tests");
    module.insert(0, "crate".to_owned());
    let mut mentions = Vec::new();
    let imports = HashMap::new();
    block(
        tokens,
        &Scope {
            module,
            test,
            imports,
        },
        &mut mentions,
    );
    Ok(mentions)
}

/// Returns the path of a file's module below its crate, from its path below `src`.
pub fn module(inside: &Path) -> Vec<String> {
    let names = inside.with_extension("");
    let names = names.iter().map(|name| name.to_string_lossy().into_owned());
    names
        .filter(|name| !matches!(name.as_str(), "mod" | "lib" | "main"))
        .collect()
}

/// Context of a block of tokens.
#[derive(Clone)]
struct Scope {
    module: Vec<String>,
    test: bool,
    /// Paths by the names that `use` items import.
    imports: HashMap<String, Vec<String>>,
}

impl Scope {
    /// Returns the full path of a path in this scope.
    fn resolve(&self, path: &[String]) -> Vec<String> {
        let [first, rest @ ..] = path else {
            return Vec::new();
        };
        let mut resolved = match first.as_str() {
            "core" | "alloc" => vec!["std".to_owned()],
            // The binary and the integration tests call the library by its name.
            "reaper" => vec!["crate".to_owned()],
            "self" if !rest.is_empty() => self.module.clone(),
            "super" => self.module[..self.module.len().saturating_sub(1)].to_vec(),
            name => self
                .imports
                .get(name)
                .cloned()
                .unwrap_or_else(|| vec![name.to_owned()]),
        };
        for segment in rest {
            if segment == "super" {
                resolved.pop();
            } else {
                resolved.push(segment.clone());
            }
        }
        resolved
    }
}

fn block(tokens: TokenStream, outside: &Scope, mentions: &mut Vec<Mention>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut scope = outside.clone();
    // A `use` applies to the whole block, even to the tokens before it.
    for (at, token) in tokens.iter().enumerate() {
        if is_word(token, "use") {
            for (path, name, _) in use_paths(&tokens[at + 1..]).0 {
                let path = scope.resolve(&path);
                scope.imports.insert(name, path);
            }
        }
    }
    // Whether the current item has `#[cfg(test)]`.
    let mut test_item = false;
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let test = scope.test || test_item;
        let before = |n: usize| at.checked_sub(n).map(|before| &tokens[before]);
        match token {
            TokenTree::Ident(word) if word == "use" => {
                let (paths, length) = use_paths(&tokens[at + 1..]);
                mentions.extend(paths.into_iter().map(|(path, _, line)| Mention {
                    path: scope.resolve(&path),
                    line,
                    called: false,
                    test,
                }));
                at += length;
            }
            TokenTree::Ident(_) => {
                let (path, length) = path(&tokens[at..]);
                let is_member = before(1).is_some_and(|token| is_punct(token, '.'));
                let is_definition = before(1).is_some_and(|token| is_word(token, "fn"));
                at += length - 1;
                let has_arguments = matches!(tokens.get(at + 1), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
                mentions.push(Mention {
                    path: if is_member {
                        path
                    } else {
                        scope.resolve(&path)
                    },
                    line: token.span().start().line,
                    called: has_arguments && !is_definition,
                    test,
                });
            }
            TokenTree::Group(group) => {
                let is_braced = group.delimiter() == Delimiter::Brace;
                let mut inside = Scope {
                    test,
                    ..scope.clone()
                };
                if let (true, Some(TokenTree::Ident(name)), Some(keyword)) =
                    (is_braced, before(1), before(2))
                    && is_word(keyword, "mod")
                {
                    inside.module.push(name.to_string());
                    inside.imports.clear();
                }
                if before(1).is_some_and(|token| is_punct(token, '#'))
                    && group.stream().to_string().replace(' ', "") == "cfg(test)"
                {
                    test_item = true;
                }
                block(group.stream(), &inside, mentions);
                test_item &= !is_braced;
            }
            TokenTree::Punct(punct) if punct.as_char() == ';' => test_item = false,
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
        at += 1;
    }
}

/// Returns the paths of a `use` item, each with its imported name and line, and the length of the item in tokens.
fn use_paths(tokens: &[TokenTree]) -> (Vec<(Vec<String>, String, usize)>, usize) {
    let length = tokens
        .iter()
        .position(|token| is_punct(token, ';'))
        .unwrap_or(tokens.len());
    let mut paths = Vec::new();
    use_tree(&tokens[..length], &[], &mut paths);
    (paths, length)
}

/// Adds the paths of a comma-separated list of use trees below a prefix.
fn use_tree(
    tokens: &[TokenTree],
    prefix: &[String],
    paths: &mut Vec<(Vec<String>, String, usize)>,
) {
    for tree in tokens.split(|token| is_punct(token, ',')) {
        let mut path = prefix.to_vec();
        let mut name = None;
        for (at, token) in tree.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    name = tree.get(at + 1).map(ToString::to_string);
                    break;
                }
                // `a::{self}` is `a`.
                TokenTree::Ident(word) if word == "self" && !prefix.is_empty() => {}
                TokenTree::Ident(word) => path.push(word.to_string()),
                TokenTree::Punct(punct) if punct.as_char() == '*' => path.push("*".to_owned()),
                TokenTree::Group(group) => {
                    let inside: Vec<TokenTree> = group.stream().into_iter().collect();
                    use_tree(&inside, &path, paths);
                    path.clear();
                }
                _ => {}
            }
        }
        if let (Some(first), Some(last)) = (tree.first(), path.last()) {
            let name = name.unwrap_or_else(|| last.clone());
            paths.push((path, name, first.span().start().line));
        }
    }
}

/// Returns the path that begins at the first token, a word, and its length in tokens.
fn path(tokens: &[TokenTree]) -> (Vec<String>, usize) {
    let mut path = Vec::new();
    let mut at = 0;
    while let Some(TokenTree::Ident(word)) = tokens.get(at) {
        path.push(word.to_string());
        at += 1;
        let colons = matches!(tokens.get(at), Some(TokenTree::Punct(p)) if p.as_char() == ':' && p.spacing() == Spacing::Joint)
            && matches!(tokens.get(at + 2), Some(TokenTree::Ident(_)));
        if !colons {
            break;
        }
        at += 2;
    }
    (path, at)
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == word)
}

fn is_punct(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == character)
}
