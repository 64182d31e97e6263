// SPDX-License-Identifier: Apache-2.0
//! The files of the demonstration: the base image, and files whose checksums go with them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kit::agent::Shell;
use kit::process::run_to_end;
use tempfile::TempDir;

use crate::nested::disk::check_ext4;
use crate::nested::guest::Mount;

/// MiB of the base image.
const BASE_MIB: u64 = 96;
/// Bytes of a block of its file system. The namespace has such blocks, and no file system with
/// smaller ones can be mounted on it.
const BLOCK: &str = "4096";
/// Bytes of the file in the base image.
const GOLDEN_BYTES: u64 = 8 << 20;

/// Compares all files of the disk with their checksums; prints their number.
const COMPARE: &str = "sha256sum --quiet -c *.sum && cat *.sum | wc -l";

/// Copies programs of the guest's system to its disk, with their checksums.
const INSTALL: &str = "cd /run/disk && mkdir installed && cp /usr/sbin/* installed/ && \
    sha256sum installed/* >installed.sum && sync";

/// Images of one host, on its own file system. Removed on drop.
#[derive(Debug)]
pub(super) struct Files(TempDir);

impl Files {
    /// Makes the base image, with a file system that has a file, and an overlay for the guest.
    pub(super) fn create() -> Result<Self> {
        // Not in /tmp, which can be a tmpfs.
        let directory = tempfile::Builder::new().prefix("demo-storage-").tempdir_in("/var/tmp")?;
        let files = Self(directory);
        let (content, base) = (files.path("content"), files.base());
        fs::create_dir(&content)?;
        let make = format!(
            "cd {} && head -c {GOLDEN_BYTES} /dev/urandom >golden && sha256sum golden >golden.sum",
            content.display()
        );
        run_to_end(&["sh", "-c", &make])?;
        let (content, size) = (content.display().to_string(), format!("{BASE_MIB}M"));
        run_to_end(&[
            "mke2fs",
            "-q",
            "-t",
            "ext4",
            "-b",
            BLOCK,
            "-d",
            &content,
            &text(&base),
            &size,
        ])?;
        let backing = ["-b", "base.raw", "-F", "raw"];
        let create = ["qemu-img", "create", "-q", "-f", "qcow2"];
        run_to_end(&[&create[..], &backing, &[&text(&files.overlay())]].concat())?;
        Ok(files)
    }

    /// Path of a file.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The base image.
    pub(super) fn base(&self) -> PathBuf {
        self.path("base.raw")
    }

    /// The overlay that the guest starts on.
    pub(super) fn overlay(&self) -> PathBuf {
        self.path("disk.qcow2")
    }

    /// Checks the copy of a mounted disk: its qcow2 structures, its file system after the journal was
    /// replayed, and all files. Returns the number of files.
    pub(super) fn check_copy(&self, copy: &Path) -> Result<usize> {
        check_qcow2(copy)?;
        let raw = self.path("copy.raw");
        run_to_end(&["qemu-img", "convert", "-O", "raw", &text(copy), &text(&raw)])?;
        let mount = Mount::writable(&raw)?;
        let compare = format!("cd {} && {COMPARE}", mount.place().display());
        let compared = number(&run_to_end(&["sh", "-c", &compare])?)?;
        drop(mount);
        check_ext4(&raw)?;
        fs::remove_file(&raw)?;
        Ok(compared)
    }
}

/// Copies files to the disk of a guest.
pub(super) fn install(guest: &mut impl Shell) -> Result<()> {
    guest.ok(INSTALL).map(drop)
}

/// Compares all files of a guest's disk, past the page cache; returns their number.
pub(super) fn compare(guest: &mut impl Shell) -> Result<usize> {
    let command = format!("echo 3 >/proc/sys/vm/drop_caches; cd /run/disk && {COMPARE}");
    number(&guest.ok(&command)?)
}

/// Megabytes that a guest has written to a disk since it booted.
pub(super) fn written_mb(guest: &mut impl Shell, node: &str) -> Result<u64> {
    let name = node.trim_start_matches("/dev/");
    let stat = guest.ok(&format!("cat /sys/block/{name}/stat"))?;
    let sectors = stat.split_whitespace().nth(6).context("no number of written sectors")?;
    Ok(sectors.parse::<u64>()? * 512 / 1_000_000)
}

/// Checks a qcow2 image, which must have neither errors nor leaks.
pub(super) fn check_qcow2(image: &Path) -> Result<()> {
    run_to_end(&["qemu-img", "check", "-q", "-f", "qcow2", &text(image)]).map(drop)
}

/// A path as an argument.
pub(super) fn text(path: &Path) -> String {
    path.display().to_string()
}

fn number(said: &str) -> Result<usize> {
    let number = said.trim().parse().with_context(|| format!("no number of files: {said}"))?;
    ensure!(number > 0, "no file was compared");
    Ok(number)
}
