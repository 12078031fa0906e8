//! The imports between files: no circle, and no arrow against the flow.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::scan::Mention;

/// Source directory of each product crate, with its rooms in the order of the flow, lowest first. A room is what lies
/// directly below; it imports only from rooms before it. Cargo holds the flow between crates.
const CRATES: [(&str, &[&str]); 3] = [
    ("reaper-user/model/src", &[]),
    (
        "reaper-user/host/src",
        &["sys", "source", "facts", "kernel"],
    ),
    (
        "reaper-user/src",
        &[
            "reap",
            "export",
            "journal",
            "config",
            "api",
            "engine",
            "leftovers",
            "run",
            "cli",
        ],
    ),
];

/// A file, as its module path below the crate.
type Module = Vec<String>;
/// Files that each file imports from, with the names it takes.
type Graph = BTreeMap<Module, BTreeMap<Module, BTreeSet<String>>>;

/// Returns a line for each circle of files, and for each import against the flow.
pub fn complaints(files: &[(PathBuf, Vec<Mention>)]) -> Vec<String> {
    let mut found = Vec::new();
    for (directory, rooms) in CRATES {
        let of_crate = files.iter().filter_map(|(file, mentions)| {
            let inside = file.strip_prefix(directory).ok()?;
            Some((module(inside)?, mentions.as_slice()))
        });
        let graph = graph(&of_crate.collect());
        let name = |file: &Module| format!("{directory}/{}", file.join("/"));
        for circle in circles(&graph) {
            let arrows = circle.iter().flat_map(|from| {
                let inside = graph[*from].iter().filter(|(to, _)| circle.contains(to));
                inside.map(move |(to, names)| {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    format!("\n  {} -> {}: {}", name(from), name(to), names.join(", "))
                })
            });
            let arrows: String = arrows.collect();
            found.push(format!("import-circle: {} files{arrows}", circle.len()));
        }
        let rank = |file: &Module| {
            let room = file.first()?;
            rooms.iter().position(|known| known == room)
        };
        for (from, targets) in &graph {
            for (to, names) in targets {
                if let (Some(low), Some(high)) = (rank(from), rank(to))
                    && low < high
                {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    let (from, to) = (name(from), name(to));
                    found.push(format!(
                        "against-the-flow: {from} -> {to}: {}",
                        names.join(", ")
                    ));
                }
            }
        }
    }
    found
}

/// The module path of a file; None for one that holds tests only.
fn module(inside: &Path) -> Option<Module> {
    let names = inside.with_extension("");
    let names = names.iter().map(|name| name.to_string_lossy().into_owned());
    let path: Module = names
        .filter(|name| !matches!(name.as_str(), "mod" | "lib" | "main"))
        .collect();
    (!path.iter().any(|name| name == "tests")).then_some(path)
}

/// An import of a child from the file of its own module, or from one above that, is no arrow: they are one module in
/// several files.
fn graph(files: &BTreeMap<Module, &[Mention]>) -> Graph {
    let mut graph = Graph::new();
    for (from, mentions) in files {
        let arrows = graph.entry(from.clone()).or_default();
        for mention in mentions.iter().filter(|mention| !mention.test) {
            let Some((to, name)) = target(files, from, &mention.path, 0) else {
                continue;
            };
            if !from.starts_with(&to) {
                arrows.entry(to).or_default().insert(name);
            }
        }
    }
    graph
}

/// Returns the file that defines what a path names, and the name. Follows re-exports.
fn target(
    files: &BTreeMap<Module, &[Mention]>,
    from: &Module,
    path: &[String],
    depth: usize,
) -> Option<(Module, String)> {
    let (mut file, rest) = match path.split_first() {
        Some((first, rest)) if first == "crate" => (Module::new(), rest),
        // A path that begins with a child module.
        Some((first, _)) if path.len() > 1 && files.contains_key(&child(from, first)) => {
            (from.clone(), path)
        }
        _ => return None,
    };
    let mut rest = rest.iter();
    let mut name = "*".to_owned();
    for segment in rest.by_ref() {
        let below = child(&file, segment);
        if !files.contains_key(&below) {
            name.clone_from(segment);
            break;
        }
        file = below;
    }
    let mentions = files.get(&file)?;
    let is_import = |mention: &&Mention| {
        !mention.test && mention.path.len() > 1 && mention.path.last() == Some(&name)
    };
    if depth < 8 && file != *from {
        for mention in mentions.iter().filter(is_import) {
            match target(files, &file, &mention.path, depth + 1) {
                Some((other, name)) if other != file => return Some((other, name)),
                _ => {}
            }
        }
    }
    Some((file, name))
}

fn child(module: &Module, name: &str) -> Module {
    let mut below = module.clone();
    below.push(name.to_owned());
    below
}

/// Returns the strongly connected components of more than one file: files that can be reached from each other.
fn circles(graph: &Graph) -> Vec<BTreeSet<&Module>> {
    let reach: BTreeMap<&Module, BTreeSet<&Module>> = graph
        .keys()
        .map(|from| {
            let mut seen = BTreeSet::new();
            let mut open = vec![from];
            while let Some(file) = open.pop() {
                let next = graph.get(file).into_iter().flat_map(BTreeMap::keys);
                open.extend(next.filter(|to| seen.insert(*to)));
            }
            (from, seen)
        })
        .collect();
    let mut found: Vec<BTreeSet<&Module>> = Vec::new();
    for (file, reached) in &reach {
        if !reached.contains(file) || found.iter().any(|circle| circle.contains(file)) {
            continue;
        }
        let back = |other: &&&Module| reach.get(*other).is_some_and(|of| of.contains(file));
        found.push(reached.iter().filter(back).copied().collect());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::scan::scan;

    /// Files by their path below reaper-user, with their text.
    type Sources = [(&'static str, &'static str)];

    fn check(sources: &Sources) -> Vec<String> {
        let files: Vec<_> = sources
            .iter()
            .map(|(file, source)| {
                let file = PathBuf::from(format!("reaper-user/{file}.rs"));
                let mentions = scan(&file, source).unwrap();
                (file, mentions)
            })
            .collect();
        let found = complaints(&files);
        found
            .iter()
            .map(|line| line.split(" files").next().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn circles_are_found_and_modules_in_several_files_are_none() {
        let table: [(&Sources, &[&str]); 6] = [
            (
                &[
                    ("model/src/a", "use crate::b::B; struct A;"),
                    ("model/src/b", "use super::a::A; struct B;"),
                ],
                &["import-circle: 2"],
            ),
            // Through a re-export, and a path without `use`.
            (
                &[
                    ("model/src/a", "pub use b::B; mod b; struct A;"),
                    ("model/src/a/b", "use crate::c::C; struct B;"),
                    ("model/src/c", "struct C(crate::a::B);"),
                ],
                &["import-circle: 2"],
            ),
            (
                &[
                    ("model/src/a", "mod b; use b::B; struct A(B);"),
                    ("model/src/a/b", "use super::A; struct B;"),
                ],
                &[],
            ),
            (
                &[
                    (
                        "model/src/a",
                        "struct A; #[cfg(test)] mod t { use crate::b::B; }",
                    ),
                    ("model/src/b", "use crate::a::A; struct B;"),
                ],
                &[],
            ),
            (
                &[
                    ("model/src/a", "use crate::b::B;"),
                    ("model/src/b", "use crate::c::C; struct B;"),
                    ("model/src/c", "fn f() { crate::a::g() }"),
                ],
                &["import-circle: 3"],
            ),
            (
                &[
                    ("src/export/json", "use crate::export::sink::Sink;"),
                    ("src/export/sink", "use std::io; struct Sink;"),
                ],
                &[],
            ),
        ];
        for (sources, expected) in table {
            assert_eq!(check(sources), expected, "{sources:?}");
        }
    }

    #[test]
    fn import_from_a_later_room_is_against_the_flow() {
        let sources = [
            ("src/export/line", "use crate::journal::Feed;"),
            (
                "src/journal",
                "use crate::export::clock::Clock; struct Feed;",
            ),
            ("src/export/clock", "struct Clock;"),
        ];
        assert_eq!(
            check(&sources),
            ["against-the-flow: reaper-user/src/export/line -> reaper-user/src/journal: Feed"]
        );
    }
}
