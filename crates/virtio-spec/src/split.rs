// SPDX-License-Identifier: Apache-2.0
//! Split virtqueues (section 2.7).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Section 2.7: the largest queue size.
pub const QUEUE_SIZE_MAX: u16 = 32768;

/// Section 2.7.5: the chain continues at `next`.
pub const DESC_F_NEXT: u16 = 1;
/// Section 2.7.5: the device may write the buffer (and must not read it).
pub const DESC_F_WRITE: u16 = 2;
/// Section 2.7.5: the buffer is a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// Section 2.7.6: the driver asks for no calls (`avail.flags`).
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// Section 2.7.8: the device asks for no kicks (`used.flags`).
pub const USED_F_NO_NOTIFY: u16 = 1;

/// Section 2.7.5: alignment of the descriptor table in bytes.
pub const DESC_ALIGN: u64 = 16;
/// Section 2.7.6: alignment of the avail ring in bytes.
pub const AVAIL_ALIGN: u64 = 2;
/// Section 2.7.8: alignment of the used ring in bytes.
pub const USED_ALIGN: u64 = 4;

/// Section 2.7.5, `struct virtq_desc`; little endian.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Desc {
    /// Guest-physical address of the buffer.
    pub addr: u64,
    /// Length of the buffer in bytes.
    pub len: u32,
    /// `DESC_F_*`.
    pub flags: u16,
    /// Index of the next descriptor, if `DESC_F_NEXT` is set.
    pub next: u16,
}

/// Bytes of the descriptor table of a queue of `size` descriptors (section 2.7).
pub const fn desc_table_bytes(size: u16) -> usize {
    16 * size as usize
}

/// Bytes of the avail ring: flags, idx, ring, `used_event` (section 2.7.6).
pub const fn avail_ring_bytes(size: u16) -> usize {
    6 + 2 * size as usize
}

/// Bytes of the used ring: flags, idx, ring, `avail_event` (section 2.7.8).
pub const fn used_ring_bytes(size: u16) -> usize {
    6 + 8 * size as usize
}

/// Byte offset of `idx` in the avail and in the used ring.
pub const IDX_OFFSET: usize = 2;
/// Byte offset of the first entry in the avail and in the used ring.
pub const RING_OFFSET: usize = 4;
