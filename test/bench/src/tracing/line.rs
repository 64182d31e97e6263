// SPDX-License-Identifier: Apache-2.0
//! The text form of trace events.

use std::collections::HashMap;

use anyhow::{Result, bail};

/// The part of an event that the measurements need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A task calls the kernel: number of the call, and its third argument.
    Enter(i64, u64),
    /// The call returns.
    Exit,
    /// Another task gets the CPU.
    Switch(u32),
    /// The submission of an I/O to io_uring begins.
    Uring,
    /// A bio enters the block layer: device, first sector, sectors.
    Queue(Device, u64, u64),
    /// A request of a block device has completed: first sector, sectors.
    Complete(u64, u64),
    /// A stage of the kernel plane's module ends.
    Module(String),
}

/// Major and minor number.
pub(crate) type Device = (u32, u32);

/// An event.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Event {
    /// The task that ran.
    pub(crate) task: u32,
    /// Microseconds or, by [`super::Clock::Counter`], instructions.
    pub(crate) at: f64,
    pub(crate) what: What,
}

/// A trace, in order of its times.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    pub(crate) events: Vec<Event>,
    /// The command of each task that had an event.
    pub(crate) commands: HashMap<u32, String>,
}

impl Trace {
    /// Reads the text form.
    ///
    /// # Errors
    /// The trace lacks events, because the buffer was too small.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if let Some(lost) = lost(text).filter(|lost| *lost > 0) {
            bail!("the buffer of the trace was too small: {lost} events are lost");
        }
        let mut trace = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((command, event)) = event(line) else { continue };
            trace.commands.entry(event.task).or_insert_with(|| command.to_owned());
            trace.events.push(event);
        }
        Ok(trace)
    }

    /// The tasks that bring I/Os to the block layer.
    pub(crate) fn tasks_that_queue(&self) -> impl Iterator<Item = u32> {
        let queues = self.events.iter().filter(|event| matches!(event.what, What::Queue(..)));
        queues.map(|event| event.task)
    }

    /// The tasks of a command.
    pub(crate) fn tasks_of(&self, command: &str) -> Vec<u32> {
        let is_its = |(_, known): &(&u32, &String)| *known == command;
        self.commands.iter().filter(is_its).map(|(task, _)| *task).collect()
    }
}

/// The number of lost events, from the head of a trace.
fn lost(trace: &str) -> Option<u64> {
    let head = trace.lines().find(|line| line.contains("entries-in-buffer/entries-written:"))?;
    let (kept, written) = head.split_once(": ")?.1.split_whitespace().next()?.split_once('/')?;
    Some(written.parse::<u64>().ok()?.saturating_sub(kept.parse().ok()?))
}

/// `COMMAND-TASK [CPU] FLAGS TIME: EVENT: TEXT`; gives the command as well.
fn event(line: &str) -> Option<(&str, Event)> {
    let (task, rest) = line.split_once(" [")?;
    let (command, task) = task.trim().rsplit_once('-')?;
    let task = task.parse().ok()?;
    let (head, rest) = rest.split_once(": ")?;
    let at = time(head.split_whitespace().last()?)?;
    let (name, text) = rest.split_once(':')?;
    Some((command, Event { task, at, what: what(name, text.trim_start())? }))
}

/// Seconds with a point become microseconds; a counter stays.
fn time(text: &str) -> Option<f64> {
    match text.split_once('.') {
        Some((seconds, micros)) => {
            Some(seconds.parse::<f64>().ok()? * 1e6 + micros.parse::<f64>().ok()?)
        }
        None => text.parse().ok(),
    }
}

fn what(name: &str, text: &str) -> Option<What> {
    Some(match name {
        "sys_enter" => enter(text)?,
        "sys_exit" => What::Exit,
        "sched_switch" => {
            let next = text.split("next_pid=").nth(1)?;
            What::Switch(next.split_whitespace().next()?.parse().ok()?)
        }
        "io_uring_submit_req" | "io_uring_submit_sqe" => What::Uring,
        "block_bio_queue" => {
            let (device, sector, sectors) = block(text)?;
            What::Queue(device, sector, sectors)
        }
        "block_rq_complete" | "block_bio_complete" => {
            let (_, sector, sectors) = block(text)?;
            What::Complete(sector, sectors)
        }
        _ => What::Module(name.strip_prefix("vhost_blk_")?.to_owned()),
    })
}

/// `NR NUMBER (ARGUMENT, ...)`, the arguments in hexadecimal digits.
fn enter(text: &str) -> Option<What> {
    let (number, arguments) = text.strip_prefix("NR ")?.split_once(" (")?;
    let third = arguments.trim_end_matches(')').split(", ").nth(2)?;
    Some(What::Enter(number.parse().ok()?, u64::from_str_radix(third, 16).ok()?))
}

/// `MAJOR,MINOR OPERATION ... SECTOR + SECTORS ...`.
fn block(text: &str) -> Option<(Device, u64, u64)> {
    let (device, rest) = text.split_once(' ')?;
    let (major, minor) = device.split_once(',')?;
    let (before, after) = rest.split_once(" + ")?;
    let sector = before.split_whitespace().last()?.parse().ok()?;
    let sectors = after.split_whitespace().next()?.parse().ok()?;
    Some(((major.parse().ok()?, minor.parse().ok()?), sector, sectors))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# tracer: nop
# entries-in-buffer/entries-written: 7/7   #P:2
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
           bench-77      [000] .....  1234.000010: sys_enter: NR 1 (5, 7ffe10, 8, 0, 0, 0)
 vhost-blk-0-a b-1234    [001] d....  1234.000012: sched_switch: prev_comm=x prev_pid=9 prev_prio=120 prev_state=S ==> next_comm=y next_pid=12 next_prio=120
     vhost-blk-0-12      [001] .....  1234.000013: sys_exit: NR 426 = 1
     vhost-blk-0-12      [001] .....  1234.000014: io_uring_submit_req: ring 00000000, req 00000000, user_data 0x1, opcode READ, flags 0x0, sq_thread 0
     vhost-blk-0-12      [001] .....  1234.000015: block_bio_queue: 254,0 R 2048 + 8 [vhost-blk-0]
          <idle>-0       [001] d.h1.  1234.000100: block_rq_complete: 254,0 R () 2048 + 8 none,0,0 [0]
     vhost-blk-0-12      [001] .....  1234.000101: vhost_blk_chain: dev 0 queue 0 head 1
";

    #[test]
    fn each_event_has_its_task_its_time_and_its_arguments() {
        let trace = Trace::parse(TRACE).unwrap();
        let all = &trace.events;
        let found: Vec<_> = all.iter().map(|e| (e.task, e.at - 1234e6, e.what.clone())).collect();
        let expected = [
            (77, 10.0, What::Enter(1, 8)),
            (1234, 12.0, What::Switch(12)),
            (12, 13.0, What::Exit),
            (12, 14.0, What::Uring),
            (12, 15.0, What::Queue((254, 0), 2048, 8)),
            (0, 100.0, What::Complete(2048, 8)),
            (12, 101.0, What::Module("chain".to_owned())),
        ];
        assert_eq!(found, expected);
        assert_eq!((trace.tasks_of("bench"), trace.tasks_of("fio")), (vec![77], vec![]));
        assert_eq!(trace.tasks_of("vhost-blk-0-a b"), [1234]);
        assert_eq!(trace.tasks_that_queue().collect::<Vec<_>>(), [12]);
    }

    #[test]
    fn a_counter_is_a_time_as_well() {
        let line = " a-1 [000] ..... 5000123: sys_exit: NR 1 = 8";
        assert_eq!(Trace::parse(line).unwrap().events[0].at, 5_000_123.0);
    }

    #[test]
    fn a_trace_that_lacks_events_is_an_error() {
        let trace = TRACE.replace("7/7", "7/9");
        assert!(Trace::parse(&trace).unwrap_err().to_string().contains("2 events are lost"));
    }
}
