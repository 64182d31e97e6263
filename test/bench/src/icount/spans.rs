// SPDX-License-Identifier: Apache-2.0
//! Instructions of each stage of any path, by the kernel's trace events on the only CPU.
//!
//! Each instruction between two events counts for one stage, by the task that runs and by the events
//! around it. So no server is changed for it, and the stages add up to the whole path.

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::{Result, bail};
use kit::metric::{Metric, Set, point};
use kit::report::{Column, Section};

use crate::timeline::PART;
use crate::tracing::{Event, Trace, What};

/// Heading of the section.
pub const TITLE: &str = "Stages of each path, in instructions";

/// Instructions of a stage for each request.
pub(crate) const SPAN: Metric = Metric::new("span", "instructions");

const CLIENT: &str = "client";
const KICK: &str = "kick";
const TAKE: &str = "chain, request";
const SUBMIT: &str = "submit";
const DEVICE: &str = "device";
const COMPLETION: &str = "completion, used";
const NOTIFY: &str = "notify";
const SWITCH: &str = "sleep, wake-up";
const OTHERS: &str = "others";
/// The clock goes on while no task runs: no stage.
const IDLE: &str = "idle";

/// The stages, in the order of a request.
pub(crate) const STAGES: [&str; 9] =
    [CLIENT, KICK, SWITCH, TAKE, SUBMIT, DEVICE, COMPLETION, NOTIFY, OTHERS];

const METHOD: &str = "Instructions of each request in each stage, 4 KiB random reads of null_blk, no \
    thread polls. The kernel's trace events divide the path: system calls, io_uring submissions, the \
    block layer, the scheduler, and the kernel plane's own events. `client`: the driver (or fio) \
    outside of its kick; `kick`: its write to the eventfd; `chain, request`: the server until it \
    submits; `submit`: in the call that submits, until the block layer; `device`: block layer and \
    null_blk; `completion, used`: from the completion on, and the server until it calls; `notify`: \
    the call; `sleep, wake-up`: the rest of the server's system calls; `others`: other tasks; idle time is left out. Where a \
    server makes no call between completions and the next requests, `completion, used` is part of \
    `chain, request`. vhost-scsi has no events of its own: all until the block layer is `submit`, all \
    after it `completion, used`. An event costs instructions, which are taken off.";

/// The tasks of a traced run.
#[derive(Clone, Debug, Default)]
pub(super) struct Tasks {
    pub(super) server: HashSet<u32>,
    pub(super) client: HashSet<u32>,
}

/// The instructions and the events of each stage, and the requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Spans {
    stages: BTreeMap<&'static str, (f64, u64)>,
    requests: u64,
}

impl Spans {
    /// Divides a trace from the first to the last request of the server.
    ///
    /// # Errors
    /// It has fewer than two requests.
    pub(super) fn of(trace: &Trace, tasks: &Tasks) -> Result<Self> {
        let is_request = |event: &Event| {
            matches!(event.what, What::Queue(..)) && tasks.server.contains(&event.task)
        };
        let first = trace.events.iter().position(is_request);
        let last = trace.events.iter().rposition(is_request);
        let (Some(first), Some(last)) = (first, last) else { bail!("the trace has no request") };
        let events = &trace.events[first..=last];
        let requests = events.iter().filter(|event| is_request(event)).count() as u64 - 1;
        if requests == 0 {
            bail!("the trace has one request only");
        }
        let mut spans = Self { requests, ..Self::default() };
        let mut calls = calls_before(&trace.events[..first]);
        let callers = callers(&trace.events);
        for (n, pair) in events.windows(2).enumerate() {
            let from = &pair[0];
            note_call(&mut calls, from);
            let place = Place { events: &events[n..], calls: &calls, callers: &callers, tasks };
            let (length, count) = spans.stages.entry(place.stage()).or_default();
            *length += pair[1].at - from.at;
            *count += 1;
        }
        Ok(spans)
    }

    /// Instructions of a request, events included.
    fn whole(&self) -> f64 {
        self.stages.values().map(|(length, _)| length).sum::<f64>() / self.requests as f64
    }

    /// Instructions that an event costs, if a request without a trace has `plain`.
    pub(super) fn each_event(&self, plain: f64) -> f64 {
        let events: u64 = self.stages.values().map(|(_, events)| events).sum();
        (self.whole() - plain) * self.requests as f64 / events as f64
    }

    /// Adds a row for each stage.
    pub(super) fn add_to(&self, set: &mut Set, subject: &str, depth: u16, each_event: f64) {
        for stage in STAGES {
            let Some((length, events)) = self.stages.get(stage) else { continue };
            let each = (length - each_event * *events as f64) / self.requests as f64;
            let place = point(&[("storage", &"null_blk"), ("depth", &depth), (PART, &stage)]);
            set.add(subject, &place, vec![(SPAN, each)]);
        }
    }
}

/// The table.
pub(super) fn section(set: &Set) -> Section {
    let columns = [
        Column::subject("server"),
        Column::count("depth"),
        Column::label(PART),
        Column::median("instructions", SPAN, 1.0, 0),
    ];
    Section::new(TITLE, METHOD, set, &columns)
}

/// The system call that each task is in.
type Calls = HashMap<u32, i64>;

fn note_call(calls: &mut Calls, event: &Event) {
    match event.what {
        What::Enter(call, _) => drop(calls.insert(event.task, call)),
        What::Exit => drop(calls.remove(&event.task)),
        _ => {}
    }
}

fn calls_before(events: &[Event]) -> Calls {
    let mut calls = Calls::new();
    events.iter().for_each(|event| note_call(&mut calls, event));
    calls
}

/// Tasks that make system calls; the others are threads of the kernel.
fn callers(events: &[Event]) -> HashSet<u32> {
    let calls = events.iter().filter(|event| matches!(event.what, What::Enter(..) | What::Exit));
    calls.map(|event| event.task).collect()
}

/// The time from the first of these events to the second one.
struct Place<'a> {
    events: &'a [Event],
    calls: &'a Calls,
    callers: &'a HashSet<u32>,
    tasks: &'a Tasks,
}

impl Place<'_> {
    fn stage(&self) -> &'static str {
        let [from, to, ..] = self.events else { return OTHERS };
        let is_block = |event: &Event| matches!(event.what, What::Queue(..) | What::Complete(..));
        let task = if let What::Switch(next) = from.what { next } else { from.task };
        if matches!(from.what, What::Queue(..)) || is_block(from) && is_block(to) {
            return DEVICE;
        }
        let call = self.calls.get(&task).copied();
        let is_client = self.tasks.client.contains(&task);
        match (self.tasks.server.contains(&task), is_client) {
            (true, true) if call.is_none() => CLIENT,
            (true, _) => self.of_server(task, call, from, to),
            (false, true) if call == Some(libc::SYS_write) => KICK,
            (false, true) => CLIENT,
            (false, false) if task == 0 => IDLE,
            (false, false) => OTHERS,
        }
    }

    fn of_server(&self, task: u32, call: Option<i64>, from: &Event, to: &Event) -> &'static str {
        if let What::Module(stage) = &to.what {
            return match stage.as_str() {
                "chain" | "request" => TAKE,
                "submit" => SUBMIT,
                "notify" => NOTIFY,
                _ => COMPLETION,
            };
        }
        if matches!(to.what, What::Complete(..)) {
            return DEVICE;
        }
        if matches!(from.what, What::Complete(..)) {
            return COMPLETION;
        }
        let submits = self.submits(task);
        match call {
            Some(libc::SYS_write) => NOTIFY,
            Some(_) if submits => SUBMIT,
            Some(_) => SWITCH,
            None if !self.callers.contains(&task) => match &from.what {
                What::Module(_) if !submits => SWITCH,
                _ if submits => SUBMIT,
                _ => COMPLETION,
            },
            None if matches!(to.what, What::Enter(libc::SYS_write, _)) => COMPLETION,
            None => TAKE,
        }
    }

    /// True if an I/O of the task is ahead, before it returns from the kernel or loses the CPU.
    fn submits(&self, task: u32) -> bool {
        for event in &self.events[1..] {
            match event.what {
                What::Queue(..) | What::Uring if event.task == task => return true,
                What::Exit | What::Switch(_) if event.task == task => return false,
                _ => {}
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: u32 = 1;
    const DRIVER: u32 = 2;
    const WAIT: i64 = 426;

    fn tasks() -> Tasks {
        Tasks { server: [SERVER].into(), client: [DRIVER].into() }
    }

    /// One cycle of a server with io_uring, with 10 instructions from each event to the next.
    fn cycle() -> Vec<(u32, What)> {
        vec![
            (SERVER, What::Queue((8, 0), 0, 8)),
            (SERVER, What::Complete(0, 8)),
            (SERVER, What::Exit),
            (SERVER, What::Enter(libc::SYS_write, 8)),
            (SERVER, What::Exit),
            (SERVER, What::Enter(WAIT, 1)),
            (SERVER, What::Switch(DRIVER)),
            (DRIVER, What::Exit),
            (DRIVER, What::Enter(libc::SYS_write, 8)),
            (DRIVER, What::Exit),
            (DRIVER, What::Enter(libc::SYS_read, 8)),
            (DRIVER, What::Switch(SERVER)),
            (SERVER, What::Exit),
            (SERVER, What::Enter(WAIT, 1)),
            (SERVER, What::Uring),
        ]
    }

    fn trace(whats: Vec<(u32, What)>) -> Trace {
        let events = (0..).zip(whats);
        let event = |(n, (task, what))| Event { task, at: f64::from(10 * n), what };
        Trace { events: events.map(event).collect(), ..Trace::default() }
    }

    fn of(whats: Vec<(u32, What)>) -> Spans {
        Spans::of(&trace(whats), &tasks()).unwrap()
    }

    #[test]
    fn each_instruction_counts_for_one_stage() {
        let spans = of([cycle(), cycle(), vec![cycle()[0].clone()]].concat());
        assert_eq!(spans.requests, 2);
        let each: Vec<_> =
            spans.stages.iter().map(|(stage, (length, _))| (*stage, *length)).collect();
        let expected = [
            // From the wake-up of the server's thread on, and from the next call to the sleep.
            (TAKE, 40.0),
            (CLIENT, 80.0),
            (COMPLETION, 40.0),
            (DEVICE, 20.0),
            (KICK, 20.0),
            (NOTIFY, 20.0),
            (SWITCH, 40.0),
            (SUBMIT, 40.0),
        ];
        assert_eq!(each, expected);
        assert_eq!(spans.whole(), 150.0);
    }

    #[test]
    fn the_cost_of_events_is_taken_off_and_the_rest_is_the_path_without_a_trace() {
        let spans = of([cycle(), vec![cycle()[0].clone()]].concat());
        assert_eq!(spans.each_event(120.0), 2.0);
        let mut set = Set::default();
        spans.add_to(&mut set, "a", 1, 2.0);
        let sum: f64 = set.rows().iter().map(|row| row.median(SPAN)).sum();
        assert!((sum - 120.0).abs() < 1e-9, "{sum}");
    }

    #[test]
    fn the_kernel_plane_has_its_own_events() {
        let module = |stage: &str| (SERVER, What::Module(stage.to_owned()));
        let queue = (SERVER, What::Queue((8, 0), 0, 8));
        let spans = of(vec![
            queue.clone(),
            module("submit"),
            (SERVER, What::Complete(0, 8)),
            module("completion"),
            module("used"),
            module("notify"),
            (SERVER, What::Switch(DRIVER)),
            (DRIVER, What::Enter(libc::SYS_write, 8)),
            (DRIVER, What::Switch(SERVER)),
            module("chain"),
            module("request"),
            queue,
        ]);
        let of = |stage| spans.stages[stage].0;
        assert_eq!([of(DEVICE), of(COMPLETION), of(NOTIFY), of(SWITCH)], [20.0, 20.0, 10.0, 10.0]);
        assert_eq!([of(CLIENT), of(KICK), of(TAKE), of(SUBMIT)], [10.0, 10.0, 20.0, 10.0]);
    }

    #[test]
    fn a_program_without_a_server_is_its_own_client() {
        let whats = [cycle(), vec![cycle()[0].clone()]].concat();
        let whats: Vec<_> = whats.into_iter().filter(|(task, _)| *task == SERVER).collect();
        let both = Tasks { server: [SERVER].into(), client: [SERVER].into() };
        let spans = Spans::of(&trace(whats), &both).unwrap();
        assert!(spans.stages.contains_key(CLIENT) && !spans.stages.contains_key(TAKE));
    }

    #[test]
    fn other_tasks_are_told_and_a_trace_without_requests_is_an_error() {
        let queue = (SERVER, What::Queue((8, 0), 0, 8));
        let [other, idle] = [9, 0].map(|task| {
            let away = (SERVER, What::Switch(task));
            of(vec![queue.clone(), away, (task, What::Exit), queue.clone()])
        });
        assert_eq!((other.stages[OTHERS].0, idle.stages[IDLE].0), (20.0, 20.0));
        let mut set = Set::default();
        idle.add_to(&mut set, "a", 1, 0.0);
        assert!(set.rows().iter().all(|row| row.label(PART) != IDLE));
        assert!(Spans::of(&Trace::default(), &tasks()).is_err());
    }
}
