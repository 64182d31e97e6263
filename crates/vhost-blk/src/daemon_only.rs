// SPDX-License-Identifier: Apache-2.0
//! A disk that only the daemon's own threads may serve.

use backend::{Disk, Info, Lane, ResizeError};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The disk `inner`, which the kernel data plane does not get.
pub(crate) struct DaemonOnly {
    pub(crate) inner: Arc<dyn Disk>,
    /// The reason and the remedy.
    pub(crate) why: &'static str,
}

impl Disk for DaemonOnly {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        self.inner.open_lane()
    }

    fn layers(&self) -> u8 {
        self.inner.layers()
    }

    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        Err(self.why)
    }
}
