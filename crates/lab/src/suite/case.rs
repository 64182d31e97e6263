// SPDX-License-Identifier: Apache-2.0
//! The cases: programs tell them by `PROGRAM list`, a line for each: name, set, description.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::process::run_to_end;
use crate::vm::machine::{GUEST_PROGRAM, Machine};

/// Programs that have cases, in the order in which they run.
const PROGRAMS: [&str; 3] = ["torture", "nested", GUEST_PROGRAM];

/// What cases run besides their own program.
const DAEMON: &str = "vhost-blk";

/// Makes everything that lies beside the lab.
const BUILD: &str =
    "cargo build --release -p vhost-blk -p torture -p nested -p bench -p guest-cases";

/// When a case is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Set {
    /// At every change: short, also on the debug kernel.
    Gating,
    /// The longer ones.
    Full,
    /// Guests inside the VM.
    Nested,
    /// The guest's driver, at every change.
    Guest,
    /// The guest's driver, the longer ones.
    GuestFull,
}

impl Set {
    /// The word in lists.
    pub fn as_str(self) -> &'static str {
        match self {
            Set::Gating => "gating",
            Set::Full => "full",
            Set::Nested => "nested",
            Set::Guest => "guest",
            Set::GuestFull => "guest-full",
        }
    }

    /// The most that a case of the set may take, on a slow machine with other work.
    pub fn timeout(self) -> Duration {
        Duration::from_secs(match self {
            Set::Gating | Set::Guest => 300,
            Set::Full | Set::Nested | Set::GuestFull => 3600,
        })
    }

    /// The machine that its cases run in.
    pub fn machine(self) -> Machine {
        match self {
            Set::Gating | Set::Full | Set::Nested => Machine::Host,
            Set::Guest | Set::GuestFull => Machine::Guest,
        }
    }
}

/// One case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Its name, unique over all programs.
    pub name: String,
    /// When it is run.
    pub set: Set,
    /// What it shows, in a sentence.
    pub description: String,
    /// The shell command that runs it in the VM.
    pub command: String,
}

/// All cases: the lab's own first, then those of the programs that lie beside the lab's. None of
/// them may be missing, or its cases would be, too.
pub fn all(programs_dir: &Path) -> Result<Vec<Case>> {
    let mut cases = own();
    built(programs_dir, DAEMON)?;
    for program in PROGRAMS {
        let path = built(programs_dir, program)?;
        let list = run_to_end(&[&path.to_string_lossy(), "list"])?;
        cases.extend(parse(program, &list)?);
    }
    for (index, case) in cases.iter().enumerate() {
        if cases[..index].iter().any(|other| other.name == case.name) {
            bail!("two cases are called {}", case.name);
        }
    }
    Ok(cases)
}

/// The path of a program that has been built beside the lab.
fn built(programs_dir: &Path, program: &str) -> Result<PathBuf> {
    let path = programs_dir.join(program);
    if !path.exists() {
        bail!("{} is missing: {BUILD}", path.display());
    }
    Ok(path)
}

/// What needs nothing but the module.
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

fn parse(program: &str, list: &str) -> Result<Vec<Case>> {
    list.lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| parse_line(program, line))
        .collect()
}

fn parse_line(program: &str, line: &str) -> Result<Case> {
    let mut fields = line.splitn(3, '\t');
    let (name, set) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
    let description =
        fields.next().with_context(|| format!("`{program} list` says '{line}': no description"))?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        bail!("`{program} list` has a case called '{name}': use letters, digits and - _ . /");
    }
    let set = Set::from_str(set, false)
        .map_err(|_| anyhow::anyhow!("`{program} list` puts {name} into an unknown set '{set}'"))?;
    Ok(Case {
        name: name.to_owned(),
        set,
        description: description.to_owned(),
        command: format!("/lab/bin/{program} run {name}"),
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
        let cases = parse("torture", LIST).unwrap();
        assert_eq!(cases[0].command, "/lab/bin/torture run read-all");
        assert_eq!(cases[1].set, Set::Full);
        assert_eq!(cases[1].description, "slow\tand long");
    }

    #[test]
    fn a_list_with_an_unknown_set_or_a_strange_name_is_refused() {
        assert!(parse("torture", "a\tsometimes\tdoes it\n").is_err());
        assert!(parse("torture", "a;b\tgating\tdoes it\n").is_err());
        assert!(parse("torture", "a\tgating\n").is_err());
    }

    #[test]
    fn a_program_that_was_not_built_is_named_with_the_line_that_builds_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(DAEMON), "").unwrap();
        let why = all(dir.path()).unwrap_err().to_string();
        assert!(why.contains("/torture is missing: cargo build --release "), "{why}");
        for program in PROGRAMS {
            assert!(why.contains(&format!("-p {program}")), "{why}");
        }
    }

    #[test]
    fn a_star_matches_what_begins_alike_and_no_match_is_an_error() {
        let cases = parse("torture", LIST).unwrap();
        assert_eq!(matching(&cases, "read-*").unwrap().len(), 2);
        assert_eq!(matching(&cases, "read-slow").unwrap()[0].name, "read-slow");
        assert!(matching(&cases, "read").is_err());
    }
}
