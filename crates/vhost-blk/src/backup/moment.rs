// SPDX-License-Identifier: Apache-2.0
//! The moment of a backup: the layer that holds writes back, and the bitmap of the backup.

use super::{Destination, clone};
use crate::disks::bitmaps::{BITMAPS_MAX, Base, Bitmap, no_bitmap};
use crate::disks::layers::{Layers, Stack};
use crate::disks::replacing::{DRAIN_MAX, Unfinished, wait};
use backend::wrap::Clusters;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, SystemTime};
use vhost_user::Control;

/// The part of a disk that a backup copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of it. Changes from the moment of the backup on are noted in this bitmap.
    Full(Option<String>),
    /// The parts that this bitmap has noted, which goes on with the moment of the backup.
    Changes(String),
}

impl Extent {
    fn bitmap(&self) -> Option<&String> {
        match self {
            Extent::Full(bitmap) => bitmap.as_ref(),
            Extent::Changes(bitmap) => Some(bitmap),
        }
    }
}

/// The backup before an incremental one: its backing file, or the content of its export.
pub(super) struct Before {
    bitmap: Arc<Bitmap>,
    pub(super) base: Base,
}

impl Before {
    /// Checks the bitmap of an incremental backup; a full one has none. Does not look at the backup before, whose
    /// storage may hang: [`Base::check`].
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn of(
        layers: &Layers,
        extent: &Extent,
        target: &Destination,
    ) -> Result<Option<Before>, String> {
        let Extent::Changes(name) = extent else { return Ok(None) };
        let bitmap = layers.bitmaps().remove(name).ok_or_else(|| no_bitmap(name, layers.lost()))?;
        let base = bitmap.sound_base()?;
        base.check_target(target)?;
        Ok(Some(Before { bitmap, base }))
    }
}

/// The bitmap of a backup in progress. Without [`Noting::complete`] it gets the notes back that it had.
pub(super) struct Noting {
    bitmap: Arc<Bitmap>,
    /// The backup before an incremental one.
    pub(super) before: Option<Base>,
}

impl Noting {
    /// The backup is complete.
    pub(super) fn complete(&self, base: Base) {
        self.bitmap.complete(base);
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        self.bitmap.give_back(); // nothing after a complete backup
    }
}

/// The begin of a copy, in time.
pub(super) struct Begun {
    /// The moment of the content.
    pub(super) at: SystemTime,
    /// The bitmap, if the backup has one.
    pub(super) noting: Option<Noting>,
    /// The clone has the content.
    pub(super) is_shared: bool,
}

/// Drains the disk for a moment, and clones it or holds the clusters that are to be copied from then on.
pub(super) fn begin(
    layers: &Arc<Layers>,
    control: &Control,
    (extent, before): (&Extent, Option<Before>),
    clone: Option<clone::Act>,
    clusters: &Arc<Clusters>,
    is_wanted: &mut dyn FnMut() -> bool,
) -> Result<Begun, Unfinished> {
    let (sender, begun) = channel();
    let (extent, of_order) = (extent.clone(), Arc::clone(clusters));
    let order = layers.change(control, move |stack| {
        let at = SystemTime::now();
        if stack.capacity_bytes() != of_order.capacity_bytes() {
            return Err("it was resized a moment ago; repeat the backup".into());
        }
        if let Some(before) = &before {
            check_same(stack, &extent, before)?;
            of_order.hold_only(before.bitmap.written());
        }
        let is_shared = clone.map_or(Ok(false), |clone| clone.make(&of_order))?;
        let before = before.map(|before| before.base);
        let noting = extent.bitmap().map(|name| note(stack, name, before)).transpose()?;
        stack.copy = Some(of_order).filter(|_| !is_shared);
        let _ = sender.send(Begun { at, noting, is_shared }); // it waits
        Ok(())
    });
    wait(&order, DRAIN_MAX, is_wanted)?;
    begun.recv().map_err(|_| Unfinished::Cancelled)
}

/// Checks that the bitmap is still the one that was found before.
fn check_same(stack: &Stack, extent: &Extent, before: &Before) -> Result<(), String> {
    let present = extent.bitmap().and_then(|name| stack.bitmaps.get(name));
    match present {
        Some(present) if Arc::ptr_eq(present, &before.bitmap) => {
            before.bitmap.sound_base().map(drop)
        }
        _ => Err("its bitmap was removed a moment ago; make a full backup with --bitmap".into()),
    }
}

/// Begins new notes of a bitmap.
fn note(stack: &mut Stack, name: &str, before: Option<Base>) -> Result<Noting, String> {
    let present = stack.bitmaps.get(name);
    if present.is_none() && stack.bitmaps.len() >= BITMAPS_MAX {
        return Err(format!(
            "it has {BITMAPS_MAX} bitmaps; remove one of them (vhost-blk ctl bitmaps --remove)"
        ));
    }
    let top = stack.top().ok_or("it has no image; serve a disk of kind file")?;
    let present = present.map(|bitmap| &**bitmap);
    let bitmap = Arc::new(Bitmap::begin(top, stack.capacity_bytes(), present));
    stack.bitmaps.insert(name.to_owned(), Arc::clone(&bitmap));
    Ok(Noting { bitmap, before })
}

/// Takes the layer off, which holds nothing any more, and a bitmap whose first backup has failed.
pub(super) fn end(layers: &Arc<Layers>, control: &Control) {
    let order = layers.end(control, |stack| {
        stack.copy = None;
        stack.bitmaps.retain(|_, bitmap| bitmap.has_base());
        Ok(())
    });
    if let Err(Unfinished::Failed(why)) = wait(&order, Duration::MAX, || true) {
        // It costs a look at a flag for each write.
        tracing::warn!(why, "the backup's layer stays, and does nothing");
    }
}
