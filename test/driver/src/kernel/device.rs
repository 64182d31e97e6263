// SPDX-License-Identifier: Apache-2.0
//! `/dev/vhost-blk`: one ioctl for each method, in the order that the caller chooses.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::abi::{
    self, BlkFailure, BlkInflight, BlkInfo, BlkKept, BlkOldest, BlkOptions, BlkShare, BlkTrace,
    BlkTraced, IotlbMsg,
};
use super::abi::{MemoryHead, MemoryRegion};
use super::abi::{VringAddr, VringFile, VringState};
use super::sys::{BadAddress, ioctl, ioctl_bad, ioctl_plain};

/// An open `/dev/vhost-blk`. Every method is one ioctl, without checks and without state.
#[derive(Debug)]
pub struct KernelDevice {
    file: File,
}

/// Puts the name of the ioctl in front of a system error.
fn named(name: &str, outcome: io::Result<u32>) -> io::Result<u32> {
    outcome.map_err(|why| KernelError { call: name.into(), why }.into())
}

/// The failed ioctl and its error, inside the [`io::Error`] of every method.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {why}")]
pub struct KernelError {
    call: String,
    why: io::Error,
}

impl From<KernelError> for io::Error {
    fn from(error: KernelError) -> Self {
        Self::new(error.why.kind(), error)
    }
}

/// The errno behind an error of [`KernelDevice`].
pub fn errno_of(error: &io::Error) -> Option<i32> {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<KernelError>());
    inner.map_or(error.raw_os_error(), |named| named.why.raw_os_error())
}

impl KernelDevice {
    /// Path of the module's device node.
    pub const PATH: &str = "/dev/vhost-blk";

    /// Opens the device.
    pub fn open() -> io::Result<Self> {
        Self::open_at(Self::PATH)
    }

    /// Opens the device at another path.
    pub fn open_at(path: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self { file: OpenOptions::new().read(true).write(true).open(path)? })
    }

    /// Another descriptor of the same device.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()? })
    }

    fn set<T: IntoBytes + FromBytes>(&self, name: &str, code: u32, value: T) -> io::Result<()> {
        self.get(name, code, value).map(drop)
    }

    fn get<T: IntoBytes + FromBytes>(&self, name: &str, code: u32, mut value: T) -> io::Result<T> {
        named(name, ioctl(self.file.as_fd(), code, &mut value))?;
        Ok(value)
    }

    fn set_state(&self, name: &str, code: u32, index: u32, num: u32) -> io::Result<()> {
        self.set(name, code, VringState { index, num })
    }

    fn get_state(&self, name: &str, code: u32, index: u32) -> io::Result<u32> {
        Ok(self.get(name, code, VringState { index, num: 0 })?.num)
    }

    fn set_file(&self, name: &str, code: u32, index: u32, fd: Option<RawFd>) -> io::Result<()> {
        let fd = fd.unwrap_or(-1);
        self.set(name, code, VringFile { index, fd })
    }

    /// Any ioctl, with bytes as its argument.
    pub fn raw<T: IntoBytes + FromBytes + Immutable>(
        &self,
        code: u32,
        value: &mut T,
    ) -> io::Result<u32> {
        ioctl(self.file.as_fd(), code, value)
    }

    /// Any ioctl, with an argument that points to no memory.
    pub fn raw_at(&self, code: u32, at: BadAddress) -> io::Result<u32> {
        ioctl_bad(self.file.as_fd(), code, at)
    }

    /// Writes any bytes as an IOTLB message.
    pub fn write_bytes(&self, bytes: &[u8]) -> io::Result<usize> {
        (&self.file).write(bytes)
    }

    /// Makes the caller the owner.
    pub fn set_owner(&self) -> io::Result<()> {
        named("VHOST_SET_OWNER", ioctl_plain(self.file.as_fd(), abi::SET_OWNER)).map(drop)
    }

    /// Gives up ownership, which resets everything.
    pub fn reset_owner(&self) -> io::Result<()> {
        named("VHOST_RESET_OWNER", ioctl_plain(self.file.as_fd(), abi::RESET_OWNER)).map(drop)
    }

    /// Offered features.
    pub fn features(&self) -> io::Result<u64> {
        self.get("VHOST_GET_FEATURES", abi::GET_FEATURES, 0)
    }

    /// Sets the negotiated features.
    pub fn set_features(&self, features: u64) -> io::Result<()> {
        self.set("VHOST_SET_FEATURES", abi::SET_FEATURES, features)
    }

    /// Offered backend features (version of the IOTLB messages).
    pub fn backend_features(&self) -> io::Result<u64> {
        self.get("VHOST_GET_BACKEND_FEATURES", abi::GET_BACKEND_FEATURES, 0)
    }

    /// Sets the backend features.
    pub fn set_backend_features(&self, features: u64) -> io::Result<()> {
        self.set("VHOST_SET_BACKEND_FEATURES", abi::SET_BACKEND_FEATURES, features)
    }

    /// Sets the memory table.
    pub fn set_mem_table(&self, regions: &[MemoryRegion]) -> io::Result<()> {
        let head = MemoryHead { nregions: regions.len() as u32, padding: 0 };
        let mut bytes = [head.as_bytes(), regions.as_bytes()].concat();
        let done = ioctl(self.file.as_fd(), abi::SET_MEM_TABLE, bytes.as_mut_slice());
        named("VHOST_SET_MEM_TABLE", done).map(drop)
    }

    /// Sets the address of the dirty log in this process.
    pub fn set_log_base(&self, address: u64) -> io::Result<()> {
        self.set("VHOST_SET_LOG_BASE", abi::SET_LOG_BASE, address)
    }

    /// Sets the eventfd that signals log writes.
    pub fn set_log_fd(&self, fd: Option<RawFd>) -> io::Result<()> {
        self.set("VHOST_SET_LOG_FD", abi::SET_LOG_FD, fd.unwrap_or(-1))
    }

    /// Sets the number of descriptors of a queue.
    pub fn set_vring_num(&self, index: u32, num: u32) -> io::Result<()> {
        self.set_state("VHOST_SET_VRING_NUM", abi::SET_VRING_NUM, index, num)
    }

    /// Sets the position at which a queue starts.
    pub fn set_vring_base(&self, index: u32, base: u32) -> io::Result<()> {
        self.set_state("VHOST_SET_VRING_BASE", abi::SET_VRING_BASE, index, base)
    }

    /// The position at which a queue would continue.
    pub fn vring_base(&self, index: u32) -> io::Result<u32> {
        self.get_state("VHOST_GET_VRING_BASE", abi::GET_VRING_BASE, index)
    }

    /// Sets the addresses of a queue.
    pub fn set_vring_addr(&self, addr: VringAddr) -> io::Result<()> {
        self.set("VHOST_SET_VRING_ADDR", abi::SET_VRING_ADDR, addr)
    }

    /// Sets the eventfd by which the driver kicks.
    pub fn set_kick(&self, index: u32, fd: Option<RawFd>) -> io::Result<()> {
        self.set_file("VHOST_SET_VRING_KICK", abi::SET_VRING_KICK, index, fd)
    }

    /// Sets the eventfd by which the device calls.
    pub fn set_call(&self, index: u32, fd: Option<RawFd>) -> io::Result<()> {
        self.set_file("VHOST_SET_VRING_CALL", abi::SET_VRING_CALL, index, fd)
    }

    /// Sets the eventfd by which the device reports a ring fault.
    pub fn set_err(&self, index: u32, fd: Option<RawFd>) -> io::Result<()> {
        self.set_file("VHOST_SET_VRING_ERR", abi::SET_VRING_ERR, index, fd)
    }

    /// Sets the busy-loop time in microseconds.
    pub fn set_busyloop(&self, index: u32, us: u32) -> io::Result<()> {
        let code = abi::SET_VRING_BUSYLOOP_TIMEOUT;
        self.set_state("VHOST_SET_VRING_BUSYLOOP_TIMEOUT", code, index, us)
    }

    /// The busy-loop time in microseconds.
    pub fn busyloop(&self, index: u32) -> io::Result<u32> {
        let code = abi::GET_VRING_BUSYLOOP_TIMEOUT;
        self.get_state("VHOST_GET_VRING_BUSYLOOP_TIMEOUT", code, index)
    }

    /// Creates a worker; returns its id.
    pub fn new_worker(&self) -> io::Result<u32> {
        self.get("VHOST_NEW_WORKER", abi::NEW_WORKER, 0_u32)
    }

    /// Ends a worker without queues.
    pub fn free_worker(&self, id: u32) -> io::Result<()> {
        self.set("VHOST_FREE_WORKER", abi::FREE_WORKER, id)
    }

    /// Attaches a queue to a worker.
    pub fn attach_worker(&self, index: u32, id: u32) -> io::Result<()> {
        self.set_state("VHOST_ATTACH_VRING_WORKER", abi::ATTACH_VRING_WORKER, index, id)
    }

    /// The worker of a queue.
    pub fn vring_worker(&self, index: u32) -> io::Result<u32> {
        self.get_state("VHOST_GET_VRING_WORKER", abi::GET_VRING_WORKER, index)
    }

    /// Attaches or detaches a backend.
    pub fn set_backend(&self, index: u32, fd: Option<RawFd>) -> io::Result<()> {
        self.set_file("VHOST_BLK_SET_BACKEND", abi::BLK_SET_BACKEND, index, fd)
    }

    /// Sets the answer to GET_ID.
    pub fn set_serial(&self, serial: [u8; 20]) -> io::Result<()> {
        self.set("VHOST_BLK_SET_SERIAL", abi::BLK_SET_SERIAL, serial)
    }

    /// Capabilities of the module and the backend.
    pub fn info(&self) -> io::Result<BlkInfo> {
        let ask = BlkInfo { size: size_of::<BlkInfo>() as u32, ..BlkInfo::default() };
        self.get("VHOST_BLK_GET_INFO", abi::BLK_GET_INFO, ask)
    }

    /// Starts or stops one queue.
    pub fn set_queue(&self, index: u32, run: bool) -> io::Result<()> {
        self.set_state("VHOST_BLK_SET_QUEUE", abi::BLK_SET_QUEUE, index, run.into())
    }

    /// Sets the options of the disk.
    pub fn set_options(&self, options: BlkOptions) -> io::Result<()> {
        self.set("VHOST_BLK_SET_OPTIONS", abi::BLK_SET_OPTIONS, options)
    }

    /// Sets the structure that tracks a queue's chains in flight.
    pub fn set_inflight(&self, inflight: BlkInflight) -> io::Result<()> {
        self.set("VHOST_BLK_SET_INFLIGHT", abi::BLK_SET_INFLIGHT, inflight)
    }

    /// Sets the number of queues, before anything else.
    pub fn set_num_queues(&self, count: u32) -> io::Result<()> {
        self.set("VHOST_BLK_SET_NUM_QUEUES", abi::BLK_SET_NUM_QUEUES, count)
    }

    /// Sets the eventfd that signals failures of the backend.
    pub fn set_failure_event(&self, fd: Option<RawFd>) -> io::Result<()> {
        let fd = fd.unwrap_or(-1);
        self.set("VHOST_BLK_SET_FAILURE_EVENT", abi::BLK_SET_FAILURE_EVENT, fd)
    }

    /// Failures of the backend since the last call.
    pub fn failure(&self) -> io::Result<BlkFailure> {
        let ask = BlkFailure { size: size_of::<BlkFailure>() as u32, ..BlkFailure::default() };
        self.get("VHOST_BLK_GET_FAILURE", abi::BLK_GET_FAILURE, ask)
    }

    /// Records requests that take this long, and signals the eventfd; 0: none.
    pub fn set_trace(&self, slower_than_ns: u64, fd: Option<RawFd>) -> io::Result<()> {
        let (size, fd) = (size_of::<BlkTrace>() as u32, fd.unwrap_or(-1));
        self.set("VHOST_BLK_SET_TRACE", abi::BLK_SET_TRACE, BlkTrace { size, fd, slower_than_ns })
    }

    /// Takes the oldest record of a slow request.
    pub fn traced(&self) -> io::Result<BlkTraced> {
        let ask = BlkTraced { size: size_of::<BlkTraced>() as u32, ..BlkTraced::default() };
        self.get("VHOST_BLK_GET_TRACED", abi::BLK_GET_TRACED, ask)
    }

    /// Age of the oldest request of a queue that is in flight.
    pub fn oldest(&self, index: u32) -> io::Result<Option<Duration>> {
        let size = size_of::<BlkOldest>() as u32;
        let ask = BlkOldest { size, index, age_ns: 0 };
        let told = self.get("VHOST_BLK_GET_OLDEST", abi::BLK_GET_OLDEST, ask)?;
        Ok((told.age_ns != u64::MAX).then(|| Duration::from_nanos(told.age_ns)))
    }

    /// Heads of the chains that a queue of a halted device keeps.
    pub fn kept(&self, index: u32) -> io::Result<Vec<u16>> {
        let (size, heads) = (size_of::<BlkKept>() as u32, [0; abi::BLK_QUEUE_SIZE_MAX as usize]);
        let ask = BlkKept { size, index, count: 0, reserved: u32::MAX, heads };
        let told = self.get("VHOST_BLK_GET_KEPT", abi::BLK_GET_KEPT, ask)?;
        assert_eq!(told.reserved, ask.reserved, "the header says that it is left alone");
        Ok(told.heads[..told.count as usize].to_vec())
    }

    /// Makes the device use limits in the memory of this process; zeroes: its own ones.
    pub fn share_limits(&self, share: BlkShare) -> io::Result<()> {
        self.set("VHOST_BLK_SHARE_LIMITS", abi::BLK_SHARE_LIMITS, share)
    }

    /// Sends an IOTLB message: UPDATE or INVALIDATE.
    pub fn send_iotlb(&self, message: IotlbMsg) -> io::Result<()> {
        let bytes = message.as_bytes();
        let written = (&self.file).write(bytes)?;
        if written < bytes.len() {
            return Err(io::Error::other(format!("only {written} bytes of the message went out")));
        }
        Ok(())
    }

    /// Maps `size` bytes at `iova` to this process's memory at `uaddr`.
    pub fn map_iotlb(&self, iova: u64, size: u64, uaddr: u64, perm: u8) -> io::Result<()> {
        let what = abi::IOTLB_UPDATE;
        let message =
            IotlbMsg { kind: abi::IOTLB_MSG, iova, size, uaddr, perm, what, ..Default::default() };
        self.send_iotlb(message)
    }

    /// Removes a mapping.
    pub fn unmap_iotlb(&self, iova: u64, size: u64) -> io::Result<()> {
        let what = abi::IOTLB_INVALIDATE;
        self.send_iotlb(IotlbMsg { kind: abi::IOTLB_MSG, iova, size, what, ..Default::default() })
    }

    /// The next miss, if one comes within `limit`.
    pub fn next_miss(&self, limit: Duration) -> io::Result<Option<IotlbMsg>> {
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
        if poll(&mut fds, Some(&limit))? == 0 {
            return Ok(None);
        }
        let mut message = IotlbMsg::default();
        let read = (&self.file).read(message.as_mut_bytes())?;
        Ok((read == size_of::<IotlbMsg>()).then_some(message))
    }
}

impl AsFd for KernelDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
