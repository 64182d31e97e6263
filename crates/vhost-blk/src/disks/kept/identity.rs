// SPDX-License-Identifier: Apache-2.0
//! The signs by which a later program knows that no other one has written the files of an image.
//!
//! The lock of the image excludes other writers until the signs are taken, and only programs that
//! respect it. The kernel sets the time of change of an inode at each write, and no program can set it
//! back, as one can the time of modification (`cp --preserve`, `touch`). A file that was restored or
//! replaced has another inode. A block device has no such signs: its writers leave no trace.

use crate::disks::Image;
use backend::file::File as ImageFile;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

/// Maximum waits for the clock of the files to pass their times of change.
const WAITS_MAX: u32 = 50;
/// One of them: the clock has ticks of 10 ms at most.
const WAIT: Duration = Duration::from_millis(1);

/// The signs of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileIdentity {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileIdentity {
    /// `None`: a block device.
    fn of(meta: &Metadata) -> Option<FileIdentity> {
        let modified = (meta.mtime(), meta.mtime_nsec());
        let changed = (meta.ctime(), meta.ctime_nsec());
        let known = FileIdentity { inode: meta.ino(), bytes: meta.len(), modified, changed };
        meta.is_file().then_some(known)
    }
}

fn files(image: &Image) -> &[Arc<ImageFile>] {
    match &image.qcow2 {
        Some(qcow2) => qcow2.files(),
        None => std::slice::from_ref(&image.top),
    }
}

/// The present signs of all files of an image, the image itself first; `None`: one of them has none.
pub(super) fn now(image: &Image) -> io::Result<Option<Vec<FileIdentity>>> {
    let all = files(image).iter();
    all.map(|file| Ok(FileIdentity::of(&file.metadata()?))).collect()
}

/// The signs at the opening, before this program has changed any.
pub(super) fn found(image: &Image) -> Option<Vec<FileIdentity>> {
    files(image).iter().map(|file| FileIdentity::of(file.found())).collect()
}

/// Waits until a later write gives the files another time of change. `false`: their clock is another
/// one, as that of a file server may be.
pub(super) fn settle(files: &[FileIdentity]) -> bool {
    let is_past = || {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        files.iter().all(|file| file.changed < (now.tv_sec, now.tv_nsec))
    };
    for _ in 0..WAITS_MAX {
        if is_past() {
            return true;
        }
        sleep(WAIT);
    }
    false
}
