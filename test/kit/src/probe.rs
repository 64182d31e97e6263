// SPDX-License-Identifier: Apache-2.0
//! Counts the calls of a kernel function by a probe (Documentation/trace/kprobetrace.rst).

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// Mount point of tracefs.
pub const TRACING: &str = "/sys/kernel/tracing";
/// The counters of all probes, below [`TRACING`].
pub const PROFILE: &str = "kprobe_profile";

/// The name of a probe and its function: `FUNCTION`, or `MODULE:FUNCTION`.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The name of the probe, unique.
    pub name: &'static str,
    /// The function.
    pub function: &'static str,
}

impl Place {
    /// The definition, for `kprobe_events`.
    pub fn definition(&self) -> String {
        format!("p:kit/{} {}", self.name, self.function)
    }

    /// Removes the definition.
    fn removal(&self) -> String {
        format!("-:kit/{}", self.name)
    }

    /// The switch of the probe, below [`TRACING`].
    pub fn switch(&self) -> String {
        format!("events/kit/{}/enable", self.name)
    }

    /// The calls so far, from the text of [`PROFILE`].
    ///
    /// # Errors
    /// If the text has no line `NAME HITS MISSES`.
    pub fn hits(&self, profile: &str) -> Result<u64> {
        let lines = profile.lines().map(str::split_whitespace);
        let hits = lines.filter_map(|mut words| (words.next()? == self.name).then(|| words.next()));
        let hits = hits.flatten().next();
        let hits = hits.with_context(|| format!("no probe '{}' in '{profile}'", self.name))?;
        hits.parse().with_context(|| profile.to_owned())
    }
}

/// A probe of this machine, removed on drop.
#[derive(Debug)]
pub struct Probe(Place);

impl Probe {
    /// Starts counting.
    ///
    /// # Errors
    /// The kernel refuses the probe.
    pub fn start(place: Place) -> Result<Self> {
        change(&place.definition())?;
        let probe = Self(place);
        probe.enable("1")?;
        Ok(probe)
    }

    /// The calls so far.
    ///
    /// # Errors
    /// The kernel's counters cannot be read.
    pub fn hits(&self) -> Result<u64> {
        let path = Path::new(TRACING).join(PROFILE);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        self.0.hits(&text)
    }

    fn enable(&self, on: &str) -> Result<()> {
        let path = Path::new(TRACING).join(self.0.switch());
        fs::write(&path, on).with_context(|| format!("'{on}' to {}", path.display()))
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let removed = self.enable("0").and_then(|()| change(&self.0.removal()));
        if let Err(why) = removed {
            eprintln!("clean-up: {why:#}");
        }
    }
}

/// Appends a definition to the existing ones.
fn change(definition: &str) -> Result<()> {
    let path = Path::new(TRACING).join("kprobe_events");
    let file = OpenOptions::new().append(true).open(&path);
    file.and_then(|mut file| file.write_all(format!("{definition}\n").as_bytes()))
        .with_context(|| format!("'{definition}' to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_are_understood() {
        let place = Place { name: "kick", function: "vp_notify" };
        assert_eq!(place.hits("  other   7  0\n  kick   1234   5\n").unwrap(), 1234);
        assert!(place.hits("  other   7  0\n").is_err());
    }
}
