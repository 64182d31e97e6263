// SPDX-License-Identifier: Apache-2.0
//! The mark of a backing file, which goes with a merge. Only the thread of the backing file changes it.

use backend::file::File as ImageFile;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A backing file with its mark, if it has one.
#[derive(Clone)]
pub(super) struct Marked {
    pub(super) backing: Arc<ImageFile>,
    /// The overlay in the mark.
    overlay: Option<PathBuf>,
}

impl Marked {
    pub(super) fn of(backing: &Arc<ImageFile>) -> Marked {
        let overlay = backing.overlay().unwrap_or(None);
        Marked { backing: Arc::clone(backing), overlay }
    }

    /// Removes the mark.
    ///
    /// # Errors
    /// The cause; the file has its mark.
    pub(super) fn remove(self) -> Result<Unmarked, String> {
        let unmarked = Unmarked(Some(self));
        let Some(Marked { backing, overlay: Some(_) }) = &unmarked.0 else { return Ok(unmarked) };
        match backing.unmark() {
            Ok(()) => Ok(unmarked),
            Err(error) => Err(format!("the mark of the backing file cannot be removed: {error}")),
        }
    }
}

/// A backing file without its mark, which it gets back at the drop.
pub(super) struct Unmarked(Option<Marked>);

impl Unmarked {
    /// Leaves the file without a mark.
    pub(super) fn keep(mut self) {
        self.0 = None;
    }

    /// Gives the file its mark back.
    ///
    /// # Errors
    /// The error of the system call.
    pub(super) fn restore(mut self) -> io::Result<()> {
        self.again()
    }

    fn again(&mut self) -> io::Result<()> {
        match self.0.take() {
            Some(Marked { backing, overlay: Some(overlay) }) => backing.mark(&overlay),
            _ => Ok(()),
        }
    }
}

impl Drop for Unmarked {
    fn drop(&mut self) {
        let file = self.0.as_ref().map(|marked| marked.backing.path().to_owned());
        if let (Some(file), Err(why)) = (file, self.again()) {
            let file = file.display();
            tracing::warn!(%file, %why, "the file has lost its mark as a backing file: do not serve it, because an overlay depends on it");
        }
    }
}
