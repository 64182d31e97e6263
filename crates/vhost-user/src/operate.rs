// SPDX-License-Identifier: Apache-2.0
//! Commands to a running device: resize, pause and resume, which stop its queues, and limits.
//!
//! A paused device keeps its state for later front-ends, too. Messages change the set-up of its
//! queues as usual, and no queue starts before the resume ([`Session::start_once`]).

use crate::error::OperateError;
use crate::session::Session;
use data_plane::{KernelError, Limits};
use virtio_spec::blk::SECTOR_BYTES;

impl Session<'_> {
    /// Stops all queues; their requests in flight complete. Returns whether they ran before.
    pub(crate) fn pause(&mut self) -> bool {
        let ran = !std::mem::replace(&mut self.device.paused, true);
        let stopped = self.stop_running();
        if ran {
            tracing::info!(queues = stopped.len(), "paused: no request is taken until the resume");
        }
        ran
    }

    /// Starts the queues that are ready. Returns whether the device was paused.
    pub(crate) fn resume(&mut self) -> Result<bool, OperateError> {
        let was_paused = std::mem::replace(&mut self.device.paused, false);
        self.restart((0..self.queues.len()).collect())?;
        if was_paused {
            tracing::info!("resumed");
        }
        Ok(was_paused)
    }

    /// Enlarges the disk to `bytes` bytes, or adopts the present size of its storage. Returns the
    /// capacity in bytes.
    pub(crate) fn resize(&mut self, bytes: Option<u64>) -> Result<u64, OperateError> {
        self.device.disk.resize(bytes)?;
        let info = self.device.disk.info();
        let (before, after) = (self.capacity_sectors(), info.capacity_sectors);
        if before != after {
            let stopped = self.stop_running();
            let adopted = self.device.planes.adopt_capacity();
            if adopted.is_ok() {
                self.device.config.info = info;
                tracing::info!(before, after, "the disk has another capacity, in sectors");
            }
            self.restart(stopped)?;
            adopted.map_err(OperateError::Lane)?;
        }
        Ok(after * SECTOR_BYTES)
    }

    /// Replaces the limits of the disk. Returns whether they differ from the old ones.
    pub(crate) fn limit(&mut self, limits: Limits) -> Result<bool, KernelError> {
        if limits == self.device.limits {
            return Ok(false);
        }
        self.device.set_limits(limits)?;
        tracing::info!(iops = ?limits.iops, bytes = ?limits.bytes, burst = ?limits.burst, "limits");
        Ok(true)
    }

    /// Capacity that the device has for the guest.
    pub(crate) fn capacity_sectors(&self) -> u64 {
        self.device.config.info.capacity_sectors
    }

    /// Starts queues that ran before. If that fails, [`Session::lost`] ends the connection.
    pub(crate) fn restart(&mut self, queues: Vec<usize>) -> Result<(), OperateError> {
        queues.into_iter().try_for_each(|index| self.try_start(index)).map_err(|error| {
            self.lost = Some(error.to_string());
            OperateError::Lost(error)
        })
    }
}
