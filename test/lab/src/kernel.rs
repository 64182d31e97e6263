// SPDX-License-Identifier: Apache-2.0
//! The guest's kernel: Debian's cloud kernel, unpacked into the cache without installation.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::debian::download_and_unpack;
use kit::process::run_to_end;

const ENTRY_PREFIX: &str = "kernel-";

/// Meta-packages to look for, in order of preference.
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

    /// The output of `uname -r` in the guest.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The bootable file.
    pub fn vmlinuz(&self) -> PathBuf {
        self.dir.join("boot").join(format!("vmlinuz-{}", self.release))
    }

    /// The directory that becomes `/lib/modules/RELEASE` in the guest.
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
