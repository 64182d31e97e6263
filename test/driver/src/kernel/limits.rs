// SPDX-License-Identifier: Apache-2.0
//! Limits in memory of this process that several devices share.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// `struct vhost_blk_limits`; see the header for the fields. It must stay in place while a device uses
/// it.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct SharedLimits {
    /// Number of changes.
    pub version: AtomicU64,
    /// The burst.
    pub burst_ns: AtomicU64,
    /// Requests a second.
    pub iops: AtomicU64,
    /// The time at which the next request passes.
    pub iops_clock: AtomicU64,
    /// Bytes a second.
    pub bytes: AtomicU64,
    /// The time at which the next request passes.
    pub bytes_clock: AtomicU64,
    /// The highest cost of a device.
    pub top: AtomicU64,
    /// The lowest cost of a device that waits.
    pub behind: AtomicU64,
    /// End of the wait of that device.
    pub behind_ns: AtomicU64,
    /// Number of that device.
    pub behind_by: AtomicU64,
    /// Zero.
    pub reserved: [u64; 6],
}

impl SharedLimits {
    /// Limits, in place of the present ones, whose debt and costs are forgiven.
    pub fn set(&self, iops: u64, bytes: u64, burst_ns: u64) {
        for (field, value) in [
            (&self.burst_ns, burst_ns),
            (&self.iops, iops),
            (&self.iops_clock, 0),
            (&self.bytes, bytes),
            (&self.bytes_clock, 0),
            (&self.top, 0),
            (&self.behind, 0),
            (&self.behind_ns, 0),
        ] {
            field.store(value, Relaxed);
        }
        // A queue that sees the version sees the limits.
        self.version.fetch_add(1, Release);
    }

    /// Address for the device.
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }
}
