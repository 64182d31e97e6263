// SPDX-License-Identifier: Apache-2.0
//! The file beside an image that has the bitmaps of its disk while no program serves it.

use super::format::{BYTES_MAX, Notes};
use super::{Earlier, identity, notes_of};
use crate::disks::Image;
use crate::disks::exchange::{path_of, settled, synced};
use crate::disks::layers::Layers;
use backend::create::sync_directory;
use backend::file::File as ImageFile;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The log line if there will be no file.
pub(in crate::disks) const LOST: &str = "the bitmaps for incremental backups are lost";
/// The end of the name, after that of the image.
const SUFFIX: &str = ".vhost-blk-bitmaps";

/// The bitmaps of a file that was removed, until the disk is served: a start that fails keeps them.
pub(in crate::disks) struct Consumed(Option<(Image, Arc<Layers>, Option<Notes>)>);

impl Consumed {
    /// The guest may write from now on.
    pub(in crate::disks) fn release(mut self) {
        self.0 = None;
    }
}

impl Drop for Consumed {
    fn drop(&mut self) {
        let Some((image, layers, unused)) = self.0.take() else { return };
        if let Err(why) = save(&image, unused.unwrap_or_else(|| notes_of(&layers))) {
            tracing::warn!(why, "{LOST}");
        }
    }
}

/// Keeps the bitmaps of a disk without requests in flight, whose image is still locked. The log has the
/// result.
pub(in crate::disks) fn keep(image: &Image, layers: &Layers) {
    match save(image, notes_of(layers)) {
        Ok(0) => {}
        Ok(bitmaps) => tracing::info!(bitmaps, "keeps the bitmaps of the disk for its next start"),
        Err(why) => tracing::warn!(why, "{LOST}"),
    }
}

/// The place of the file.
fn place(image: &ImageFile) -> Result<PathBuf, String> {
    let mut path = OsString::from(path_of(image.path(), image)?);
    path.push(SUFFIX);
    Ok(path.into())
}

/// Returns the number of bitmaps in the file.
///
/// # Errors
/// Cause and remedy.
fn save(image: &Image, mut notes: Notes) -> Result<usize, String> {
    const FULL: &str = "make a full backup after the next start";
    if notes.bitmaps.is_empty() {
        return Ok(0);
    }
    if image.disk.info().read_only {
        return Err(format!("a read-only disk keeps none; {FULL}"));
    }
    synced(&*image.disk)?;
    settled(image.qcow2.as_deref())?;
    if let Some(qcow2) = &image.qcow2 {
        // Its mark changes the signs of the file.
        qcow2.end_use();
    }
    let unknown = |why: io::Error| format!("{why}; check the storage of the image");
    let files = identity::now(image).map_err(unknown)?;
    notes.files = files.ok_or_else(|| {
        format!("a block device shows no trace of the writes of other programs; {FULL}")
    })?;
    if !identity::settle(&notes.files) {
        return Err(format!(
            "the clock of the image's file system is ahead of this host's; {FULL}"
        ));
    }
    let path = place(&image.top)?;
    let bytes = notes.to_bytes().map_err(|why| format!("{why}; {FULL}"))?;
    write(&path, &bytes).map_err(|why| {
        let path = path.display();
        format!("{path} cannot be written: {why}; let the daemon's user write to this directory")
    })?;
    Ok(notes.bitmaps.len())
}

/// Takes the bitmaps of an open image from its file. `obstacle`: the reason for which this program cannot go on with
/// them; an image that waits for its guest is not locked, for example.
pub(in crate::disks) fn load(image: &Image, obstacle: Option<&str>) -> Earlier {
    let Ok(path) = place(&image.top) else { return Earlier::default() };
    if image.disk.info().read_only {
        return Earlier::default();
    }
    remove_incomplete(&path);
    if fs::symlink_metadata(&path).is_err() {
        return Earlier::default();
    }
    let bytes = read(&path);
    // Nothing trusts it any more, whatever happens from now on.
    if let Err(why) = remove(&path) {
        return Earlier::lost(format!("{} cannot be removed: {why}", path.display()));
    }
    let unreadable = |why| format!("{} cannot be read: {why}", path.display());
    let notes = bytes.map_err(unreadable).and_then(|bytes| trusted(&bytes, image));
    match (notes, obstacle) {
        (notes, Some(why)) => Earlier { unused: notes.ok(), ..Earlier::lost(why) },
        (Ok(notes), None) => Earlier::of(notes, &image.top),
        (Err(why), None) => Earlier::lost(why),
    }
}

/// The bitmaps of a disk that is not served yet, in its layers or `unused`.
pub(in crate::disks) fn until_served(
    image: &Image,
    layers: &Arc<Layers>,
    unused: Option<Notes>,
) -> Consumed {
    Consumed(Some((image.clone(), Arc::clone(layers), unused)))
}

/// The notes of a file, if no other program has written the image since.
fn trusted(bytes: &[u8], image: &Image) -> Result<Notes, String> {
    let notes = Notes::of_bytes(bytes).map_err(|why| format!("in the file of bitmaps: {why}"))?;
    let capacity_bytes = image.disk.info().capacity_sectors * 512;
    if notes.bitmaps.iter().any(|(.., written)| written.capacity_bytes() > capacity_bytes) {
        return Err("in the file of bitmaps: it is of a larger disk".to_owned());
    }
    match identity::found(image) {
        Some(files) if files == notes.files => Ok(notes),
        _ => Err("the image was changed or replaced while no daemon served it".to_owned()),
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(BYTES_MAX as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Removes the file durably.
fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path).and_then(|()| sync_directory(path))
}

/// Name of the file until it is complete: always the same one, so that the next start finds the file.
fn incomplete(path: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".part");
    name
}

/// Removes the file that a program left that was killed while it wrote.
fn remove_incomplete(path: &Path) {
    let left = path.with_file_name(incomplete(path));
    if let Err(why) = fs::remove_file(&left)
        && why.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %left.display(), %why, "cannot remove an incomplete file of bitmaps");
    }
}

/// Writes the file durably; its name has the old content, or all of the new one.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let name = incomplete(path);
    let mut new = tempfile::Builder::new().prefix(&name).rand_bytes(0).tempfile_in(directory)?;
    new.write_all(bytes)?;
    new.as_file().sync_all()?;
    new.persist(path).map_err(|error| error.error)?;
    sync_directory(path)
}
