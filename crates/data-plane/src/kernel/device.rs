// SPDX-License-Identifier: Apache-2.0
//! An open `/dev/vhost-blk` and its ioctls. The `vhost` crate provides most ioctls of the vhost
//! core, but cannot detach an eventfd, and translates ring addresses itself.
// UNSAFETY: makes ioctls with the structures of `abi.rs`, which the kernel copies.
#![expect(unsafe_code)]

use super::abi;
use crate::error::KernelError;
use crate::limits::KernelUser;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::vhost_kern::VhostKernBackend;
use vhost::vhost_kern::vhost_binding::{
    VHOST_SET_VRING_ADDR, VHOST_SET_VRING_CALL, VHOST_SET_VRING_ERR, VHOST_SET_VRING_KICK,
    vhost_vring_addr, vhost_vring_file, vhost_vring_state,
};
use virtio_spec::blk::ID_BYTES;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

/// The device node of the module.
pub const DEVICE_PATH: &str = "/dev/vhost-blk";

/// Maximum wait for a claimed block device.
const CLAIM_WAIT_MAX: Duration = Duration::from_secs(1);
const CLAIM_RETRY: Duration = Duration::from_millis(20);

/// The eventfds of a vring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Kick,
    Call,
    Err,
}

/// An open device. Closing it stops and drains all queues.
#[derive(Debug)]
pub(crate) struct VhostBlk {
    file: File,
    /// Empty guest memory for the `vhost` crate, which would use it to translate ring addresses.
    /// [`VhostBlk::set_vring_addr`] takes translated ones.
    no_memory: Arc<GuestMemoryMmap>,
}

impl AsRawFd for VhostBlk {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl VhostKernBackend for VhostBlk {
    type AS = Arc<GuestMemoryMmap>;

    fn mem(&self) -> &Self::AS {
        &self.no_memory
    }
}

impl VhostBlk {
    pub(crate) fn open(path: &Path) -> Result<Self, KernelError> {
        let opened = OpenOptions::new().read(true).write(true).open(path);
        let file = opened.map_err(|source| KernelError::open(path, source))?;
        Ok(VhostBlk { file, no_memory: Arc::default() })
    }

    fn set<T>(
        &self,
        what: &'static str,
        request: libc::Ioctl,
        value: &T,
    ) -> Result<(), KernelError> {
        // SAFETY: `value` outlives the call; each caller passes the type of the ioctl.
        match unsafe { ioctl_with_ref(self, request, value) } {
            code if code < 0 => Err(KernelError::call(what, io::Error::last_os_error())),
            _ => Ok(()),
        }
    }

    fn get<T>(
        &self,
        what: &'static str,
        request: libc::Ioctl,
        value: &mut T,
    ) -> Result<(), KernelError> {
        // SAFETY: as in `set`.
        match unsafe { ioctl_with_mut_ref(self, request, value) } {
            code if code < 0 => Err(KernelError::call(what, io::Error::last_os_error())),
            _ => Ok(()),
        }
    }

    /// Attaches the storage without starting a queue. Waits up to [`CLAIM_WAIT_MAX`] for a claimed
    /// block device: a killed daemon holds it until its last I/O completes.
    pub(crate) fn attach(&self, storage: BorrowedFd<'_>) -> Result<(), KernelError> {
        let file = vhost_vring_file { index: 0, fd: storage.as_raw_fd() };
        let deadline = Instant::now() + CLAIM_WAIT_MAX;
        loop {
            match self.set("VHOST_BLK_SET_BACKEND", abi::SET_BACKEND(), &file) {
                Err(error) if error.is_busy() && Instant::now() < deadline => {
                    std::thread::sleep(CLAIM_RETRY);
                }
                outcome => return outcome,
            }
        }
    }

    /// Sets the number of queues; this must be the first ioctl.
    pub(crate) fn set_num_queues(&self, count: u32) -> Result<(), KernelError> {
        self.set("VHOST_BLK_SET_NUM_QUEUES", abi::SET_NUM_QUEUES(), &count)
    }

    /// Sets the eventfd that the kernel signals after a failure of the storage.
    pub(crate) fn set_failure_event(&self, event: &EventFd) -> Result<(), KernelError> {
        let request = abi::SET_FAILURE_EVENT();
        self.set("VHOST_BLK_SET_FAILURE_EVENT", request, &event.as_raw_fd())
    }

    /// The failures of the storage since the previous query.
    pub(crate) fn failure(&self) -> Result<abi::Failure, KernelError> {
        let size = size_of::<abi::Failure>() as u32;
        let mut failure = abi::Failure { size, ..abi::Failure::default() };
        self.get("VHOST_BLK_GET_FAILURE", abi::GET_FAILURE(), &mut failure)?;
        Ok(failure)
    }

    /// Records requests that take this long, and signals the event; 0: none.
    pub(crate) fn set_trace(&self, slower_than: u64, event: &EventFd) -> Result<(), KernelError> {
        let size = size_of::<abi::Trace>() as u32;
        let trace = abi::Trace { size, fd: event.as_raw_fd(), slower_than_ns: slower_than };
        self.set("VHOST_BLK_SET_TRACE", abi::SET_TRACE(), &trace)
    }

    /// Takes the oldest record of a slow request.
    pub(crate) fn traced(&self) -> Result<abi::Traced, KernelError> {
        let size = size_of::<abi::Traced>() as u32;
        // An older module leaves the time in the ring as it is: not known.
        let mut traced = abi::Traced { size, ring_ns: u64::MAX, ..abi::Traced::default() };
        self.get("VHOST_BLK_GET_TRACED", abi::GET_TRACED(), &mut traced)?;
        Ok(traced)
    }

    /// The age of the oldest request of a queue that is in flight. Waits for no storage.
    pub(crate) fn oldest(&self, index: u16) -> Result<Option<Duration>, KernelError> {
        let (size, index) = (size_of::<abi::Oldest>() as u32, index.into());
        let mut oldest = abi::Oldest { size, index, age_ns: 0 };
        self.get("VHOST_BLK_GET_OLDEST", abi::GET_OLDEST(), &mut oldest)?;
        Ok((oldest.age_ns != u64::MAX).then(|| Duration::from_nanos(oldest.age_ns)))
    }

    /// The heads of the chains that a queue keeps because the device is halted.
    pub(crate) fn kept(&self, index: u16) -> Result<Vec<u16>, KernelError> {
        let (size, index) = (size_of::<abi::Kept>() as u32, index.into());
        let heads = [0; abi::QUEUE_SIZE_MAX as usize];
        let mut kept = abi::Kept { size, index, count: 0, reserved: 0, heads };
        self.get("VHOST_BLK_GET_KEPT", abi::GET_KEPT(), &mut kept)?;
        Ok(kept.heads.into_iter().take(kept.count as usize).collect())
    }

    /// Duplicates the descriptor of the device.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(VhostBlk { file: self.file.try_clone()?, no_memory: Arc::clone(&self.no_memory) })
    }

    /// Stops all queues and detaches the storage.
    pub(crate) fn detach(&self) -> Result<(), KernelError> {
        let file = vhost_vring_file { index: 0, fd: -1 };
        self.set("VHOST_BLK_SET_BACKEND", abi::SET_BACKEND(), &file)
    }

    pub(crate) fn info(&self) -> Result<abi::Info, KernelError> {
        let mut info = abi::Info { size: size_of::<abi::Info>() as u32, ..abi::Info::default() };
        self.get("VHOST_BLK_GET_INFO", abi::GET_INFO(), &mut info)?;
        Ok(info)
    }

    pub(crate) fn set_options(&self, options: &abi::Options) -> Result<(), KernelError> {
        self.set("VHOST_BLK_SET_OPTIONS", abi::SET_OPTIONS(), options)
    }

    /// Makes the device use shared limits, or its own ones. The caller keeps `user` until the device
    /// uses others or is closed.
    pub(crate) fn share_limits(&self, user: Option<&KernelUser>) -> Result<(), KernelError> {
        let share = user.map_or_else(abi::Share::default, |user| abi::Share {
            limits_addr: std::ptr::from_ref(user.clocks()) as u64,
            debt_addr: std::ptr::from_ref(user.debt()) as u64,
        });
        self.set("VHOST_BLK_SHARE_LIMITS", abi::SHARE_LIMITS(), &share)
    }

    pub(crate) fn set_serial(&self, serial: &[u8; ID_BYTES]) -> Result<(), KernelError> {
        self.set("VHOST_BLK_SET_SERIAL", abi::SET_SERIAL(), serial)
    }

    /// Starts or stops one queue; a stop drains it.
    pub(crate) fn set_queue(&self, index: u16, run: bool) -> Result<(), KernelError> {
        let state = vhost_vring_state { index: index.into(), num: run.into() };
        self.set("VHOST_BLK_SET_QUEUE", abi::SET_QUEUE(), &state)
    }

    pub(crate) fn set_inflight(&self, inflight: &abi::Inflight) -> Result<(), KernelError> {
        self.set("VHOST_BLK_SET_INFLIGHT", abi::SET_INFLIGHT(), inflight)
    }

    /// Sets the addresses of the areas, which are addresses of this process.
    pub(crate) fn set_vring_addr(&self, addr: &vhost_vring_addr) -> Result<(), KernelError> {
        self.set("VHOST_SET_VRING_ADDR", VHOST_SET_VRING_ADDR(), addr)
    }

    pub(crate) fn set_vring_signal(
        &self,
        index: u16,
        signal: Signal,
        fd: Option<&File>,
    ) -> Result<(), KernelError> {
        let file = vhost_vring_file { index: index.into(), fd: fd.map_or(-1, AsRawFd::as_raw_fd) };
        let (what, request) = match signal {
            Signal::Kick => ("VHOST_SET_VRING_KICK", VHOST_SET_VRING_KICK()),
            Signal::Call => ("VHOST_SET_VRING_CALL", VHOST_SET_VRING_CALL()),
            Signal::Err => ("VHOST_SET_VRING_ERR", VHOST_SET_VRING_ERR()),
        };
        self.set(what, request, &file)
    }

    /// Sets the time in microseconds that the kernel polls the ring before it asks for kicks again.
    pub(crate) fn set_busy_loop(&self, index: u16, micros: u32) -> Result<(), KernelError> {
        let state = vhost_vring_state { index: index.into(), num: micros };
        let request = abi::SET_VRING_BUSYLOOP_TIMEOUT();
        self.set("VHOST_SET_VRING_BUSYLOOP_TIMEOUT", request, &state)
    }

    pub(crate) fn new_worker(&self) -> Result<u32, KernelError> {
        let mut state = abi::WorkerState::default();
        self.get("VHOST_NEW_WORKER", abi::NEW_WORKER(), &mut state)?;
        Ok(state.worker_id)
    }

    pub(crate) fn attach_worker(&self, index: u16, worker_id: u32) -> Result<(), KernelError> {
        let worker = abi::VringWorker { index: index.into(), worker_id };
        self.set("VHOST_ATTACH_VRING_WORKER", abi::ATTACH_VRING_WORKER(), &worker)
    }

    /// Opens the `fdinfo` of the open device: lines of the form `name:\tvalue`.
    pub(crate) fn fdinfo(&self) -> Result<File, KernelError> {
        let opened = File::open(format!("/proc/self/fdinfo/{}", self.file.as_raw_fd()));
        opened.map_err(|why| KernelError::call("open of fdinfo", why))
    }
}
