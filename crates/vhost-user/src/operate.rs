// SPDX-License-Identifier: Apache-2.0
//! Commands to a running device: resize, pause and resume, which stop its queues, and limits.
//!
//! The operator pauses a device, and an error of the storage halts it ([`data_plane::Health`]). Both
//! states hold for later front-ends, too, and messages change the set-up of queues as usual:
//!
//! | Paused | Halted | Queues | Requests that failed | Leaves by |
//! |---|---|---|---|---|
//! | no | no | run | none | pause, error |
//! | yes | no | are stopped; none starts | none | resume |
//! | no | yes | run, and take no request | are kept in flight on their queues | pause, resume |
//! | yes | yes | as halted: a pause has nothing to stop | the same | resume |
//!
//! A resume ends both. It tries the kept requests again, and a new failure halts the device again. A
//! queue of a halted device that is stopped for a moment takes its kept requests along
//! ([`AtStop`]). If the queues run in the kernel, the io_uring plane tries the requests again,
//! and the resume waits for them; the queues then return to the kernel.

use crate::control::{ErrorChange, Notice};
use crate::error::OperateError;
use crate::session::Session;
use data_plane::{AtStop, LimitChange, PlaneKind};
use std::io;
use std::sync::atomic::Ordering;
use virtio_spec::blk::SECTOR_BYTES;

impl Session<'_> {
    /// Returns whether a queue may start: see the table above.
    pub(crate) fn may_start(&self) -> bool {
        !self.device.paused || self.device.health.is_halted()
    }

    /// Stops all queues; their requests in flight complete. Queues of a halted device start again,
    /// with the requests that it keeps. Returns whether the device was not paused before.
    pub(crate) fn pause(&mut self) -> Result<bool, OperateError> {
        let ran = !std::mem::replace(&mut self.device.paused, true);
        let stopped = self.stop_running(AtStop::Resubmit);
        if ran {
            tracing::info!(queues = stopped.len(), "paused: no request is taken until the resume");
            self.device.tell(Notice::Paused);
        }
        self.restart(stopped)?;
        Ok(ran)
    }

    /// Ends a pause and a halt, and starts the queues that are ready. Returns whether the device was
    /// paused or halted.
    pub(crate) fn resume(&mut self) -> Result<bool, OperateError> {
        if self.device.health.is_halted() && self.device.planes.current() == PlaneKind::Kernel {
            self.leave_kernel()?;
        }
        let was_paused = std::mem::replace(&mut self.device.paused, false);
        let was_halted = self.device.health.resume();
        if was_halted {
            self.device.planes.retry_kept();
        }
        self.restart((0..self.queues.len()).collect())?;
        if was_paused {
            tracing::info!("resumed");
            self.device.tell(Notice::Resumed);
        }
        Ok(was_paused || was_halted)
    }

    /// As [`Session::resume`], unless the device is paused or not halted.
    pub(crate) fn end_halt(&mut self) -> Result<bool, OperateError> {
        match self.device.health.is_halted() && !self.device.paused {
            true => self.resume(),
            false => Ok(false),
        }
    }

    /// Stops the queues of a halted disk in the kernel, so that their next start tries the kept
    /// requests again. They start again at once if the kernel would refuse them after that.
    fn leave_kernel(&mut self) -> Result<(), OperateError> {
        let stopped = self.stop_running(AtStop::Resubmit);
        // Otherwise they may leave it for good.
        if self.device.planes.may_fall_back() {
            return Ok(());
        }
        self.device.planes.check(PlaneKind::Kernel).or_else(|why| {
            self.restart(stopped)?;
            Err(OperateError::Kernel(why))
        })
    }

    /// Enlarges the disk to `bytes` bytes, or adopts the present size of its storage. Returns the
    /// capacity in bytes.
    pub(crate) fn resize(&mut self, bytes: Option<u64>) -> Result<u64, OperateError> {
        if bytes.is_some() && self.is_image_released() {
            return Err(OperateError::Released);
        }
        let before = self.capacity_sectors();
        let grows = bytes.is_some_and(|bytes| bytes > before * SECTOR_BYTES);
        let mut stopped = match grows && self.device.disk.info().grows_in_block {
            true => self.stop_running(AtStop::Resubmit),
            false => Vec::new(),
        };
        let resized = self.device.disk.resize(bytes).map_err(OperateError::from);
        let after = self.device.disk.info().capacity_sectors;
        let adopted = resized.and_then(|()| match before == after {
            true => Ok(()),
            false => {
                stopped.extend(self.stop_running(AtStop::Resubmit));
                self.adopt_capacity(after)
            }
        });
        self.restart(stopped)?;
        adopted.map(|()| after * SECTOR_BYTES)
    }

    /// Makes the stopped queues use the present size of the storage.
    fn adopt_capacity(&mut self, sectors: u64) -> Result<(), OperateError> {
        self.device.planes.adopt_capacity().map_err(OperateError::Lane)?;
        let before = std::mem::replace(&mut self.device.config.info.capacity_sectors, sectors);
        tracing::info!(before, after = sectors, "the disk has another capacity, in sectors");
        self.device.tell(Notice::Resized(sectors * SECTOR_BYTES));
        Ok(())
    }

    /// Changes the limits of the disk or of its group, or makes it share those of `group` and changes them. Returns
    /// whether something has changed.
    pub(crate) fn limit(
        &mut self,
        group: Option<&str>,
        change: LimitChange,
    ) -> Result<bool, OperateError> {
        let planes = &mut self.device.planes;
        let changed = match group {
            Some(group) if change.is_empty() && planes.limits_of_group(group).is_none() => {
                return Err(OperateError::NoLimits(group.to_owned()));
            }
            Some(group) => planes.join_limit_group(group, change)?,
            None => planes.change_limits(change)?,
        };
        if changed {
            self.device.limits_changed();
        }
        Ok(changed)
    }

    /// Sets the cache mode and tells the front-end. Returns whether it was another one.
    ///
    /// A guest that was started in write-through mode sends no FLUSH: write-back mode would lose its
    /// writes in a power cut.
    pub(crate) fn set_cache(&mut self, on: bool, connected: bool) -> Result<bool, OperateError> {
        if on == self.writeback.load(Ordering::Relaxed) {
            self.device.cache_set = Some(on);
            return Ok(false);
        }
        if on && connected {
            return Err(OperateError::NoFlush);
        }
        self.set_writeback(on).map_err(|error| {
            self.lost = Some(error.to_string());
            OperateError::Lost(error)
        })?;
        self.device.cache_set = Some(on);
        self.backend_channel.mark_changed();
        tracing::info!(writeback = on, "cache mode");
        Ok(true)
    }

    /// Sets the cache mode, by a command or a message.
    pub(crate) fn set_writeback(&mut self, on: bool) -> io::Result<()> {
        let was = self.writeback.swap(on, Ordering::Relaxed);
        if let Err(why) = self.device.planes.cache_mode_changed() {
            tracing::warn!(%why, "the kernel refused the cache mode: its queues restart");
            self.while_stopped(AtStop::Resubmit, |_| Ok(())).inspect_err(|_| {
                // The guest's mode is unknown now: write-through is safe for the next connection.
                self.writeback.store(on && was, Ordering::Relaxed);
            })?;
        }
        if on != was {
            self.device.tell(Notice::CacheSet(on));
        }
        Ok(())
    }

    /// Changes the treatment of storage that fails or hangs. The queues stop for it: their requests in flight complete,
    /// and a halted disk keeps those that have failed. Returns whether the rules differ from the old ones.
    pub(crate) fn set_errors(&mut self, change: ErrorChange) -> Result<bool, OperateError> {
        let old = self.device.health.rules();
        let new = change.of(old);
        if new == old {
            return Ok(false);
        }
        let stopped = self.stop_running(AtStop::Resubmit);
        let adopted = self.device.set_error_rules(new);
        self.restart(stopped)?;
        adopted?;
        let (reads, others) = (new.policies.reads, new.policies.others);
        tracing::info!(?others, ?reads, io_timeout = ?new.io_timeout, "treatment of errors");
        self.device.tell(Notice::ErrorsSet(new));
        Ok(true)
    }

    /// Capacity that the device has for the guest.
    pub(crate) fn capacity_sectors(&self) -> u64 {
        self.device.config.info.capacity_sectors
    }

    /// Starts queues that ran before. If one cannot start, [`Session::lost`] ends the connection.
    pub(crate) fn restart(&mut self, queues: Vec<usize>) -> Result<(), OperateError> {
        self.try_start_each(queues).map_err(|error| {
            self.lost = Some(error.to_string());
            OperateError::Lost(error)
        })
    }
}
