// SPDX-License-Identifier: Apache-2.0
//! Moving the queues of a running device from one data plane to the other.

use crate::control::{QueueStatus, Status};
use crate::session::{Session, refusal};
use data_plane::{KernelError, PlaneKind, QueueStartError, StartedQueue};
use std::io;
use std::sync::atomic::Ordering;
use virtio_spec::features::F_RING_PACKED;

impl Session<'_> {
    /// Moves all running queues to `to`; returns how many. When it fails, they run where they
    /// were; when they cannot, [`Session::lost`] ends the connection.
    pub(crate) fn switch(&mut self, to: PlaneKind) -> Result<usize, String> {
        let from = self.device.planes.current();
        if from == to {
            self.device.planes.prefer_current();
            return Ok(0);
        }
        if to == PlaneKind::Kernel && self.acked(F_RING_PACKED) {
            return Err("the guest uses packed virtqueues, and the kernel knows only split ones; \
                        set --packed off and restart the guest's device"
                .into());
        }
        // Tried before anything is stopped.
        self.device.planes.check(to).map_err(|why| why.to_string())?;
        let (was, queues) = (self.device.planes.why().to_owned(), self.stop_running());
        self.device.planes.move_to(to, "the control socket says so");
        match queues.iter().try_for_each(|&index| self.start_once(index)) {
            Ok(()) => {
                self.device.planes.prefer_current();
                tracing::info!(plane = %to, queues = queues.len(), "the data plane was switched");
                Ok(queues.len())
            }
            Err(error) => {
                self.stop_running();
                self.device.planes.move_to(from, &was);
                let back = queues.iter().try_for_each(|&index| self.start_once(index));
                tracing::warn!(plane = %to, %error, "the data plane was not switched");
                match back {
                    Ok(()) => Err(error.to_string()),
                    Err(worse) => {
                        let lost = format!("{error}; and the old data plane says: {worse}");
                        self.lost = Some(lost.clone());
                        Err(format!("{lost}; the VMM is disconnected, to start anew"))
                    }
                }
            }
        }
    }

    /// The kernel refused queue `index`: all queues go to the daemon's own plane.
    pub(crate) fn fall_back(&mut self, index: usize, why: &KernelError) -> io::Result<()> {
        tracing::warn!(queue = index, %why, "the kernel refused a queue: data plane: uring");
        let mut queues = self.stop_running();
        queues.push(index);
        let because = format!("the kernel refused queue {index}: {why}");
        self.device.planes.move_to(PlaneKind::Uring, &because);
        queues.iter().try_for_each(|&index| self.start_once(index)).map_err(refusal)
    }

    /// Starts queue `index`, if its set-up is complete, on the current plane and no other.
    pub(crate) fn start_once(&mut self, index: usize) -> Result<(), QueueStartError> {
        let Some(spec) = self.spec(index)? else { return Ok(()) };
        let plane = self.device.planes.current();
        let (size, base) = (spec.setup.size, spec.setup.base);
        tracing::debug!(queue = index, size, base, layout = ?spec.setup.layout, %plane, "starts");
        self.queues[index].running = Some(self.device.planes.start_queue(spec)?);
        Ok(())
    }

    /// Stops the queues that run; returns which.
    pub(crate) fn stop_running(&mut self) -> Vec<usize> {
        (0..self.queues.len()).filter(|&index| self.stop(index)).collect()
    }

    /// For [`crate::Command::Status`].
    pub(crate) fn report(&self, connected: bool) -> Status {
        let device = &*self.device;
        let kernel = device.planes.kernel_counters();
        let queues = self.queues.iter().map(|slot| QueueStatus {
            plane: slot.running.as_ref().map(StartedQueue::plane),
            size: slot.size,
            counts: slot
                .running
                .as_ref()
                .map(|queue| device.planes.queue_counts(queue, &kernel))
                .unwrap_or_default(),
        });
        Status {
            disk: device.config.info.description.clone(),
            plane: device.planes.current(),
            why: device.planes.why().to_owned(),
            connected,
            features: self.features,
            writeback: self.writeback.load(Ordering::Relaxed),
            queues: queues.collect(),
            kernel_counters: kernel,
        }
    }
}
