// SPDX-License-Identifier: Apache-2.0
//! The image files of a run: the disk and its overlays, the oldest first, and its backups.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::run_to_end;

/// Most files of a chain of backups; then a full backup begins the next chain. The daemon's limit is
/// 32.
const BACKUPS_MAX: usize = 6;

/// The files, all in the directory of the disk.
#[derive(Debug)]
pub(super) struct Images {
    disk: PathBuf,
    /// Format of the disk without its overlays.
    is_qcow2: bool,
    overlays: Vec<PathBuf>,
    /// A full backup and those that are based on it.
    backups: Vec<PathBuf>,
    /// Files that had a name of their own so far.
    made: usize,
}

impl Images {
    /// A raw disk without overlays.
    pub(super) fn new(disk: &Path) -> Self {
        let (overlays, backups) = (Vec::new(), Vec::new());
        Self { disk: disk.to_owned(), is_qcow2: false, overlays, backups, made: 0 }
    }

    /// The options of the daemon that serve the disk.
    pub(super) fn options(&self) -> String {
        let file = format!("blk-file = '{}'\n", self.top().display());
        match (self.is_raw(), self.has_overlays()) {
            (true, _) => file,
            (false, false) => file + "format = 'qcow2'\n",
            (false, true) => file + "format = 'qcow2'\nallow-backing = 'same-dir'\n",
        }
    }

    /// The file in which the guest writes.
    pub(super) fn top(&self) -> &Path {
        self.overlays.last().unwrap_or(&self.disk)
    }

    /// True if the disk is a raw image without an overlay.
    pub(super) fn is_raw(&self) -> bool {
        !self.is_qcow2 && !self.has_overlays()
    }

    /// True if there is an overlay.
    pub(super) fn has_overlays(&self) -> bool {
        !self.overlays.is_empty()
    }

    /// A path that no file had.
    pub(super) fn new_path(&mut self, kind: &str) -> PathBuf {
        self.made += 1;
        self.disk.with_file_name(format!("{kind}-{}", self.made))
    }

    /// The disk has moved to another image: the present ones are of no use.
    pub(super) fn moved(&mut self, to: PathBuf, is_qcow2: bool) -> Result<()> {
        let disk = std::mem::replace(&mut self.disk, to);
        self.is_qcow2 = is_qcow2;
        std::mem::take(&mut self.overlays).iter().chain([&disk]).try_for_each(|old| remove(old))
    }

    /// A new overlay has become the top.
    pub(super) fn pushed(&mut self, overlay: PathBuf) {
        self.overlays.push(overlay);
    }

    /// The top was merged into the file below.
    pub(super) fn merged(&mut self) -> Result<()> {
        let merged = self.overlays.pop().context("the disk itself was merged")?;
        remove(&merged)
    }

    /// True if another backup may be based on those that exist.
    pub(super) fn may_continue(&self) -> bool {
        (1..BACKUPS_MAX).contains(&self.backups.len())
    }

    /// A full backup was made: those before it are of no use.
    pub(super) fn backed_up_fully(&mut self, copy: PathBuf) -> Result<()> {
        for old in std::mem::take(&mut self.backups) {
            remove(&old)?;
        }
        self.backups.push(copy);
        Ok(())
    }

    /// An incremental backup was made.
    pub(super) fn backed_up_more(&mut self, copy: PathBuf) {
        self.backups.push(copy);
    }

    /// Checks all qcow2 files, which no program serves. Returns a raw file with the disk's content.
    pub(super) fn check(&self) -> Result<PathBuf> {
        let disk = self.is_qcow2.then_some(&self.disk);
        for image in disk.into_iter().chain(&self.overlays).chain(&self.backups) {
            check_qcow2(image)?;
        }
        match self.is_raw() {
            true => Ok(self.disk.clone()),
            false => self.flatten(self.top()),
        }
    }

    /// Makes one raw file of an image, which may be served, and those below it.
    pub(super) fn flatten(&self, image: &Path) -> Result<PathBuf> {
        let raw = self.disk.with_file_name("flat.raw");
        let format = if image == self.disk && !self.is_qcow2 { "raw" } else { "qcow2" };
        let convert = ["qemu-img", "convert", "-U", "-f", format, "-O", "raw"];
        run_to_end(&[&convert[..], &[&text(image), &text(&raw)]].concat())?;
        Ok(raw)
    }
}

fn remove(file: &Path) -> Result<()> {
    fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))
}

/// Checks a qcow2 image: an error or a leak is an error.
fn check_qcow2(image: &Path) -> Result<()> {
    run_to_end(&["qemu-img", "check", "-q", "-U", "-f", "qcow2", &text(image)]).map(drop)
}

/// A path as an argument.
pub(super) fn text(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_follow_snapshots_and_commits() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disk");
        let mut images = Images::new(&disk);
        let raw = format!("blk-file = '{}'\n", disk.display());
        assert_eq!(images.options(), raw);
        let overlay = images.new_path("overlay");
        fs::write(&overlay, "").unwrap();
        images.pushed(overlay.clone());
        assert_eq!(images.top(), overlay);
        assert!(images.options().contains("format = 'qcow2'"), "{}", images.options());
        images.merged().unwrap();
        assert_eq!(images.options(), raw);
        assert!(!overlay.exists() && images.merged().is_err());
    }

    #[test]
    fn a_disk_moves_with_its_overlays_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disk");
        let mut images = Images::new(&disk);
        let overlay = images.new_path("overlay");
        images.pushed(overlay.clone());
        for file in [&disk, &overlay] {
            fs::write(file, "").unwrap();
        }
        let to = images.new_path("moved");
        fs::write(&to, "").unwrap();
        images.moved(to.clone(), true).unwrap();
        assert_eq!(images.options(), format!("blk-file = '{}'\nformat = 'qcow2'\n", to.display()));
        assert!(!disk.exists() && !overlay.exists() && !images.is_raw() && !images.has_overlays());
        let raw = images.new_path("moved");
        images.moved(raw.clone(), false).unwrap();
        assert_eq!((images.top(), images.is_raw()), (&*raw, true));
    }

    #[test]
    fn a_full_backup_ends_the_chain_before_it() {
        let directory = tempfile::tempdir().unwrap();
        let mut images = Images::new(&directory.path().join("disk"));
        assert!(!images.may_continue(), "there is nothing to continue");
        let make = |images: &mut Images| {
            let copy = images.new_path("backup");
            fs::write(&copy, "").unwrap();
            copy
        };
        let first = make(&mut images);
        images.backed_up_fully(first.clone()).unwrap();
        while images.may_continue() {
            let copy = make(&mut images);
            images.backed_up_more(copy);
        }
        assert_eq!(images.backups.len(), BACKUPS_MAX);
        let next = make(&mut images);
        images.backed_up_fully(next.clone()).unwrap();
        assert_eq!(images.backups, [next]);
        assert!(!first.exists() && images.may_continue());
    }
}
