// SPDX-License-Identifier: Apache-2.0
//! Another storage for a disk whose queues are stopped.

use super::{PlaneChoice, PlaneSelector, Selection};
use crate::error::StartError;
use crate::lanes::Lanes;
use crate::plane::PlaneKind;
use backend::Disk;
use std::sync::Arc;

/// A storage that both data planes can use, beside the present one. Dropping it closes its lanes.
pub struct Prepared {
    disk: Arc<dyn Disk>,
    lanes: Lanes,
    /// The reason to leave the kernel data plane.
    leaves_kernel: Option<&'static str>,
}

/// Errors of [`PlaneSelector::prepare`]; each text names the cause and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    /// The io_uring threads cannot have the storage.
    #[error(transparent)]
    Start(#[from] StartError),
    /// `--data-plane kernel` and a storage that the kernel does not serve.
    #[error("the disk has --data-plane kernel, and {0}")]
    Kernel(&'static str),
}

impl PlaneSelector {
    /// Opens the lanes of `disk`, and checks the data plane that is selected for it.
    ///
    /// # Errors
    /// [`ReplaceError`]; nothing is changed.
    pub fn prepare(&self, disk: Arc<dyn Disk>) -> Result<Prepared, ReplaceError> {
        let is_selected = |plane: PlaneKind| {
            [&self.current, &self.preferred].iter().any(|selection| selection.plane == plane)
        };
        let leaves_kernel = match disk.kernel_file() {
            Err(why) if self.choice == PlaneChoice::Only(PlaneKind::Kernel) => {
                return Err(ReplaceError::Kernel(why));
            }
            Err(why) => Some(why).filter(|_| is_selected(PlaneKind::Kernel)),
            Ok(_) => None,
        };
        let lanes = self.uring.open_lanes(Arc::clone(&disk))?;
        Ok(Prepared { disk, lanes, leaves_kernel })
    }

    /// Makes both planes use a storage in place of the present one. Queues that were on the kernel
    /// plane start on the io_uring plane if the kernel does not serve the storage. No queue may run.
    pub fn replace(&mut self, prepared: Prepared) {
        let Prepared { disk, lanes, leaves_kernel } = prepared;
        if let Some(kernel) = &mut self.kernel {
            kernel.set_disk(disk);
        }
        self.uring.use_lanes(lanes);
        if let Some(why) = leaves_kernel {
            self.move_to(PlaneKind::Uring, why);
            self.preferred = Selection { plane: PlaneKind::Uring, reason: why.to_owned() };
        }
    }
}
