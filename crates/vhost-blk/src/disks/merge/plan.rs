// SPDX-License-Identifier: Apache-2.0
//! The checks of a merge before anything is changed. Errors are texts with cause and remedy.

use crate::disks::Disks;
use crate::disks::exchange::{Source, check_writes, path_of};
use crate::options::DiskArgs;
use crate::values::{AllowBacking, Format, LockMode};
use backend::Disk;
use backend::LockError;
use backend::file::{File as ImageFile, RaisedLock};
use qcow2::Qcow2Disk;
use qcow2::inspect;
use qcow2::merge::Merge;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NO_BACKING: &str = "its image has no backing file; there is nothing to commit";

/// A merge that can be begun.
pub(super) struct Plan {
    image: Arc<Qcow2Disk>,
    backing: Arc<ImageFile>,
    /// Path of the image before.
    overlay: PathBuf,
    /// Path of the backing file.
    path: PathBuf,
    is_qcow2: bool,
    args: DiskArgs,
    capacity_bytes: u64,
}

impl Plan {
    /// A plan for a disk that has had this capacity when its work began.
    pub(super) fn of(
        source: &Source,
        update_config: bool,
        capacity_bytes: u64,
    ) -> Result<Plan, String> {
        let image = source.image.qcow2.clone().ok_or(NO_BACKING)?;
        let backing = Arc::clone(image.backing().ok_or(NO_BACKING)?);
        source.check_config(update_config)?;
        check_writes(&source.image.top)?;
        if image.info().read_only {
            return Err("the disk is read-only; start it without --read-only".to_owned());
        }
        let overlay = source.path()?;
        let path = path_of(backing.path(), &backing)?;
        check_mark(&backing, &overlay)?;
        let (args, is_qcow2) = next(source, &overlay, &path)?;
        Ok(Plan { image, backing, overlay, path, is_qcow2, args, capacity_bytes })
    }

    /// The options of the disk in the backing file.
    pub(super) fn args(&self) -> &DiskArgs {
        &self.args
    }

    pub(super) fn backing(&self) -> &Arc<ImageFile> {
        &self.backing
    }

    /// Path of the backing file.
    pub(super) fn image(&self) -> &Path {
        &self.path
    }

    /// Paths of the backing file and of the image before.
    pub(super) fn paths(&self) -> (PathBuf, PathBuf) {
        (self.path.clone(), self.overlay.clone())
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Locks the backing file for writing, unless the disk locks nothing.
    pub(super) fn lock(
        &self,
        disks: &Disks,
        source: &Source,
    ) -> Result<Option<RaisedLock>, String> {
        if source.args.lock == LockMode::Off {
            return Ok(None);
        }
        self.backing.raise_lock().map(Some).map_err(|error| {
            let LockError::InUse { .. } = error else { return error.to_string() };
            let (why, remedy) = match disks.other_user_of(source, &self.backing) {
                Some(other) => other.told(),
                None => (
                    "another program, of this host or another one, has it".to_owned(),
                    "stop that program".to_owned(),
                ),
            };
            format!("the backing file {}: {why}; {remedy}", self.path.display())
        })
    }

    /// Opens the backing file for writing, and gives it the size of the disk.
    pub(super) fn open(&self, source: &Source) -> Result<Merge, String> {
        let allow_backing = source.args.allow_backing.into();
        let image = Arc::clone(&self.image);
        let mut merge = Merge::open(image, &self.path, self.is_qcow2, allow_backing)
            .map_err(|error| error.to_string())?;
        let failed = |error: std::io::Error| {
            format!(
                "the backing file cannot grow to the size of the disk: {error}; make room for it"
            )
        };
        let (wanted, present) = (self.capacity_bytes(), merge.target_bytes().map_err(failed)?);
        let block = u64::from(source.image.disk.info().logical_block_bytes);
        if present / block * block > wanted {
            return Err(format!(
                "its backing file has {present} bytes, and the disk only {wanted}; enlarge the disk \
                 (vhost-blk ctl resize)"
            ));
        }
        if present < wanted {
            merge.grow(wanted).map_err(failed)?;
        }
        Ok(merge)
    }
}

fn check_mark(backing: &ImageFile, overlay: &Path) -> Result<(), String> {
    match backing.overlay() {
        Ok(Some(other)) if other != overlay => Err(format!(
            "its backing file is the one of {}, too, by its mark; remove the mark if that image is \
             given up ({})",
            other.display(),
            backing.unmarking()
        )),
        _ => Ok(()),
    }
}

/// The options of the disk in its backing file, and whether that is qcow2.
fn next(source: &Source, overlay: &Path, path: &Path) -> Result<(DiskArgs, bool), String> {
    let text = |error: qcow2::Qcow2Error| error.to_string();
    let chain = inspect::inspect_as(overlay, Some(true)).map_err(text)?;
    let is_qcow2 = chain.files.get(1).ok_or(NO_BACKING)?.qcow2.is_some();
    let found = inspect::inspect_as(path, Some(is_qcow2)).map_err(text)?;
    let needs = found.serve.map_err(|why| format!("{}; {}", why.what, why.remedy))?;
    let args = DiskArgs {
        blk_file: Some(path.to_owned()),
        format: Some(if is_qcow2 { Format::Qcow2 } else { Format::Raw }),
        allow_backing: match needs.allow_backing {
            qcow2::AllowBacking::Off => AllowBacking::Off,
            qcow2::AllowBacking::SameDir => AllowBacking::SameDir,
            qcow2::AllowBacking::Any => AllowBacking::Any,
        },
        ..source.args.clone()
    };
    Ok((args, is_qcow2))
}
