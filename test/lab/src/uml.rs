// SPDX-License-Identifier: Apache-2.0
//! A guest in User Mode Linux: a Linux kernel that runs as a process, with the stock virtio_blk
//! driver and a vhost-user front-end of its own. It needs neither KVM nor an emulator.
//!
//! Its root is the lab's image, read-only. It sees one directory of the host, with its job and
//! results.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::debian::download_and_unpack;
use crate::guest::Guest;
use crate::image::RootImage;
use crate::job::Job;
use kit::process::{OwnedChild, StopWith};

/// Debian's package; its modules fit only this kernel.
const PACKAGE: &str = "user-mode-linux";
const ENTRY: &str = "user-mode-linux";
/// Directory of the kernels' modules in the package.
const MODULES: &str = "usr/lib/uml/modules";

/// The guest's first process.
const INIT: &str = include_str!("uml-init.sh");
/// Block devices consist of whole blocks; empty lines fill the rest of the script's last one.
const BLOCK: usize = 4096;

/// A kernel that runs as a process.
#[derive(Debug, Clone)]
pub struct UmlKernel {
    linux: PathBuf,
    virtio_blk: PathBuf,
}

impl UmlKernel {
    /// The kernel in the cache, fetched if there is none; `None` if apt does not know it.
    pub fn cached(cache: &Cache) -> Result<Option<Self>> {
        let known = || {
            let shown = Command::new("apt-cache").args(["show", PACKAGE]).output();
            shown.is_ok_and(|shown| shown.status.success())
        };
        if !cache.dir().join(ENTRY).exists() && !known() {
            return Ok(None);
        }
        let dir = cache.entry(ENTRY, |staging| {
            eprintln!("lab: fetching {PACKAGE} (about 40 MB)");
            download_and_unpack(PACKAGE, staging)
        })?;
        let modules = fs::read_dir(dir.join(MODULES))?.next();
        let modules = modules.with_context(|| format!("{PACKAGE} has no {MODULES}"))??.path();
        let virtio_blk = modules.join("kernel/drivers/block/virtio_blk.ko");
        Ok(Some(Self { linux: dir.join("usr/bin/linux.uml"), virtio_blk }))
    }

    /// Boots a guest with the disk that is served on `socket`; its job runs as soon as it has
    /// booted.
    pub fn boot(&self, image: &RootImage, socket: &Path, job: &Job) -> Result<Guest> {
        let dir = tempfile::Builder::new().prefix("lab-uml-").tempdir()?;
        let at = |name: &str| dir.path().join(name);
        let mut init = INIT.as_bytes().to_vec();
        init.resize(init.len().next_multiple_of(BLOCK), b'\n');
        fs::write(at("init"), init)?;
        fs::write(at("job"), job.script())?;
        fs::write(at("results"), "")?;
        fs::copy(&self.virtio_blk, at("virtio_blk.ko"))?;
        let args = [
            // If its heap begins far from its program, the kernel cannot count its memory.
            "setarch -R".into(),
            self.linux.display().to_string(),
            "mem=512M".into(),
            // `r`: opened read-only. The second disk is the script that the shell below reads.
            format!("ubd0r={}", image.path().display()),
            format!("ubd1r={}", at("init").display()),
            "root=/dev/ubda rootfstype=ext4 ro".into(),
            format!("virtio_uml.device={}:2", socket.display()),
            format!("hostfs={}", dir.path().display()),
            format!("uml_dir={}/", dir.path().display()),
            "umid=guest".into(),
            "con=null".into(),
            "con0=null,fd:1".into(),
            "panic=-1".into(),
            "init=/bin/sh".into(),
            "--".into(),
            "/dev/ubdb".into(),
        ];
        let args: Vec<String> =
            args.iter().flat_map(|arg| arg.split(' ')).map(str::to_owned).collect();
        let child = OwnedChild::spawn(&args, &at("console"), StopWith::KillGroup)?;
        Ok(Guest::of(child, dir))
    }
}
