// SPDX-License-Identifier: Apache-2.0
//! The times at which the requests of a run pass each stage, from trace events and the client's notes.
//!
//! Requests are not followed one by one. Each passes each stage once, so that the mean time from one
//! stage to the next is the difference of the mean times, and the n-th passing of a stage belongs to
//! the n-th request of a queue that keeps its order.

use std::collections::HashMap;

use anyhow::{Result, bail};

use crate::tracing::{Device, Event, What};
use crate::worker::Notes;

/// The stages, in the order of a request.
pub(crate) const STAGES: [&str; 6] = ["available", "taken", "submitted", "done", "called", "seen"];

const AVAILABLE: usize = 0;
const TAKEN: usize = 1;
const SUBMITTED: usize = 2;
const DONE: usize = 3;
const CALLED: usize = 4;
const SEEN: usize = 5;

const SECTOR: u64 = virtio_spec::blk::SECTOR_BYTES;
/// Bytes that a signal of an eventfd writes.
const SIGNAL_BYTES: u64 = 8;

/// The traced server and its storage.
#[derive(Clone, Debug)]
pub(crate) struct Traced {
    /// Its threads.
    pub(crate) tasks: Vec<u32>,
    /// The device of the storage.
    pub(crate) device: Device,
    /// The first sector of that device on the whole disk.
    pub(crate) start_sector: u64,
    /// Bytes of each request.
    pub(crate) block_bytes: u32,
}

/// A run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flow {
    /// Microseconds at which each stage was passed, sorted; one for each request.
    pub(crate) passed: [Vec<f64>; STAGES.len()],
    /// Calls of the server.
    pub(crate) calls: u64,
    /// Kicks of the client.
    pub(crate) kicks: u64,
}

impl Flow {
    /// The passings of a run.
    ///
    /// # Errors
    /// The device or the server did other work, too, so that the numbers of passings differ.
    pub(crate) fn of(events: &[Event], notes: &[Notes], traced: &Traced) -> Result<Self> {
        let mut flow = Self::default();
        let calls = flow.add_server(events, notes, traced);
        flow.calls = calls.len() as u64;
        for notes in notes {
            for &(at, count) in &notes.available {
                flow.pass(AVAILABLE, micros(at), count);
            }
            flow.passed[SEEN].extend(notes.seen.iter().map(|&at| micros(at)));
        }
        flow.passed.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
        flow.check()?;
        flow.take_after_available();
        flow.add_calls(&calls);
        Ok(flow)
    }

    /// Requests.
    pub(crate) fn requests(&self) -> usize {
        self.passed[AVAILABLE].len()
    }

    /// Mean time in microseconds from the stage at this index to the next one.
    pub(crate) fn mean(&self, stage: usize) -> f64 {
        mean(&self.passed[stage + 1]) - mean(&self.passed[stage])
    }

    /// The requests that became available within so many microseconds from the middle of the run on:
    /// the times of each stage, from the first of these on.
    pub(crate) fn window(&self, micros: f64) -> Vec<[f64; STAGES.len()]> {
        let available = &self.passed[AVAILABLE];
        let Some(&begin) = available.get(available.len() / 2) else { return Vec::new() };
        let first = available.partition_point(|&at| at < begin);
        let end = available.partition_point(|&at| at < begin + micros);
        (first..end).map(|n| self.passed.each_ref().map(|times| times[n] - begin)).collect()
    }

    fn pass(&mut self, stage: usize, at: f64, count: u64) {
        self.passed[stage].extend((0..count).map(|_| at));
    }

    /// The stages that the kernel sees. Gives the times of the calls.
    fn add_server(&mut self, events: &[Event], notes: &[Notes], traced: &Traced) -> Vec<f64> {
        let mut calls = Vec::new();
        // The last return of each task from the kernel, and I/Os in flight by their first sector.
        let mut returned: HashMap<u32, f64> = HashMap::new();
        let mut flying: HashMap<u64, u64> = HashMap::new();
        let block = u64::from(traced.block_bytes) / SECTOR;
        let has_module = events.iter().any(|event| matches!(event.what, What::Module(_)));
        for Event { task, at, what } in events {
            let is_server = traced.tasks.contains(task);
            match what {
                What::Enter(call, SIGNAL_BYTES) if *call == libc::SYS_write => {
                    if is_server {
                        calls.push(*at);
                    }
                    self.kicks += u64::from(notes.iter().any(|notes| notes.task == *task));
                }
                What::Exit if is_server => drop(returned.insert(*task, *at)),
                What::Queue(device, sector, sectors) if is_server && *device == traced.device => {
                    let requests = sectors / block;
                    self.pass(SUBMITTED, *at, requests);
                    if !has_module {
                        self.pass(TAKEN, returned.get(task).copied().unwrap_or(*at), requests);
                    }
                    for n in 0..requests {
                        *flying.entry(traced.start_sector + sector + n * block).or_default() += 1;
                    }
                }
                What::Complete(sector, sectors) => {
                    for n in 0..sectors / block {
                        let Some(count) = flying.get_mut(&(sector + n * block)) else { continue };
                        if *count > 0 {
                            *count -= 1;
                            self.pass(DONE, *at, 1);
                        }
                    }
                }
                What::Module(stage) if stage == "chain" => self.pass(TAKEN, *at, 1),
                What::Module(stage) if stage == "notify" => calls.push(*at),
                _ => {}
            }
        }
        calls
    }

    /// A thread that polls takes a request without a return from the kernel since it is available.
    fn take_after_available(&mut self) {
        let [available, taken, ..] = &mut self.passed;
        for (taken, available) in taken.iter_mut().zip(available) {
            *taken = taken.max(*available);
        }
    }

    /// The last call after each request was done and before the client saw it. The client may see a
    /// request without a call, or before it: then that time counts.
    fn add_calls(&mut self, calls: &[f64]) {
        let both = self.passed[DONE].iter().zip(&self.passed[SEEN]);
        let called = both.map(|(&done, &seen)| {
            let before = calls.partition_point(|&call| call <= seen);
            let call = before.checked_sub(1).map(|last| calls[last]);
            call.filter(|&call| call >= done).unwrap_or(seen)
        });
        let mut called: Vec<f64> = called.collect();
        called.sort_by(f64::total_cmp);
        self.passed[CALLED] = called;
    }

    fn check(&self) -> Result<()> {
        let stages = [AVAILABLE, TAKEN, SUBMITTED, DONE, SEEN];
        if self.passed[SUBMITTED].is_empty() {
            bail!("no I/O of the server reached the device");
        }
        if stages.iter().any(|&stage| self.passed[stage].len() != self.requests()) {
            let all = stages.map(|stage| format!("{} {}", self.passed[stage].len(), STAGES[stage]));
            bail!("the numbers of requests differ: {}", all.join(", "));
        }
        Ok(())
    }
}

/// Mean microseconds that the device takes for each request of these tasks, whatever its size.
///
/// # Errors
/// The trace has no request of theirs.
pub(crate) fn device_time(
    events: &[Event],
    tasks: &[u32],
    (device, start_sector): (Device, u64),
) -> Result<f64> {
    let mut flying: HashMap<u64, f64> = HashMap::new();
    let mut times = Vec::new();
    for Event { task, at, what } in events {
        match what {
            What::Queue(queue, sector, _) if *queue == device && tasks.contains(task) => {
                flying.insert(start_sector + sector, *at);
            }
            What::Complete(sector, _) => {
                times.extend(flying.remove(sector).map(|since| at - since));
            }
            _ => {}
        }
    }
    if times.is_empty() {
        bail!("no I/O reached the device");
    }
    Ok(times.iter().sum::<f64>() / times.len() as f64)
}

/// Whole microseconds, as the trace has them.
fn micros(nanos: u64) -> f64 {
    (nanos / 1000) as f64
}

fn mean(times: &[f64]) -> f64 {
    // Less than the whole time since the start of the machine, which would cost digits.
    let first = times.first().copied().unwrap_or_default();
    first + times.iter().map(|at| at - first).sum::<f64>() / times.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: u32 = 12;
    const CLIENT: u32 = 77;
    const DISK: Device = (254, 1);

    fn traced() -> Traced {
        Traced { tasks: vec![SERVER], device: DISK, start_sector: 2048, block_bytes: 4096 }
    }

    fn event(task: u32, at: f64, what: What) -> Event {
        Event { task, at, what }
    }

    /// Two requests in one turn of the server, which come back one by one.
    fn events() -> Vec<Event> {
        let call = What::Enter(libc::SYS_write, SIGNAL_BYTES);
        vec![
            event(CLIENT, 101.0, call.clone()),
            event(SERVER, 110.0, What::Exit),
            event(SERVER, 112.0, What::Queue(DISK, 8, 8)),
            event(SERVER, 113.0, What::Queue(DISK, 80, 8)),
            // Another device, and another task's I/O.
            event(SERVER, 113.0, What::Queue((254, 0), 8, 8)),
            event(9, 114.0, What::Queue(DISK, 800, 8)),
            event(0, 150.0, What::Complete(2048 + 80, 8)),
            event(0, 151.0, What::Complete(2048 + 800, 8)),
            event(0, 170.0, What::Complete(2048 + 8, 8)),
            event(SERVER, 175.0, What::Exit),
            event(SERVER, 180.0, call),
        ]
    }

    fn notes() -> Vec<Notes> {
        vec![Notes { task: CLIENT, available: vec![(100_500, 2)], seen: vec![190_900; 2] }]
    }

    #[test]
    fn each_stage_has_the_time_of_each_request() {
        let flow = Flow::of(&events(), &notes(), &traced()).unwrap();
        let expected = [
            [100.0, 100.0],
            [110.0, 110.0],
            [112.0, 113.0],
            [150.0, 170.0],
            [180.0, 180.0],
            [190.0, 190.0],
        ];
        assert_eq!(flow.passed, expected.map(Vec::from));
        assert_eq!((flow.calls, flow.kicks, flow.requests()), (1, 1, 2));
        let means: Vec<_> = (0..5).map(|stage| flow.mean(stage)).collect();
        assert_eq!(means, [10.0, 2.5, 47.5, 20.0, 10.0]);
    }

    #[test]
    fn a_window_has_the_requests_of_its_time_from_its_begin_on() {
        let flow =
            Flow { passed: STAGES.map(|_| vec![1.0, 2.0, 5.0, 6.0, 9.0, 20.0]), ..Flow::default() };
        let window = flow.window(4.0);
        assert_eq!(window.iter().map(|times| times[0]).collect::<Vec<_>>(), [0.0, 3.0]);
        assert_eq!(Flow::default().window(4.0), Vec::<[f64; 6]>::new());
    }

    #[test]
    fn an_io_that_is_not_a_request_is_an_error() {
        let mut events = events();
        events.insert(4, event(SERVER, 113.5, What::Queue(DISK, 8000, 8)));
        let error = Flow::of(&events, &notes(), &traced()).unwrap_err().to_string();
        assert!(error.contains("2 available, 3 taken, 3 submitted, 2 done"), "{error}");
        assert!(Flow::of(&[], &notes(), &traced()).is_err());
    }

    #[test]
    fn the_time_of_the_device_is_that_between_its_events() {
        let of = |task, place| device_time(&events(), &[task], place);
        assert_eq!(of(SERVER, (DISK, 2048)).unwrap(), (37.0 + 58.0) / 2.0);
        assert_eq!(of(9, (DISK, 2048)).unwrap(), 37.0);
        assert!(of(CLIENT, (DISK, 2048)).is_err() && of(SERVER, ((8, 0), 0)).is_err());
    }

    #[test]
    fn the_module_tells_when_it_takes_and_calls() {
        let mut events = events();
        events.retain(|event| !matches!(event.what, What::Enter(..) | What::Exit));
        for (at, name) in [(111.0, "chain"), (112.5, "chain"), (181.0, "notify")] {
            events.push(event(SERVER, at, What::Module(name.to_owned())));
        }
        let flow = Flow::of(&events, &notes(), &traced()).unwrap();
        assert_eq!(flow.passed[TAKEN], [111.0, 112.5]);
        assert_eq!(flow.passed[CALLED], [181.0, 181.0]);
    }

    #[test]
    fn a_thread_that_polls_takes_a_request_when_it_is_available() {
        let mut notes = notes();
        notes[0].available = vec![(111_000, 2)];
        let flow = Flow::of(&events(), &notes, &traced()).unwrap();
        assert_eq!((flow.passed[TAKEN].as_slice(), flow.mean(0)), (&[111.0, 111.0][..], 0.0));
    }

    #[test]
    fn requests_that_are_seen_without_a_call_count_as_called_then() {
        let mut notes = notes();
        notes[0].seen = vec![165_000, 195_000];
        let flow = Flow::of(&events(), &notes, &traced()).unwrap();
        assert_eq!(flow.passed[CALLED], [165.0, 180.0]);
    }
}
