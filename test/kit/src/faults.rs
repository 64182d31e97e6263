// SPDX-License-Identifier: Apache-2.0
//! Faults that a kernel with fault injection injects
//! (Documentation/fault-injection/fault-injection.rst).

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::outcome::skip;

/// Mount point with the switches.
const DEBUGFS: &str = "/sys/kernel/debug";
/// Faults that may be injected: more than any test needs. The kernel counts down the rest.
const TIMES: i64 = 1_000_000_000;

/// An active fault, switched off on drop.
pub struct Fault {
    directory: PathBuf,
    /// The other settings and their earlier values.
    before: Vec<(String, String)>,
}

impl Fault {
    /// Switches the fault on with this probability in percent, after it has set `more`, the other
    /// files of its directory.
    ///
    /// # Errors
    /// A skip if this kernel does not have the fault.
    pub fn on(name: &str, percent: u32, more: &[(&str, &str)]) -> Result<Self> {
        let directory = Path::new(DEBUGFS).join(name);
        if !directory.exists() {
            return Err(skip(format!("this kernel has no {name}")));
        }
        let mut fault = Self { directory, before: Vec::new() };
        for (file, value) in [("verbose", "0"), ("times", &TIMES.to_string()), ("interval", "1")] {
            fault.set(file, value)?;
        }
        for (file, value) in more {
            let before = fault.get(file)?;
            fault.before.push(((*file).to_owned(), before));
            fault.set(file, value)?;
        }
        fault.set("probability", &percent.to_string())?;
        Ok(fault)
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.directory.join(file);
        std::fs::write(&path, value).with_context(|| path.display().to_string())
    }

    fn get(&self, file: &str) -> Result<String> {
        let path = self.directory.join(file);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok(text.trim().to_owned())
    }

    /// Number of faults injected since the fault was switched on.
    ///
    /// # Errors
    /// If the kernel does not report the number.
    pub fn injected(&self) -> Result<i64> {
        Ok(TIMES - self.get("times")?.parse::<i64>().context("what is left of the faults")?)
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        let off = self.set("probability", "0");
        let back = self.before.iter().map(|(file, value)| self.set(file, value));
        for why in std::iter::once(off).chain(back).filter_map(Result::err) {
            eprintln!("clean-up: {why:#}");
        }
    }
}

/// One fault of this thread, at any place of the kernel whose faults are not filtered out, whatever their probability.
pub struct NthFault(File);

impl NthFault {
    /// # Errors
    /// A skip if this kernel injects no faults.
    pub fn of_this_thread() -> Result<Self> {
        let file = File::options().read(true).write(true).open("/proc/thread-self/fail-nth");
        file.map(Self).map_err(|_| skip("threads cannot be exposed to faults here"))
    }

    /// Makes the `n`th place from now on fail.
    ///
    /// # Errors
    /// If the kernel refuses the number.
    pub fn arm(&mut self, n: u32) -> Result<()> {
        self.0.write_all(n.to_string().as_bytes()).context("fail-nth")
    }

    /// Returns whether the fault was injected; it will not be any more.
    ///
    /// # Errors
    /// If the kernel does not tell it.
    pub fn disarm(&mut self) -> Result<bool> {
        let mut left = [0; 16];
        let is_over = match self.0.read_at(&mut left, 0) {
            Ok(_) => left[0] == b'0',
            // This copy of the number was to fail.
            Err(_) => false,
        };
        // The copy for this write may be to fail, too.
        self.arm(0).or_else(|_| self.arm(0))?;
        Ok(is_over)
    }
}
