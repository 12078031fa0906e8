//! Bill of materials in CycloneDX JSON, from `cargo metadata` and Cargo.lock.
//!
//! It lists the crates that are linked into the program, and SQLite, whose sources come with one of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use super::format_time;
use crate::cross::Arch;
use crate::shell::{cargo, output, workspace};

/// Package of the program.
const ROOT: &str = "reaper-user";
/// Crate that contains the sources of SQLite.
const SQLITE: &str = "libsqlite3-sys";

/// Part of the output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// Registry; `None` for crates of this workspace.
    source: Option<String>,
    manifest_path: String,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// `None` for a normal dependency, otherwise `dev` or `build`.
    kind: Option<String>,
}

impl Package {
    /// Returns the name of the package in the bill. Its id may contain a path of this host.
    fn reference(&self) -> String {
        format!("{}@{}", self.name, self.version)
    }
}

/// Part of Cargo.lock.
#[derive(Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

#[derive(Deserialize)]
struct Locked {
    name: String,
    version: String,
    checksum: Option<String>,
}

/// Returns the bill of materials of the program for a processor.
///
/// # Errors
/// cargo fails, or a file cannot be read.
pub fn sbom(arch: Arch, time: u64) -> Result<String> {
    let target = format!("--filter-platform={}-unknown-linux-gnu", arch.name());
    let metadata = ["metadata", "--locked", "--format-version=1", &target];
    let metadata = serde_json::from_str(&output(cargo().args(metadata))?)?;
    let lock = fs::read_to_string(workspace().join("Cargo.lock")).context("Cargo.lock")?;
    let lock = toml::from_str(&lock).context("Cargo.lock")?;
    let time = format_time(time, "+%Y-%m-%dT%H:%M:%SZ")?;
    let mut bill = bill(&metadata, &lock, &time)?;
    if let Some(sqlite) = metadata.packages.iter().find(|p| p.name == SQLITE) {
        let version = sqlite_version(Path::new(&sqlite.manifest_path))?;
        add_sqlite(&mut bill, &sqlite.reference(), &version);
    }
    Ok(format!("{bill:#}\n"))
}

fn bill(metadata: &Metadata, lock: &Lock, time: &str) -> Result<Value> {
    let linked = linked(metadata)?;
    let checksums: BTreeMap<_, _> = lock
        .package
        .iter()
        .filter_map(|p| Some(((&*p.name, &*p.version), p.checksum.as_ref()?)))
        .collect();
    let (mut components, mut root) = (Vec::new(), Value::Null);
    for package in metadata
        .packages
        .iter()
        .filter(|p| linked.contains_key(&*p.id))
    {
        let checksum = checksums.get(&(&*package.name, &*package.version));
        let component = component(package, checksum.map(|sum| sum.as_str()));
        match package.name == ROOT {
            true => root = component,
            false => components.push(component),
        }
    }
    let references: BTreeMap<&str, String> = metadata
        .packages
        .iter()
        .map(|package| (&*package.id, package.reference()))
        .collect();
    let dependencies = linked.iter().map(|(id, needs)| {
        let needs: Vec<&String> = needs.iter().filter_map(|id| references.get(id)).collect();
        json!({ "ref": references.get(id), "dependsOn": needs })
    });
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "timestamp": time, "component": root },
        "components": components,
        "dependencies": dependencies.collect::<Vec<_>>(),
    }))
}

/// Returns the packages that the program links, with those that each needs. Follows no dependencies of build scripts and
/// tests.
fn linked(metadata: &Metadata) -> Result<BTreeMap<&str, BTreeSet<&str>>> {
    let root = metadata.packages.iter().find(|p| p.name == ROOT);
    let root = root.with_context(|| format!("no package {ROOT}"))?;
    let nodes: BTreeMap<&str, &Node> = metadata.resolve.nodes.iter().map(|n| (&*n.id, n)).collect();
    let (mut found, mut open) = (BTreeMap::new(), vec![&*root.id]);
    while let Some(id) = open.pop() {
        let node = nodes.get(id).with_context(|| format!("no node {id}"))?;
        let is_linked = |d: &&Dependency| d.dep_kinds.iter().any(|kind| kind.kind.is_none());
        let needs: BTreeSet<&str> = node
            .deps
            .iter()
            .filter(is_linked)
            .map(|d| &*d.pkg)
            .collect();
        if found.insert(id, needs.clone()).is_none() {
            open.extend(needs);
        }
    }
    Ok(found)
}

fn component(package: &Package, checksum: Option<&str>) -> Value {
    let Package { name, version, .. } = package;
    let is_program = name == ROOT;
    let mut component = json!({
        "type": if is_program { "application" } else { "library" },
        "bom-ref": package.reference(),
        "name": if is_program { "reaper" } else { name },
        "version": version,
    });
    // Older manifests separate the licenses with a slash.
    let license = package
        .license
        .as_ref()
        .map(|text| text.replace('/', " OR "));
    if let Some(license) = license {
        component["licenses"] = json!([{ "expression": license }]);
    }
    if package.source.is_some() {
        component["purl"] = json!(format!("pkg:cargo/{name}@{version}"));
    }
    if let Some(checksum) = checksum {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

/// Reads the version of SQLite from the header beside the manifest of its crate.
fn sqlite_version(manifest: &Path) -> Result<String> {
    let header = manifest.with_file_name("sqlite3").join("sqlite3.h");
    let text = fs::read_to_string(&header).with_context(|| header.display().to_string())?;
    let line = text
        .lines()
        .find(|line| line.starts_with("#define SQLITE_VERSION "));
    let version = line.and_then(|line| line.split('"').nth(1));
    let version = version.with_context(|| format!("no SQLITE_VERSION in {}", header.display()))?;
    Ok(version.to_owned())
}

fn add_sqlite(bill: &mut Value, parent: &str, version: &str) {
    let id = format!("sqlite@{version}");
    let component = json!({
        "type": "library",
        "bom-ref": id,
        "name": "sqlite",
        "version": version,
        "licenses": [{ "license": { "id": "blessing" } }],
        "cpe": format!("cpe:2.3:a:sqlite:sqlite:{version}:*:*:*:*:*:*:*"),
        "purl": format!("pkg:generic/sqlite@{version}"),
    });
    let list = |value: &mut Value, entry| {
        if let Some(list) = value.as_array_mut() {
            list.push(entry);
        }
    };
    list(&mut bill["components"], component);
    let dependencies = bill["dependencies"].as_array_mut();
    for dependency in dependencies.into_iter().flatten() {
        if dependency["ref"] == parent {
            list(&mut dependency["dependsOn"], json!(id));
        }
    }
    list(
        &mut bill["dependencies"],
        json!({ "ref": id, "dependsOn": [] }),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bill_lists_linked_crates_only() {
        let metadata: Metadata = serde_json::from_value(json!({
            "packages": [
                { "id": "u", "name": ROOT, "version": "1.0.0", "license": null, "source": null, "manifest_path": "" },
                { "id": "a", "name": "a", "version": "2.0.0", "license": "MIT/Apache-2.0", "source": "registry",
                  "manifest_path": "" },
                { "id": "b", "name": "b", "version": "3.0.0", "license": "MIT", "source": "registry",
                  "manifest_path": "" },
            ],
            "resolve": { "nodes": [
                { "id": "u", "deps": [
                    { "pkg": "a", "dep_kinds": [{ "kind": null }, { "kind": "dev" }] },
                    { "pkg": "b", "dep_kinds": [{ "kind": "build" }] },
                ] },
                { "id": "a", "deps": [] },
                { "id": "b", "deps": [] },
            ] },
        }))
        .unwrap();
        let lock = "[[package]]\nname = \"a\"\nversion = \"2.0.0\"\nchecksum = \"00ff\"\n";
        let lock = toml::from_str(lock).unwrap();
        let mut bill = bill(&metadata, &lock, "2026-11-25T00:00:00Z").unwrap();
        add_sqlite(&mut bill, "a@2.0.0", "3.50.0");
        assert_eq!(bill["metadata"]["component"]["name"], "reaper");
        let [a, sqlite] = &bill["components"].as_array().unwrap()[..] else {
            panic!("{:#}", bill["components"]);
        };
        assert_eq!(a["purl"], "pkg:cargo/a@2.0.0");
        assert_eq!(a["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(a["hashes"][0]["content"], "00ff");
        assert_eq!(sqlite["version"], "3.50.0");
        assert_eq!(
            bill["dependencies"],
            json!([
                { "ref": "a@2.0.0", "dependsOn": ["sqlite@3.50.0"] },
                { "ref": "reaper-user@1.0.0", "dependsOn": ["a@2.0.0"] },
                { "ref": "sqlite@3.50.0", "dependsOn": [] },
            ])
        );
    }
}
