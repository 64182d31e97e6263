// SPDX-License-Identifier: Apache-2.0
//! Another storage for a disk whose queues are stopped.

use super::{PlaneChoice, PlaneSelector};
use crate::error::StartError;
use crate::lanes::Lanes;
use crate::plane::PlaneKind;
use backend::Disk;
use std::sync::Arc;

/// A storage that both data planes can use, beside the present one. Dropping it closes its lanes.
pub struct Prepared {
    disk: Arc<dyn Disk>,
    lanes: Lanes,
    /// The reason for which the kernel does not serve it.
    unsuited: Option<&'static str>,
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
        let unsuited = disk.kernel_file().err();
        if let Some(why) = unsuited
            && self.choice == PlaneChoice::Only(PlaneKind::Kernel)
        {
            return Err(ReplaceError::Kernel(why));
        }
        let lanes = self.uring.open_lanes(Arc::clone(&disk))?;
        Ok(Prepared { disk, lanes, unsuited })
    }

    /// Makes both planes use a storage in place of the present one. Queues of the kernel plane start on
    /// the io_uring plane if the kernel does not serve the storage, and return with one that it serves,
    /// unless the operator has selected a plane meanwhile, or the guest uses `packed` virtqueues. No
    /// queue may run.
    pub fn replace(&mut self, prepared: Prepared, packed: bool) {
        let Prepared { disk, lanes, unsuited } = prepared;
        if let Some(kernel) = &mut self.kernel {
            kernel.set_disk(disk);
        }
        self.uring.use_lanes(lanes);
        match unsuited {
            Some(why) => self.leave_kernel(why),
            None if !packed => self.return_to_kernel(),
            None => {}
        }
    }

    fn leave_kernel(&mut self, why: &str) {
        if self.left_kernel.is_none() {
            let mut selections = [&self.current, &self.preferred].into_iter();
            let of_kernel = selections.find(|selection| selection.plane == PlaneKind::Kernel);
            self.left_kernel = of_kernel.map(|selection| selection.reason.clone());
        }
        if self.left_kernel.is_some() {
            let reason = format!("{why}; the disk then returns to the kernel plane");
            self.select(PlaneKind::Uring, &reason);
            self.preferred.clone_from(&self.current);
        }
    }

    fn return_to_kernel(&mut self) {
        let Some(reason) = self.left_kernel.clone() else { return };
        match self.check(PlaneKind::Kernel) {
            Ok(()) => {
                self.select(PlaneKind::Kernel, &reason);
                self.prefer_current();
            }
            Err(why) => {
                tracing::warn!(%why, "the disk does not return to the kernel data plane");
                self.select(PlaneKind::Uring, &why.to_string());
                self.preferred.clone_from(&self.current);
            }
        }
    }
}
