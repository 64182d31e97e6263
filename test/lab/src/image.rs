// SPDX-License-Identifier: Apache-2.0
//! The guest's root image: a minimal Debian with fio, made once; guests only read it.
//!
//! QEMU keeps a guest's changes in a throw-away overlay, so that any number of guests can run from
//! the one image. It is attached as an NVMe disk because NVMe and ext4 are built into the cloud
//! kernel: the guest needs no initramfs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::cache::{Cache, key_of};
use crate::debian::{self, Variant};
use crate::kernel::GuestKernel;
use kit::process::run_to_end;

const SUITE: &str = "bookworm";
const PACKAGES: &str = "fio,e2fsprogs,fdisk,util-linux,kmod,busybox-static";
const SIZE: &str = "1500M";

/// The guest's first process.
const INIT: &str = include_str!("guest-init.sh");

/// Path of that process in the guest.
pub const INIT_PATH: &str = "/sbin/lab-init";

/// A root image for guests of one kernel.
#[derive(Debug, Clone)]
pub struct RootImage {
    path: PathBuf,
}

impl RootImage {
    /// The image for `kernel`; made in the cache if it does not exist.
    pub fn cached(cache: &Cache, kernel: &GuestKernel) -> Result<Self> {
        let key = key_of(&[SUITE, PACKAGES, SIZE, INIT, kernel.release()]);
        let entry = cache.entry(&format!("image-{key}"), |staging| {
            eprintln!("lab: making the guest's root image (about half a minute)");
            build(staging, kernel)
        })?;
        Ok(Self { path: entry.join("root.img") })
    }

    /// The raw ext4 image.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn build(staging: &Path, kernel: &GuestKernel) -> Result<()> {
    let root = staging.join("root");
    debian::bootstrap(Variant::Minbase, SUITE, PACKAGES, &root)?;
    let modules = root.join("lib/modules");
    fs::create_dir_all(&modules)?;
    run_to_end(&[
        "cp",
        "-a",
        &kernel.modules().to_string_lossy(),
        &modules.join(kernel.release()).to_string_lossy(),
    ])?;
    run_to_end(&["chroot", &root.to_string_lossy(), "depmod", kernel.release()])?;
    debian::install_program(&root.join(INIT_PATH.trim_start_matches('/')), INIT)?;
    debian::ext4_from(&root, &staging.join("root.img"), "guest-root", SIZE)?;
    fs::remove_dir_all(&root)?;
    Ok(())
}
