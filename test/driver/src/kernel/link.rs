// SPDX-License-Identifier: Apache-2.0
//! A VMM without a daemon: ioctls in place of the messages of [`crate::Session`].

use std::fs::File;
use std::os::fd::AsRawFd;

use vhost::vhost_user::message::{FrontendReq, VhostUserInflight};
use virtio_spec::blk::{CONFIG_WRITEBACK_OFFSET, Config, SECTOR_BYTES};
use virtio_spec::features::{F_ACCESS_PLATFORM, bit};
use vmm_sys_util::eventfd::EventFd;

use super::abi::{self, BlkInflight, BlkInfo, BlkOptions, MemoryRegion, VringAddr};
use super::device::KernelDevice;
use crate::device::Error;
use crate::frontend::{InflightRegion, Place};
use crate::memory::{Area, GuestMemory};

/// Head and entry of the vhost-user protocol's "inflight split" structure.
const INFLIGHT_BYTES: u64 = 16;
/// Alignment of each queue's part in an in-flight region.
const INFLIGHT_ALIGN: u64 = 64;

/// The threads that serve the queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// The worker that comes with the device.
    #[default]
    Shared,
    /// This many more workers, with the queues spread over them in turn.
    Extra(u32),
}

/// A VMM's choices that no virtio feature expresses.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// The answer to GET_ID.
    pub serial: [u8; 20],
    /// Options of the disk.
    pub options: BlkOptions,
    /// Threads.
    pub workers: Workers,
    /// Busy-loop time of each queue in microseconds.
    pub busyloop_us: u32,
    /// Queues of the device; by default as many as it supports.
    pub num_queues: Option<u32>,
}

impl Default for KernelOptions {
    fn default() -> Self {
        Self {
            serial: *b"a serial number\0\0\0\0\0",
            options: BlkOptions::with_flags(0),
            workers: Workers::Shared,
            busyloop_us: 0,
            num_queues: None,
        }
    }
}

/// The kernel's device with its backend.
#[derive(Debug)]
pub struct KernelSession {
    device: KernelDevice,
    backend: Option<File>,
    options: KernelOptions,
    workers: Vec<u32>,
    features: u64,
    attached: bool,
}

impl KernelSession {
    pub(crate) fn new(device: KernelDevice, backend: File, options: KernelOptions) -> Self {
        let backend = Some(backend);
        Self { device, backend, options, workers: Vec::new(), features: 0, attached: false }
    }

    /// The device, for ioctls one by one.
    pub fn device(&self) -> &KernelDevice {
        &self.device
    }

    /// Closes the caller's own descriptor of the backend; the device keeps its own.
    pub fn close_backend(&mut self) {
        self.backend = None;
    }

    /// Attaches another backend; running queues continue on it.
    pub fn swap_backend(&mut self, backend: File) -> Result<(), Error> {
        self.device.set_backend(0, Some(backend.as_raw_fd()))?;
        self.backend = Some(backend);
        Ok(())
    }

    /// Sets the options of the disk from now on.
    pub fn set_options(&mut self, options: BlkOptions) -> Result<(), Error> {
        self.device.set_options(options)?;
        self.options.options = options;
        Ok(())
    }

    /// Ids of the workers that were created besides the device's own.
    pub fn workers(&self) -> &[u32] {
        &self.workers
    }

    pub(crate) fn negotiate_protocol(&mut self) -> Result<u64, Error> {
        if let Some(count) = self.options.num_queues {
            self.device.set_num_queues(count)?;
        }
        self.device.set_owner()?;
        Ok(self.device.features()?)
    }

    pub(crate) fn set_features(&mut self, features: u64) -> Result<(), Error> {
        self.device.set_features(features)?;
        self.features = features;
        Ok(())
    }

    fn has_iotlb(&self) -> bool {
        self.features & bit(F_ACCESS_PLATFORM) != 0
    }

    /// The vring address of a guest-physical address.
    fn ring_address(&self, memory: &GuestMemory, gpa: u64) -> u64 {
        if self.has_iotlb() { gpa } else { memory.user_address(gpa) }
    }

    pub(crate) fn share_memory(&mut self, memory: &GuestMemory) -> Result<(), Error> {
        Ok(self.device.set_mem_table(&regions_of(memory))?)
    }

    /// Sets serial, options, workers and backend, once.
    pub(crate) fn attach(&mut self) -> Result<(), Error> {
        if self.attached {
            return Ok(());
        }
        self.device.set_serial(self.options.serial)?;
        self.device.set_options(self.options.options)?;
        if let Workers::Extra(count) = self.options.workers {
            for _ in 0..count {
                self.workers.push(self.device.new_worker()?);
            }
        }
        let backend = self.backend.as_ref().map(|backend| backend.as_raw_fd());
        self.device.set_backend(0, backend)?;
        self.attached = true;
        Ok(())
    }

    pub(crate) fn set_up_place(&mut self, index: usize, place: &Place<'_>) -> Result<(), Error> {
        let number = index as u32;
        self.device.set_vring_num(number, place.size.into())?;
        self.device.set_vring_base(number, place.base)?;
        self.set_ring_addresses(index, place.memory, place.addresses, None)?;
        self.device.set_err(number, place.err.map(|err| err.as_raw_fd()))?;
        self.device.set_call(number, Some(place.call.as_raw_fd()))?;
        self.device.set_kick(number, Some(place.kick.as_raw_fd()))?;
        self.device.set_busyloop(number, self.options.busyloop_us)?;
        if !self.workers.is_empty() {
            let worker = self.workers[index % self.workers.len()];
            self.device.attach_worker(number, worker)?;
        }
        Ok(())
    }

    pub(crate) fn set_ring_addresses(
        &mut self,
        index: usize,
        memory: &GuestMemory,
        [desc, avail, used]: [u64; 3],
        log: Option<u64>,
    ) -> Result<(), Error> {
        let at = |gpa| self.ring_address(memory, gpa);
        Ok(self.device.set_vring_addr(VringAddr {
            index: index as u32,
            flags: log.is_some().into(),
            desc: at(desc),
            used: at(used),
            avail: at(avail),
            log: log.unwrap_or(0),
        })?)
    }

    pub(crate) fn stop_queue(&mut self, index: usize) -> Result<u32, Error> {
        self.device.set_queue(index as u32, false)?;
        Ok(self.device.vring_base(index as u32)?)
    }

    pub(crate) fn set_call(&mut self, index: usize, call: Option<&EventFd>) -> Result<(), Error> {
        Ok(self.device.set_call(index as u32, call.map(|call| call.as_raw_fd()))?)
    }

    /// The configuration space, as a VMM would build it.
    pub(crate) fn config(&mut self) -> Result<Config, Error> {
        let info = self.device.info()?;
        let write_back = info.flags & abi::INFO_WRITE_CACHE != 0
            && self.options.options.flags & abi::OPT_WRITE_THROUGH == 0;
        Ok(config_of(&info, write_back))
    }

    /// A write to the configuration space: only the cache mode is writable.
    pub(crate) fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let (at, [mode]) = (offset as usize, bytes) else {
            return Err(Error::Refused(FrontendReq::SET_CONFIG));
        };
        if at != CONFIG_WRITEBACK_OFFSET {
            return Err(Error::Refused(FrontendReq::SET_CONFIG));
        }
        let mut options = self.options.options;
        options.flags &= !abi::OPT_WRITE_THROUGH;
        options.flags |= if *mode == 0 { abi::OPT_WRITE_THROUGH } else { 0 };
        self.set_options(options)
    }

    pub(crate) fn get_inflight(queues: u16, queue_size: u16) -> Result<InflightRegion, Error> {
        let stride = inflight_stride(queue_size);
        let bytes = stride * u64::from(queues);
        let memory = GuestMemory::new(&[(0, bytes.next_multiple_of(4096))])?;
        Ok(InflightRegion::new(VhostUserInflight::new(bytes, 0, queues, queue_size), memory))
    }

    pub(crate) fn set_inflight(&mut self, region: &InflightRegion) -> Result<(), Error> {
        let stride = inflight_stride(region.info.queue_size);
        for index in 0..u32::from(region.info.num_queues) {
            self.device.set_inflight(BlkInflight {
                index,
                desc_num: region.info.queue_size.into(),
                user_addr: region.area().user_address() + u64::from(index) * stride,
            })?;
        }
        Ok(())
    }

    pub(crate) fn set_log(&mut self, log: &Area) -> Result<(), Error> {
        Ok(self.device.set_log_base(log.user_address())?)
    }

    /// Gives up ownership and takes it again; everything must be set up anew.
    pub(crate) fn reset(&mut self) -> Result<(), Error> {
        self.device.reset_owner()?;
        self.attached = false;
        self.workers.clear();
        self.device.set_owner()?;
        self.set_features(self.features)
    }
}

/// The memory table that describes all regions.
pub fn regions_of(memory: &GuestMemory) -> Vec<MemoryRegion> {
    let regions = memory.regions().iter();
    regions
        .map(|region| MemoryRegion {
            gpa: region.gpa(),
            size: region.size(),
            user: region.user_address(),
            flags_padding: 0,
        })
        .collect()
}

/// Bytes from one queue's part of an in-flight region to the next one.
fn inflight_stride(queue_size: u16) -> u64 {
    (INFLIGHT_BYTES * (1 + u64::from(queue_size))).next_multiple_of(INFLIGHT_ALIGN)
}

fn config_of(info: &BlkInfo, write_back: bool) -> Config {
    let ratio = (info.physical_block_bytes / info.logical_block_bytes.max(1)).max(1);
    Config {
        capacity: info.capacity_sectors,
        seg_max: info.seg_max,
        blk_size: info.logical_block_bytes,
        physical_block_exp: ratio.ilog2() as u8,
        min_io_size: (info.io_min_bytes / info.logical_block_bytes.max(1)) as u16,
        opt_io_size: info.io_opt_bytes / SECTOR_BYTES as u32,
        writeback: write_back.into(),
        num_queues: info.queues_max as u16,
        max_discard_sectors: info.max_discard_sectors,
        max_discard_seg: abi::BLK_RANGES_MAX,
        discard_sector_alignment: info.discard_align_sectors,
        max_write_zeroes_sectors: info.max_write_zeroes_sectors,
        max_write_zeroes_seg: abi::BLK_RANGES_MAX,
        write_zeroes_may_unmap: 1,
        max_secure_erase_sectors: info.max_secure_erase_sectors,
        max_secure_erase_seg: abi::BLK_RANGES_MAX,
        ..Config::default()
    }
}
