// SPDX-License-Identifier: Apache-2.0
//! Files of sysfs, the kernel's log, and waits.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use kit::system::run;
use kit::wait;

/// Limit of every wait for the kernel.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Waits until `condition` returns a value.
pub(crate) fn wait_for<T>(what: &str, condition: impl FnMut() -> Option<T>) -> Result<T> {
    wait_up_to(LIMIT, what, condition)
}

/// Waits like [`wait_for`], with another limit.
pub(crate) fn wait_up_to<T>(
    limit: Duration,
    what: &str,
    mut condition: impl FnMut() -> Option<T>,
) -> Result<T> {
    wait::wait_until(limit, what, || Ok(condition()))
}

/// A file's text without surrounding white space.
pub(crate) fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(text.trim().to_owned())
}

/// The number in a file.
pub(crate) fn read_number(path: impl AsRef<Path>) -> Result<u64> {
    let path = path.as_ref();
    read(path)?.parse().with_context(|| path.display().to_string())
}

/// Number of interrupts so far, of all CPUs.
pub(crate) fn interrupts(irq: &str) -> Result<u64> {
    sum(&read(format!("/sys/kernel/irq/{irq}/per_cpu_count"))?)
}

/// Sum of the numbers in a comma-separated list.
fn sum(text: &str) -> Result<u64> {
    let numbers = text.split(',').map(|word| word.trim().parse::<u64>());
    numbers.sum::<Result<u64, _>>().with_context(|| text.to_owned())
}

/// Writes to an existing file.
pub(crate) fn write(path: impl AsRef<Path>, text: &str) -> Result<()> {
    let path = path.as_ref();
    if !path.exists() {
        bail!("{} is missing", path.display());
    }
    fs::write(path, text).with_context(|| format!("'{text}' to {}", path.display()))
}

/// A file of the kernel with a temporary value, restored on drop.
#[derive(Debug)]
pub(crate) struct Setting {
    path: &'static str,
    before: String,
}

impl Setting {
    /// Sets the temporary value.
    pub(crate) fn change(path: &'static str, value: &str) -> Result<Self> {
        let before = read(path)?;
        write(path, value)?;
        Ok(Self { path, before })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(why) = write(self.path, &self.before) {
            eprintln!("clean-up: {why:#}");
        }
    }
}

/// The kernel's log from a given moment on.
pub(crate) struct KernelLog {
    mark: String,
}

impl KernelLog {
    /// Starts at this moment.
    pub(crate) fn mark() -> Result<Self> {
        let mark = format!("cases: mark {:?}", Instant::now());
        // Without the end of its line, this message could not be read before the next one.
        fs::write("/dev/kmsg", format!("<6>{mark}\n")).context("/dev/kmsg")?;
        Ok(Self { mark })
    }

    /// The lines so far.
    pub(crate) fn lines(&self) -> Result<String> {
        let log = run("dmesg", &[])?;
        let at = log.rfind(&self.mark).context("the kernel's log has lost its mark")?;
        Ok(log[at + self.mark.len()..].to_owned())
    }

    /// Waits for a line that contains these words; returns false after `limit`.
    pub(crate) fn wait_for(&self, words: &str, limit: Duration) -> Result<bool> {
        let end = Instant::now() + limit;
        while !self.lines()?.contains(words) {
            if Instant::now() >= end {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(true)
    }
}

/// The lines that the kernel logs while `during` runs.
pub(crate) fn kernel_log<T>(during: impl FnOnce() -> Result<T>) -> Result<(T, String)> {
    let log = KernelLog::mark()?;
    let result = during()?;
    Ok((result, log.lines()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_those_of_all_cpus() {
        assert_eq!(sum("3,0,12,1").unwrap(), 16);
    }
}
