// SPDX-License-Identifier: Apache-2.0
//! A probe in a guest's kernel that counts kicks: notifications of all virtio devices on PCI
//! (Documentation/trace/kprobetrace.rst).

use anyhow::{Context, Result};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_are_understood() {
        assert_eq!(kicks("  other   7  0\n  kick   1234   5\n").unwrap(), 1234);
        assert!(kicks("  other   7  0\n").is_err());
    }
}
