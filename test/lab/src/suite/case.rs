// SPDX-License-Identifier: Apache-2.0
//! The cases. `cases list` prints a line for each: name, set, description.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use kit::set::Set;

use kit::process::run_to_end;

/// The program that contains the cases.
const PROGRAM: &str = "cases";

/// The program that cases run besides their own.
const DAEMON: &str = "vhost-blk";

/// Builds everything that lies beside the lab.
const BUILD: &str = "cargo build --release -p vhost-blk -p cases -p bench";

/// One case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Its name, unique.
    pub name: String,
    /// The set that it belongs to.
    pub set: Set,
    /// A sentence about the property that it shows.
    pub description: String,
    /// The shell command that runs it in the VM.
    pub command: String,
}

/// All cases: the lab's own first, then those of the program beside the lab. Neither it nor the
/// daemon may be missing.
pub fn all(programs_dir: &Path) -> Result<Vec<Case>> {
    let mut cases = own();
    built(programs_dir, DAEMON)?;
    let program = built(programs_dir, PROGRAM)?;
    cases.extend(parse(&run_to_end(&[&program.to_string_lossy(), "list"])?)?);
    for (index, case) in cases.iter().enumerate() {
        if cases[..index].iter().any(|other| other.name == case.name) {
            bail!("two cases are called {}", case.name);
        }
    }
    Ok(cases)
}

/// The path of a program that was built beside the lab.
fn built(programs_dir: &Path, program: &str) -> Result<PathBuf> {
    let path = programs_dir.join(program);
    if !path.exists() {
        bail!("{} is missing: {BUILD}", path.display());
    }
    Ok(path)
}

/// The cases that need only the module.
fn own() -> Vec<Case> {
    let reload = "[ -c /dev/vhost-blk ] && rmmod vhost_blk && [ ! -e /dev/vhost-blk ] && \
                  insmod /lab/modules/vhost_blk.ko && [ -c /dev/vhost-blk ]";
    vec![Case {
        name: "module-reload".to_owned(),
        set: Set::Gating,
        description: "the module loads, makes its device, unloads and loads again".to_owned(),
        command: format!("sh -c '{reload}'"),
    }]
}

fn parse(list: &str) -> Result<Vec<Case>> {
    list.lines().filter(|line| !line.trim().is_empty()).map(parse_line).collect()
}

fn parse_line(line: &str) -> Result<Case> {
    let mut fields = line.splitn(3, '\t');
    let (name, set) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
    let description =
        fields.next().with_context(|| format!("`{PROGRAM} list` says '{line}': no description"))?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        bail!("`{PROGRAM} list` has a case called '{name}': use letters, digits and - _ . /");
    }
    let set = Set::from_str(set, false)
        .map_err(|_| anyhow::anyhow!("`{PROGRAM} list` puts {name} into an unknown set '{set}'"))?;
    Ok(Case {
        name: name.to_owned(),
        set,
        description: description.to_owned(),
        command: format!("/lab/bin/{PROGRAM} run {name}"),
    })
}

/// The cases that a pattern names: a name, or the beginning of names before a `*`.
pub fn matching<'a>(cases: &'a [Case], pattern: &str) -> Result<Vec<&'a Case>> {
    let found: Vec<&Case> = match pattern.strip_suffix('*') {
        Some(prefix) => cases.iter().filter(|case| case.name.starts_with(prefix)).collect(),
        None => cases.iter().filter(|case| case.name == pattern).collect(),
    };
    if found.is_empty() {
        bail!("no case is called {pattern}: see `lab list`");
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "read-all\tgating\treads it all\nread-slow\tfull\tslow\tand long\n";

    #[test]
    fn a_list_is_read_as_names_sets_and_descriptions() {
        let cases = parse(LIST).unwrap();
        assert_eq!(cases[0].command, "/lab/bin/cases run read-all");
        assert_eq!(cases[1].set, Set::Full);
        assert_eq!(cases[1].description, "slow\tand long");
    }

    #[test]
    fn a_list_with_an_unknown_set_or_a_strange_name_is_refused() {
        assert!(parse("a\tsometimes\tdoes it\n").is_err());
        assert!(parse("a;b\tgating\tdoes it\n").is_err());
        assert!(parse("a\tgating\n").is_err());
    }

    #[test]
    fn a_program_that_was_not_built_is_named_with_the_line_that_builds_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(DAEMON), "").unwrap();
        let why = all(dir.path()).unwrap_err().to_string();
        assert!(why.contains("/cases is missing: cargo build --release "), "{why}");
        assert!(why.contains(&format!("-p {PROGRAM}")), "{why}");
    }

    #[test]
    fn a_star_matches_what_begins_alike_and_no_match_is_an_error() {
        let cases = parse(LIST).unwrap();
        assert_eq!(matching(&cases, "read-*").unwrap().len(), 2);
        assert_eq!(matching(&cases, "read-slow").unwrap()[0].name, "read-slow");
        assert!(matching(&cases, "read").is_err());
    }
}
