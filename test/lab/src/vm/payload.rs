// SPDX-License-Identifier: Apache-2.0
//! The files that change from run to run, as the VM's `/lab`: the modules, this project's programs,
//! the first process.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::debian;
use crate::scripts;
use crate::vm::root::GUEST_DIR;

/// This project's programs that are included if they were built beside the lab.
const PROGRAMS: [&str; 3] = ["vhost-blk", "cases", "bench"];

/// Prefix of further programs that are included: tests as cargo builds them (`scripts/suite.sh`).
const SUITE: &str = "suite-";

/// Addition to the version of the second packages.
const NEWER: &str = "+newer";

/// The VM's first process.
const INIT: &str = include_str!("init.sh");

/// Room for files that a run writes to `/lab`.
const SLACK_BYTES: u64 = 64 << 20;

/// The content of `/lab`.
#[derive(Debug, Clone, Default)]
pub struct Payload {
    /// Files for `/lab/modules`.
    pub modules: Vec<PathBuf>,
    /// Files for `/lab/bin`.
    pub programs: Vec<PathBuf>,
    /// Files for `/lab/packages`.
    packages: Vec<PathBuf>,
    /// The directory of the packages, which goes with the payload.
    packages_directory: Option<Arc<TempDir>>,
}

impl Payload {
    /// The modules (`.ko`) of a directory, and the programs that lie beside the lab's own.
    pub fn new(modules: &Path) -> Result<Self> {
        let mut payload = Self::default();
        for entry in fs::read_dir(modules).with_context(|| modules.display().to_string())? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "ko") {
                payload.modules.push(path);
            }
        }
        let lab = std::env::current_exe()?;
        let beside = PROGRAMS.map(|name| lab.with_file_name(name));
        payload.programs.extend(beside.into_iter().filter(|path| path.exists()));
        payload.programs.extend(suite_beside(&lab)?);
        Ok(payload)
    }

    /// Adds a program; one of the same name is replaced.
    pub fn add_program(&mut self, path: &Path) -> Result<()> {
        if !path.is_file() {
            bail!("{} is no file: --add needs a program to put into /lab/bin", path.display());
        }
        self.programs.retain(|known| known.file_name() != path.file_name());
        self.programs.push(path.to_owned());
        Ok(())
    }

    /// Makes the Debian packages of the daemon that lies beside the lab, twice: the second ones are
    /// newer.
    pub(crate) fn add_packages(&mut self) -> Result<()> {
        let daemon = std::env::current_exe()?.with_file_name(PROGRAMS[0]);
        let directory = tempfile::Builder::new().prefix("lab-packages-").tempdir()?;
        for (name, suffix) in [("old", ""), ("new", NEWER)] {
            let made = scripts::packages(&daemon, &directory.path().join(name), suffix)?;
            self.packages.extend(made);
        }
        self.packages_directory = Some(Arc::new(directory));
        Ok(())
    }

    /// Writes the payload and the script of this boot as an ext4 image.
    pub(crate) fn write_image(&self, path: &Path, script: &str) -> Result<()> {
        let tree = tempfile::Builder::new().prefix("lab-payload-").tempdir()?;
        let mut bytes = SLACK_BYTES;
        let directories =
            [("modules", &self.modules), ("bin", &self.programs), ("packages", &self.packages)];
        for (directory, files) in directories {
            let directory = tree.path().join(directory);
            fs::create_dir_all(&directory)?;
            for file in files {
                let name = file.file_name().with_context(|| file.display().to_string())?;
                bytes += fs::copy(file, directory.join(name))
                    .with_context(|| format!("cannot copy {}", file.display()))?;
            }
        }
        std::os::unix::fs::symlink(GUEST_DIR, tree.path().join("guest"))?;
        debian::install_program(&tree.path().join("init"), INIT)?;
        fs::write(tree.path().join("job"), script)?;
        let size = format!("{}M", bytes.div_ceil(1 << 20));
        debian::ext4_from(tree.path(), path, "lab-payload", &size)
    }
}

fn suite_beside(lab: &Path) -> Result<Vec<PathBuf>> {
    let directory = lab.parent().context("a program lies in a directory")?;
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(SUITE) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_has_the_modules_of_a_directory_and_nothing_else_of_it() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.ko", "a.o", "Kbuild"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(Payload::new(dir.path()).unwrap().modules, [dir.path().join("a.ko")]);
    }

    #[test]
    fn an_added_program_replaces_the_one_of_the_same_name() {
        let dir = tempfile::tempdir().unwrap();
        let added = dir.path().join("cases");
        fs::write(&added, "").unwrap();
        let mut payload = Payload { programs: vec!["/old/cases".into()], ..Payload::default() };
        payload.add_program(&added).unwrap();
        assert_eq!(payload.programs, [added]);
        assert!(payload.add_program(Path::new("/no-such-program")).is_err());
    }
}
