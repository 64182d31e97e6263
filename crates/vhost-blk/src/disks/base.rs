// SPDX-License-Identifier: Apache-2.0
//! The complete backup that the next one of a bitmap builds on.

use super::bitmaps::{FULL, real_path};
use crate::backup::Destination;
use crate::nbd::Address;
use qcow2::FILES_MAX;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A complete backup that the next one can build on. Displays as its path or address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Base {
    place: Place,
    /// The moment of its content.
    pub(super) at: SystemTime,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Place {
    /// An image, which becomes the backing file of the next one.
    Image {
        /// Its path without symbolic links.
        path: PathBuf,
        /// It is no raw image.
        is_qcow2: bool,
        /// The files of its chain, the full backup first.
        files: Vec<(PathBuf, FileState)>,
    },
    /// An export, in which the next one replaces the changed parts.
    Export(Address),
}

/// The state of a file, which each change of the file changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileState {
    bytes: u64,
    modified: (i64, i64),
}

impl FileState {
    fn of(meta: &fs::Metadata) -> FileState {
        FileState { bytes: meta.len(), modified: (meta.mtime(), meta.mtime_nsec()) }
    }
}

impl Base {
    /// The backup of the moment `at` in a complete file that is about to get the name `path`, over the
    /// chain of `before`.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn of(
        file: &fs::File,
        path: &Path,
        (at, is_qcow2): (SystemTime, bool),
        before: Option<&Base>,
    ) -> io::Result<Base> {
        let (path, state) = (real_path(path)?, FileState::of(&file.metadata()?));
        let mut files = match before {
            Some(Base { place: Place::Image { files, .. }, .. }) => files.clone(),
            _ => Vec::new(),
        };
        files.push((path.clone(), state));
        Ok(Base { place: Place::Image { path, is_qcow2, files }, at })
    }

    /// The backup of the moment `at` in an export.
    pub(crate) fn in_export(address: &Address, at: SystemTime) -> Base {
        Base { place: Place::Export(address.clone()), at }
    }

    /// The path of its image, and whether that is no raw one; `None`: it is in an export.
    pub(crate) fn image(&self) -> Option<(&Path, bool)> {
        match &self.place {
            Place::Image { path, is_qcow2, .. } => Some((path, *is_qcow2)),
            Place::Export(_) => None,
        }
    }

    /// Checks that the next backup can go to `target`: over an image, or into the same export, of which
    /// only the changed parts are written.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(crate) fn check_target(&self, target: &Destination) -> Result<(), String> {
        match (&self.place, target) {
            (Place::Image { .. }, Destination::File { .. }) => Ok(()),
            (Place::Export(before), Destination::Export(now)) if before == now => Ok(()),
            (Place::Image { .. }, Destination::Export(_)) => Err(format!(
                "its last backup is the image {self}, and an export needs all of the disk first; \
                 give --to FILE, or {FULL}"
            )),
            (Place::Export(_), _) => Err(format!(
                "its last backup is in {self}, and only the changes since then are copied; give \
                 --to {self}, or {FULL}"
            )),
        }
    }

    /// Checks that the files of the chain are as they were, and leave room for one more. An export
    /// does not tell that.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Place::Image { files, .. } = &self.place else { return Ok(()) };
        if files.len() >= FILES_MAX {
            return Err(format!("its chain has {FILES_MAX} files already; {FULL}"));
        }
        let remedy = format!("put it back as it was (cp --preserve=timestamps), or {FULL}");
        for (path, state) in files.iter().rev() {
            let shown = path.display();
            match fs::metadata(path) {
                Ok(meta) if FileState::of(&meta) == *state => {}
                Ok(_) => return Err(format!("the backup {shown} was changed; {remedy}")),
                Err(why) => {
                    return Err(format!("the backup {shown} cannot be found: {why}; {remedy}"));
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Image { path, .. } => path.display().fmt(f),
            Place::Export(address) => address.fmt(f),
        }
    }
}
