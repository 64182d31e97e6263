// SPDX-License-Identifier: Apache-2.0
//! Wakes the CPUs of an emulated machine, which loses timer interrupts.
//!
//! A CPU that has lost the interrupt of its one-shot timer sleeps until another CPU needs it. Its
//! kernel programs the timer again as soon as a thread runs on the CPU. So each CPU has a thread
//! that sleeps for a while by its own CPU's timer, and then wakes the thread of the next CPU.

use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kit::system::cpu_list;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::guest::system::read;

/// Interval between two wake-ups of a CPU.
const INTERVAL: Duration = Duration::from_secs(1);

/// Wakes all CPUs until the machine ends.
pub(crate) fn beat() -> Result<()> {
    let cpus = cpu_list(&read("/sys/devices/system/cpu/possible")?)?;
    let mut next = thread::current();
    for cpu in cpus {
        let body = move || beat_on(cpu, &next);
        let spawned = thread::Builder::new().name(format!("heartbeat-{cpu}")).spawn(body);
        next = spawned.context("cannot start a thread")?.thread().clone();
    }
    // The first thread's neighbour is this one: it closes the ring.
    loop {
        thread::park();
        next.unpark();
    }
}

fn beat_on(cpu: usize, next: &Thread) {
    let mut only = CpuSet::new();
    only.set(cpu);
    loop {
        // Fails while the CPU is offline. A CPU that comes back gets its thread back.
        let _ = sched_setaffinity(None, &only);
        let due = Instant::now() + INTERVAL;
        while let Some(left) = due.checked_duration_since(Instant::now()) {
            thread::park_timeout(left);
        }
        next.unpark();
    }
}
