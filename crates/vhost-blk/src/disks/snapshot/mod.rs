// SPDX-License-Identifier: Apache-2.0
//! Snapshots: the image of a running disk becomes the read-only backing file of a new qcow2 overlay,
//! in which the guest goes on.
//!
//! | Step | After a crash behind it |
//! |---|---|
//! | 1. the overlay is made, and the new configuration file beside the old one, both durably | the image is served as before; the overlay has no data and is of no use |
//! | 2. the queues are drained, the image is synced, the overlay is opened | the same |
//! | 3. the image gets its mark ([`backend::mark`]) | no program opens the image for writing; the overlay has no data of its own, and shows the content of the image |
//! | 4. the new configuration file takes the place of the old one | the next start serves the overlay |
//! | 5. the guest goes on in the overlay | the same |
//!
//! No step after the third writes to the image, and the overlay is written only after it.

mod overlay;
mod plan;

use super::Disks;
use super::config_file::NewConfig;
use super::exchange::{New, identity, options, replacement, settled, synced};
use super::layers::Layers;
use super::replacing::{DRAIN_MAX, wait};
use crate::disk::{self, From, LockWait};
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::Format;
use backend::Disk;
use backend::file::File as ImageFile;
use overlay::Overlay;
use plan::Plan;
use qcow2::Qcow2Disk;
use qcow2::inspect::{self, FileFacts};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use vhost_user::Replacement;

const WHAT: &str = "take a snapshot of";

/// The options of a snapshot.
#[derive(Debug)]
pub struct Wanted {
    /// Path of the new overlay.
    pub overlay: PathBuf,
    /// Rewrite the configuration file of the disk.
    pub update_config: bool,
    /// Do without the mark where the image cannot have one.
    pub no_mark: bool,
}

/// A snapshot that was taken.
#[derive(Debug)]
pub struct Taken {
    /// Path of the overlay.
    pub overlay: PathBuf,
    /// Options for the next start of the disk.
    pub options: String,
    /// The configuration file that names the overlay now.
    pub config: Option<PathBuf>,
    /// The image has a mark.
    pub is_marked: bool,
    /// Time in which the disk took no request.
    pub pause: Duration,
}

/// The space that a disk takes.
#[derive(Debug)]
pub struct Space {
    /// The files of the disk, the top first.
    pub files: Vec<FileFacts>,
    /// Bytes of discarded data whose places in qcow2 images were freed, also in those before a snapshot
    /// or a commit.
    pub unmapped_bytes: Option<u64>,
}

impl Disks {
    /// Takes a snapshot of a disk. Waits for its requests in flight as long as `go_on` says so, and
    /// at most 10 s.
    ///
    /// # Errors
    /// [`Failure`]; the disk is as before, and there is no overlay.
    pub fn snapshot(
        &self,
        name: &str,
        wanted: &Wanted,
        go_on: impl Fn() -> bool,
    ) -> Result<Taken, Failure> {
        let refused = |told: String| Failure::told(format!("{WHAT} {name}"), told);
        // The drained disk then has little to sync.
        self.sync_image(name, &format!("{WHAT} {name}"))?;
        // Neither a reload nor an upgrade comes in between, and no other snapshot.
        let _no_reload = self.no_reload();
        let source = self.source(name, WHAT)?;
        self.check_no_backup(name).and_then(|()| self.check_no_job(name)).map_err(refused)?;
        let plan = Plan::of(&source, wanted).map_err(refused)?;
        let overlay = Overlay::create(&plan, &source.image).map_err(refused)?;
        let args = plan.next(&source.args).map_err(refused)?;
        let config = self.config_of(&source, &args, wanted.update_config).map_err(refused)?;
        let path = config.as_ref().map(|config| config.path().to_owned());
        let change = Change {
            args: args.clone(),
            layers: Arc::clone(&source.layers),
            top: Arc::clone(&source.image.top),
            qcow2: source.image.qcow2.clone(),
            mark: plan.marks().then(|| plan.overlay().to_owned()),
            config,
        };
        let (sender, new) = channel();
        let order = source
            .control
            .replace_storage(Box::new(move |old: &Arc<dyn Disk>| change.prepare(old, sender)));
        let pause = match wait(&order, DRAIN_MAX, go_on) {
            Ok(pause) => pause,
            Err(unfinished) => {
                if !unfinished.is_over() {
                    overlay.keep();
                }
                return Err(refused(unfinished.to_string()));
            }
        };
        overlay.keep();
        let options = options(&args);
        if let Ok(new) = new.try_recv() {
            self.go_on_in(&source, args, new);
        }
        let overlay = plan.overlay().to_owned();
        Ok(Taken { overlay, options, config: path, is_marked: plan.marks(), pause })
    }

    /// The space that the files of a disk take. A disk without an image has none.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or its image cannot be read.
    pub fn space(&self, name: &str) -> Result<Space, Failure> {
        let Some(image) = self.lock().entry(name)?.image.clone() else {
            return Ok(Space { files: vec![], unmapped_bytes: None });
        };
        let has_some = image.qcow2.is_some() || image.unmapped_before > 0;
        let unmapped_bytes = has_some.then(|| image.unmapped_bytes());
        Ok(Space { files: self.chain(name)?, unmapped_bytes })
    }

    /// The files of a disk, the top first.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, it has no image, or the image cannot be read.
    pub fn chain(&self, name: &str) -> Result<Vec<FileFacts>, Failure> {
        let source = self.source(name, "show the files of")?;
        let is_qcow2 = source.args.format == Some(Format::Qcow2);
        let path = source.args.blk_file.as_deref().unwrap_or(Path::new(""));
        match inspect::inspect_as(path, Some(is_qcow2)) {
            Ok(found) => Ok(found.files),
            Err(why) => Err(Failure::told(format!("show the files of {name}"), why)),
        }
    }
}

/// The change of a disk that is drained.
struct Change {
    args: DiskArgs,
    layers: Arc<Layers>,
    /// The file that becomes the backing file.
    top: Arc<ImageFile>,
    /// Its disk, if it is qcow2.
    qcow2: Option<Arc<Qcow2Disk>>,
    /// The content of its mark.
    mark: Option<PathBuf>,
    config: Option<NewConfig>,
}

impl Change {
    /// Opens the overlay over the image, which has everything that the guest wrote.
    fn prepare(self, old: &Arc<dyn Disk>, new: Sender<New>) -> Result<Replacement, String> {
        synced(&**old)?;
        settled(self.qcow2.as_deref())?;
        let image = identity(&self.top)?;
        let opened = disk::open(&self.args, From::Overlay { image }, LockWait::No)
            .map_err(|failure| failure.to_string())?;
        let layers = Arc::clone(&self.layers);
        replacement(opened, &layers, &new, Box::new(move || self.commit()))
    }

    /// Marks the image, and replaces the configuration file.
    fn commit(self) -> Result<(), String> {
        let Change { top, mark, config, .. } = self;
        let is_marked = mark.is_some();
        if let Some(overlay) = mark
            && let Err(error) = top.mark(&overlay)
        {
            return Err(unmark(&top, format!("the image cannot be marked: {error}")));
        }
        match config.map(|config| config.replace(is_marked)) {
            Some(Err(told)) if is_marked => Err(unmark(&top, told)),
            Some(Err(told)) => Err(told),
            Some(Ok(())) | None => Ok(()),
        }
    }
}

/// Removes the mark of an image that stays in use. Returns the cause of this with the remedy.
fn unmark(top: &ImageFile, told: String) -> String {
    match top.overlay() {
        Ok(None) => format!("{told}; check its file system, or give --no-mark"),
        _ => match top.unmark() {
            Ok(()) => format!("{told}; check the file system and the permissions"),
            Err(error) => format!(
                "{told}, and the mark of the image stays: {error}; remove it with `setfattr -x \
                 user.vhost-blk.overlay {}` before the next start of the disk",
                top.path().display()
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::kept::Earlier;
    use backend::FileOptions;

    #[test]
    fn a_change_that_cannot_be_recorded_leaves_no_mark() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("a.img"), vec![0; 4096]).unwrap();
        let text = format!("blk-file = '{}'\nsocket-path = '/s'\n", path("a.img").display());
        std::fs::write(path("a.toml"), &text).unwrap();
        let args = crate::config::disk_of_file(&path("a.toml")).unwrap();
        let top = Arc::new(ImageFile::open(path("a.img"), FileOptions::default()).unwrap());
        let config = NewConfig::prepare(&path("a.toml"), &args, &args).unwrap();
        // A folder in place of the file cannot be replaced.
        std::fs::remove_file(path("a.toml")).unwrap();
        std::fs::create_dir(path("a.toml")).unwrap();
        let mark = Some(path("b.qcow2"));
        let layers = Layers::new(Arc::clone(&top) as Arc<dyn Disk>, None, Earlier::default());
        let change =
            Change { args, layers, top: Arc::clone(&top), qcow2: None, mark, config: Some(config) };
        let told = change.commit().unwrap_err();
        assert!(told.contains("a.toml cannot be replaced") && told.contains("; check"), "{told}");
        assert_eq!(top.overlay().unwrap(), None);
    }
}
