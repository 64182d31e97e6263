// SPDX-License-Identifier: Apache-2.0
//! Moves the queues of a running device from one data plane to the other.

use crate::control::{ImageLockState, Notice, QueueStatus, Status};
use crate::error::{SwitchError, refusal};
use crate::session::Session;
use data_plane::{AtStop, KernelError, PlaneKind, QueueHandle, QueueStartError};
use std::io;
use std::sync::atomic::Ordering;
use virtio_spec::blk::SECTOR_BYTES;
use virtio_spec::features::F_RING_PACKED;

impl Session<'_> {
    /// Moves all running queues to `to` and returns their number. If this fails, restarts them on
    /// the old data plane; if that fails, too, [`Session::lost`] ends the connection.
    pub(crate) fn switch(&mut self, to: PlaneKind) -> Result<usize, SwitchError> {
        let from = self.device.planes.current();
        if from == to {
            self.device.planes.prefer_current();
            return Ok(0);
        }
        if to == PlaneKind::Kernel && self.acked(F_RING_PACKED) {
            return Err(SwitchError::Packed);
        }
        // Check it before any queue stops.
        self.device.planes.check(to)?;
        let (was, queues) =
            (self.device.planes.why().to_owned(), self.stop_running(AtStop::Resubmit));
        self.device.planes.select(to, "the control socket says so");
        match queues.iter().try_for_each(|&index| self.start_once(index)) {
            Ok(()) => {
                self.device.planes.prefer_current();
                tracing::info!(plane = %to, queues = queues.len(), "the data plane was switched");
                self.device.tell(Notice::Switched(to));
                Ok(queues.len())
            }
            Err(error) => {
                self.stop_running(AtStop::Resubmit);
                self.device.planes.select(from, &was);
                let back = self.start_each(queues, Self::start_once);
                tracing::warn!(plane = %to, %error, "the data plane was not switched");
                match back {
                    Ok(()) => Err(error.into()),
                    Err(worse) => {
                        let lost = format!("{error}; and the old data plane says: {worse}");
                        self.lost = Some(lost.clone());
                        Err(SwitchError::Lost(lost))
                    }
                }
            }
        }
    }

    /// Moves all queues to the io_uring data plane after the kernel refused queue `index`.
    pub(crate) fn fall_back(&mut self, index: usize, why: &KernelError) -> io::Result<()> {
        data_plane::log_once_per_second!(
            warn,
            queue = index,
            %why,
            "the kernel refused a queue: data plane: uring"
        );
        let mut queues = self.stop_running(AtStop::Resubmit);
        queues.push(index);
        let because = format!("the kernel refused queue {index}: {why}");
        self.device.planes.select(PlaneKind::Uring, &because);
        self.device.tell(Notice::Switched(PlaneKind::Uring));
        self.start_each(queues, Self::start_once).map_err(refusal)
    }

    /// Starts queue `index` on the current data plane if its set-up is complete and a queue
    /// [may start](Session::may_start).
    pub(crate) fn start_once(&mut self, index: usize) -> Result<(), QueueStartError> {
        if !self.may_start() {
            return Ok(());
        }
        let Some(setup) = self.setup(index)? else { return Ok(()) };
        let plane = self.device.planes.current();
        let (size, base) = (setup.ring.size, setup.ring.base);
        tracing::debug!(queue = index, size, base, layout = ?setup.ring.layout, %plane, "starts");
        let started = self.device.planes.start_queue(setup);
        if let Some(recovered) = started.recovered {
            self.device.earlier_stats[index] += recovered.stats;
            self.device.counted_kept[index] = recovered.kept;
            self.queues[index].base = recovered.base;
            self.queues[index].kept = recovered.left;
        }
        self.queues[index].running = Some(started.result?);
        self.device.counted_kept[index] = 0;
        self.queues[index].kept.clear();
        self.queues[index].fault_told = false;
        Ok(())
    }

    /// The answer to [`crate::Command::Status`].
    ///
    /// # Errors
    /// The kernel module's counters cannot be read.
    pub(crate) fn report(&self, connected: bool) -> io::Result<Status> {
        let device = &*self.device;
        let kernel = device.planes.device_counters()?;
        let queues = self.queues.iter().zip(&device.earlier_stats).map(|(slot, earlier)| {
            let plane = slot.running.as_ref().map(QueueHandle::plane);
            let running = slot.running.as_ref();
            let running = running.map(|queue| device.planes.queue_report(queue, &kernel));
            let mut total = *earlier;
            total += running.as_ref().map(|report| report.stats).unwrap_or_default();
            QueueStatus { plane, size: slot.size, running, total }
        });
        Ok(Status {
            disk: device.config.info.description.clone(),
            plane: device.planes.current(),
            why: device.planes.why().to_owned(),
            capacity_bytes: device.config.info.capacity_sectors * SECTOR_BYTES,
            connected,
            paused: device.paused,
            health: device.health.report(),
            limits: device.planes.limits(),
            limit_group: device.planes.limit_group().cloned(),
            image_lock: match &device.image_lock {
                None => ImageLockState::Off,
                Some(followed) if followed.lock.is_off() => ImageLockState::Off,
                Some(followed) if followed.held => ImageLockState::Held,
                Some(_) => ImageLockState::Released,
            },
            front_ends: device.front_ends,
            features: self.features,
            writeback: self.writeback.load(Ordering::Relaxed),
            cache_set: device.cache_set,
            errors: device.health.rules(),
            queues: queues.collect(),
            kernel_counters: kernel,
        })
    }
}
