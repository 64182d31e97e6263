// SPDX-License-Identifier: Apache-2.0
//! The kernels of the host VM, each with the files to build modules for it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::cache::{Cache, key_of};
use crate::debian;
use crate::kernel::GuestKernel;
use crate::scripts;
use kit::process::run_to_end;

/// A kernel by its user-visible name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum KernelName {
    /// Debian's 6.12 for virtual machines.
    #[value(name = "6.12")]
    Stable,
    /// The newest kernel in Debian sid.
    #[value(name = "sid")]
    Sid,
    /// 6.12 with KASAN, lockdep, kmemleak, UBSAN, fault injection and more.
    #[value(name = "debug")]
    Debug,
}

impl KernelName {
    /// The name.
    pub fn as_str(self) -> &'static str {
        match self {
            KernelName::Stable => "6.12",
            KernelName::Sid => "sid",
            KernelName::Debug => "debug",
        }
    }

    /// Additions to the kernel's command line. Under emulation the debug kernel would interpret
    /// ACPI's byte code for most of a minute; without ACPI it needs to know the place of the one
    /// reliable timer.
    pub(crate) fn command_line(self) -> &'static str {
        match self {
            KernelName::Stable | KernelName::Sid => "",
            KernelName::Debug => " acpi=off pmtmr=0x608",
        }
    }
}

/// A kernel that is ready to boot.
#[derive(Debug, Clone)]
pub struct VmKernel {
    name: KernelName,
    release: String,
    image: PathBuf,
    modules: PathBuf,
}

impl VmKernel {
    /// Fetches or builds the kernel if the cache does not have it.
    pub fn cached(cache: &Cache, name: KernelName) -> Result<Self> {
        let (release, image, modules) = match name {
            KernelName::Stable => {
                let kernel = GuestKernel::cached(cache)?;
                (kernel.release().to_owned(), kernel.vmlinuz(), kernel.modules())
            }
            KernelName::Debug => {
                let dir = scripts::directory_from("debug.sh", &[])?;
                let (release, modules) = only_modules(&dir)?;
                (release, dir.join("bzImage"), modules)
            }
            KernelName::Sid => {
                let dir = scripts::directory_from("sid.sh", &[])?;
                let (release, modules) = only_modules(&dir)?;
                let image = dir.join("boot").join(format!("vmlinuz-{release}"));
                (release, image, modules)
            }
        };
        Ok(Self { name, release, image, modules })
    }

    /// Name of the kernel on the command line.
    pub fn name(&self) -> KernelName {
        self.name
    }

    /// The output of `uname -r`.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The bootable file.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Builds this project's modules for it; returns the directory with the `.ko` files.
    pub fn build_modules(&self) -> Result<PathBuf> {
        match self.name {
            KernelName::Stable => {
                let kdir = scripts::directory_from("headers.sh", &[&self.release])?;
                scripts::directory_from("modules.sh", &[&kdir.to_string_lossy()])
            }
            KernelName::Debug => {
                let dir = self.image.parent().context("the debug kernel lies in no directory")?;
                let kdir = dir.join("build");
                scripts::directory_from("modules.sh", &[&kdir.to_string_lossy()])
            }
            KernelName::Sid => scripts::directory_from("sid-modules.sh", &[]),
        }
    }

    /// An ext4 image of the kernel's own modules, to be mounted at `/lib/modules`.
    pub(crate) fn modules_image(&self, cache: &Cache) -> Result<PathBuf> {
        let key = key_of(&["lab-modules", &self.modules.to_string_lossy(), &self.release]);
        let entry = cache.entry(&format!("ko-{}-{key}", self.release), |staging| {
            let tree = staging.join("tree");
            let modules = tree.join("lib/modules");
            fs::create_dir_all(&modules)?;
            let (from, to) = (self.modules.to_string_lossy(), modules.to_string_lossy());
            run_to_end(&["cp", "-a", &from, &to])?;
            run_to_end(&["depmod", "--basedir", &tree.to_string_lossy(), &self.release])?;
            debian::ext4_from(&modules, &staging.join("modules.img"), "lab-modules", "1G")?;
            Ok(fs::remove_dir_all(&tree)?)
        })?;
        Ok(entry.join("modules.img"))
    }
}

/// The one directory below `lib/modules`, and its name, which is the kernel's release.
fn only_modules(dir: &Path) -> Result<(String, PathBuf)> {
    let modules = dir.join("lib/modules");
    let entry = fs::read_dir(&modules)
        .with_context(|| modules.display().to_string())?
        .next()
        .with_context(|| format!("{} is empty", modules.display()))??;
    Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
}
