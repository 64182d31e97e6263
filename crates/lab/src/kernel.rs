// SPDX-License-Identifier: Apache-2.0
//! The guest's kernel: Debian's cloud kernel, unpacked into the cache and not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::process::run_to_end;

const ENTRY_PREFIX: &str = "kernel-";

/// Meta-packages to look for, the preferred one first.
const META_PACKAGES: [&str; 2] = ["linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64"];

/// A kernel that guests boot.
#[derive(Debug, Clone)]
pub struct GuestKernel {
    release: String,
    dir: PathBuf,
}

impl GuestKernel {
    /// The newest kernel in the cache; downloads one if there is none.
    pub fn cached(cache: &Cache) -> Result<Self> {
        let name = match cache.entries(ENTRY_PREFIX)?.pop() {
            Some(name) => name,
            None => fetch(cache)?,
        };
        let release = name.trim_start_matches(ENTRY_PREFIX).to_owned();
        Ok(Self { release, dir: cache.dir().join(name) })
    }

    /// What `uname -r` says in the guest.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The bootable file.
    pub fn vmlinuz(&self) -> PathBuf {
        self.dir.join("boot").join(format!("vmlinuz-{}", self.release))
    }

    /// The folder that becomes `/lib/modules/RELEASE` in the guest.
    pub fn modules(&self) -> PathBuf {
        self.dir.join("lib/modules").join(&self.release)
    }
}

fn fetch(cache: &Cache) -> Result<String> {
    let package = newest_package()?;
    let release = package.trim_start_matches("linux-image-").to_owned();
    let name = format!("{ENTRY_PREFIX}{release}");
    eprintln!("lab: fetching the guest kernel {release} (about 35 MB)");
    cache.entry(&name, |staging| {
        download_and_unpack(&package, staging)?;
        let vmlinuz = staging.join("boot").join(format!("vmlinuz-{release}"));
        if !vmlinuz.exists() {
            bail!("the package {package} holds no {}", vmlinuz.display());
        }
        Ok(())
    })?;
    Ok(name)
}

/// The versioned package behind the first meta-package that apt knows.
fn newest_package() -> Result<String> {
    if let Some(found) = package_known_to_apt()? {
        return Ok(found);
    }
    run_to_end(&["apt-get", "-q", "update"]).context("apt knows no cloud kernel")?;
    package_known_to_apt()?.with_context(|| {
        format!(
            "apt offers neither {}: add Debian's main repository to its sources",
            META_PACKAGES.join(" nor ")
        )
    })
}

fn package_known_to_apt() -> Result<Option<String>> {
    for meta in META_PACKAGES {
        let shown = Command::new("apt-cache")
            .args(["show", "--no-all-versions", meta])
            .output()
            .context("cannot start apt-cache: the guest kernel comes from Debian's packages")?;
        let text = String::from_utf8_lossy(&shown.stdout);
        if let Some(package) = versioned_dependency(&text) {
            return Ok(Some(package));
        }
    }
    Ok(None)
}

/// Finds `linux-image-VERSION` in the `Depends:` line of a package description.
fn versioned_dependency(description: &str) -> Option<String> {
    let line = description.lines().find_map(|line| line.strip_prefix("Depends:"))?;
    line.split(',')
        .filter_map(|dependency| dependency.split_whitespace().next())
        .find(|package| package.starts_with("linux-image-"))
        .map(str::to_owned)
}

fn download_and_unpack(package: &str, staging: &Path) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::versioned_dependency;

    #[test]
    fn the_versioned_kernel_is_found_behind_the_meta_package() {
        let text = "Package: linux-image-cloud-amd64\n\
                    Depends: initramfs, linux-image-6.12.1+deb12-cloud-amd64 (= 6.12.1-1)\n";
        assert_eq!(
            versioned_dependency(text).as_deref(),
            Some("linux-image-6.12.1+deb12-cloud-amd64")
        );
    }

    #[test]
    fn a_package_unknown_to_apt_gives_none() {
        assert_eq!(versioned_dependency(""), None);
        assert_eq!(versioned_dependency("Package: x\nDepends: libc6\n"), None);
    }
}
