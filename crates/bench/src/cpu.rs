// SPDX-License-Identifier: Apache-2.0
//! CPU time and placement of processes.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// CPU time of all living threads of a process, in nanoseconds (`schedstat`).
pub fn process_cpu(pid: u32) -> Result<Duration> {
    let mut total_ns = 0;
    for task in tasks(pid)? {
        let path = format!("/proc/{pid}/task/{task}/schedstat");
        // A thread may end between the listing and the reading; its time is lost, not the run.
        let Ok(text) = fs::read_to_string(path) else { continue };
        let field = text.split_whitespace().next().context("schedstat has no fields")?;
        total_ns += field.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(total_ns))
}

fn tasks(pid: u32) -> Result<Vec<u32>> {
    let directory = format!("/proc/{pid}/task");
    let entries =
        fs::read_dir(&directory).with_context(|| format!("process {pid} is not running"))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

fn cpu_set(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    set
}

/// Pins the calling thread, where a CPU is given.
pub fn pin_this_thread(cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    sched_setaffinity(None, &cpu_set(&[cpu])).with_context(|| format!("cannot run on CPU {cpu}"))
}

/// Pins all threads of a process, where CPUs are given.
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
    let number = |t: &str| t.parse::<usize>().map_err(|_| format!("`{t}` is not a CPU number"));
    let mut cpus = Vec::new();
    for part in text.split(',') {
        match part.split_once('-') {
            None => cpus.push(number(part)?),
            Some((first, last)) => cpus.extend(number(first)?..=number(last)?),
        }
    }
    if cpus.is_empty() { Err("no CPUs in the list".to_owned()) } else { Ok(CpuList(cpus)) }
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

    #[test]
    fn cpu_lists_take_numbers_and_ranges() {
        assert_eq!(parse_list("0-2,5").unwrap().0, [0, 1, 2, 5]);
        assert!(parse_list("none").unwrap().0.is_empty());
        assert_eq!(parse_list("a").unwrap_err(), "`a` is not a CPU number");
    }

    #[test]
    fn cpu_time_of_this_process_grows_with_work() {
        let pid = std::process::id();
        let before = process_cpu(pid).unwrap();
        let mut sum = 0_u64;
        while process_cpu(pid).unwrap() == before {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(process_cpu(pid).unwrap() > before);
    }
}
