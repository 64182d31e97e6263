// SPDX-License-Identifier: Apache-2.0
//! The bitmaps of a disk between two programs: in a file beside the image after a clean end, in a memory
//! file in an upgrade.
//!
//! | Step of a clean end | If it fails |
//! |---|---|
//! | 1. no request is in flight any more | the process ends after 900 ms without the file; steps 2 to 5 have 3 s more |
//! | 2. no backup or merge runs any more; a target that hangs is left alone after 1 s | no file |
//! | 3. all writes are durable: a loss of power cannot undo one that precedes the last backup | no file |
//! | 4. a qcow2 image loses its mark of use; the signs of the image are read ([`identity`]), and its clock passes them, under its lock | no file |
//! | 5. the file gets its name, durably | no file |
//!
//! | Step of a start | If it fails |
//! |---|---|
//! | 1. the image is locked; if it waits for its guest (`--incoming on`), the bitmaps are lost | the start fails, and the file stays |
//! | 2. the file is read, and its signs are compared with those of the image | the bitmaps are lost |
//! | 3. the file is removed, durably, before the guest can write | the bitmaps are lost |
//! | 4. the disk is served | as a clean end: the file is written again |
//!
//! So a program that ends without these steps leaves no file, and never notes that are too few.

mod format;
mod identity;
mod side_file;

pub(super) use side_file::{Consumed, LOST, keep, load, until_served};

use super::bitmaps::Bitmap;
use super::layers::Layers;
use crate::os::memory_file;
use backend::file::File as ImageFile;
use format::{BYTES_MAX, Notes};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The bitmaps of an earlier program.
#[derive(Default)]
pub(super) struct Earlier {
    pub(super) bitmaps: BTreeMap<String, Arc<Bitmap>>,
    /// The reason for which some are lost.
    pub(super) lost: Option<String>,
    /// The notes of the file, which the disk cannot go on with.
    pub(super) unused: Option<Notes>,
}

impl Earlier {
    fn lost(why: impl Into<String>) -> Self {
        Earlier { lost: Some(why.into()), ..Earlier::default() }
    }

    /// The notes for the image `top`.
    fn of(notes: Notes, top: &Arc<ImageFile>) -> Self {
        let bitmap =
            |(name, base, written)| (name, Arc::new(Bitmap::of_earlier(top, written, base)));
        let bitmaps = notes.bitmaps.into_iter().map(bitmap).collect();
        Earlier { bitmaps, lost: notes.lost, unused: None }
    }

    /// The bitmaps that an upgrade has passed.
    pub(super) fn of_upgrade(passed: &File, top: &Arc<ImageFile>) -> Self {
        match read(passed) {
            Ok(notes) => Earlier::of(notes, top),
            Err(why) => Earlier::lost(format!("the upgrade has lost them: {why}")),
        }
    }
}

/// The bitmaps that a later program can trust.
fn notes_of(layers: &Layers) -> Notes {
    let mut notes = Notes { lost: layers.lost().map(str::to_owned), ..Notes::default() };
    for (name, bitmap) in layers.bitmaps() {
        match bitmap.base_to_keep() {
            Ok(base) => notes.bitmaps.push((name, base, Arc::clone(bitmap.written()))),
            Err(why) => notes.lost = Some(why.to_owned()),
        }
    }
    notes
}

fn read(file: &File) -> Result<Notes, String> {
    let mut bytes = Vec::new();
    file.take(BYTES_MAX as u64).read_to_end(&mut bytes).map_err(|why| why.to_string())?;
    Notes::of_bytes(&bytes)
}

/// Checks that this program knows the bitmaps that an upgrade is about to pass.
///
/// # Errors
/// The cause.
pub(crate) fn check(passed: &Path) -> Result<(), String> {
    let file = File::open(passed).map_err(|why| why.to_string())?;
    read(&file).map(drop).map_err(|why| format!("the bitmaps cannot be read: {why}"))
}

/// The bitmaps of a disk for an upgrade.
pub struct Passing {
    layers: Arc<Layers>,
    file: Mutex<Option<File>>,
}

impl Passing {
    pub(super) fn of(layers: &Arc<Layers>) -> Self {
        Passing { layers: Arc::clone(layers), file: Mutex::default() }
    }

    /// A descriptor with the bitmaps of now, until the next call; `None`: there are none.
    ///
    /// # Errors
    /// The cause.
    pub(crate) fn descriptor(&self) -> Result<Option<RawFd>, String> {
        let notes = notes_of(&self.layers);
        if notes.bitmaps.is_empty() && notes.lost.is_none() {
            return Ok(None);
        }
        let file =
            memory_file("vhost-blk-bitmaps", &notes.to_bytes()?).map_err(|why| why.to_string())?;
        let descriptor = file.as_raw_fd();
        *self.file.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
        Ok(Some(descriptor))
    }
}
