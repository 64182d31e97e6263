// SPDX-License-Identifier: Apache-2.0
//! The new mark of an image, which becomes the backing file of an overlay.
//!
//! The storage of the image may hang: the guest then goes on in the image, and the thread of the overlay removes the
//! mark as soon as the storage answers. A mark that a loss of power leaves behind in that time costs no data: no
//! program opens the image for writing until an operator removes the mark, and the overlay has no data.

use crate::disks::converge::{Acts, DRAINED_MAX, TargetUser, There};
use backend::file::File as ImageFile;
use std::path::PathBuf;
use std::sync::Arc;

/// The mark. Its drop removes it, in the thread of the overlay.
pub(super) struct NewMark(There<Marked>);

impl NewMark {
    /// Marks the image as the backing file of `overlay`.
    ///
    /// # Errors
    /// Cause and remedy. The image has no mark, unless the text says so.
    pub(super) fn set<C: TargetUser>(
        acts: &Acts<C>,
        top: &Arc<ImageFile>,
        overlay: PathBuf,
    ) -> Result<NewMark, String> {
        let top = Arc::clone(top);
        let marked = acts.on_old("the mark of the image", move || {
            let done = top.mark(&overlay);
            let marked = Marked(Some(top));
            match done {
                Ok(()) => Ok(marked),
                Err(error) => Err(marked.remove(format!("the image cannot be marked: {error}"))),
            }
        })?;
        Ok(NewMark(acts.there(marked)))
    }

    /// Leaves the image with its mark.
    pub(super) fn keep(self) {
        self.0.into_inner().into_iter().for_each(|mut marked| marked.0 = None);
    }

    /// Removes the mark. Returns the cause `told` of this with the remedy.
    pub(super) fn remove(self, told: String) -> String {
        let cause = told.clone();
        let removed = self.0.act(|marked| marked.remove(cause), DRAINED_MAX);
        removed.unwrap_or_else(|| {
            format!("{told}, and the storage of the image hangs; check it: its answer removes the mark of the image")
        })
    }
}

/// An image that may have the mark. The drop removes it.
struct Marked(Option<Arc<ImageFile>>);

impl Marked {
    /// As [`NewMark::remove`].
    fn remove(mut self, told: String) -> String {
        match self.0.take() {
            Some(top) => unmark(&top, told),
            None => told,
        }
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        let Some(top) = self.0.take() else { return };
        if !matches!(top.overlay(), Ok(None))
            && let Err(why) = top.unmark()
        {
            let (image, command) = (top.path().display(), top.unmarking());
            tracing::warn!(%image, %why, command, "the mark of the image stays: remove it by the command");
        }
    }
}

/// Removes the mark of an image that stays in use. Returns the cause `told` of this with the remedy.
fn unmark(top: &ImageFile, told: String) -> String {
    match top.overlay() {
        Ok(None) => format!("{told}; check its file system, or give --no-mark"),
        _ => match top.unmark() {
            Ok(()) => format!("{told}; check the file system and the permissions"),
            Err(error) => format!(
                "{told}, and the mark of the image stays: {error}; remove it with `{}` before the next \
                 start of the disk",
                top.unmarking()
            ),
        },
    }
}
