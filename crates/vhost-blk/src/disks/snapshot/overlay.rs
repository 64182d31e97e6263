// SPDX-License-Identifier: Apache-2.0
//! The file of a new overlay.

use super::plan::Plan;
use crate::image::inherit;
use backend::create::{CreateError, create_with, remove_own};
use std::fs::{File, Metadata};
use std::path::PathBuf;

/// A new overlay; removed when it is dropped.
pub(super) struct Overlay {
    /// Its path, and the file.
    made: Option<(PathBuf, File)>,
}

impl Overlay {
    /// Makes the overlay, durably, with owner and mode of the image.
    ///
    /// # Errors
    /// Cause and remedy. No file remains.
    pub(super) fn create(plan: &Plan, image: &Metadata) -> Result<Overlay, String> {
        let new = plan.image()?;
        new.check()?;
        let fill = |file: &File| {
            inherit(image, file)?;
            new.write(file)
        };
        let made =
            create_with(plan.overlay(), new.size_bytes, fill).map_err(|error| match error {
                CreateError::Failed { .. } => {
                    format!("{error}; check the path and its permissions")
                }
                CreateError::NoSpace { path, .. } => {
                    format!(
                        "{}: no space is left; free some, or choose another directory",
                        path.display()
                    )
                }
                other => other.to_string(),
            })?;
        Ok(Overlay { made: Some((plan.overlay().to_owned(), made)) })
    }

    /// Leaves the file.
    pub(super) fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        if let Some((path, file)) = &self.made {
            remove_own(path, file);
        }
    }
}
