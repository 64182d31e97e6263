// SPDX-License-Identifier: Apache-2.0
//! Kicks and interrupts of a guest's disk for each request. A probe in the guest's kernel counts
//! kicks: notifications of all virtio devices on PCI (Documentation/trace/kprobetrace.rst).

use anyhow::{Context, Result, ensure};

use crate::metric::{Figures, INTERRUPTS, KICKS};

/// Mount point of tracefs.
pub const TRACING: &str = "/sys/kernel/tracing";
/// The definition, for `kprobe_events`.
pub const DEFINITION: &str = "p:kit/kick vp_notify";
/// Removes the definition.
pub const REMOVAL: &str = "-:kit/kick";
/// The switch of the probe, below [`TRACING`].
pub const SWITCH: &str = "events/kit/kick/enable";
/// The counters of all probes, below [`TRACING`].
pub const PROFILE: &str = "kprobe_profile";

/// The kicks so far, from the text of [`PROFILE`].
///
/// # Errors
/// If the text has no line `kick HITS MISSES`.
pub fn kicks(profile: &str) -> Result<u64> {
    let lines = profile.lines().map(str::split_whitespace);
    let hits = lines.filter_map(|mut words| (words.next()? == "kick").then(|| words.next()));
    let hits = hits.flatten().next().with_context(|| format!("no probe 'kick' in '{profile}'"))?;
    hits.parse().with_context(|| profile.to_owned())
}

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

    #[test]
    fn the_kernels_counters_are_understood() {
        assert_eq!(kicks("  other   7  0\n  kick   1234   5\n").unwrap(), 1234);
        assert!(kicks("  other   7  0\n").is_err());
    }
}
