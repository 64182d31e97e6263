// SPDX-License-Identifier: Apache-2.0
//! Kicks and interrupts of a guest's disk for each request.

use anyhow::{Result, ensure};

use crate::metric::{Figures, INTERRUPTS, KICKS};
use crate::probe::Place;

/// The probe in the guest's kernel that counts kicks: notifications of all virtio devices on PCI.
pub const KICK: Place = Place { name: "kick", function: "vp_notify" };

/// The guest's counters of a disk at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Signals {
    /// Kicks of all devices.
    pub kicks: u64,
    /// Interrupts of the disk.
    pub interrupts: u64,
    /// Requests as their submitters counted them.
    pub requests: u64,
}

impl Signals {
    /// The growth until `later`, for each request.
    ///
    /// # Errors
    /// If there was no request.
    pub fn until(&self, later: &Self) -> Result<Figures> {
        ensure!(later.requests > self.requests, "the load had no requests");
        let requests = (later.requests - self.requests) as f64;
        Ok(vec![
            (KICKS, (later.kicks - self.kicks) as f64 / requests),
            (INTERRUPTS, (later.interrupts - self.interrupts) as f64 / requests),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_for_each_request() {
        let before = Signals { kicks: 100, interrupts: 50, requests: 1000 };
        let later = Signals { kicks: 600, interrupts: 300, requests: 2000 };
        assert_eq!(before.until(&later).unwrap(), [(KICKS, 0.5), (INTERRUPTS, 0.25)]);
        assert!(before.until(&before).is_err());
    }
}
