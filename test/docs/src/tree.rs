// SPDX-License-Identifier: Apache-2.0
//! The files of the repository.

use crate::Document;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("the crate is two directories below the root").to_path_buf()
}

/// The text of a file, by its path from the root.
///
/// # Panics
/// If it cannot be read.
pub fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|why| panic!("{path}: {why}"))
}

/// The paths from the root of all files that are or may become part of the repository, sorted. A
/// source archive has no `.git`: there these are all files outside of build directories.
pub fn files() -> Vec<String> {
    let git = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let listed = Command::new("git").args(git).current_dir(root()).output();
    let mut files: Vec<String> = match listed {
        Ok(listed) if listed.status.success() => {
            let paths = String::from_utf8(listed.stdout).expect("paths are UTF-8");
            paths.split_terminator('\0').map(String::from).collect()
        }
        _ => below(&root()),
    };
    files.retain(|path| root().join(path).is_file());
    files.sort();
    files.dedup();
    files
}

fn below(directory: &Path) -> Vec<String> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory of the repository") {
        let path = entry.expect("an entry of a directory").path();
        match path.file_name().and_then(|name| name.to_str()) {
            Some("target" | ".git") => {}
            _ if path.is_dir() => paths.extend(below(&path)),
            _ => {
                let path = path.strip_prefix(root()).expect("a path below the root");
                paths.push(path.to_str().expect("paths are UTF-8").into());
            }
        }
    }
    paths
}

/// All documents.
pub fn documents() -> Vec<Document> {
    let paths = files().into_iter().filter(|path| path.ends_with(".md"));
    let documents: Vec<_> = paths.map(|path| Document::parse(&path, &read(&path))).collect();
    assert!(documents.len() > 20, "only {} documents were found", documents.len());
    documents
}
