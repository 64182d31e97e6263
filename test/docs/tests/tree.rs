// SPDX-License-Identifier: Apache-2.0
//! The lists in documents are complete; each source names its licence, and is not too long.

use docs::{Document, files, read, root};
use regex::Regex;
use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use toml::{Spanned, Value};

/// Dependencies with their places in the manifest.
type Dependencies = BTreeMap<String, Spanned<Value>>;

#[derive(Deserialize)]
struct Manifest {
    #[serde(default)]
    dependencies: Dependencies,
    workspace: Option<Workspace>,
}

#[derive(Deserialize)]
struct Workspace {
    dependencies: Dependencies,
}

fn manifest(path: &str) -> Manifest {
    toml::from_str(&read(path)).unwrap_or_else(|why| panic!("{path}: {why}"))
}

/// The names of the dependencies of each crate of the workspace, without those of its tests.
fn crates() -> BTreeMap<String, Vec<String>> {
    let path = Regex::new("^(?:crates|test)/([^/]+)/Cargo.toml$").expect("a valid pattern");
    let found: BTreeMap<_, _> = files()
        .iter()
        .filter_map(|file| {
            let name = path.captures(file)?[1].to_string();
            Some((name, manifest(file).dependencies.into_keys().collect()))
        })
        .collect();
    assert!(found.len() > 10, "only the crates {:?} were found", found.keys());
    found
}

/// The crates in the list of ARCHITECTURE.md, in its order.
fn crates_of_architecture() -> Vec<String> {
    let item = Regex::new(r"(?m)^\* \*\*([a-z0-9-]+)\*\*:").expect("a valid pattern");
    item.captures_iter(&read("ARCHITECTURE.md")).map(|found| found[1].to_string()).collect()
}

/// The crates in the list of the workspace's Cargo.toml, in its order.
fn crates_of_manifest() -> Vec<String> {
    let workspace = manifest("Cargo.toml").workspace.expect("a workspace");
    let ours =
        workspace.dependencies.into_iter().filter(|(_, it)| it.get_ref().get("path").is_some());
    let mut ours: Vec<_> = ours.map(|(name, it)| (it.span().start, name)).collect();
    ours.sort();
    ours.into_iter().map(|(_, name)| name).collect()
}

#[test]
fn architecture_lists_every_crate() {
    let (crates, listed) = (crates(), crates_of_architecture());
    let missing: Vec<_> = crates.keys().filter(|name| !listed.contains(name)).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md: no line for {missing:?}");
}

#[test]
fn no_crate_stands_above_one_that_it_uses() {
    let crates = crates();
    for (path, listed) in
        [("ARCHITECTURE.md", crates_of_architecture()), ("Cargo.toml", crates_of_manifest())]
    {
        assert!(listed.len() > 10, "{path}: only {listed:?} were recognized");
        let mut above = HashSet::new();
        for name in &listed {
            let used = crates.get(name).unwrap_or_else(|| panic!("{path}: no crate {name}"));
            for used in used.iter().filter(|used| crates.contains_key(*used)) {
                assert!(above.contains(used), "{path}: {name} stands above {used}, which it uses");
            }
            above.insert(name);
        }
    }
}

#[test]
fn architecture_links_every_decision() {
    let architecture = Document::parse("ARCHITECTURE.md", &read("ARCHITECTURE.md"));
    let files = files();
    let decisions: Vec<_> = files.iter().filter(|f| f.starts_with("docs/decisions/0")).collect();
    assert!(decisions.len() > 5, "only the decisions {decisions:?} were found");
    let missing: Vec<_> =
        decisions.into_iter().filter(|path| !architecture.links.contains(path)).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md: no link to {missing:?}");
}

#[test]
fn the_documents_that_everybody_looks_for_exist() {
    for name in
        ["README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG", "LICENSES/README"]
    {
        assert!(root().join(name).with_extension("md").is_file(), "{name}.md is missing");
    }
    assert!(root().join("docs/options.md").is_file(), "docs/options.md is missing");
}

/// GPL-2.0-only below kernel/, else Apache-2.0, in one of the first three lines.
#[test]
fn each_source_names_its_licence_at_the_top() {
    let source = r"\.(rs|sh|c|h|S|service|socket)$|(^|/)(Makefile|Kbuild|Dockerfile)|^\.ci/run$";
    let source = Regex::new(source).expect("a valid pattern");
    let mut wrong = Vec::new();
    for file in files().iter().filter(|file| source.is_match(file)) {
        let licence = match file.starts_with("kernel/") {
            true => "GPL-2.0-only",
            false => "Apache-2.0",
        };
        let line = format!("SPDX-License-Identifier: {licence}");
        if !read(file).lines().take(3).any(|found| found.contains(&line)) {
            wrong.push(format!("{file}: no line {line} at its top"));
        }
        let text = format!("LICENSES/{licence}.txt");
        assert!(root().join(&text).is_file(), "{text} is missing");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_source_has_at_most_500_lines() {
    let source = Regex::new(r"\.(rs|c|h|sh)$").expect("a valid pattern");
    let files = files();
    let lengths = files.iter().filter(|file| source.is_match(file));
    let lengths = lengths.map(|file| (file, read(file).lines().count()));
    let long: Vec<_> = lengths.filter(|(_, lines)| *lines > 500).collect();
    assert!(long.is_empty(), "split these: {long:?}");
}

#[test]
fn no_file_has_the_marks_of_an_unfinished_merge() {
    let mark = Regex::new("(?m)^(<{7}|>{7}) ").expect("a valid pattern");
    let is_text = |file: &&String| fs::read(root().join(file)).is_ok_and(|it| !it.contains(&0));
    let files = files();
    let marked: Vec<_> =
        files.iter().filter(is_text).filter(|file| mark.is_match(&read(file))).collect();
    assert!(marked.is_empty(), "merges were not finished: {marked:?}");
}

/// DKMS replaces a module by one with another version only.
#[test]
fn the_modules_have_the_version_of_the_workspace() {
    let manifest: Value = toml::from_str(&read("Cargo.toml")).expect("a manifest");
    let version = manifest["workspace"]["package"]["version"].as_str().expect("a version");
    for module in ["kernel/vhost_blk/dev.c", "kernel/virtio_blk/main.c"] {
        let line = format!("MODULE_VERSION(\"{version}\");");
        assert!(read(module).contains(&line), "{module} has no line {line}");
    }
}
