// SPDX-License-Identifier: Apache-2.0
//! A connected, negotiated and started device with synchronous helpers.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};
use virtio_spec::blk::{Config, F_MQ, RangeSegment, S_OK, SECTOR_BYTES};
use virtio_spec::features::{
    F_ACCESS_PLATFORM, F_EVENT_IDX, F_IN_ORDER, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1,
    VHOST_F_LOG_ALL, bit,
};

use crate::blk::{Layout, Request, RequestQueue};
use crate::frontend::{DirtyLog, InflightRegion, Session};
use crate::kernel::{KernelDevice, KernelOptions, KernelSession};
use crate::memory::GuestMemory;
use crate::queue::{Queue, RingError};

/// The reason why the driver cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The vhost-user exchange failed.
    #[error("vhost-user: {0}")]
    Protocol(#[from] vhost::Error),
    /// The ring is full or the device broke it.
    #[error("ring: {0}")]
    Ring(#[from] RingError),
    /// The daemon answered a message with a failure.
    #[error("the daemon refused {0:?}")]
    Refused(FrontendReq),
    /// The daemon lacks a feature that the options ask for.
    #[error("the daemon does not offer {0}")]
    NotOffered(&'static str),
    /// The options want more queues than the daemon has.
    #[error("the daemon has {has} queues, {wanted} are wanted")]
    TooFewQueues {
        /// Queues of the daemon.
        has: u64,
        /// Queues of the options.
        wanted: u16,
    },
    /// No room in the queue's scratch memory.
    #[error("no scratch memory for {0} bytes: collect requests, or raise scratch_bytes")]
    NoScratch(usize),
    /// The device returned a chain that was not added as a request.
    #[error("chain {0} was not added as a request")]
    NotARequest(u16),
    /// The device returned nothing in time.
    #[error("the device returned nothing for {0:?}")]
    Silent(Duration),
    /// A helper's request ended with another status than OK.
    #[error("the request ended with status {0:?}")]
    Status(Option<u8>),
}

/// The state to which `connect` brings the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueSetup {
    /// Set up and enabled.
    Started,
    /// Created, but no message is sent: tests send the messages themselves.
    Untouched,
}

/// The choices of the driver and the VMM.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queues to start.
    pub num_queues: u16,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// Packed rings; an error if the daemon does not offer them.
    pub packed: bool,
    /// Negotiate EVENT_IDX if offered.
    pub event_idx: bool,
    /// Negotiate INDIRECT_DESC if offered.
    pub indirect: bool,
    /// Mask of all other virtio features that may be negotiated.
    pub features: u64,
    /// Mask of protocol features that may be negotiated.
    pub protocol_features: u64,
    /// Use ADD_MEM_REG instead of SET_MEM_TABLE if the daemon supports it.
    pub mem_slots: bool,
    /// Use an in-flight region if the daemon offers it.
    pub inflight: bool,
    /// Queue size to request for the in-flight region; 0: `queue_size`.
    pub inflight_queue_size: u16,
    /// (guest-physical address, size) of each region; none: one region, large enough.
    pub regions: Vec<(u64, u64)>,
    /// Guest memory of huge pages.
    pub huge_pages: bool,
    /// Request memory of each queue.
    pub scratch_bytes: usize,
    /// Bound of every wait for the device.
    pub limit: Duration,
    /// The state to which the queues are brought.
    pub setup: QueueSetup,
}

impl Default for Options {
    fn default() -> Self {
        use VhostUserProtocolFeatures as P;
        let protocol = P::MQ
            | P::CONFIG
            | P::REPLY_ACK
            | P::CONFIGURE_MEM_SLOTS
            | P::RESET_DEVICE
            | P::INFLIGHT_SHMFD
            | P::LOG_SHMFD;
        let not_ours = bit(F_ACCESS_PLATFORM) | bit(F_IN_ORDER) | bit(VHOST_F_LOG_ALL);
        Self {
            num_queues: 1,
            queue_size: 128,
            packed: false,
            event_idx: true,
            indirect: true,
            features: !not_ours,
            protocol_features: protocol.bits(),
            mem_slots: false,
            inflight: false,
            inflight_queue_size: 0,
            regions: Vec::new(),
            huge_pages: false,
            scratch_bytes: 8 << 20,
            limit: Duration::from_secs(60),
            setup: QueueSetup::Started,
        }
    }
}

impl Options {
    fn wanted_features(&self) -> u64 {
        let mut wanted = self.features | bit(F_VERSION_1);
        let choices = [
            (F_RING_PACKED, self.packed),
            (F_EVENT_IDX, self.event_idx),
            (F_INDIRECT_DESC, self.indirect),
        ];
        for (feature, choice) in choices {
            wanted = if choice { wanted | bit(feature) } else { wanted & !bit(feature) };
        }
        if self.num_queues == 1 { wanted & !bit(F_MQ) } else { wanted }
    }

    fn memory_layout(&self) -> Vec<(u64, u64)> {
        if !self.regions.is_empty() {
            return self.regions.clone();
        }
        // Rings, and indirect tables of up to 128 descriptors for every head.
        let ring_bytes = usize::from(self.queue_size) * (64 + 128 * 16) + (64 << 10);
        let bytes = usize::from(self.num_queues) * (ring_bytes + self.scratch_bytes + 4096);
        vec![(0, bytes.next_multiple_of(2 << 20) as u64)]
    }
}

/// A virtio-blk device behind a vhost-user socket.
pub struct Device {
    session: Session,
    memory: Arc<GuestMemory>,
    queues: Vec<RequestQueue>,
    inflight: Option<InflightRegion>,
    indirect: bool,
    options: Options,
}

impl Device {
    /// Connects to a socket and sets up the device by the options.
    pub fn connect(path: impl AsRef<Path>, options: &Options) -> Result<Self, Error> {
        Self::from_session(Session::connect(path)?, options)
    }

    /// As [`Self::connect`], on a connected socket.
    pub fn from_stream(stream: UnixStream, options: &Options) -> Result<Self, Error> {
        Self::from_session(Session::from_stream(stream)?, options)
    }

    /// Opens `/dev/vhost-blk` and sets it up over `backend` without a daemon (split rings only).
    pub fn open_kernel(
        backend: File,
        options: &Options,
        kernel: &KernelOptions,
    ) -> Result<Self, Error> {
        let session = KernelSession::new(KernelDevice::open()?, backend, kernel.clone());
        Self::from_session(Session::with_kernel(session), options)
    }

    fn from_session(mut session: Session, options: &Options) -> Result<Self, Error> {
        session.negotiate_protocol(options.protocol_features)?;
        if options.packed && session.offered() & bit(F_RING_PACKED) == 0 {
            return Err(Error::NotOffered("RING_PACKED"));
        }
        let has = session.queue_num()?;
        if has < options.num_queues.into() {
            return Err(Error::TooFewQueues { has, wanted: options.num_queues });
        }
        let features = session.negotiate_features(options.wanted_features())?;
        let layout = options.memory_layout();
        let memory = match options.huge_pages {
            true => GuestMemory::of_huge_pages(&layout)?,
            false => GuestMemory::new(&layout)?,
        };
        let event_idx = features & bit(F_EVENT_IDX) != 0;
        let queues = (0..options.num_queues)
            .map(|_| {
                let queue = Queue::new(&memory, options.queue_size, options.packed, event_idx)?;
                Ok(RequestQueue::new(queue, options.scratch_bytes, options.limit))
            })
            .collect::<io::Result<_>>()?;
        let indirect = features & bit(F_INDIRECT_DESC) != 0;
        let options = options.clone();
        let mut device = Self { session, memory, queues, inflight: None, indirect, options };
        if device.options.setup == QueueSetup::Started {
            device.start()?;
        }
        Ok(device)
    }

    /// Shares in-flight region and memory, sets all queues up and enables them.
    pub fn start(&mut self) -> Result<(), Error> {
        use VhostUserProtocolFeatures as P;
        if self.options.inflight && self.session.can_track_inflight() {
            let queues = self.options.num_queues;
            let size = match self.options.inflight_queue_size {
                0 => self.options.queue_size,
                size => size,
            };
            let region = match self.inflight.take() {
                Some(region) => region,
                None => self.session.get_inflight(queues, size)?,
            };
            // A connection that is refused does not lose it.
            let set = self.session.set_inflight(&region);
            self.inflight = Some(region);
            set?;
        }
        let slots = self.options.mem_slots && self.session.has_protocol(P::CONFIGURE_MEM_SLOTS);
        self.session.share_memory(&self.memory, slots)?;
        self.session.attach()?;
        (0..self.queues.len()).try_for_each(|index| self.start_queue(index))
    }

    /// Continues with another daemon after the first one has ended, as QEMU reconnects: the same
    /// memory, rings, requests in flight and in-flight region.
    pub fn reconnect(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.resume(Session::connect(path)?)
    }

    /// As [`Self::reconnect`], with the kernel's device: closes the previous one first.
    pub fn reopen_kernel(&mut self, backend: File, kernel: &KernelOptions) -> Result<(), Error> {
        let session = KernelSession::new(KernelDevice::open()?, backend, kernel.clone());
        self.resume(Session::with_kernel(session))
    }

    fn resume(&mut self, session: Session) -> Result<(), Error> {
        let features = self.features();
        self.session = session;
        self.session.negotiate_protocol(self.options.protocol_features)?;
        self.session.set_features(features)?;
        self.start()
    }

    /// Starts dirty logging as QEMU does for a migration: log, LOG_ALL, addresses with the flag.
    pub fn start_log(&mut self) -> Result<DirtyLog, Error> {
        if self.session.offered() & bit(VHOST_F_LOG_ALL) == 0 {
            return Err(Error::NotOffered("LOG_ALL"));
        }
        let log = self.session.set_log(&self.memory)?;
        self.session.negotiate_features(self.features() | bit(VHOST_F_LOG_ALL))?;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            self.session.set_vring_addr(index, queue.queue(), true)?;
        }
        Ok(log)
    }

    /// Sets up a queue at the driver's position and enables it.
    pub fn start_queue(&mut self, index: usize) -> Result<(), Error> {
        self.session.set_up_queue(index, self.queues[index].queue())?;
        self.session.enable(index, true)
    }

    /// Sets up all queues at the driver's positions and enables none.
    pub fn set_up_queues(&mut self) -> Result<(), Error> {
        for (index, queue) in self.queues.iter_mut().enumerate() {
            self.session.set_up_queue(index, queue.queue())?;
        }
        Ok(())
    }

    /// Negotiated virtio features.
    pub fn features(&self) -> u64 {
        self.session.features()
    }

    /// The vhost-user connection.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Guest memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The in-flight region, if one is used.
    pub fn inflight(&self) -> Option<&InflightRegion> {
        self.inflight.as_ref()
    }

    /// Takes the in-flight region out, for a caller that goes on with [`Self::into_parts`]: a
    /// running device writes to it.
    pub fn take_inflight(&mut self) -> Option<InflightRegion> {
        self.inflight.take()
    }

    /// A queue.
    pub fn queue(&mut self, index: usize) -> &mut RequestQueue {
        &mut self.queues[index]
    }

    /// Splits the connection from the queues, so that threads can own the queues. Keep the
    /// connection as long as they are used.
    pub fn into_parts(self) -> (Session, Vec<RequestQueue>) {
        (self.session, self.queues)
    }

    /// The configuration space.
    pub fn config(&mut self) -> Result<Config, Error> {
        self.session.config()
    }

    /// Capacity in sectors.
    pub fn capacity_sectors(&mut self) -> Result<u64, Error> {
        Ok(self.config()?.capacity)
    }

    /// The usual layout, through an indirect table if that was negotiated.
    pub fn layout(&self) -> Layout {
        Layout { indirect: self.indirect, ..Layout::default() }
    }

    /// Runs one request on queue 0, which must end with status OK; returns the data.
    pub fn request(&mut self, request: &Request) -> Result<Vec<u8>, Error> {
        let layout = self.layout();
        let completion = self.queues[0].execute(request, &layout)?;
        match completion.status {
            Some(S_OK) => Ok(completion.data),
            other => Err(Error::Status(other)),
        }
    }

    /// Reads whole sectors.
    pub fn read(&mut self, sector: u64, data: &mut [u8]) -> Result<(), Error> {
        debug_assert!(data.len().is_multiple_of(SECTOR_BYTES as usize));
        data.copy_from_slice(&self.request(&Request::read(sector, data.len()))?);
        Ok(())
    }

    /// Writes whole sectors.
    pub fn write(&mut self, sector: u64, data: &[u8]) -> Result<(), Error> {
        self.request(&Request::write(sector, data)).map(drop)
    }

    /// Makes completed writes durable.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.request(&Request::flush()).map(drop)
    }

    /// Discards one range.
    pub fn discard(&mut self, sector: u64, num_sectors: u32) -> Result<(), Error> {
        let range = RangeSegment { sector, num_sectors, flags: 0 };
        self.request(&Request::discard(&[range])).map(drop)
    }

    /// Writes zeroes to one range; `flags` may hold the unmap bit.
    pub fn write_zeroes(&mut self, sector: u64, count: u32, flags: u32) -> Result<(), Error> {
        let range = RangeSegment { sector, num_sectors: count, flags };
        self.request(&Request::write_zeroes(&[range])).map(drop)
    }

    /// Erases one range securely.
    pub fn secure_erase(&mut self, sector: u64, num_sectors: u32) -> Result<(), Error> {
        let range = RangeSegment { sector, num_sectors, flags: 0 };
        self.request(&Request::secure_erase(&[range])).map(drop)
    }

    /// The id string, 20 bytes.
    pub fn get_id(&mut self) -> Result<Vec<u8>, Error> {
        self.request(&Request::get_id())
    }
}
