// SPDX-License-Identifier: Apache-2.0
//! The file of a new overlay.

use super::plan::Plan;
use crate::image::inherit;
use backend::create::{CreateError, create_with};
use std::fs::{self, File, Metadata};
use std::path::PathBuf;

/// A new overlay; removed when it is dropped.
pub(super) struct Overlay {
    path: PathBuf,
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
        create_with(plan.overlay(), new.size_bytes, fill).map_err(|error| match error {
            CreateError::Failed { .. } => format!("{error}; check the path and its permissions"),
            CreateError::NoSpace { path, .. } => {
                format!(
                    "{}: no space is left; free some, or choose another directory",
                    path.display()
                )
            }
            other => other.to_string(),
        })?;
        Ok(Overlay { path: plan.overlay().to_owned() })
    }

    /// Leaves the file.
    pub(super) fn keep(mut self) {
        self.path.clear();
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // The caller has another error to tell; the file is of no use and does no harm.
            let _ = fs::remove_file(&self.path);
        }
    }
}
