// SPDX-License-Identifier: Apache-2.0
//! A disk whose content of one moment is copied while it is written: copy before write.
//!
//! The wrapper is put around a disk without I/O in flight; that is the moment. From then on each
//! write, discard and zeroing waits until the clusters that it touches are free ([`Clusters`]). Reads
//! do not wait. A cluster that lies behind the capacity of that moment is free.

mod clusters;

pub use clusters::{CLUSTER_BYTES, CLUSTER_BYTES_MAX, Clusters, TooLarge, Turn};

use super::wrapped_info;
use crate::{Disk, Engine, Info, Io, Lane, Remote, ResizeError, Slot, Step, Token};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

/// Holds I/Os that change data until a copier has read the old data.
pub struct CopyFirst {
    inner: Arc<dyn Disk>,
    clusters: Arc<Clusters>,
}

impl CopyFirst {
    /// A disk around `inner`, which has no I/O in flight. `clusters` are shared with the copier.
    pub fn new(inner: Arc<dyn Disk>, clusters: Arc<Clusters>) -> Self {
        CopyFirst { inner, clusters }
    }
}

impl Disk for CopyFirst {
    fn info(&self) -> Info {
        wrapped_info(&*self.inner, "backed up")
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(CopyFirstLane {
            inner: self.inner.open_lane()?,
            layer: self.inner.layers(),
            clusters: Arc::clone(&self.clusters),
            remote: None,
        }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }

    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        Err("only the uring data plane serves a disk during a backup; wait for the end of that \
             (a disk with --data-plane kernel needs auto for it)")
    }

    fn sync_failed(&self, errno: i32) {
        self.inner.sync_failed(errno);
    }
}

struct CopyFirstLane {
    inner: Box<dyn Lane>,
    layer: u8,
    clusters: Arc<Clusters>,
    remote: Option<Remote>,
}

impl CopyFirstLane {
    /// Makes `io` wait if it changes a held cluster. The event of this layer ends the wait.
    fn waits(&mut self, io: &Io, slot: Slot, engine: &mut dyn Engine) -> bool {
        if !io.writes() {
            return false;
        }
        let Some(held) = self.clusters.held(io.offset_bytes, io.len_bytes) else { return false };
        let remote = self.remote.get_or_insert_with(|| engine.remote()).clone();
        self.clusters.wait(held, remote, Token { slot, layer: self.layer })
    }
}

impl Lane for CopyFirstLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn moves_data_itself(&self) -> bool {
        self.inner.moves_data_itself()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        match self.waits(io, slot, engine) {
            true => Step::Pending,
            false => self.inner.start(io, slot, engine),
        }
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        if token.layer != self.layer {
            return self.inner.event(io, token, result, engine);
        }
        self.inner.start(io, token.slot, engine)
    }
}
