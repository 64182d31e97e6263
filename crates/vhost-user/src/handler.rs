// SPDX-License-Identifier: Apache-2.0
//! One function for each vhost-user message.

use crate::QUEUES_MAX;
use crate::descriptor::{check_eventfd, check_signalled};
use crate::error::refusal;
use crate::inflight_region;
use crate::mem_table::{MemTable, SLOTS_MAX};
use crate::queue_setup::{QueueSlot, VringAddr};
use crate::region_use::UsedRegion;
use crate::session::Session;
use data_plane::{AtStop, InflightRegion};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_spec::blk::{CONFIG_WRITEBACK_OFFSET, F_CONFIG_WCE};
use virtio_spec::features::{F_RING_PACKED, VHOST_USER_F_PROTOCOL_FEATURES, bit};
use virtio_spec::split::{QUEUE_SIZE_MAX, used_ring_bytes};
use virtqueue::DirtyLog;

pub(crate) fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::STATUS
}

fn refused<T>(cause: impl ToString) -> Result<T> {
    Err(Error::ReqHandlerError(refusal(cause)))
}

fn checked<T>(result: io::Result<T>) -> Result<T> {
    result.map_err(Error::ReqHandlerError)
}

fn not_offered<T>() -> Result<T> {
    Err(Error::InvalidOperation("not offered by this device"))
}

impl Session<'_> {
    fn index(&self, index: u32) -> Result<usize> {
        match usize::try_from(index) {
            Ok(at) if at < self.queues.len() => Ok(at),
            _ => refused(format!(
                "queue {index} of {}; give the VMM at most as many queues as --num-queues",
                self.queues.len()
            )),
        }
    }

    /// Changes the set-up of a queue. Stops a running queue before and restarts it afterwards.
    fn reconfigure(
        &mut self,
        index: usize,
        at_stop: AtStop,
        change: impl FnOnce(&mut QueueSlot),
    ) -> Result<()> {
        self.stop([index], at_stop);
        change(&mut self.queues[index]);
        checked(self.try_start(index))
    }
}

impl VhostUserBackendReqHandlerMut for Session<'_> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.disable_rings();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        self.asked_features = true;
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !(self.offered() | self.accepted_unoffered());
        if unknown != 0 {
            return refused(format!("features {unknown:#x} were not offered"));
        }
        let running = self.queues.iter().any(|queue| queue.running.is_some());
        if running && (features ^ self.features) & bit(F_RING_PACKED) != 0 {
            return refused("the ring layout cannot change while a queue runs");
        }
        if features != self.features {
            checked(self.while_stopped(AtStop::Resubmit, |session| {
                session.features = features;
                Ok(())
            }))?;
        }
        // Without protocol features there is no SET_VRING_ENABLE: rings start enabled.
        if features & bit(VHOST_USER_F_PROTOCOL_FEATURES) == 0 {
            self.queues.iter_mut().for_each(|queue| queue.enabled = true);
            checked(self.try_start_each(0..self.queues.len()))?;
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let table = checked(MemTable::set(regions, files))?;
        checked(self.set_table(table))?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let index = self.index(index)?;
        let limit = self.device.options.queue_size_max;
        match u16::try_from(num) {
            Ok(size) if size > 0 && size <= limit => {
                // kept requests fail: a ring of another size does not contain their chains
                self.reconfigure(index, AtStop::Fail, |queue| queue.size = size)
            }
            _ => refused(format!("a queue of {num} descriptors; at most --queue-size {limit}")),
        }
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let index = self.index(index)?;
        let logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        if logged && log.checked_add(used_ring_bytes(QUEUE_SIZE_MAX) as u64).is_none() {
            return refused(format!("a used ring that is logged at {log:#x} wraps"));
        }
        let addr =
            VringAddr { desc: descriptor, avail: available, used, used_log: logged.then_some(log) };
        if self.queues[index].addr == Some(addr) {
            return Ok(());
        }
        self.reconfigure(index, AtStop::Resubmit, |queue| queue.addr = Some(addr))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let index = self.index(index)?;
        self.reconfigure(index, AtStop::Fail, |queue| queue.base = base)
    }

    /// Stops the queue; it starts again only with a new SET_VRING_KICK. The last stop of a migration
    /// gives up the lock of the image.
    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let at = self.index(index)?;
        self.stop([at], AtStop::Fail);
        self.queues[at].kick = None;
        self.release_image_lock();
        Ok(VhostUserVringState::new(index, self.queues[at].base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        checked(fd.as_ref().map(check_eventfd).transpose())?;
        self.reconfigure(index, AtStop::Resubmit, |queue| queue.kick = Some(fd))
    }

    /// Does not stop a running queue, because QEMU sends this at every MSI-X mask. Restarts the
    /// queue only if the kernel refuses the new eventfd.
    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        checked(fd.as_ref().map(check_signalled).transpose())?;
        if let Some(queue) = &self.queues[index].running {
            let copy = checked(fd.as_ref().map(File::try_clone).transpose())?;
            if let Err(why) = self.device.planes.set_call(queue, copy) {
                data_plane::log_once_per_second!(
                    warn,
                    queue = index,
                    %why,
                    "the kernel refused a call eventfd: restarts"
                );
                return self.reconfigure(index, AtStop::Resubmit, |queue| queue.call = fd);
            }
        }
        self.queues[index].call = fd;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        checked(fd.as_ref().map(check_signalled).transpose())?;
        self.reconfigure(index, AtStop::Resubmit, |queue| queue.err = fd)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !protocol_features().bits();
        if unknown != 0 {
            return refused(format!("protocol features {unknown:#x} were not offered"));
        }
        self.protocol_features = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.queues.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let index = self.index(index)?;
        if self.queues[index].enabled == enable {
            return Ok(());
        }
        let at_stop = if enable { AtStop::Resubmit } else { AtStop::Fail };
        self.reconfigure(index, at_stop, |queue| queue.enabled = enable)
    }

    /// Fields beyond those of this device read as zero (virtio 1.3, section 2.5).
    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        self.backend_channel.set_known_sectors(self.capacity_sectors());
        let mut space = self.device.config.space(self.writeback.load(Ordering::Relaxed));
        let (start, end) = (offset as usize, offset as usize + size as usize);
        space.resize(space.len().max(end), 0);
        Ok(space[start..end].to_vec())
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], flags: VhostUserConfigFlags) -> Result<()> {
        let at = offset as usize;
        if flags.contains(VhostUserConfigFlags::LIVE_MIGRATION) {
            // The whole space of the migration source; only the cache mode is applied.
            if let Some(&mode) = CONFIG_WRITEBACK_OFFSET.checked_sub(at).and_then(|i| bytes.get(i))
            {
                checked(self.set_writeback(mode != 0))?;
            }
            return Ok(());
        }
        // A driver may write before DRIVER_OK, before the front-end has sent its features.
        let may_write = self.features == 0 || self.acked(F_CONFIG_WCE);
        match bytes {
            [mode] if at == CONFIG_WRITEBACK_OFFSET && may_write => {
                checked(self.set_writeback(*mode != 0))
            }
            _ => refused(format!(
                "a write of {} bytes at {offset} of the configuration space; only `writeback` can \
                 be written, where CONFIG_WCE was negotiated",
                bytes.len()
            )),
        }
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let limits = (self.queues.len(), self.device.options.queue_size_max);
        if usize::from(wanted.num_queues) > limits.0 || wanted.queue_size > limits.1 {
            return refused("an in-flight region for more or larger queues than this device has");
        }
        checked(inflight_region::make(wanted, self.layout(), limits.1))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = *inflight;
        // An earlier daemon may have had more queues than this device, but at most QUEUES_MAX. The number bounds the
        // mapping.
        if num_queues > QUEUES_MAX {
            return refused(format!("an in-flight region for more than {QUEUES_MAX} queues"));
        }
        let region =
            checked(InflightRegion::map(file, mmap_offset, mmap_size, num_queues, queue_size))?;
        let region = checked(UsedRegion::begin(region, self.inflight_region.as_ref()))?;
        // The old region records kept requests, and the new one does not.
        checked(self.while_stopped(AtStop::Fail, |session| {
            session.inflight_region = Some(region);
            Ok(())
        }))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(SLOTS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        if self.table.len() >= SLOTS_MAX {
            return refused(format!("more than {SLOTS_MAX} memory regions"));
        }
        let table = checked(self.table.with(region, file))?;
        checked(self.set_table(table))?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        match self.table.without(region) {
            Some(table) => checked(self.set_table(table)),
            None => refused("no such memory region"),
        }
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let log = DirtyLog::map(file, log.mmap_offset, log.mmap_size)
            .map_err(|e| Error::ReqHandlerError(refusal(e)))?;
        checked(self.while_stopped(AtStop::Resubmit, |session| {
            session.log = Some(Arc::new(log));
            Ok(())
        }))
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        not_offered()
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        not_offered()
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        not_offered()
    }

    fn check_device_state(&mut self) -> Result<()> {
        not_offered()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        not_offered()
    }
}
