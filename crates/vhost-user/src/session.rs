// SPDX-License-Identifier: Apache-2.0
//! The state of one connection, and the start and stop of its queues.

use crate::Device;
use crate::backend_channel::BackendChannel;
use crate::error::refusal;
use crate::mem_table::MemTable;
use crate::queue_setup::QueueSlot;
use crate::region_use::UsedRegion;
use data_plane::{AtStop, QueueSetup, QueueStartError, QueueStats};
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use virtio_blk::DiskView;
use virtio_spec::features::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES,
    bit,
};
use virtqueue::{DirtyLog, GuestMemory, Layout, RingSetup};

/// vhost-user's own features.
pub(crate) const OWN_FEATURES: u64 = 1 << VHOST_F_LOG_ALL | 1 << VHOST_USER_F_PROTOCOL_FEATURES;

/// One connection's state.
pub(crate) struct Session<'a> {
    pub(crate) device: &'a mut Device,
    /// The front-end has asked for the offered features.
    pub(crate) asked_features: bool,
    pub(crate) features: u64,
    pub(crate) protocol_features: u64,
    pub(crate) queues: Vec<QueueSlot>,
    pub(crate) table: MemTable,
    memory: Arc<GuestMemory>,
    pub(crate) log: Option<Arc<DirtyLog>>,
    pub(crate) inflight_region: Option<UsedRegion>,
    pub(crate) writeback: Arc<AtomicBool>,
    pub(crate) backend_channel: BackendChannel,
    /// The reason to end the connection: queues that run for the guest are stopped.
    pub(crate) lost: Option<String>,
    status: u8,
}

impl<'a> Session<'a> {
    pub(crate) fn new(device: &'a mut Device) -> Self {
        let queues = (0..device.options.num_queues).map(|_| QueueSlot::default()).collect();
        let writeback = Arc::clone(&device.writeback);
        Session {
            device,
            asked_features: false,
            features: 0,
            protocol_features: 0,
            queues,
            table: MemTable::default(),
            memory: Arc::default(),
            log: None,
            inflight_region: None,
            writeback,
            backend_channel: BackendChannel::default(),
            lost: None,
            status: 0,
        }
    }

    /// The features offered: the device's, and vhost-user's own two.
    pub(crate) fn offered(&self) -> u64 {
        self.device.config.features() | OWN_FEATURES
    }

    /// Features that are not offered but accepted: packed rings that a previous daemon without the
    /// kernel data plane offered to this guest, which cannot give them up.
    pub(crate) fn accepted_unoffered(&self) -> u64 {
        let Device { options, planes, .. } = &*self.device;
        u64::from(options.packed && planes.can_serve_packed()) << F_RING_PACKED
    }

    pub(crate) fn acked(&self, number: u32) -> bool {
        self.features & bit(number) != 0
    }

    pub(crate) fn layout(&self) -> Layout {
        if self.acked(F_RING_PACKED) { Layout::Packed } else { Layout::Split }
    }

    /// Starts queue `index` if its set-up is complete. Takes the lock of the image before. If the
    /// kernel refuses the queue, moves all queues to the other data plane if that is allowed.
    pub(crate) fn try_start(&mut self, index: usize) -> io::Result<()> {
        self.acquire_image_lock_for(index)?;
        match self.start_once(index) {
            Ok(()) => Ok(()),
            Err(QueueStartError::Kernel(why)) if self.device.planes.may_fall_back() => {
                self.fall_back(index, &why)
            }
            Err(error) => Err(cannot_start(index, &error)),
        }
    }

    /// The complete set-up of queue `index`; `None` if it is incomplete or the queue runs.
    pub(crate) fn setup(&self, index: usize) -> io::Result<Option<QueueSetup>> {
        let Some(addr) = self.queues[index].ready() else { return Ok(None) };
        let slot = &self.queues[index];
        let ring = RingSetup {
            memory: Arc::clone(&self.memory),
            layout: self.layout(),
            size: slot.size,
            desc_addr: addr.desc,
            avail_addr: addr.avail,
            used_addr: addr.used,
            base: slot.base,
            indirect: self.acked(F_INDIRECT_DESC),
            event_idx: self.acked(F_EVENT_IDX),
            keep_descriptors: self.inflight_region.is_some() || self.device.health.can_halt(),
            log: self.log.clone().filter(|_| self.acked(VHOST_F_LOG_ALL)),
            used_log_addr: addr.used_log,
        };
        let duplicate = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        let info = &self.device.config.info;
        let serial = &self.device.options.serial;
        Ok(Some(QueueSetup {
            index: index as u16,
            ring,
            features: self.features,
            disk: DiskView::new(info, self.features, Arc::clone(&self.writeback), serial),
            kick: duplicate(slot.kick.as_ref().unwrap_or(&None))?,
            call: duplicate(&slot.call)?,
            err: Some(self.device.faults.try_clone()?),
            region: self.inflight_region.as_ref().map(|used| Arc::clone(&used.region)),
            health: Arc::clone(&self.device.health),
            kept: slot.kept.clone(),
            counted: self.device.counted_kept[index],
        }))
    }

    /// [`Session::try_start`] for each of these queues. Without the lock of the image none can start: all
    /// together wait for it once.
    pub(crate) fn try_start_each(
        &mut self,
        queues: impl IntoIterator<Item = usize>,
    ) -> io::Result<()> {
        let queues: Vec<usize> = queues.into_iter().collect();
        for &index in &queues {
            self.acquire_image_lock_for(index)?;
        }
        self.start_each(queues, Self::try_start)
    }

    /// Takes the lock of the image, if queue `index` can start.
    fn acquire_image_lock_for(&mut self, index: usize) -> io::Result<()> {
        if self.may_start() && self.queues[index].ready().is_some() {
            self.acquire_image_lock().map_err(|error| cannot_start(index, &error))?;
        }
        Ok(())
    }

    /// Starts each of these queues, also behind one that cannot start: its requests must not wait for
    /// that one. Returns the first error; the log has all of them.
    pub(crate) fn start_each<E: Display>(
        &mut self,
        queues: impl IntoIterator<Item = usize>,
        start: impl Fn(&mut Self, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut all = Ok(());
        for queue in queues {
            if let Err(error) = start(self, queue) {
                data_plane::log_once_per_second!(error, queue, %error, "the queue does not start");
                all = all.and(Err(error));
            }
        }
        all
    }

    /// Stops and drains the running queues among `which`, and stores their bases. The requests that
    /// a halted disk keeps end as `at_stop` says, also those of a queue that could not start again.
    /// Returns the indices of the stopped queues.
    pub(crate) fn stop(
        &mut self,
        which: impl IntoIterator<Item = usize>,
        at_stop: AtStop,
    ) -> Vec<usize> {
        let (mut indices, mut handles) = (Vec::new(), Vec::new());
        for index in which {
            if let Some(handle) = self.queues[index].running.take() {
                indices.push(index);
                handles.push(handle);
            } else if at_stop.fails(false) && !self.queues[index].kept.is_empty() {
                self.end_kept(index, at_stop); // `kept` is empty if a region has them
            }
        }
        let all_stopped = self.device.planes.stop_queues(handles, at_stop);
        for (&queue, stopped) in indices.iter().zip(all_stopped) {
            let QueueStats { chains, refused, kicks, calls, .. } = stopped.stats;
            self.device.earlier_stats[queue] += stopped.stats;
            self.device.counted_kept[queue] = stopped.kept;
            let base = stopped.base;
            tracing::debug!(queue, base, chains, refused, kicks, calls, "stopped");
            self.queues[queue].base = base;
            // Without a region they are in `left`.
            let fails = at_stop.fails(stopped.left.is_empty());
            self.queues[queue].kept = stopped.left;
            if stopped.kept > 0 && fails {
                self.end_kept(queue, at_stop);
            }
        }
        indices
    }

    /// Ends the requests that a stopped queue keeps, if its plane could not.
    fn end_kept(&mut self, queue: usize, at_stop: AtStop) {
        let ended = match self.setup(queue) {
            Ok(Some(setup)) => self.device.planes.end_kept(setup, at_stop),
            Ok(None) => return,
            Err(error) => Err(error.into()),
        };
        match ended {
            Ok(state) => {
                self.device.earlier_stats[queue] += state.stats;
                self.device.counted_kept[queue] = state.kept;
                self.queues[queue].base = state.base;
                self.queues[queue].kept.clear();
            }
            Err(error) => {
                tracing::error!(queue, %error, "requests that failed get no answer");
            }
        }
    }

    /// [`Session::stop`] for all queues.
    pub(crate) fn stop_running(&mut self, at_stop: AtStop) -> Vec<usize> {
        self.stop(0..self.queues.len(), at_stop)
    }

    /// Stops the running queues, makes a change that affects them, and restarts them.
    pub(crate) fn while_stopped(
        &mut self,
        at_stop: AtStop,
        change: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        let stopped = self.stop_running(at_stop);
        change(self)?;
        self.try_start_each(stopped)
    }

    /// Replaces the memory table. Refuses overlapping regions and keeps the old table then.
    pub(crate) fn set_table(&mut self, table: MemTable) -> io::Result<()> {
        let memory = table.to_memory().map_err(refusal)?;
        self.stop_running(AtStop::Resubmit);
        self.device.planes.set_memory(Some(Arc::clone(&memory)));
        self.table = table;
        self.memory = memory;
        // Also queues whose rings are in the new memory only.
        self.try_start_each(0..self.queues.len())
    }

    /// RESET_OWNER: disables all rings, as the specification allows.
    pub(crate) fn disable_rings(&mut self) {
        self.stop_running(AtStop::Fail);
        self.queues.iter_mut().for_each(|queue| queue.enabled = false);
    }

    /// RESET_DEVICE: resets the device except the memory table and the cache mode. The front-end
    /// shows the mode of its own copy of the configuration space: a reset must not end
    /// write-through.
    pub(crate) fn reset(&mut self) {
        // Without protocol features there is no SET_VRING_ENABLE.
        let negotiated = self.features != 0;
        let enabled = negotiated && !self.acked(VHOST_USER_F_PROTOCOL_FEATURES);
        self.stop_running(AtStop::Fail);
        self.queues.fill_with(|| QueueSlot { enabled, ..QueueSlot::default() });
        // It records rings that no longer exist; the front-end sends a region at the next start.
        self.inflight_region = None;
        self.status = 0;
    }

    /// Handles the end of the connection: stops all queues and unmaps guest memory.
    pub(crate) fn end(&mut self) {
        self.stop_running(AtStop::LeaveInRegion);
        self.reset();
        self.memory = Arc::default();
        self.table = MemTable::default();
        self.backend_channel = BackendChannel::default();
        self.device.planes.set_memory(None);
        let before = self.device.planes.current();
        self.device.planes.select_preferred();
        self.device.tell_plane(before);
    }

    pub(crate) fn has_protocol(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol_features & feature.bits() != 0
    }

    pub(crate) fn status(&self) -> u8 {
        self.status
    }

    /// Sets the status without its effects.
    pub(crate) fn set_raw_status(&mut self, status: u8) {
        self.status = status;
    }

    /// SET_STATUS. Status 0 stops the rings and keeps their set-up: QEMU 7.2 sends it when it stops
    /// a VM, *before* it asks for the positions by GET_VRING_BASE. The rings restart only after a
    /// new SET_VRING_KICK, as after that message.
    pub(crate) fn set_status(&mut self, status: u8) {
        if status == 0 {
            self.stop_running(AtStop::Fail);
            self.queues.iter_mut().for_each(|queue| queue.kick = None);
        }
        self.status = status;
    }
}

fn cannot_start(index: usize, error: &dyn Display) -> io::Error {
    refusal(format!("queue {index} cannot start: {error}"))
}

/// Locks the session of a connection.
pub(crate) fn lock<'a, 'b>(session: &'a Mutex<Session<'b>>) -> MutexGuard<'a, Session<'b>> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}
