// SPDX-License-Identifier: Apache-2.0
//! A daemon's records in memory of the VMM: requests in flight and written pages.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{FrontendReq, VhostUserInflight, VhostUserProtocolFeatures};

use super::{REPLY_LIMIT, Session};
use crate::device::Error;
use crate::kernel::KernelSession;
use crate::memory::{Area, GuestMemory};

/// One bit of the dirty log stands for a page of this size.
const LOG_PAGE_BYTES: u64 = 4096;

/// The region in which a daemon tracks its requests in flight.
pub struct InflightRegion {
    /// Size, offset and queues as the daemon answered.
    pub info: VhostUserInflight,
    memory: Arc<GuestMemory>,
}

impl InflightRegion {
    pub(crate) fn new(info: VhostUserInflight, memory: Arc<GuestMemory>) -> Self {
        Self { info, memory }
    }

    /// The bytes of the region.
    pub fn area(&self) -> Area {
        self.memory.area(self.info.mmap_offset, self.info.mmap_size as usize)
    }
}

/// The bitmap of pages that a daemon wrote, one bit for each 4 KiB.
pub struct DirtyLog {
    memory: Arc<GuestMemory>,
}

impl DirtyLog {
    fn area(&self) -> Area {
        let region = &self.memory.regions()[0];
        self.memory.area(0, region.size() as usize)
    }

    /// True if the page of this guest-physical address is marked.
    pub fn is_dirty(&self, gpa: u64) -> bool {
        let page = gpa / LOG_PAGE_BYTES;
        let byte = self.area().load_u8((page / 8) as usize, Ordering::Acquire);
        byte & (1 << (page % 8)) != 0
    }

    /// Guest-physical addresses of all marked pages.
    pub fn dirty_pages(&self) -> Vec<u64> {
        let pages = self.area().len() as u64 * 8;
        (0..pages).map(|page| page * LOG_PAGE_BYTES).filter(|&gpa| self.is_dirty(gpa)).collect()
    }

    /// The file of the log. This side must not look at the log any more after a truncation.
    pub fn file(&self) -> std::io::Result<std::fs::File> {
        Ok(self.memory.regions()[0].fd().try_clone_to_owned()?.into())
    }

    /// Clears all marks.
    pub fn clear(&self) {
        let area = self.area();
        (0..area.len()).for_each(|byte| area.store_u8(byte, 0, Ordering::Release));
    }
}

impl Session {
    /// True if a region can track requests in flight.
    pub fn can_track_inflight(&mut self) -> bool {
        let message = VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        self.kernel().is_some() || self.has_protocol(message)
    }

    /// Asks the daemon for a new in-flight region; for the kernel's device the front-end creates
    /// it.
    pub fn get_inflight(&mut self, queues: u16, queue_size: u16) -> Result<InflightRegion, Error> {
        if self.kernel().is_some() {
            return KernelSession::get_inflight(queues, queue_size);
        }
        let wanted = VhostUserInflight::new(0, 0, queues, queue_size);
        let (info, file) = self.frontend().get_inflight_fd(&wanted)?;
        let memory = GuestMemory::from_file(file, info.mmap_offset + info.mmap_size)?;
        Ok(InflightRegion { info, memory })
    }

    /// Gives the daemon an in-flight region, a new one or that of an earlier daemon.
    pub fn set_inflight(&mut self, region: &InflightRegion) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.set_inflight(region);
        }
        let fd = region.memory.regions()[0].fd().as_raw_fd();
        Ok(self.frontend().set_inflight_fd(&region.info, fd)?)
    }

    /// Gives the daemon a dirty log that covers `memory`. Logging starts when LOG_ALL is set and,
    /// for the used rings, with the log flag of [`Self::set_vring_addr`].
    pub fn set_log(&mut self, memory: &GuestMemory) -> Result<DirtyLog, Error> {
        let end = memory.regions().iter().map(|r| r.gpa() + r.size()).max().unwrap_or(0);
        let bytes = (end / LOG_PAGE_BYTES).div_ceil(8).max(1).next_multiple_of(LOG_PAGE_BYTES);
        let log = DirtyLog { memory: GuestMemory::new(&[(0, bytes)])? };
        if let Some(kernel) = self.kernel() {
            kernel.set_log(&log.area())?;
            return Ok(log);
        }
        let payload = [bytes, 0].map(u64::to_le_bytes).concat();
        let code = FrontendReq::SET_LOG_BASE.into();
        let region = &log.memory.regions()[0];
        // Section "Migration": the daemon always answers this message if it has a descriptor.
        self.raw().message(code, &payload, &[region.fd().as_fd()])?;
        let reply = self.raw().reply(REPLY_LIMIT)?;
        if reply.code != code {
            return Err(Error::Refused(FrontendReq::SET_LOG_BASE));
        }
        Ok(log)
    }
}
