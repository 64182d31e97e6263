// SPDX-License-Identifier: Apache-2.0
//! CPU time and placement of processes.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kit::sched::{tasks, threads};
use kit::system;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

pub use kit::sched::Times;

/// A reading of the times of threads, each by its number. Sums do not suffice: a thread that ends takes its time from
/// them, such as an idle one of qemu-storage-daemon's pool.
#[derive(Clone, Debug, Default)]
pub struct Reading(BTreeMap<u32, Times>);

impl Reading {
    /// The increase since an earlier reading, without the threads that have ended in between.
    pub fn since(&self, earlier: &Self) -> Times {
        let before = |task| earlier.0.get(task).copied().unwrap_or_default();
        self.0.iter().map(|(task, times)| times.since(&before(task))).sum()
    }
}

impl FromIterator<(u32, Times)> for Reading {
    fn from_iter<I: IntoIterator<Item = (u32, Times)>>(threads: I) -> Self {
        Self(threads.into_iter().collect())
    }
}

/// Reads the times of the threads of a process.
pub fn times(pid: u32) -> Result<Reading> {
    times_of_all(&[pid])
}

/// Reads the times of the threads of processes.
pub fn times_of_all(pids: &[u32]) -> Result<Reading> {
    let threads = pids.iter().map(|&pid| threads(pid)).collect::<Result<Vec<_>>>()?;
    Ok(threads.into_iter().flatten().collect())
}

/// Reads the times of the vhost workers among the threads of a process.
pub fn vhost_times(pid: u32) -> Result<Reading> {
    let workers = vhost_tasks(pid)?;
    Ok(threads(pid)?.into_iter().filter(|(task, _)| workers.contains(task)).collect())
}

/// Pins the vhost workers among the threads of a process.
pub fn pin_vhost(pid: u32, cpus: &[usize]) -> Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    for task in vhost_tasks(pid)? {
        let thread = Pid::from_raw(task as i32).context("thread id 0")?;
        sched_setaffinity(Some(thread), &cpu_set(cpus)).context("cannot move a vhost worker")?;
    }
    Ok(())
}

/// Numbers of the vhost workers among the threads of a process.
pub(crate) fn vhost_tasks(pid: u32) -> Result<Vec<u32>> {
    let is_worker = |task: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/task/{task}/comm"));
        name.is_ok_and(|name| name.starts_with("vhost-"))
    };
    Ok(tasks(pid)?.into_iter().filter(is_worker).collect())
}

/// CPU time of all tasks on the machine since it started, in steps of 10 ms.
pub fn machine_busy() -> Result<Duration> {
    let text = fs::read_to_string("/proc/stat")?;
    parse_machine(&text).context("/proc/stat has an unknown form")
}

fn parse_machine(text: &str) -> Option<Duration> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_whitespace().map_while(|t| t.parse().ok()).collect();
    // user, nice, system, (idle, waiting,) interrupts, soft interrupts
    let busy = [0, 1, 2, 5, 6].iter().map(|&i| ticks.get(i)).sum::<Option<u64>>()?;
    Some(Duration::from_millis(busy * 10))
}

fn cpu_set(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    set
}

/// Pins the calling thread if a CPU is given.
pub fn pin_this_thread(cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    sched_setaffinity(None, &cpu_set(&[cpu])).with_context(|| format!("cannot run on CPU {cpu}"))
}

/// Pins all threads of a process if CPUs are given.
pub fn pin_process(pid: u32, cpus: &[usize]) -> Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let set = cpu_set(cpus);
    for task in tasks(pid)? {
        let thread = Pid::from_raw(task as i32).context("thread id 0")?;
        let moved = sched_setaffinity(Some(thread), &set);
        // Kernel workers (io_uring) may refuse, and any thread but the first may have ended.
        if task == pid {
            moved.with_context(|| format!("cannot move process {pid} to CPUs {cpus:?}"))?;
        }
    }
    Ok(())
}

/// Parses `0-2,5`; `none` is the empty list.
pub fn parse_list(text: &str) -> Result<CpuList, String> {
    if text == "none" {
        return Ok(CpuList(Vec::new()));
    }
    match system::cpu_list(text) {
        Ok(cpus) if cpus.is_empty() => Err("no CPUs in the list".to_owned()),
        Ok(cpus) => Ok(CpuList(cpus)),
        Err(why) => Err(why.to_string()),
    }
}

/// CPU numbers of one command-line option.
#[derive(Clone, Debug)]
pub struct CpuList(pub Vec<usize>);

/// CPUs that this process may use.
pub fn usable() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    let cpus: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    if cpus.is_empty() {
        bail!("this process may use no CPU");
    }
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::process::{OwnedChild, StopWith};

    #[test]
    fn cpu_lists_take_numbers_and_ranges() {
        assert_eq!(parse_list("0-2,5").unwrap().0, [0, 1, 2, 5]);
        assert_eq!(parse_list("3-1").unwrap_err(), "no CPUs in the list");
        assert!(parse_list("none").unwrap().0.is_empty());
        assert_eq!(parse_list("a").unwrap_err(), "`a` is not a CPU number");
    }

    #[test]
    fn time_of_the_machine_leaves_idle_time_out() {
        let text = "cpu  1 2 3 1000 1000 4 5 1000 0 0\ncpu0 9 9\n";
        assert_eq!(parse_machine(text), Some(Duration::from_millis(150)));
        assert_eq!(parse_machine("cpu  1 2\n"), None);
    }

    #[test]
    fn a_thread_that_ends_takes_no_time_from_the_others() {
        let reading = |threads: &[(u32, u64)]| -> Reading {
            let times = |ms| Times { busy: Duration::from_millis(ms), ..Times::default() };
            threads.iter().map(|&(task, ms)| (task, times(ms))).collect()
        };
        let before = reading(&[(1, 10), (2, 9000)]);
        let after = reading(&[(1, 15), (3, 2)]);
        assert_eq!(after.since(&before).busy, Duration::from_millis(7));
    }

    #[test]
    fn cpu_time_of_a_process_grows_with_work() {
        let args = ["sh", "-c", "while :; do :; done"].map(str::to_owned);
        let null = std::path::Path::new("/dev/null");
        let child = OwnedChild::spawn(&args, null, StopWith::Kill).unwrap();
        let before = times(child.id()).unwrap();
        while times(child.id()).unwrap().since(&before).busy < Duration::from_millis(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
