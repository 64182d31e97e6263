// SPDX-License-Identifier: Apache-2.0
//! The layers around the image of a running disk.
//!
//! | From the guest down | There |
//! |---|---|
//! | [`CopyFirst`] | during a backup |
//! | [`Braked`] | during a merge or a mirror |
//! | [`Track`] | during a merge or a mirror, and while the disk has bitmaps |
//! | the image, with the wrappers of `--wrap` | always |
//!
//! Only the thread of the disk changes the layers, while the disk is drained; so one change follows
//! another, and each builds all layers anew.

use super::bitmaps::Bitmap;
use super::exchange::Bitmaps;
use super::kept::Earlier;
use backend::Disk;
use backend::file::File as ImageFile;
use backend::wrap::{Brake, Braked, Clusters, CopyFirst, Growth, Track};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vhost_user::{Control, Replace, Replacement, Replacing};

/// The layers of a disk.
pub(crate) struct Layers {
    stack: Mutex<Stack>,
    /// The reason for which the bitmaps of an earlier program are lost.
    lost: Option<String>,
}

/// The layers at one moment.
#[derive(Clone)]
pub(crate) struct Stack {
    image: Arc<dyn Disk>,
    /// The file of the image; a disk in memory has none.
    top: Option<Arc<ImageFile>>,
    /// The clusters of a backup.
    pub(crate) copy: Option<Arc<Clusters>>,
    /// The copy that follows the changes.
    pub(crate) following: Option<Following>,
    /// By name.
    pub(crate) bitmaps: BTreeMap<String, Arc<Bitmap>>,
}

/// A copy that follows the changes of a disk.
#[derive(Clone)]
pub(crate) struct Following {
    /// The brake, with the notes of the changes.
    pub(crate) brake: Arc<Brake>,
    /// The reason for which the disk keeps its size.
    pub(crate) growth: Growth,
}

impl Stack {
    /// Capacity of the disk in bytes.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.image.info().capacity_sectors * 512
    }

    /// The file of the image; a disk in memory has none.
    pub(crate) fn top(&self) -> Option<&Arc<ImageFile>> {
        self.top.as_ref()
    }

    /// The clusters of a backup in progress.
    fn held(&self) -> Option<&Arc<Clusters>> {
        self.copy.as_ref().filter(|clusters| !clusters.has_ended())
    }

    /// Returns whether a backup is in progress.
    pub(crate) fn is_copied(&self) -> bool {
        self.held().is_some()
    }

    fn disk(&self) -> Arc<dyn Disk> {
        let (mut disk, following) = (Arc::clone(&self.image), self.following.as_ref());
        let of_bitmaps = self.bitmaps.values().map(|bitmap| bitmap.written());
        let noted: Vec<_> = of_bitmaps
            .chain(following.map(|following| following.brake.written()))
            .cloned()
            .collect();
        if !noted.is_empty() {
            let growth = following.map_or(Growth::Allowed, |following| following.growth);
            disk = Arc::new(Track::new(disk, noted, growth));
        }
        if let Some(Following { brake, .. }) = following {
            disk = Arc::new(Braked::new(disk, Arc::clone(brake)));
        }
        if let Some(clusters) = self.held() {
            disk = Arc::new(CopyFirst::new(disk, Arc::clone(clusters)));
        }
        disk
    }
}

impl Layers {
    /// The image, whose file is `top`, and the bitmaps of an earlier program.
    pub(super) fn new(
        image: Arc<dyn Disk>,
        top: Option<Arc<ImageFile>>,
        earlier: Earlier,
    ) -> Arc<Layers> {
        let Earlier { bitmaps, lost, .. } = earlier;
        let stack = Stack { image, top, copy: None, following: None, bitmaps };
        Arc::new(Layers { stack: Mutex::new(stack), lost })
    }

    /// The disk with its layers.
    pub(super) fn disk(&self) -> Arc<dyn Disk> {
        self.lock().disk()
    }

    /// The reason for which the bitmaps of an earlier program are lost.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// The bitmaps, by name.
    pub(crate) fn bitmaps(&self) -> BTreeMap<String, Arc<Bitmap>> {
        self.lock().bitmaps.clone()
    }

    /// Drains the disk and changes its layers. After an error they are as before.
    pub(crate) fn change(
        self: &Arc<Self>,
        control: &Control,
        change: impl FnOnce(&mut Stack) -> Result<(), String> + Send + 'static,
    ) -> Replacing {
        control.replace_storage(self.changed(change))
    }

    /// As [`Layers::change`], for the end of what such a change has begun: a disk that does not answer takes the
    /// order, too.
    pub(crate) fn end(
        self: &Arc<Self>,
        control: &Control,
        change: impl FnOnce(&mut Stack) -> Result<(), String> + Send + 'static,
    ) -> Replacing {
        control.end_with(self.changed(change))
    }

    fn changed(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Stack) -> Result<(), String> + Send + 'static,
    ) -> Replace {
        let layers = Arc::clone(self);
        Box::new(move |_| {
            let mut next = layers.lock().clone();
            change(&mut next)?;
            let disk = next.disk();
            let commit = Box::new(move || {
                layers.set(next);
                Ok(())
            });
            Ok(Replacement { commit, ..Replacement::around(disk) })
        })
    }

    /// [`ImageFile::check_writes`] of the image.
    pub(super) fn check_writes(&self) -> io::Result<()> {
        let top = self.lock().top.clone();
        top.map_or(Ok(()), |top| top.check_writes())
    }

    /// Puts the layers around another image, whose file is `top`. The following of a merge or a mirror ends
    /// with it. The disk is drained.
    pub(super) fn go_on_in(
        self: &Arc<Self>,
        image: Replacement,
        top: Option<Arc<ImageFile>>,
        then: Bitmaps,
    ) -> Replacement {
        let Replacement { disk, keeps_lock, lock, commit } = image;
        let layers = Arc::clone(self);
        let bitmaps = self.bitmaps();
        let next = Stack { image: disk, top, copy: None, following: None, bitmaps };
        let disk = next.disk();
        let commit = Box::new(move || {
            commit()?;
            if let Some(top) = &next.top {
                next.bitmaps.values().for_each(|bitmap| match then {
                    Bitmaps::GoOn => bitmap.go_on_in(top),
                    Bitmaps::End => bitmap.end(),
                });
            }
            layers.set(next);
            Ok(())
        });
        Replacement { disk, keeps_lock, lock, commit }
    }

    fn set(&self, next: Stack) {
        let old = std::mem::replace(&mut *self.lock(), next);
        drop(old); // without the lock
    }

    fn lock(&self) -> MutexGuard<'_, Stack> {
        self.stack.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
