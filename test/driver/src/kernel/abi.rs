// SPDX-License-Identifier: Apache-2.0
//! The interface of `/dev/vhost-blk`, a copy of its two headers (`linux/vhost.h` and
//! `kernel/include/uapi/vhost_blk.h`); `tests/header.rs` compares them.

pub use super::limits::{SharedDebt, SharedLimits};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The type byte of all vhost ioctls.
const VHOST_VIRTIO: u32 = 0xaf;

const fn io(number: u32) -> u32 {
    VHOST_VIRTIO << 8 | number
}

const fn iow<T>(number: u32) -> u32 {
    1 << 30 | (size_of::<T>() as u32) << 16 | io(number)
}

const fn ior<T>(number: u32) -> u32 {
    2 << 30 | (size_of::<T>() as u32) << 16 | io(number)
}

const fn iowr<T>(number: u32) -> u32 {
    3 << 30 | (size_of::<T>() as u32) << 16 | io(number)
}

/// `VHOST_GET_FEATURES`.
pub const GET_FEATURES: u32 = ior::<u64>(0x00);
/// `VHOST_SET_FEATURES`.
pub const SET_FEATURES: u32 = iow::<u64>(0x00);
/// `VHOST_SET_OWNER`.
pub const SET_OWNER: u32 = io(0x01);
/// `VHOST_RESET_OWNER`.
pub const RESET_OWNER: u32 = io(0x02);
/// `VHOST_SET_MEM_TABLE`; the regions follow the head.
pub const SET_MEM_TABLE: u32 = iow::<MemoryHead>(0x03);
/// `VHOST_SET_LOG_BASE`.
pub const SET_LOG_BASE: u32 = iow::<u64>(0x04);
/// `VHOST_SET_LOG_FD`.
pub const SET_LOG_FD: u32 = iow::<i32>(0x07);
/// `VHOST_NEW_WORKER`.
pub const NEW_WORKER: u32 = ior::<u32>(0x08);
/// `VHOST_FREE_WORKER`.
pub const FREE_WORKER: u32 = iow::<u32>(0x09);
/// `VHOST_SET_VRING_NUM`.
pub const SET_VRING_NUM: u32 = iow::<VringState>(0x10);
/// `VHOST_SET_VRING_ADDR`.
pub const SET_VRING_ADDR: u32 = iow::<VringAddr>(0x11);
/// `VHOST_SET_VRING_BASE`.
pub const SET_VRING_BASE: u32 = iow::<VringState>(0x12);
/// `VHOST_GET_VRING_BASE`.
pub const GET_VRING_BASE: u32 = iowr::<VringState>(0x12);
/// `VHOST_ATTACH_VRING_WORKER`.
pub const ATTACH_VRING_WORKER: u32 = iow::<VringState>(0x15);
/// `VHOST_GET_VRING_WORKER`.
pub const GET_VRING_WORKER: u32 = iowr::<VringState>(0x16);
/// `VHOST_SET_VRING_KICK`.
pub const SET_VRING_KICK: u32 = iow::<VringFile>(0x20);
/// `VHOST_SET_VRING_CALL`.
pub const SET_VRING_CALL: u32 = iow::<VringFile>(0x21);
/// `VHOST_SET_VRING_ERR`.
pub const SET_VRING_ERR: u32 = iow::<VringFile>(0x22);
/// `VHOST_SET_VRING_BUSYLOOP_TIMEOUT`.
pub const SET_VRING_BUSYLOOP_TIMEOUT: u32 = iow::<VringState>(0x23);
/// `VHOST_GET_VRING_BUSYLOOP_TIMEOUT` (it writes to user space, although its code says otherwise).
pub const GET_VRING_BUSYLOOP_TIMEOUT: u32 = iow::<VringState>(0x24);
/// `VHOST_SET_BACKEND_FEATURES`.
pub const SET_BACKEND_FEATURES: u32 = iow::<u64>(0x25);
/// `VHOST_GET_BACKEND_FEATURES`.
pub const GET_BACKEND_FEATURES: u32 = ior::<u64>(0x26);
/// `VHOST_BLK_SET_BACKEND`.
pub const BLK_SET_BACKEND: u32 = iow::<VringFile>(0xff);
/// `VHOST_BLK_SET_SERIAL`.
pub const BLK_SET_SERIAL: u32 = iow::<[u8; 20]>(0xfe);
/// `VHOST_BLK_GET_INFO`.
pub const BLK_GET_INFO: u32 = iowr::<BlkInfo>(0xfd);
/// `VHOST_BLK_SET_QUEUE`.
pub const BLK_SET_QUEUE: u32 = iow::<VringState>(0xfc);
/// `VHOST_BLK_SET_OPTIONS`.
pub const BLK_SET_OPTIONS: u32 = iow::<BlkOptions>(0xfb);
/// `VHOST_BLK_SET_INFLIGHT`.
pub const BLK_SET_INFLIGHT: u32 = iow::<BlkInflight>(0xfa);

/// `VHOST_BLK_SET_NUM_QUEUES`.
pub const BLK_SET_NUM_QUEUES: u32 = iow::<u32>(0xf9);
/// `VHOST_BLK_SET_FAILURE_EVENT`.
pub const BLK_SET_FAILURE_EVENT: u32 = iow::<i32>(0xf8);
/// `VHOST_BLK_GET_FAILURE`.
pub const BLK_GET_FAILURE: u32 = iowr::<BlkFailure>(0xf7);
/// `VHOST_BLK_SET_TRACE`.
pub const BLK_SET_TRACE: u32 = iow::<BlkTrace>(0xf6);
/// `VHOST_BLK_GET_TRACED`.
pub const BLK_GET_TRACED: u32 = iowr::<BlkTraced>(0xf5);
/// `VHOST_BLK_GET_OLDEST`.
pub const BLK_GET_OLDEST: u32 = iowr::<BlkOldest>(0xf4);
/// `VHOST_BLK_SHARE_LIMITS`.
pub const BLK_SHARE_LIMITS: u32 = iow::<BlkShare>(0xf2);

/// `VHOST_BLK_GET_KEPT`.
pub const BLK_GET_KEPT: u32 = iowr::<BlkKept>(0xf3);

/// `VHOST_BLK_BUSYLOOP_US_MAX`.
pub const BLK_BUSYLOOP_US_MAX: u32 = 1_000_000;
/// `VHOST_BLK_FAILURE_IO`.
pub const FAILURE_IO: u32 = 1;
/// `VHOST_BLK_FAILURE_REMOVED`.
pub const FAILURE_REMOVED: u32 = 1 << 1;
/// `VHOST_BLK_FAILURE_NO_SPACE`.
pub const FAILURE_NO_SPACE: u32 = 1 << 2;
/// `VHOST_BLK_FAILURE_TIMEOUT`.
pub const FAILURE_TIMEOUT: u32 = 1 << 3;
/// `VHOST_BLK_FAILURE_READ_ONLY`.
pub const FAILURE_READ_ONLY: u32 = 1 << 4;
/// `VHOST_BLK_FAILURE_SYNC`.
pub const FAILURE_SYNC: u32 = 1 << 5;
/// `VHOST_BLK_FAILURE_HALTED`.
pub const FAILURE_HALTED: u32 = 1 << 6;
/// `VHOST_BLK_TRACED_VALID`.
pub const TRACED_VALID: u32 = 1;
/// `VHOST_BLK_TRACED_FAILED`.
pub const TRACED_FAILED: u32 = 1 << 1;
/// `VHOST_BLK_TRACED_MAX`.
pub const BLK_TRACED_MAX: u32 = 256;
/// `VHOST_BLK_QUEUES_MAX`.
pub const BLK_QUEUES_MAX: u32 = 64;
/// `VHOST_BLK_QUEUE_SIZE_MAX`.
pub const BLK_QUEUE_SIZE_MAX: u32 = 1024;
/// `VHOST_BLK_RANGES_MAX`.
pub const BLK_RANGES_MAX: u32 = 256;

/// `VHOST_BLK_INFO_ATTACHED`.
pub const INFO_ATTACHED: u32 = 1;
/// `VHOST_BLK_INFO_BLOCK_DEVICE`.
pub const INFO_BLOCK_DEVICE: u32 = 1 << 1;
/// `VHOST_BLK_INFO_READ_ONLY`.
pub const INFO_READ_ONLY: u32 = 1 << 2;
/// `VHOST_BLK_INFO_WRITE_CACHE`.
pub const INFO_WRITE_CACHE: u32 = 1 << 3;
/// `VHOST_BLK_INFO_DISCARD`.
pub const INFO_DISCARD: u32 = 1 << 4;
/// `VHOST_BLK_INFO_WRITE_ZEROES`.
pub const INFO_WRITE_ZEROES: u32 = 1 << 5;
/// `VHOST_BLK_INFO_SECURE_ERASE`.
pub const INFO_SECURE_ERASE: u32 = 1 << 6;
/// `VHOST_BLK_INFO_POLL_QUEUES`.
pub const INFO_POLL_QUEUES: u32 = 1 << 7;
/// `VHOST_BLK_INFO_DEAD`.
pub const INFO_DEAD: u32 = 1 << 8;

/// `VHOST_BLK_OPT_WRITE_THROUGH`.
pub const OPT_WRITE_THROUGH: u32 = 1;
/// `VHOST_BLK_OPT_READ_ONLY`.
pub const OPT_READ_ONLY: u32 = 1 << 1;
/// `VHOST_BLK_OPT_IOPOLL`.
pub const OPT_IOPOLL: u32 = 1 << 2;
/// `VHOST_BLK_OPT_PIN_MEMORY`.
pub const OPT_PIN_MEMORY: u32 = 1 << 3;
/// `VHOST_BLK_OPT_NO_UNMAP`.
pub const OPT_NO_UNMAP: u32 = 1 << 4;
/// `VHOST_BLK_OPT_COALESCE`.
pub const OPT_COALESCE: u32 = 1 << 5;
/// `VHOST_BLK_OPT_COALESCE_AUTO`.
pub const OPT_COALESCE_AUTO: u32 = 1 << 6;
/// `VHOST_BLK_OPT_KEEP_FAILED`.
pub const OPT_KEEP_FAILED: u32 = 1 << 7;
/// `VHOST_BLK_OPT_KEEP_NO_SPACE`.
pub const OPT_KEEP_NO_SPACE: u32 = 1 << 8;
/// `VHOST_BLK_OPT_HALT_AT_FLUSH`.
pub const OPT_HALT_AT_FLUSH: u32 = 1 << 9;
/// `VHOST_BLK_OPT_HALT`.
pub const OPT_HALT: u32 = 1 << 10;
/// `VHOST_BLK_OPT_BATCH`.
pub const OPT_BATCH: u32 = 1 << 11;
/// `VHOST_BLK_OPT_READS_APART`.
pub const OPT_READS_APART: u32 = 1 << 12;
/// `VHOST_BLK_OPT_READS_KEEP_FAILED`.
pub const OPT_READS_KEEP_FAILED: u32 = 1 << 13;
/// `VHOST_BLK_OPT_READS_KEEP_NO_SPACE`.
pub const OPT_READS_KEEP_NO_SPACE: u32 = 1 << 14;
/// `VHOST_BLK_BATCH_SIZE_MAX`.
pub const BATCH_SIZE_MAX: u32 = 64;

/// `VHOST_ACCESS_RO`.
pub const ACCESS_RO: u8 = 1;
/// `VHOST_ACCESS_WO`.
pub const ACCESS_WO: u8 = 2;
/// `VHOST_ACCESS_RW`.
pub const ACCESS_RW: u8 = 3;
/// `VHOST_IOTLB_MISS`.
pub const IOTLB_MISS: u8 = 1;
/// `VHOST_IOTLB_UPDATE`.
pub const IOTLB_UPDATE: u8 = 2;
/// `VHOST_IOTLB_INVALIDATE`.
pub const IOTLB_INVALIDATE: u8 = 3;
/// `VHOST_IOTLB_MSG`: the message's type.
pub const IOTLB_MSG: u32 = 1;

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
    )*};
}

wire! {
    /// `struct vhost_vring_state`; also the shape of `vhost_vring_worker`.
    VringState {
        /// The queue.
        index: u32,
        /// The value of the ioctl.
        num: u32,
    }

    /// `struct vhost_vring_file`.
    VringFile {
        /// The queue.
        index: u32,
        /// The descriptor; -1: none.
        fd: i32,
    }

    /// `struct vhost_vring_addr`.
    VringAddr {
        /// The queue.
        index: u32,
        /// Bit 0: log writes to the used ring.
        flags: u32,
        /// Address of the descriptor table.
        desc: u64,
        /// Address of the used ring.
        used: u64,
        /// Address of the avail ring.
        avail: u64,
        /// Guest-physical address of the used ring.
        log: u64,
    }

    /// The head of `struct vhost_memory`.
    MemoryHead {
        /// Regions that follow.
        nregions: u32,
        /// Zero.
        padding: u32,
    }

    /// `struct vhost_memory_region`.
    MemoryRegion {
        /// Guest-physical address.
        gpa: u64,
        /// Length in bytes.
        size: u64,
        /// Address in the owner.
        user: u64,
        /// Zero.
        flags_padding: u64,
    }

    /// `struct vhost_msg` with its `struct vhost_iotlb_msg`.
    IotlbMsg {
        /// [`IOTLB_MSG`].
        kind: u32,
        /// Padding in version 1, address space in version 2.
        asid: u32,
        /// Address that the driver gave.
        iova: u64,
        /// Length in bytes.
        size: u64,
        /// Address in the owner.
        uaddr: u64,
        /// `ACCESS_*`.
        perm: u8,
        /// `IOTLB_*`.
        what: u8,
        /// Padding to the alignment of 8.
        pad: [u8; 6],
        /// Padding to the size of the union.
        room: [u64; 4],
    }

    /// `struct vhost_blk_info`; see the header for the fields.
    BlkInfo {
        /// In: size of the buffer; out: bytes known.
        size: u32,
        /// `INFO_*`.
        flags: u32,
        /// `OPT_*` that can be set.
        option_flags: u32,
        /// Maximum number of queues.
        queues_max: u32,
        /// Maximum number of descriptors of a queue.
        queue_size_max: u32,
        /// Maximum number of data segments of a request.
        seg_max: u32,
        /// Maximum data bytes of a request.
        request_bytes_max: u64,
        /// Maximum data bytes in flight.
        inflight_bytes_max: u64,
        /// Capacity in sectors.
        capacity_sectors: u64,
        /// Logical block size.
        logical_block_bytes: u32,
        /// Physical block size.
        physical_block_bytes: u32,
        /// Minimum I/O size.
        io_min_bytes: u32,
        /// Optimal I/O size.
        io_opt_bytes: u32,
        /// A buffer below this alignment is bounced.
        memory_align_bytes: u32,
        /// Granularity of DISCARD.
        discard_align_sectors: u32,
        /// Maximum sectors of a DISCARD range.
        max_discard_sectors: u32,
        /// Maximum sectors of a WRITE_ZEROES range.
        max_write_zeroes_sectors: u32,
        /// Maximum sectors of a SECURE_ERASE range.
        max_secure_erase_sectors: u32,
        /// Queues that this device has.
        num_queues: u32,
    }

    /// `struct vhost_blk_options`; see the header for the fields.
    BlkOptions {
        /// Number of bytes that the caller fills in.
        size: u32,
        /// `OPT_*`.
        flags: u32,
        /// Maximum sectors of a DISCARD range; 0: no bound.
        max_discard_sectors: u32,
        /// The same for WRITE_ZEROES.
        max_write_zeroes_sectors: u32,
        /// The same for SECURE_ERASE.
        max_secure_erase_sectors: u32,
        /// With `OPT_BATCH`: size of batches; else zero.
        batch: u32,
        /// Requests per second; 0: no limit.
        limit_iops: u64,
        /// Bytes per second; 0: no limit.
        limit_bytes: u64,
        /// Burst in milliseconds; 0: the default.
        limit_burst_ms: u32,
        /// Time in milliseconds until the first request.
        limit_debt_ms: u32,
    }

    /// `struct vhost_blk_failure`; see the header for the fields.
    BlkFailure {
        /// In: size of the buffer; out: bytes known.
        size: u32,
        /// `FAILURE_*`.
        kinds: u32,
        /// Requests that failed.
        count: u64,
        /// First sector of the first failed request.
        sector: u64,
        /// Errno of the first failure.
        error: u32,
        /// Zero.
        reserved: u32,
        /// Type of the request that has halted the device.
        halt_type: u32,
        /// Its errno.
        halt_error: u32,
        /// Its first sector.
        halt_sector: u64,
        /// Its bytes.
        halt_bytes: u64,
    }


    /// `struct vhost_blk_trace`.
    BlkTrace {
        /// Number of bytes that the caller fills in.
        size: u32,
        /// The eventfd; -1: none.
        fd: i32,
        /// Time of a slow request in nanoseconds; 0: none is slow.
        slower_than_ns: u64,
    }

    /// `struct vhost_blk_traced`; see the header for the fields.
    BlkTraced {
        /// In: size of the buffer; out: bytes known.
        size: u32,
        /// `TRACED_*`.
        flags: u32,
        /// Records that were replaced.
        lost: u64,
        /// The queue.
        queue: u32,
        /// The type of the request.
        kind: u32,
        /// First sector of a read or a write.
        sector: u64,
        /// Bytes that it moves or names.
        bytes: u64,
        /// Wait for a limit.
        limit_ns: u64,
        /// Time until the storage had it.
        submit_ns: u64,
        /// Time in the storage.
        storage_ns: u64,
        /// Time until the driver sees it.
        used_ns: u64,
        /// Time in the ring, at most.
        ring_ns: u64,
    }

    /// `struct vhost_blk_oldest`.
    BlkOldest {
        /// In: size of the buffer; out: bytes known.
        size: u32,
        /// The queue.
        index: u32,
        /// Age of the oldest request in flight; all ones: there is none.
        age_ns: u64,
    }

    /// `struct vhost_blk_share`.
    BlkShare {
        /// Address of the shared limits; 0: the device's own ones.
        limits_addr: u64,
        /// Address of the debt of the device.
        debt_addr: u64,
    }

    /// `struct vhost_blk_inflight`.
    BlkInflight {
        /// The queue.
        index: u32,
        /// Number of entries.
        desc_num: u32,
        /// Address of the structure in the owner; 0: none.
        user_addr: u64,
    }
}

/// `struct vhost_blk_kept`; see the header for the fields.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlkKept {
    /// In: size of the buffer; out: bytes known.
    pub size: u32,
    /// The queue.
    pub index: u32,
    /// Number of chains.
    pub count: u32,
    /// Not used.
    pub reserved: u32,
    /// Their heads.
    pub heads: [u16; BLK_QUEUE_SIZE_MAX as usize],
}

impl BlkOptions {
    /// Options with these flags and without bounds.
    pub fn with_flags(flags: u32) -> Self {
        Self { size: size_of::<Self>() as u32, flags, ..Self::default() }
    }
}
