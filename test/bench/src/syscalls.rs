// SPDX-License-Identifier: Apache-2.0
//! Counts system calls of a process by the kernel's tracepoint, as `perf trace -s` does.
//!
//! While a counter exists, each system call of the machine takes a slower path: rates are measured
//! without one.

use std::fs;

use anyhow::{Context, Result};
use kit::metric::Metric;
use kit::sched::tasks;
use perf_event::events::Tracepoint;
use perf_event::{Builder, Counter};

use crate::tracing::Tracefs;

/// System calls of the server for each request.
pub(crate) const SYSCALLS: Metric = Metric::new("syscalls", "1");

const EVENT: &str = "events/raw_syscalls/sys_enter/id";

/// Running counters of all threads that a process has now.
#[derive(Debug)]
pub(crate) struct Syscalls(Vec<Counter>);

impl Syscalls {
    /// Counts from now on. A thread that starts later is not counted.
    ///
    /// # Errors
    /// The kernel has no such tracepoint, or this process may not count.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let id = event_id()?;
        let counters = tasks(pid)?.into_iter().filter_map(|task| counter(id, task).transpose());
        Ok(Self(counters.collect::<Result<_>>()?))
    }

    /// The calls so far.
    ///
    /// # Errors
    /// A counter cannot be read.
    pub(crate) fn count(&mut self) -> Result<u64> {
        let mut sum = 0;
        for counter in &mut self.0 {
            sum += counter.read()?;
        }
        Ok(sum)
    }
}

/// A running counter of an event in a thread; `None`: the thread has ended since it was listed.
fn counter(id: u64, task: u32) -> Result<Option<Counter>> {
    // The event itself is in the kernel.
    let built = Builder::new(Tracepoint::with_id(id))
        .observe_pid(task as i32)
        .any_cpu()
        .exclude_kernel(false)
        .exclude_hv(false)
        .build();
    let mut counter = match built {
        Err(why) if why.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        built => built.context("cannot count system calls (root is needed)")?,
    };
    counter.enable()?;
    Ok(Some(counter))
}

fn event_id() -> Result<u64> {
    let tracefs = Tracefs::open()?;
    let path = tracefs.directory().join(EVENT);
    let text = fs::read_to_string(&path).with_context(|| {
        format!("the kernel has no tracepoint of system calls {}", path.display())
    })?;
    text.trim().parse().context("the number of a tracepoint")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::process::{OwnedChild, StopWith};
    use kit::wait::wait_until;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_thread_that_has_ended_is_left_out() {
        let id = match event_id() {
            Ok(id) => id,
            Err(why) => return println!("SKIP: {why:#}"),
        };
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(counter(id, child.id()).unwrap().is_none());
    }

    #[test]
    fn each_call_of_a_process_is_counted_and_none_of_another_one() {
        let mut calls = match Syscalls::of(std::process::id()) {
            Ok(calls) => calls,
            Err(why) => return println!("SKIP: {why:#}"),
        };
        let args = ["sleep", "100"].map(str::to_owned);
        let null = std::path::Path::new("/dev/null");
        let idle = OwnedChild::spawn(&args, null, StopWith::Kill).unwrap();
        let asleep = || fs::read_to_string(format!("/proc/{}/wchan", idle.id()));
        wait_until(LIMIT, "a process that sleeps", || {
            Ok(asleep()?.contains("nanosleep").then_some(()))
        })
        .unwrap();
        let mut of_idle = Syscalls::of(idle.id()).unwrap();
        let before = calls.count().unwrap();
        for _ in 0..100 {
            let _ = fs::metadata("/proc/self");
        }
        // Other tests may be threads of this process.
        assert!(calls.count().unwrap() - before >= 100);
        assert_eq!(of_idle.count().unwrap(), 0);
    }
}
