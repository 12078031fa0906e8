//! Checks the imports between files: no circles, and none against the flow of the architecture.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::scan::{self, Mention};

/// Source directory of each product crate, and its top-level modules in the order of the flow.
///
/// A module imports only from those before it. Cargo checks the flow between crates.
const CRATES: [(&str, &str); 3] = [
    ("reaper-user/model/src", ""),
    ("reaper-user/host/src", "sys workers source facts kernel"),
    (
        "reaper-user/src",
        "reap export journal config api engine leftovers run cli",
    ),
];

/// Module path of a file, relative to the crate.
type Module = Vec<String>;
/// Files that each file imports from, with the imported names.
type Graph = BTreeMap<Module, BTreeMap<Module, BTreeSet<String>>>;

/// Returns a message for each circle of files and for each import against the flow.
pub fn complaints(files: &[(PathBuf, Vec<Mention>)]) -> Vec<String> {
    let mut found = Vec::new();
    for (directory, layers) in CRATES {
        let of_crate = files.iter().filter_map(|(file, mentions)| {
            let inside = file.strip_prefix(directory).ok()?;
            let module = scan::module(inside);
            // Files with tests only do not count.
            let is_test = module.iter().any(|name| name == "tests");
            (!is_test).then_some((module, mentions.as_slice()))
        });
        let graph = graph(&of_crate.collect());
        let arrow = |from: &Module, to: &Module| {
            let names: Vec<&str> = graph[from][to].iter().map(String::as_str).collect();
            let [from, to] = [from, to].map(|file| format!("{directory}/{}", file.join("/")));
            format!("{from} -> {to}: {}", names.join(", "))
        };
        for circle in circles(&graph) {
            let arrows = circle.iter().flat_map(|from| {
                let inside = graph[*from].keys().filter(|to| circle.contains(to));
                inside.map(|to| format!("\n  {}", arrow(from, to)))
            });
            let arrows: String = arrows.collect();
            found.push(format!("import-circle: {} files{arrows}", circle.len()));
        }
        let rank = |file: &Module| {
            layers
                .split_whitespace()
                .position(|layer| file.first().is_some_and(|f| f == layer))
        };
        for (from, targets) in &graph {
            let later = |to: &&Module| {
                rank(from)
                    .zip(rank(to))
                    .is_some_and(|(low, high)| low < high)
            };
            let against = targets.keys().filter(later);
            found.extend(against.map(|to| format!("against-the-flow: {}", arrow(from, to))));
        }
    }
    found
}

/// Returns the graph of imports. A child may import from the modules above it: they count as one module in several files.
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

/// Returns the file that defines the target of a path, and its name. Follows re-exports.
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

/// Returns the strongly connected components of the graph: sets of files that import each other, directly or not.
fn circles(graph: &Graph) -> Vec<BTreeSet<&Module>> {
    let reached = |from| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            let next = graph.get(file).into_iter().flat_map(BTreeMap::keys);
            open.extend(next.filter(|to| seen.insert(*to)));
        }
        seen
    };
    let reach: BTreeMap<&Module, BTreeSet<&Module>> =
        graph.keys().map(|from| (from, reached(from))).collect();
    let circle = |file| {
        let back = |other: &&Module| reach.get(other).is_some_and(|of| of.contains(file));
        reach[file].iter().copied().filter(back).collect()
    };
    let all = graph.keys().filter(|file| reach[file].contains(file));
    let all: BTreeSet<BTreeSet<&Module>> = all.map(circle).collect();
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cases: the expected message, then files (relative to reaper-user) with their text.
    const CASES: &str = "
import-circle: 2 files
    model/src/a     use crate::b::B; struct A;
    model/src/b     use super::a::A; struct B;
import-circle: 2 files, through a re-export and a path without `use`
    model/src/a     pub use b::B; mod b; struct A;
    model/src/a/b   use crate::c::C; struct B;
    model/src/c     struct C(crate::a::B);
none: one module in several files
    model/src/a     mod b; use b::B; struct A(B);
    model/src/a/b   use super::A; struct B;
none: a test
    model/src/a     struct A; #[cfg(test)] mod t { use crate::b::B; }
    model/src/b     use crate::a::A; struct B;
import-circle: 3 files
    model/src/a     use crate::b::B;
    model/src/b     use crate::c::C; struct B;
    model/src/c     fn f() { crate::a::g() }
none: with the flow
    src/export/json use crate::export::sink::Sink;
    src/export/sink use std::io; struct Sink;
against-the-flow: reaper-user/src/export/line -> reaper-user/src/journal: Feed
    src/export/line use crate::journal::Feed;
    src/journal     use crate::export::clock::Clock; struct Feed;
    src/export/clock struct Clock;
";

    #[test]
    fn circles_and_imports_against_the_flow_are_found() {
        for case in CASES.trim().replace("\n    ", "\0").lines() {
            let (expected, sources) = case.split_once('\0').unwrap();
            let files = sources.split('\0').map(|line| {
                let (file, source) = line.split_once(' ').unwrap();
                let file = PathBuf::from(format!("reaper-user/{file}.rs"));
                let mentions = scan::scan(&file, source).unwrap();
                (file, mentions)
            });
            let found = complaints(&files.collect::<Vec<_>>());
            let found = found.first().and_then(|found| found.lines().next());
            let found = found.unwrap_or("none");
            assert!(expected.starts_with(found), "{expected}: {found}");
        }
    }
}
