//! What a source file mentions: every path and word of it, as tokens have them.
//!
//! Tokens and not text, so that comments and strings say nothing; tokens and not a syntax tree, so
//! that what stands inside of macros is seen like everything else.

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// A path or word at one place of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mention {
    /// Segments from the crate on, as far as the file's own imports tell: `crate` is the package's
    /// library, `core` and `alloc` count as `std`, a glob ends with `*`.
    pub path: Vec<String>,
    pub line: usize,
    /// Whether arguments in parentheses follow.
    pub called: bool,
    /// Whether it is in `#[cfg(test)]`.
    pub test: bool,
}

/// Finds all mentions in a file, whose name tells which module it is.
///
/// # Errors
/// The source is not made of Rust's tokens.
pub fn scan(file: &Path, source: &str) -> Result<Vec<Mention>> {
    let tokens = TokenStream::from_str(source)
        .map_err(|error| anyhow!("{}:{}: {error}", file.display(), error.span().start().line))?;
    let module = module(file);
    let test = module.iter().any(|name| name == "tests");
    let mut scanner = Scanner {
        mentions: Vec::new(),
    };
    scanner.block(
        tokens,
        &Scope {
            module,
            test,
            imports: HashMap::new(),
        },
    );
    Ok(scanner.mentions)
}

/// `reaper-user/model/src/tree.rs` is `crate::tree`.
fn module(file: &Path) -> Vec<String> {
    let names = file.with_extension("");
    let names = names.iter().map(|name| name.to_string_lossy().into_owned());
    let inside = names.skip_while(|name| name != "src").skip(1);
    std::iter::once("crate".to_owned())
        .chain(inside.filter(|name| !matches!(name.as_str(), "mod" | "lib" | "main")))
        .collect()
}

/// Where a block of tokens stands.
#[derive(Clone)]
struct Scope {
    module: Vec<String>,
    test: bool,
    /// What its `use` items bring in: name and path.
    imports: HashMap<String, Vec<String>>,
}

impl Scope {
    /// The path from the crate on.
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

struct Scanner {
    mentions: Vec<Mention>,
}

impl Scanner {
    fn block(&mut self, tokens: TokenStream, outside: &Scope) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut scope = outside.clone();
        // A `use` holds for the whole block, what stands before it included.
        for (at, token) in tokens.iter().enumerate() {
            if is_word(token, "use") {
                self.import(&tokens[at + 1..], &mut scope);
            }
        }
        // Whether an attribute says that the item at hand is for tests.
        let mut test_item = false;
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let here = Scope {
                test: scope.test || test_item,
                ..scope.clone()
            };
            at += 1;
            match token {
                TokenTree::Ident(word) if word == "use" => {
                    let (paths, length) = use_paths(&tokens[at..]);
                    for (path, _, line) in paths {
                        self.mention(here.resolve(&path), line, false, here.test);
                    }
                    at += length;
                }
                TokenTree::Ident(_) => {
                    let (path, length) = path(&tokens[at - 1..]);
                    let before = at.checked_sub(2).map(|before| &tokens[before]);
                    at += length - 1;
                    let arguments = matches!(tokens.get(at), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
                    let defined = before.is_some_and(|token| is_word(token, "fn"));
                    let member = before.is_some_and(|token| is_punct(token, '.'));
                    let resolved = if member { path } else { here.resolve(&path) };
                    self.mention(
                        resolved,
                        token.span().start().line,
                        arguments && !defined,
                        here.test,
                    );
                }
                TokenTree::Group(group) => {
                    let braced = group.delimiter() == Delimiter::Brace;
                    let before = |n: usize| at.checked_sub(1 + n).map(|before| &tokens[before]);
                    let mut inside = here;
                    if let (true, Some(TokenTree::Ident(name)), Some(keyword)) =
                        (braced, before(1), before(2))
                        && is_word(keyword, "mod")
                    {
                        inside.module.push(name.to_string());
                        inside.imports.clear();
                    }
                    if before(1).is_some_and(|token| is_punct(token, '#'))
                        && is_cfg_test(&group.stream())
                    {
                        test_item = true;
                    }
                    self.block(group.stream(), &inside);
                    test_item &= !braced;
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => test_item = false,
                _ => {}
            }
        }
    }

    fn import(&mut self, tokens: &[TokenTree], scope: &mut Scope) {
        for (path, name, _) in use_paths(tokens).0 {
            let path = scope.resolve(&path);
            scope.imports.insert(name, path);
        }
    }

    fn mention(&mut self, path: Vec<String>, line: usize, called: bool, test: bool) {
        self.mentions.push(Mention {
            path,
            line,
            called,
            test,
        });
    }
}

/// The paths of a `use` item, each with the name it brings in and its line, and the item's length in tokens.
fn use_paths(tokens: &[TokenTree]) -> (Vec<(Vec<String>, String, usize)>, usize) {
    let length = tokens
        .iter()
        .position(|token| is_punct(token, ';'))
        .unwrap_or(tokens.len());
    let mut paths = Vec::new();
    use_tree(&tokens[..length], &[], &mut paths);
    (paths, length)
}

/// One comma-separated list of use trees below a prefix.
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

/// The path that begins at the first token, a word, and its length in tokens.
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

fn is_cfg_test(attribute: &TokenStream) -> bool {
    attribute.to_string().replace(' ', "") == "cfg(test)"
}
