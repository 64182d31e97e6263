// SPDX-License-Identifier: Apache-2.0
//! Minimal Debian trees for root images.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::process::run_to_end;

/// apt's source lists on a Debian machine: the guest comes from where the machine came from.
const SOURCE_LISTS: [&str; 2] = ["/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"];

/// Makes a Debian tree in `root`, from the machine's own apt sources if they have the suite.
pub(crate) fn bootstrap(suite: &str, packages: &str, root: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("making a root image needs root: run it with sudo");
    }
    let root_text = root.to_string_lossy();
    let include = format!("--include={packages}");
    let base = ["mmdebstrap", "--quiet", "--variant=minbase", &include, suite, &root_text];
    let sources = SOURCE_LISTS.into_iter().find(|list| names_suite(Path::new(list), suite));
    let first = match sources {
        Some(list) => run_to_end(&[&base[..], &[list]].concat()),
        None => run_to_end(&base),
    };
    match (first, sources) {
        (Err(error), Some(list)) => {
            eprintln!("lab: {error:#}\nlab: trying again with mmdebstrap's default, not {list}");
            fs::remove_dir_all(root).ok();
            run_to_end(&base).context("mmdebstrap could not make the root tree")?;
        }
        (first, _) => {
            first.context("mmdebstrap could not make the root tree")?;
        }
    }
    Ok(())
}

fn names_suite(list: &Path, suite: &str) -> bool {
    fs::read_to_string(list).is_ok_and(|text| {
        text.lines().any(|line| !line.trim_start().starts_with('#') && line.contains(suite))
    })
}

/// Puts a program with this text at `path`.
pub(crate) fn install_program(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Makes an ext4 image of `size` (as mke2fs reads it) with a label and the content of a folder.
pub(crate) fn ext4_from(folder: &Path, image: &Path, label: &str, size: &str) -> Result<()> {
    let options = ["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-L", label];
    let paths = ["-d", &folder.to_string_lossy(), &image.to_string_lossy(), size];
    run_to_end(&[&["mke2fs"][..], &options, &paths].concat())?;
    Ok(())
}
