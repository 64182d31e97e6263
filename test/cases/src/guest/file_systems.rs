// SPDX-License-Identifier: Apache-2.0
//! File systems on the disk.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use kit::file_system::FileSystem;
use kit::system::{run, run_quietly};
use tempfile::TempDir;

use super::file_ops::FileOps;
use crate::case::cases;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::Mode;
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-ext4", Modes::of(Mode::ALL).at_every_change(&[Mode::Request, Mode::Bio]).and_long(),
        "random operations on files in ext4 read what they wrote, also after a mount, and fsck finds nothing",
        |context| on_disk(context, FileSystem::Ext4);
    "guest-xfs", Modes::of(Mode::ALL),
        "random operations on files in XFS read what they wrote, also after a mount, and xfs_repair finds nothing",
        |context| on_disk(context, FileSystem::Xfs);
}

/// Number of files that are changed in turn.
const FILES: u64 = 4;

/// A mounted file system; dropping it unmounts it.
pub(crate) struct Mounted {
    place: TempDir,
}

impl Mounted {
    /// Mounts a device.
    pub(crate) fn new(device: &str, kind: FileSystem, options: &str) -> Result<Self> {
        let place = tempfile::Builder::new().prefix("mounted-").tempdir()?;
        let at = place.path().to_string_lossy().into_owned();
        run("mount", &["-t", kind.name(), "-o", options, device, &at])?;
        Ok(Self { place })
    }

    /// A file in it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Mount point.
    pub(crate) fn place(&self) -> &Path {
        self.place.path()
    }

    /// Unmounts it; an error comes from the kernel.
    pub(crate) fn unmount(self) -> Result<()> {
        run("umount", &[&self.place.path().to_string_lossy()]).map(drop)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let at = self.place.path().to_string_lossy();
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
        if mounts.lines().any(|line| line.split(' ').nth(1) == Some(at.as_ref())) {
            run_quietly("umount", &[&at]);
        }
    }
}

fn on_disk(context: &Context, kind: FileSystem) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(kind.disk_mib()))?;
    exercise(context, &disk.path()?, kind)?;
    ensure!(disk.stat()?.discarded_sectors > 0, "nothing was discarded");
    Ok(())
}

/// Makes a file system, uses it, and checks it.
pub(crate) fn exercise(context: &Context, device: &str, kind: FileSystem) -> Result<()> {
    kind.make(device)?;
    let options = if kind == FileSystem::Ext4 { "discard" } else { "rw" };
    let mounted = Mounted::new(device, kind, options)?;
    let mut files = Vec::new();
    for index in 0..FILES {
        let path = mounted.file(&format!("file-{index}"));
        files.push(FileOps::new(&path, context.seed ^ index)?);
    }
    for step in 0..context.effort.steps {
        for (index, file) in files.iter_mut().enumerate() {
            file.step().with_context(|| format!("file {index}, step {step}"))?;
        }
    }
    // The reads must come from the disk, not from memory.
    run("sync", &[])?;
    std::fs::write("/proc/sys/vm/drop_caches", "3")?;
    for file in &files {
        file.check()?;
    }
    drop(files);
    // Fails if a layer between the disk and the file system blocks discards.
    let _ = run("fstrim", &[&mounted.place().to_string_lossy()]);
    mounted.unmount()?;
    kind.check(device)
}
