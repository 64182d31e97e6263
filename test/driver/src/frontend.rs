// SPDX-License-Identifier: Apache-2.0
//! The VMM's side: single vhost-user messages, in the order that the caller chooses.

mod tracking;

pub use tracking::{DirtyLog, InflightRegion};

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vhost::VhostBackend;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostUserMemoryRegionInfo, VringConfigData};
use virtio_spec::blk::Config;
use virtio_spec::features::{VHOST_USER_F_PROTOCOL_FEATURES, bit};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::IntoBytes;

use crate::device::Error;
use crate::kernel::KernelSession;
use crate::memory::{GuestMemory, Region};
use crate::queue::Queue;
use crate::raw::RawChannel;

/// Time that a daemon may take for an answer.
const REPLY_LIMIT: Duration = Duration::from_secs(60);
/// VHOST_VRING_F_LOG: writes to the used ring are logged.
const VRING_F_LOG: u32 = 1;
/// Configuration space up to and including the WRITE_ZEROES fields.
const CONFIG_BYTES_OLD: usize = 60;

/// A VMM's side of a device: a vhost-user connection, or the kernel's device without a daemon.
pub struct Session {
    link: Link,
    offered: u64,
    acked: u64,
    offered_protocol: u64,
    acked_protocol: u64,
}

/// The peer of the session.
enum Link {
    /// A daemon.
    Daemon(Box<Connection>),
    /// `/dev/vhost-blk`.
    Kernel(Box<KernelSession>),
}

struct Connection {
    frontend: Frontend,
    raw: RawChannel,
}

/// The set-up of a queue, as the device needs it.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Descriptors.
    pub size: u16,
    /// The position at which the device starts: a vring base.
    pub base: u32,
    /// Memory of the ring.
    pub memory: &'a GuestMemory,
    /// Guest-physical addresses of descriptors, driver area and device area.
    pub addresses: [u64; 3],
    /// Eventfd by which the driver kicks.
    pub kick: &'a EventFd,
    /// Eventfd by which the device calls.
    pub call: &'a EventFd,
    /// Eventfd by which the device reports a ring fault.
    pub err: Option<&'a EventFd>,
}

impl Session {
    /// Connects to a daemon's socket. Sends no message yet.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::from_stream(UnixStream::connect(path)?)
    }

    /// Takes a connected socket. Sends no message yet.
    pub fn from_stream(stream: UnixStream) -> Result<Self, Error> {
        let raw = RawChannel::from_stream(stream.try_clone()?);
        // This only bounds the front-end's own checks; `queue_num` asks the daemon.
        let frontend = Frontend::from_stream(stream, 256);
        Ok(Self::of(Link::Daemon(Box::new(Connection { frontend, raw }))))
    }

    /// Takes the kernel's device. Issues no ioctl yet.
    pub(crate) fn with_kernel(kernel: KernelSession) -> Self {
        Self::of(Link::Kernel(Box::new(kernel)))
    }

    fn of(link: Link) -> Self {
        Self { link, offered: 0, acked: 0, offered_protocol: 0, acked_protocol: 0 }
    }

    /// The `vhost` crate's front-end, for messages that have no method here. Panics without a
    /// daemon.
    pub fn frontend(&mut self) -> &mut Frontend {
        match &mut self.link {
            Link::Daemon(connection) => &mut connection.frontend,
            Link::Kernel(_) => panic!("this session speaks to the kernel, not to a daemon"),
        }
    }

    /// The same socket, for messages of any form. Panics without a daemon.
    pub fn raw(&self) -> &RawChannel {
        match &self.link {
            Link::Daemon(connection) => &connection.raw,
            Link::Kernel(_) => panic!("this session speaks to the kernel, not to a daemon"),
        }
    }

    /// The kernel's device, if there is no daemon.
    pub fn kernel(&mut self) -> Option<&mut KernelSession> {
        match &mut self.link {
            Link::Daemon(_) => None,
            Link::Kernel(kernel) => Some(kernel),
        }
    }

    /// Virtio features that the daemon offered.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Virtio features that were negotiated.
    pub fn features(&self) -> u64 {
        self.acked
    }

    /// Protocol features that the daemon offered.
    pub fn offered_protocol(&self) -> u64 {
        self.offered_protocol
    }

    /// Protocol features that were negotiated.
    pub fn protocol_features(&self) -> u64 {
        self.acked_protocol
    }

    /// True if a protocol feature was negotiated.
    pub fn has_protocol(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.acked_protocol & feature.bits() != 0
    }

    /// First part of negotiation: reads features and protocol features, sets those protocol
    /// features that are both wanted and offered, and sets the owner of the session.
    pub fn negotiate_protocol(&mut self, wanted: u64) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            self.offered = kernel.negotiate_protocol()?;
            return Ok(());
        }
        self.offered = self.frontend().get_features()?;
        if self.offered & bit(VHOST_USER_F_PROTOCOL_FEATURES) != 0 {
            self.offered_protocol = self.frontend().get_protocol_features()?.bits();
            self.acked_protocol = self.offered_protocol & wanted;
            let features = VhostUserProtocolFeatures::from_bits_truncate(self.acked_protocol);
            self.frontend().set_protocol_features(features)?;
        }
        if self.has_protocol(VhostUserProtocolFeatures::REPLY_ACK) {
            self.frontend().set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        Ok(self.frontend().set_owner()?)
    }

    /// Second part of negotiation: sets those features that are both wanted and offered.
    pub fn negotiate_features(&mut self, wanted: u64) -> Result<u64, Error> {
        let acked = self.offered & (wanted | bit(VHOST_USER_F_PROTOCOL_FEATURES));
        self.set_features(acked)?;
        Ok(acked)
    }

    /// Sets features unchanged, offered or not: a guest keeps those that another daemon offered.
    pub fn set_features(&mut self, features: u64) -> Result<(), Error> {
        match self.kernel() {
            Some(kernel) => kernel.set_features(features)?,
            None => self.frontend().set_features(features)?,
        }
        self.acked = features;
        Ok(())
    }

    /// Number of queues that the daemon supports: 1 if MQ was not negotiated.
    pub fn queue_num(&mut self) -> Result<u64, Error> {
        if let Some(kernel) = self.kernel() {
            return Ok(kernel.device().info()?.queues_max.into());
        }
        if !self.has_protocol(VhostUserProtocolFeatures::MQ) {
            return Ok(1);
        }
        Ok(self.frontend().get_queue_num()?)
    }

    /// Shares guest memory: one ADD_MEM_REG for each region with `slots`, else SET_MEM_TABLE.
    pub fn share_memory(&mut self, memory: &GuestMemory, slots: bool) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.share_memory(memory);
        }
        let regions: Vec<_> = memory.regions().iter().map(|r| region_info(r)).collect();
        if !slots {
            self.frontend().set_mem_table(&regions)?;
            return Ok(());
        }
        for region in &regions {
            self.frontend().add_mem_region(region)?;
        }
        Ok(())
    }

    /// Takes one region away from the daemon (REM_MEM_REG).
    pub fn unshare_region(&mut self, region: &Region) -> Result<(), Error> {
        Ok(self.frontend().remove_mem_region(&region_info(region))?)
    }

    /// Gives the kernel's device its backend, unless that is done; does nothing for a daemon, which
    /// brings its own.
    pub fn attach(&mut self) -> Result<(), Error> {
        self.kernel().map_or(Ok(()), KernelSession::attach)
    }

    /// Sends size, base, addresses and eventfds of a queue; the kick comes last and starts a
    /// daemon's queue.
    pub fn set_up_queue(&mut self, index: usize, queue: &Queue) -> Result<(), Error> {
        let place = Place {
            size: queue.size(),
            base: queue.base(),
            memory: queue.memory(),
            addresses: queue.addresses(),
            kick: queue.kick_fd(),
            call: queue.call_fd(),
            err: Some(queue.err_fd()),
        };
        self.set_up_place(index, &place)
    }

    /// As [`Self::set_up_queue`], for a queue that another thread holds.
    pub fn set_up_place(&mut self, index: usize, place: &Place<'_>) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.set_up_place(index, place);
        }
        self.frontend().set_vring_num(index, place.size)?;
        self.set_vring_base(index, place.base)?;
        self.set_ring_addresses(index, place.size, place.memory, place.addresses, None)?;
        if let Some(err) = place.err {
            self.frontend().set_vring_err(index, err)?;
        }
        self.frontend().set_vring_call(index, place.call)?;
        Ok(self.frontend().set_vring_kick(index, place.kick)?)
    }

    /// Sends the addresses of a queue's areas; with `log`, writes to the used ring are logged.
    pub fn set_vring_addr(&mut self, index: usize, queue: &Queue, log: bool) -> Result<(), Error> {
        let addresses = queue.addresses();
        let log = log.then_some(addresses[2]);
        self.set_ring_addresses(index, queue.size(), queue.memory(), addresses, log)
    }

    /// As [`Self::set_vring_addr`], for a queue that another thread holds.
    pub fn set_ring_addresses(
        &mut self,
        index: usize,
        size: u16,
        memory: &GuestMemory,
        [desc, driver, device]: [u64; 3],
        log: Option<u64>,
    ) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.set_ring_addresses(index, memory, [desc, driver, device], log);
        }
        let user = |gpa| memory.user_address(gpa);
        let addresses = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: if log.is_some() { VRING_F_LOG } else { 0 },
            desc_table_addr: user(desc),
            avail_ring_addr: user(driver),
            used_ring_addr: user(device),
            log_addr: log,
        };
        Ok(self.frontend().set_vring_addr(index, &addresses)?)
    }

    /// SET_VRING_BASE with all 32 bits (a packed ring needs both halves).
    pub fn set_vring_base(&mut self, index: usize, base: u32) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return Ok(kernel.device().set_vring_base(index as u32, base)?);
        }
        let payload = [index as u32, base].map(u32::to_le_bytes).concat();
        self.send(FrontendReq::SET_VRING_BASE, &payload)
    }

    /// Enables or disables a queue. Needs negotiated protocol features.
    pub fn enable(&mut self, index: usize, enable: bool) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return Ok(kernel.device().set_queue(index as u32, enable)?);
        }
        Ok(self.frontend().set_vring_enable(index, enable)?)
    }

    /// Stops a queue; returns its base.
    pub fn stop_queue(&mut self, index: usize) -> Result<u32, Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.stop_queue(index);
        }
        Ok(self.frontend().get_vring_base(index)?)
    }

    /// Tells the daemon that the driver polls, by a call message without descriptor (bit 8).
    pub fn remove_call(&mut self, index: usize) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.set_call(index, None);
        }
        self.send(FrontendReq::SET_VRING_CALL, &(index as u64 | 1 << 8).to_le_bytes())
    }

    /// Gives a running queue another call eventfd.
    pub fn replace_call(&mut self, index: usize, call: &EventFd) -> Result<(), Error> {
        match self.kernel() {
            Some(kernel) => kernel.set_call(index, Some(call)),
            None => Ok(self.frontend().set_vring_call(index, call)?),
        }
    }

    /// Gives a queue another err eventfd.
    pub fn replace_err(&mut self, index: usize, err: &EventFd) -> Result<(), Error> {
        match self.kernel() {
            Some(kernel) => Ok(kernel.device().set_err(index as u32, Some(err.as_raw_fd()))?),
            None => Ok(self.frontend().set_vring_err(index, err)?),
        }
    }

    fn send(&mut self, code: FrontendReq, payload: &[u8]) -> Result<(), Error> {
        if !self.has_protocol(VhostUserProtocolFeatures::REPLY_ACK) {
            return Ok(self.raw().message(code.into(), payload, &[])?);
        }
        let reply = self.raw().message_with_ack(code.into(), payload, &[], REPLY_LIMIT)?;
        match reply.value() {
            Some(0) => Ok(()),
            _ => Err(Error::Refused(code)),
        }
    }

    /// The configuration space; fields that the daemon does not know are zero.
    pub fn config(&mut self) -> Result<Config, Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.config();
        }
        let mut config = Config::default();
        let whole = config.as_mut_bytes();
        // Older daemons refuse to read beyond the fields they know, which end with WRITE_ZEROES.
        let bytes = match self.config_bytes(0, whole.len()) {
            Err(Error::Refused(_)) => self.config_bytes(0, CONFIG_BYTES_OLD)?,
            bytes => bytes?,
        };
        whole[..bytes.len()].copy_from_slice(&bytes);
        Ok(config)
    }

    /// Some bytes of the configuration space. Avoids the `vhost` crate, which waits forever if a
    /// daemon refuses by an answer without payload.
    pub fn config_bytes(&mut self, offset: u32, len: usize) -> Result<Vec<u8>, Error> {
        let head = [offset, len as u32, 0].map(u32::to_le_bytes).concat();
        let head_len = head.len();
        let code = FrontendReq::GET_CONFIG;
        self.raw().message(code.into(), &[head, vec![0; len]].concat(), &[])?;
        let reply = self.raw().reply(REPLY_LIMIT)?;
        if reply.code != u32::from(code) || reply.payload.len() != head_len + len {
            return Err(Error::Refused(code));
        }
        Ok(reply.payload[head_len..].to_vec())
    }

    /// Writes bytes of the configuration space, as a driver does.
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.set_config(offset, bytes);
        }
        Ok(self.frontend().set_config(offset, VhostUserConfigFlags::WRITABLE, bytes)?)
    }

    /// Resets the device (RESET_DEVICE; in the kernel RESET_OWNER and SET_OWNER).
    pub fn reset_device(&mut self) -> Result<(), Error> {
        if let Some(kernel) = self.kernel() {
            return kernel.reset();
        }
        Ok(self.frontend().reset_device()?)
    }
}

fn region_info(region: &Region) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: region.gpa(),
        memory_size: region.size(),
        userspace_addr: region.user_address(),
        mmap_offset: 0,
        mmap_handle: region.fd().as_raw_fd(),
    }
}
