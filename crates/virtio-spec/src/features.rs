// SPDX-License-Identifier: Apache-2.0
//! Reserved feature bits (section 6), as bit *numbers*. [`bit`] converts a number to its mask.

/// The mask of a feature bit number.
pub const fn bit(number: u32) -> u64 {
    1 << number
}

/// Section 6: the driver may use arbitrary descriptor layouts (legacy; implied by VERSION_1).
pub const F_ANY_LAYOUT: u32 = 27;
/// Section 6: descriptors may point to a table of descriptors.
pub const F_INDIRECT_DESC: u32 = 28;
/// Section 6: notification suppression by index (`used_event`, `avail_event`).
pub const F_EVENT_IDX: u32 = 29;
/// Section 6: compliance with the specification (not legacy).
pub const F_VERSION_1: u32 = 32;
/// Section 6: the device may be used behind an IOMMU.
pub const F_ACCESS_PLATFORM: u32 = 33;
/// Section 6: the packed virtqueue layout.
pub const F_RING_PACKED: u32 = 34;
/// Section 6: the device uses buffers in the order in which the driver made them available.
pub const F_IN_ORDER: u32 = 35;

/// vhost, not virtio: log every write to guest memory in the dirty log.
pub const VHOST_F_LOG_ALL: u32 = 26;
/// vhost-user, not virtio: protocol feature negotiation is supported.
pub const VHOST_USER_F_PROTOCOL_FEATURES: u32 = 30;
