// SPDX-License-Identifier: Apache-2.0
//! Minimal Debian trees for root images.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use kit::process::run_to_end;

/// apt's source lists on a Debian machine: the guest's packages come from the same mirror.
const SOURCE_LISTS: [&str; 2] = ["/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"];

/// The treatment of the packages, in mmdebstrap's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Installs them on a minimal Debian.
    Minbase,
    /// Unpacks them and their dependencies, and runs none of their scripts.
    Extract,
}

impl Variant {
    fn option(self) -> &'static str {
        match self {
            Variant::Minbase => "--variant=minbase",
            Variant::Extract => "--variant=extract",
        }
    }
}

/// Makes a Debian tree in `root`, from the machine's own apt sources if they have the suite.
pub(crate) fn bootstrap(variant: Variant, suite: &str, packages: &str, root: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("making a Debian tree needs root: run it with sudo");
    }
    let root_text = root.to_string_lossy();
    let include = format!("--include={packages}");
    let base = ["mmdebstrap", "--quiet", variant.option(), &include, suite, &root_text];
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

/// Writes an executable program with this text to `path`.
pub(crate) fn install_program(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Makes an ext4 image of `size` (in mke2fs syntax) with a label and the content of a directory.
pub(crate) fn ext4_from(directory: &Path, image: &Path, label: &str, size: &str) -> Result<()> {
    let options = ["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-L", label];
    let paths = ["-d", &directory.to_string_lossy(), &image.to_string_lossy(), size];
    run_to_end(&[&["mke2fs"][..], &options, &paths].concat())?;
    Ok(())
}

/// Unpacks a package into `staging` without installing it.
pub(crate) fn download_and_unpack(package: &str, staging: &Path) -> Result<()> {
    let download = tempfile::tempdir_in(staging)?;
    let output = Command::new("apt-get")
        .args(["-q", "-o", "APT::Sandbox::User=root", "download", package])
        .current_dir(download.path())
        .output()?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("`apt-get download {package}` failed: {}", text.trim());
    }
    let deb = fs::read_dir(download.path())?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt-get download left no package")?;
    run_to_end(&["dpkg-deb", "-x", &deb.to_string_lossy(), &staging.to_string_lossy()])?;
    Ok(())
}
