// SPDX-License-Identifier: Apache-2.0
//! The state of one connection, and the start and stop of its queues.

use crate::Device;
use crate::mem_table::MemTable;
use crate::queue_setup::QueueSlot;
use data_plane::{InflightRegion, QueueSpec, QueueStartError};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use virtio_blk::DiskView;
use virtio_spec::features::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES,
    bit,
};
use virtqueue::{DirtyLog, GuestMemory, Layout, QueueSetup};

/// One connection's state.
pub(crate) struct Session<'a> {
    pub(crate) device: &'a mut Device,
    pub(crate) features: u64,
    pub(crate) protocol_features: u64,
    pub(crate) queues: Vec<QueueSlot>,
    pub(crate) table: MemTable,
    memory: Arc<GuestMemory>,
    pub(crate) log: Option<Arc<DirtyLog>>,
    pub(crate) inflight: Option<Arc<InflightRegion>>,
    pub(crate) writeback: Arc<AtomicBool>,
    /// Why queues stand still that the guest believes to run: the connection is to end.
    pub(crate) lost: Option<String>,
    status: u8,
}

impl<'a> Session<'a> {
    pub(crate) fn new(device: &'a mut Device) -> Self {
        let queues = (0..device.options.num_queues).map(|_| QueueSlot::default()).collect();
        let writeback = Arc::clone(&device.writeback);
        Session {
            device,
            features: 0,
            protocol_features: 0,
            queues,
            table: MemTable::default(),
            memory: Arc::default(),
            log: None,
            inflight: None,
            writeback,
            lost: None,
            status: 0,
        }
    }

    /// The features offered: the device's, and vhost-user's own two.
    pub(crate) fn offered(&self) -> u64 {
        let own = bit(VHOST_F_LOG_ALL) | bit(VHOST_USER_F_PROTOCOL_FEATURES);
        self.device.config.features() | own
    }

    /// What is not offered, and served if it comes: packed rings that a daemon before this one
    /// offered to this guest, because it had no kernel data plane. The guest cannot give them up.
    pub(crate) fn served_all_the_same(&self) -> u64 {
        let Device { options, planes, .. } = &*self.device;
        u64::from(options.packed && planes.can_serve_packed()) << F_RING_PACKED
    }

    pub(crate) fn acked(&self, number: u32) -> bool {
        self.features & bit(number) != 0
    }

    pub(crate) fn layout(&self) -> Layout {
        if self.acked(F_RING_PACKED) { Layout::Packed } else { Layout::Split }
    }

    /// Starts queue `index` if its set-up is complete; otherwise nothing happens. Where the kernel
    /// does not take it, all queues go to the other plane if they may.
    pub(crate) fn try_start(&mut self, index: usize) -> io::Result<()> {
        match self.start_once(index) {
            Ok(()) => Ok(()),
            Err(QueueStartError::Kernel(why)) if self.device.planes.may_fall_back() => {
                self.fall_back(index, &why)
            }
            Err(error) => Err(refusal(format!("queue {index} cannot start: {error}"))),
        }
    }

    /// All that a data plane needs to start queue `index`; `None` while something is missing.
    pub(crate) fn spec(&self, index: usize) -> io::Result<Option<QueueSpec>> {
        let Some(addr) = self.queues[index].ready() else { return Ok(None) };
        let slot = &self.queues[index];
        let setup = QueueSetup {
            memory: Arc::clone(&self.memory),
            layout: self.layout(),
            size: slot.size,
            desc_addr: addr.desc,
            avail_addr: addr.avail,
            used_addr: addr.used,
            base: slot.base,
            indirect: self.acked(F_INDIRECT_DESC),
            event_idx: self.acked(F_EVENT_IDX),
            keep_descriptors: self.inflight.is_some(),
            log: self.log.clone().filter(|_| self.acked(VHOST_F_LOG_ALL)),
            used_log_addr: addr.used_log,
        };
        let duplicate = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        let info = &self.device.config.info;
        let serial = &self.device.options.serial;
        Ok(Some(QueueSpec {
            index: index as u16,
            setup,
            features: self.features,
            disk: DiskView::new(info, self.features, Arc::clone(&self.writeback), serial),
            kick: duplicate(slot.kick.as_ref().unwrap_or(&None))?,
            call: duplicate(&slot.call)?,
            err: duplicate(&slot.err)?,
            region: self.inflight.clone(),
        }))
    }

    /// Stops queue `index` and drains it; its base is where it would go on. Returns whether it
    /// was running.
    pub(crate) fn stop(&mut self, index: usize) -> bool {
        let Some(handle) = self.queues[index].running.take() else { return false };
        let stopped = self.device.planes.stop_queue(handle);
        let stats = stopped.stats;
        tracing::debug!(
            queue = index,
            base = stopped.base,
            chains = stats.chains,
            refused = stats.refused,
            kicks = stats.kicks,
            calls = stats.calls,
            "stopped"
        );
        self.queues[index].base = stopped.base;
        true
    }

    /// Stops the queues that run, makes a change they rely on, and starts them again.
    pub(crate) fn while_stopped(
        &mut self,
        change: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        let stopped = self.stop_running();
        change(self)?;
        stopped.into_iter().try_for_each(|index| self.try_start(index))
    }

    /// Replaces the memory table; refuses one whose regions overlap, and keeps the old one then.
    pub(crate) fn set_table(&mut self, table: MemTable) -> io::Result<()> {
        let memory = table.to_memory().map_err(refusal)?;
        self.while_stopped(|session| {
            session.device.planes.set_memory(Some(Arc::clone(&memory)));
            session.table = table;
            session.memory = memory;
            Ok(())
        })?;
        // Queues whose rings lie in memory that is only now known.
        (0..self.queues.len()).try_for_each(|index| self.try_start(index))
    }

    /// RESET_OWNER, which the specification says to ignore or to disable all rings at.
    pub(crate) fn disable_rings(&mut self) {
        for index in 0..self.queues.len() {
            self.stop(index);
            self.queues[index].enabled = false;
        }
    }

    /// RESET_DEVICE: the device is as new; the memory table stays. So does the cache mode: the
    /// front-end shows the mode of its own copy of the configuration space, so that write-through
    /// must not end here unasked.
    pub(crate) fn reset(&mut self) {
        // Without protocol features there is no SET_VRING_ENABLE.
        let negotiated = self.features != 0;
        let enabled = negotiated && !self.acked(VHOST_USER_F_PROTOCOL_FEATURES);
        for index in 0..self.queues.len() {
            self.stop(index);
            self.queues[index] = QueueSlot { enabled, ..QueueSlot::default() };
        }
        // It tells of rings that are no more; the front-end gives one again at the next start.
        self.inflight = None;
        self.status = 0;
    }

    /// The connection ended: stops everything and lets the guest's memory go.
    pub(crate) fn end(&mut self) {
        self.reset();
        self.memory = Arc::default();
        self.table = MemTable::default();
        self.device.planes.set_memory(None);
        self.device.planes.start_over();
    }

    pub(crate) fn status_negotiated(&self) -> bool {
        self.protocol_features & VhostUserProtocolFeatures::STATUS.bits() != 0
    }

    pub(crate) fn reply_ack_negotiated(&self) -> bool {
        self.protocol_features & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0
    }

    pub(crate) fn status(&self) -> u8 {
        self.status
    }

    /// Status 0 stops the rings, but does not forget them: QEMU 7.2 sends it whenever it stops a
    /// VM, *before* it asks for the rings' positions by GET_VRING_BASE. As after that message,
    /// they start again only with a new SET_VRING_KICK.
    pub(crate) fn set_status(&mut self, status: u8) {
        if status == 0 {
            for index in 0..self.queues.len() {
                self.stop(index);
                self.queues[index].kick = None;
            }
        }
        self.status = status;
    }
}

/// An error that the front-end caused.
pub(crate) fn refusal(cause: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, cause.to_string())
}
