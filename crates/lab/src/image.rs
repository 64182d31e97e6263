// SPDX-License-Identifier: Apache-2.0
//! The guest's root image: a minimal Debian with fio, made once, only ever read by guests.
//!
//! QEMU is told to keep a guest's changes in a throw-away overlay, so that any number of guests can
//! run from the one image. It is attached as an NVMe disk because NVMe and ext4 are built into the
//! cloud kernel: the guest needs no initramfs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cache::{Cache, key_of};
use crate::kernel::GuestKernel;
use crate::process::run_to_end;

const SUITE: &str = "bookworm";
const PACKAGES: &str = "fio,e2fsprogs,fdisk,util-linux,kmod,busybox-static";
const SIZE: &str = "1500M";

/// The guest's first process.
const INIT: &str = include_str!("guest-init.sh");

/// Where that process is found in the guest.
pub const INIT_PATH: &str = "/sbin/lab-init";

/// apt's source lists on a Debian machine: the guest comes from where the machine came from.
const SOURCE_LISTS: [&str; 2] = ["/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"];

/// A root image for guests of one kernel.
#[derive(Debug, Clone)]
pub struct RootImage {
    path: PathBuf,
}

impl RootImage {
    /// The image for `kernel`; made in the cache if it is not there.
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
    if !rustix::process::geteuid().is_root() {
        bail!("making the guest's root image needs root: run it with sudo");
    }
    let root = staging.join("root");
    let root_text = root.to_string_lossy().into_owned();
    bootstrap(&root_text)?;
    let modules = root.join("lib/modules");
    fs::create_dir_all(&modules)?;
    run_to_end(&[
        "cp",
        "-a",
        &kernel.modules().to_string_lossy(),
        &modules.join(kernel.release()).to_string_lossy(),
    ])?;
    run_to_end(&["chroot", &root_text, "depmod", kernel.release()])?;
    let init = root.join(INIT_PATH.trim_start_matches('/'));
    fs::write(&init, INIT)?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    let image = staging.join("root.img");
    let image_text = image.to_string_lossy();
    let options = ["-q", "-F", "-t", "ext4", "-O", "^has_journal"];
    run_to_end(&[&["mke2fs"][..], &options, &["-d", &root_text, &image_text, SIZE]].concat())?;
    fs::remove_dir_all(&root)?;
    Ok(())
}

/// Makes the Debian tree, from the machine's own apt sources if they are Debian's.
fn bootstrap(root: &str) -> Result<()> {
    let include = format!("--include={PACKAGES}");
    let base = ["mmdebstrap", "--quiet", "--variant=minbase", &include, SUITE, root];
    let sources = SOURCE_LISTS.into_iter().find(|list| names_suite(Path::new(list)));
    let first = match sources {
        Some(list) => run_to_end(&[&base[..], &[list]].concat()),
        None => run_to_end(&base),
    };
    match (first, sources) {
        (Err(error), Some(list)) => {
            eprintln!("lab: {error:#}\nlab: trying again with mmdebstrap's default, not {list}");
            fs::remove_dir_all(root).ok();
            run_to_end(&base).context("mmdebstrap could not make the guest's root")?;
        }
        (first, _) => {
            first.context("mmdebstrap could not make the guest's root")?;
        }
    }
    Ok(())
}

fn names_suite(list: &Path) -> bool {
    fs::read_to_string(list).is_ok_and(|text| {
        text.lines().any(|line| !line.trim_start().starts_with('#') && line.contains(SUITE))
    })
}
