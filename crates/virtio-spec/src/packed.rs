// SPDX-License-Identifier: Apache-2.0
//! Packed virtqueues (section 2.8).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Section 2.8.1: the avail bit of a descriptor's flags (bit 7).
pub const DESC_F_AVAIL: u16 = 1 << 7;
/// Section 2.8.1: the used bit of a descriptor's flags (bit 15).
pub const DESC_F_USED: u16 = 1 << 15;
pub use crate::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// Section 2.8.13, `struct pvirtq_desc`; little endian.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Desc {
    /// Guest-physical address of the buffer.
    pub addr: u64,
    /// Length of the buffer; in a used descriptor, the bytes written.
    pub len: u32,
    /// Buffer id, valid in the last descriptor of a chain.
    pub id: u16,
    /// `DESC_F_*`.
    pub flags: u16,
}

/// Section 2.8.10: notifications are wanted.
pub const EVENT_ENABLE: u16 = 0;
/// Section 2.8.10: no notifications are wanted.
pub const EVENT_DISABLE: u16 = 1;
/// Section 2.8.10: a notification is wanted for one descriptor (needs EVENT_IDX).
pub const EVENT_DESC: u16 = 2;

/// Section 2.8.10.1: alignment of the descriptor ring in bytes.
pub const DESC_ALIGN: u64 = 16;
/// Section 2.8.10.1: alignment of the event suppression structures in bytes.
pub const EVENT_ALIGN: u64 = 4;

/// Bytes of the descriptor ring of a queue of `size` descriptors (section 2.8.10.1).
pub const fn desc_ring_bytes(size: u16) -> usize {
    16 * size as usize
}

/// Bytes of one event suppression structure (section 2.8.14).
pub const EVENT_BYTES: usize = 4;
