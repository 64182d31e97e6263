// SPDX-License-Identifier: Apache-2.0
//! The block device (section 5.2).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Section 5.2.4: a sector always has 512 bytes.
pub const SECTOR_BYTES: u64 = 512;
/// Section 5.2.6: the length of the GET_ID answer.
pub const ID_BYTES: usize = 20;

/// Section 5.2.3: `size_max` is valid.
pub const F_SIZE_MAX: u32 = 1;
/// Section 5.2.3: `seg_max` is valid.
pub const F_SEG_MAX: u32 = 2;
/// Section 5.2.3: `geometry` is valid.
pub const F_GEOMETRY: u32 = 4;
/// Section 5.2.3: the device is read-only.
pub const F_RO: u32 = 5;
/// Section 5.2.3: `blk_size` is valid.
pub const F_BLK_SIZE: u32 = 6;
/// Section 5.2.3: the FLUSH command.
pub const F_FLUSH: u32 = 9;
/// Section 5.2.3: `topology` is valid.
pub const F_TOPOLOGY: u32 = 10;
/// Section 5.2.3: `writeback` can be read and written.
pub const F_CONFIG_WCE: u32 = 11;
/// Section 5.2.3: `num_queues` is valid.
pub const F_MQ: u32 = 12;
/// Section 5.2.3: the DISCARD command.
pub const F_DISCARD: u32 = 13;
/// Section 5.2.3: the WRITE_ZEROES command.
pub const F_WRITE_ZEROES: u32 = 14;
/// Section 5.2.3: lifetime information.
pub const F_LIFETIME: u32 = 15;
/// Section 5.2.3: the SECURE_ERASE command.
pub const F_SECURE_ERASE: u32 = 16;
/// Section 5.2.3: a zoned device.
pub const F_ZONED: u32 = 17;

/// Section 5.2.6: read.
pub const T_IN: u32 = 0;
/// Section 5.2.6: write.
pub const T_OUT: u32 = 1;
/// Section 5.2.6: make completed writes durable.
pub const T_FLUSH: u32 = 4;
/// Section 5.2.6: read the device's id string.
pub const T_GET_ID: u32 = 8;
/// Section 5.2.6: read lifetime information.
pub const T_GET_LIFETIME: u32 = 10;
/// Section 5.2.6: discard.
pub const T_DISCARD: u32 = 11;
/// Section 5.2.6: write zeroes.
pub const T_WRITE_ZEROES: u32 = 13;
/// Section 5.2.6: secure erase.
pub const T_SECURE_ERASE: u32 = 14;

/// Section 5.2.6: success.
pub const S_OK: u8 = 0;
/// Section 5.2.6: device or driver error.
pub const S_IOERR: u8 = 1;
/// Section 5.2.6: the device does not support the request.
pub const S_UNSUPP: u8 = 2;

/// Section 5.2.6: WRITE_ZEROES may deallocate the range.
pub const WRITE_ZEROES_F_UNMAP: u32 = 1;

/// Section 5.2.6: the header of `struct virtio_blk_req`, device-readable in every request.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct ReqHeader {
    /// `T_*`.
    pub kind: u32,
    /// Reserved.
    pub reserved: u32,
    /// First sector of an IN or OUT request.
    pub sector: u64,
}

/// Bytes of [`ReqHeader`].
pub const REQ_HEADER_BYTES: usize = 16;

/// Section 5.2.6, `struct virtio_blk_discard_write_zeroes`: one range of DISCARD, WRITE_ZEROES or
/// SECURE_ERASE.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct RangeSegment {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub num_sectors: u32,
    /// Bit 0: unmap (WRITE_ZEROES only); the others are reserved.
    pub flags: u32,
}

/// Bytes of [`RangeSegment`].
pub const RANGE_SEGMENT_BYTES: usize = 16;

/// Section 5.2.4: the configuration space, up to and including the secure erase fields.
#[repr(C, packed)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Config {
    /// Capacity in 512-byte sectors.
    pub capacity: u64,
    /// Largest segment in bytes (F_SIZE_MAX).
    pub size_max: u32,
    /// Most data segments of a request (F_SEG_MAX).
    pub seg_max: u32,
    /// Cylinders (F_GEOMETRY).
    pub cylinders: u16,
    /// Heads (F_GEOMETRY).
    pub heads: u8,
    /// Sectors per track (F_GEOMETRY).
    pub sectors: u8,
    /// Logical block size in bytes (F_BLK_SIZE).
    pub blk_size: u32,
    /// Logical blocks per physical block, as a power of two (F_TOPOLOGY).
    pub physical_block_exp: u8,
    /// Offset of the first aligned logical block (F_TOPOLOGY).
    pub alignment_offset: u8,
    /// Suggested minimum I/O size in logical blocks (F_TOPOLOGY).
    pub min_io_size: u16,
    /// Optimal (suggested maximum) I/O size in logical blocks (F_TOPOLOGY).
    pub opt_io_size: u32,
    /// Cache mode: 0 write-through, 1 write-back (F_CONFIG_WCE).
    pub writeback: u8,
    /// Reserved.
    pub unused0: u8,
    /// Number of request queues (F_MQ).
    pub num_queues: u16,
    /// Most sectors of one discard range (F_DISCARD).
    pub max_discard_sectors: u32,
    /// Most ranges of one DISCARD (F_DISCARD).
    pub max_discard_seg: u32,
    /// Alignment of discard ranges in sectors (F_DISCARD).
    pub discard_sector_alignment: u32,
    /// Most sectors of one write-zeroes range (F_WRITE_ZEROES).
    pub max_write_zeroes_sectors: u32,
    /// Most ranges of one WRITE_ZEROES (F_WRITE_ZEROES).
    pub max_write_zeroes_seg: u32,
    /// 1 if WRITE_ZEROES with unmap may deallocate (F_WRITE_ZEROES).
    pub write_zeroes_may_unmap: u8,
    /// Reserved.
    pub unused1: [u8; 3],
    /// Most sectors of one secure-erase range (F_SECURE_ERASE).
    pub max_secure_erase_sectors: u32,
    /// Most ranges of one SECURE_ERASE (F_SECURE_ERASE).
    pub max_secure_erase_seg: u32,
    /// Alignment of secure-erase ranges in sectors (F_SECURE_ERASE).
    pub secure_erase_sector_alignment: u32,
}

/// Byte offset of `writeback` in [`Config`].
pub const CONFIG_WRITEBACK_OFFSET: usize = 32;
