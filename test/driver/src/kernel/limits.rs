// SPDX-License-Identifier: Apache-2.0
//! Limits in memory of this process that several devices share.

use super::abi::BlkShare;
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

/// `struct vhost_blk_debt`; see the header for the fields. It must stay in place while its device uses
/// it.
#[repr(C, align(16))]
#[derive(Debug, Default)]
pub struct SharedDebt {
    /// Cost for the limit on requests.
    pub iops_ns: AtomicU64,
    /// Cost for the limit on bytes.
    pub bytes_ns: AtomicU64,
}

impl SharedDebt {
    /// Forgives the debt, after a new version of the limits.
    pub fn forgive(&self) {
        self.iops_ns.store(0, Release);
        self.bytes_ns.store(0, Release);
    }
}

impl SharedLimits {
    /// Limits, in place of the present ones, whose costs are forgiven; [`SharedDebt::forgive`] forgives
    /// the debts.
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

    /// The part of a device with this debt.
    pub fn share(&self, debt: &SharedDebt) -> BlkShare {
        let (limits_addr, debt_addr) =
            (std::ptr::from_ref(self) as u64, std::ptr::from_ref(debt) as u64);
        BlkShare { limits_addr, debt_addr }
    }
}
