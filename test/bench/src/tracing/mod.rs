// SPDX-License-Identifier: Apache-2.0
//! The kernel's trace events (Documentation/trace/events.rst), in a buffer of our own.

mod line;

pub(crate) use self::line::{Device, Event, Trace, What};

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use kit::system::run;
use tempfile::TempDir;

const DIRECTORIES: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// The clock of the events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// CLOCK_MONOTONIC, printed in microseconds.
    Monotonic,
    /// The time stamp counter, which counts instructions under QEMU's `-icount`.
    Counter,
}

/// A tracefs.
#[derive(Debug)]
pub(crate) struct Tracefs {
    directory: PathBuf,
    /// The place where this process has mounted it; unmounted on drop.
    mounted: Option<TempDir>,
}

impl Tracefs {
    /// The mounted tracefs, or one that is mounted in a temporary directory.
    ///
    /// # Errors
    /// The kernel has no trace events, or this process may not use them.
    pub(crate) fn open() -> Result<Self> {
        let known = DIRECTORIES.map(PathBuf::from);
        if let Some(directory) =
            known.into_iter().find(|directory| directory.join("events").exists())
        {
            return Ok(Self { directory, mounted: None });
        }
        let place = tempfile::Builder::new().prefix("bench-tracing-").tempdir()?;
        let directory = place.path().to_owned();
        run("mount", &["-t", "tracefs", "tracefs", &directory.display().to_string()])
            .context("no trace events (they need root and a kernel with tracefs)")?;
        let this = Self { directory, mounted: Some(place) };
        if !this.directory.join("events").exists() {
            bail!("the kernel has no trace events");
        }
        Ok(this)
    }

    /// Its directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for Tracefs {
    fn drop(&mut self) {
        if self.mounted.is_some() {
            kit::system::run_quietly("umount", &[&self.directory.display().to_string()]);
        }
    }
}

/// Trace events on their way into a buffer of this process, which is removed on drop.
#[derive(Debug)]
pub(crate) struct Tracing {
    instance: PathBuf,
    _tracefs: Tracefs,
}

impl Tracing {
    /// An empty buffer of `kib` KiB for each CPU, without any event.
    ///
    /// # Errors
    /// As of [`Tracefs::open`].
    pub(crate) fn new(clock: Clock, kib: u32) -> Result<Self> {
        let tracefs = Tracefs::open()?;
        let instance = tracefs.directory().join(format!("instances/bench-{}", std::process::id()));
        fs::create_dir(&instance).with_context(|| format!("cannot make {}", instance.display()))?;
        let this = Self { instance, _tracefs: tracefs };
        this.set("tracing_on", "0")?;
        this.set(
            "trace_clock",
            match clock {
                Clock::Monotonic => "mono",
                Clock::Counter => "x86-tsc",
            },
        )?;
        this.set("buffer_size_kb", &kib.to_string())?;
        Ok(this)
    }

    /// Adds the events of a directory such as `sched/sched_switch`; false: the kernel has none.
    ///
    /// # Errors
    /// The events exist, and the kernel refuses them.
    pub(crate) fn add(&self, name: &str) -> Result<bool> {
        let switch = format!("events/{name}/enable");
        let exists = self.instance.join(&switch).exists();
        if exists {
            self.set(&switch, "1")?;
        }
        Ok(exists)
    }

    /// Records from now on.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn begin(&self) -> Result<()> {
        self.set("tracing_on", "1")
    }

    /// Ends the recording; gives the events.
    ///
    /// # Errors
    /// The buffer was too small, or cannot be read.
    pub(crate) fn finish(self) -> Result<Trace> {
        self.set("tracing_on", "0")?;
        let path = self.instance.join("trace");
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Trace::parse(&String::from_utf8_lossy(&text))
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let path = self.instance.join(name);
        fs::write(&path, value).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        // The events of an instance end with it.
        if let Err(error) = fs::remove_dir(&self.instance) {
            eprintln!("cannot remove {}: {error}", self.instance.display());
        }
    }
}
