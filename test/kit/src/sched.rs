// SPDX-License-Identifier: Apache-2.0
//! The scheduler's times of threads (`schedstat`).

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Times of one or more threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Time on a CPU.
    pub busy: Duration,
    /// Time ready to run while another task had the CPU.
    pub waited: Duration,
}

impl Times {
    /// The increase since an earlier reading of the same threads.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            busy: self.busy.saturating_sub(earlier.busy),
            waited: self.waited.saturating_sub(earlier.waited),
        }
    }

    /// The times of the calling thread.
    pub fn of_this_thread() -> Result<Self> {
        parse(&fs::read_to_string("/proc/thread-self/schedstat")?)
    }
}

impl std::iter::Sum for Times {
    fn sum<I: Iterator<Item = Self>>(times: I) -> Self {
        times.fold(Self::default(), |sum, times| Self {
            busy: sum.busy + times.busy,
            waited: sum.waited + times.waited,
        })
    }
}

/// Numbers of the living threads of a process.
pub fn tasks(pid: u32) -> Result<Vec<u32>> {
    let directory = format!("/proc/{pid}/task");
    let entries =
        fs::read_dir(&directory).with_context(|| format!("process {pid} is not running"))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// Number and times of each living thread of a process.
pub fn threads(pid: u32) -> Result<Vec<(u32, Times)>> {
    let mut threads = Vec::new();
    for task in tasks(pid)? {
        // A thread may end between the listing and the reading; its time is lost, but the run
        // continues.
        if let Ok(text) = fs::read_to_string(format!("/proc/{pid}/task/{task}/schedstat")) {
            threads.push((task, parse(&text)?));
        }
    }
    Ok(threads)
}

/// Number of the calling thread.
pub fn this_task() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// The state of a living thread: the letter in its `stat` (proc_pid_stat(5)).
fn state(pid: u32, task: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{task}/stat")).ok()?;
    // The name in parentheses may contain anything.
    stat.rsplit(") ").next()?.chars().next()
}

/// Returns whether all threads of a killed process have ended, or wait in the kernel for something that no signal ends.
pub fn stands_still(pid: u32) -> Result<bool> {
    let is_running = |task: &u32| !matches!(state(pid, *task), None | Some('D' | 'X' | 'Z'));
    Ok(!tasks(pid)?.iter().any(is_running))
}

/// Returns whether a thread of this process waits uninterruptibly in a function of the kernel, by its stack, which only
/// root may read.
pub fn waits_in(task: u32, function: &str) -> bool {
    let frame = format!("] {function}+");
    let stack = || fs::read_to_string(format!("/proc/self/task/{task}/stack")).ok();
    state(std::process::id(), task) == Some('D')
        && stack().is_some_and(|stack| stack.contains(&frame))
}

/// Bounds the time for which a process makes no progress. A process that waits for a CPU on a busy
/// machine gets more time: it is no hang.
#[derive(Debug)]
pub struct Patience {
    pid: u32,
    limit: Duration,
    began: Instant,
    waited: Duration,
}

impl Patience {
    /// A bound for the process `pid`, from now on.
    pub fn new(pid: u32, limit: Duration) -> Self {
        Self { pid, limit, began: Instant::now(), waited: longest_wait(pid) }
    }

    /// Takes note of progress: the time begins anew.
    pub fn renew(&mut self) {
        *self = Self::new(self.pid, self.limit);
    }

    /// Returns whether the process has exceeded the limit. The time that one of its threads waited
    /// for a CPU does not count.
    pub fn is_over(&self) -> bool {
        let passed = self.began.elapsed();
        passed >= self.limit
            && exceeds(passed, self.limit, longest_wait(self.pid).saturating_sub(self.waited))
    }
}

fn exceeds(passed: Duration, limit: Duration, waited: Duration) -> bool {
    passed.saturating_sub(waited) >= limit
}

/// The longest wait for a CPU of any thread of a process; zero if it has ended.
fn longest_wait(pid: u32) -> Duration {
    let threads = threads(pid).unwrap_or_default();
    threads.iter().map(|(_, times)| times.waited).max().unwrap_or_default()
}

fn parse(text: &str) -> Result<Times> {
    let mut fields = text.split_whitespace().map(str::parse::<u64>);
    let mut next = || -> Result<Duration> {
        Ok(Duration::from_nanos(fields.next().context("schedstat has too few fields")??))
    };
    Ok(Times { busy: next()?, waited: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, Signal, kill_process};
    use std::process::{Command, Stdio};

    #[test]
    fn times_are_read_from_the_first_two_fields() {
        let times = Times { busy: Duration::from_nanos(7), waited: Duration::from_nanos(9) };
        assert_eq!(parse("7 9 3\n").unwrap(), times);
        assert!(parse("7").is_err() && parse("a b").is_err());
        assert!(threads(u32::MAX).is_err());
    }

    #[test]
    fn a_killed_process_stands_still_and_one_that_sleeps_does_not() {
        let mut child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let wait_for = |letter| {
            while state(child.id(), child.id()) != Some(letter) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait_for('S');
        assert!(!stands_still(child.id()).unwrap());
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        wait_for('Z');
        assert!(stands_still(child.id()).unwrap());
        child.wait().unwrap();
        assert_eq!(state(child.id(), child.id()), None);
    }

    #[test]
    fn a_process_that_sleeps_exceeds_its_limit_and_progress_renews_it() {
        let mut child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let mut patience = Patience::new(child.id(), Duration::MAX);
        assert!(!patience.is_over());
        let began = patience.began;
        patience.limit = Duration::from_millis(200);
        while !patience.is_over() {
            std::thread::sleep(Duration::from_millis(10));
        }
        patience.renew();
        assert!(patience.began >= began + patience.limit);
        assert_eq!(patience.limit, Duration::from_millis(200));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn time_without_a_cpu_does_not_count() {
        let [limit, short, long] = [10, 12, 60].map(Duration::from_secs);
        assert!(exceeds(short, limit, Duration::ZERO));
        assert!(!exceeds(short, limit, Duration::from_secs(3)));
        assert!(exceeds(long, limit, long - limit));
    }
}
