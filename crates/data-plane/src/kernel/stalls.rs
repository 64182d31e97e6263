// SPDX-License-Identifier: Apache-2.0
//! Tells requests of the kernel's queues that are in flight for too long.
//!
//! A thread asks the module for the age of the oldest request of each queue, at the times of
//! [`StallWatch`]. It runs only if the disk has a time limit, and no request costs anything more.

use super::device::VhostBlk;
use crate::error::KernelError;
use crate::health::Health;
use crate::latency::{Nanos, monotonic};
use crate::stall::{StallChange, StallWatch};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The thread that watches the queues of a run; dropping this value ends it. All stalls have ended
/// then, so the queues must have stopped.
#[derive(Debug)]
pub(super) struct StallThread {
    /// Dropped to end the thread.
    running: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StallThread {
    /// Watches so many queues; `None`: the disk has no time limit.
    pub(super) fn start(
        device: &VhostBlk,
        num_queues: u16,
        health: Arc<Health>,
    ) -> Result<Option<Self>, KernelError> {
        let Some(limit) = health.io_timeout() else { return Ok(None) };
        check(device)?;
        let failed = |source| KernelError::call("watching the time of requests", source);
        let (running, ended) = mpsc::channel();
        let device = device.try_clone().map_err(failed)?;
        let body = move || {
            let mut watches = Watches::new(num_queues, limit);
            watch(&mut watches, &device, &health, &ended);
            watches.end(&health);
        };
        let thread = std::thread::Builder::new().name("kernel-stalls".into()).spawn(body);
        Ok(Some(StallThread { running: Some(running), thread: Some(thread.map_err(failed)?) }))
    }
}

impl Drop for StallThread {
    fn drop(&mut self) {
        drop(self.running.take());
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

/// Checks that the module can tell the age of requests.
pub(super) fn check(device: &VhostBlk) -> Result<(), KernelError> {
    match device.oldest(0) {
        Ok(_) => Ok(()),
        Err(error) if error.errno() == Some(libc::ENOTTY) => Err(KernelError::Unsuited(
            "the kernel module is too old to watch the time of requests; load the one that belongs \
             to this program, drop --io-timeout, or use --data-plane uring"
                .into(),
        )),
        Err(error) => Err(error),
    }
}

/// Watches until the sender of `ended` is dropped.
fn watch(watches: &mut Watches, device: &VhostBlk, health: &Health, ended: &mpsc::Receiver<()>) {
    loop {
        if let Err(error) = watches.look(monotonic(), |queue| device.oldest(queue), health) {
            tracing::warn!(%error, "cannot read the age of requests from the module: stalls of this disk are no longer reported");
            return;
        }
        let next = watches.due_in(monotonic());
        if ended.recv_timeout(next) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

/// The watches of all queues.
struct Watches(Vec<StallWatch>);

impl Watches {
    fn new(num_queues: u16, limit: Duration) -> Self {
        Watches((0..num_queues).map(|_| StallWatch::new(Some(limit))).collect())
    }

    /// Checks the queues that are due at `now`. `oldest` is the age of the oldest request of a queue.
    fn look(
        &mut self,
        now: Nanos,
        oldest: impl Fn(u16) -> Result<Option<Duration>, KernelError>,
        health: &Health,
    ) -> Result<(), KernelError> {
        for (queue, watch) in (0..).zip(&mut self.0).filter(|(_, watch)| watch.is_due(now)) {
            let taken = oldest(queue)?.map(|age| now.saturating_sub(age.as_nanos() as Nanos));
            match watch.check(taken, now) {
                Some(StallChange::Began(age)) => health.record_stall(queue, age),
                Some(StallChange::Ended) => health.record_recovery(queue),
                None => {}
            }
        }
        Ok(())
    }

    /// Time until the next check.
    fn due_in(&self, now: Nanos) -> Duration {
        self.0.iter().filter_map(|watch| watch.due_in(now)).min().unwrap_or(Duration::MAX)
    }

    /// Tells the end of all stalls.
    fn end(&mut self, health: &Health) {
        for (queue, watch) in (0..).zip(&mut self.0) {
            if watch.check(None, 0) == Some(StallChange::Ended) {
                health.record_recovery(queue);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_rules::ErrorPolicy;
    use crate::health::HealthEvent;
    use std::cell::Cell;
    use std::sync::Mutex;

    const SECOND: Nanos = 1_000_000_000;
    const START: Nanos = 1000 * SECOND;

    fn health() -> (Health, Arc<Mutex<Vec<HealthEvent>>>) {
        let health = Health::new(ErrorPolicy::Report, None);
        let told = Arc::new(Mutex::new(Vec::new()));
        let events = Arc::clone(&told);
        health.set_hook(Box::new(move |event| events.lock().unwrap().push(event.clone())));
        (health, told)
    }

    #[test]
    fn a_request_beyond_the_limit_is_told_once_with_its_queue_and_its_end_too() {
        let (health, told) = health();
        let mut watches = Watches::new(2, Duration::from_secs(10));
        // The request of queue 1 was taken at the start, and ends after 15 seconds.
        let look = |watches: &mut Watches, at: Nanos| {
            let age = (at < 15).then(|| Duration::from_secs(at));
            let oldest = |queue| Ok(age.filter(|_| queue == 1));
            watches.look(START + at * SECOND, oldest, &health).unwrap();
        };
        for at in 0..10 {
            look(&mut watches, at);
        }
        assert_eq!(*told.lock().unwrap(), []);
        for at in 10..15 {
            look(&mut watches, at);
        }
        assert_eq!(*told.lock().unwrap(), [HealthEvent::Stalled(1)]);
        look(&mut watches, 15);
        assert_eq!(told.lock().unwrap()[1..], [HealthEvent::Recovered(1)]);
        watches.end(&health);
        assert_eq!(told.lock().unwrap().len(), 2);
    }

    #[test]
    fn the_end_of_the_run_is_the_end_of_its_stalls() {
        let (health, told) = health();
        let mut watches = Watches::new(1, Duration::from_secs(1));
        watches.look(START, |_| Ok(Some(Duration::from_secs(2))), &health).unwrap();
        watches.end(&health);
        let expected = [HealthEvent::Stalled(0), HealthEvent::Recovered(0)];
        assert_eq!(*told.lock().unwrap(), expected);
    }

    #[test]
    fn the_module_is_asked_once_for_each_time_limit_and_queue() {
        let (health, _) = health();
        let mut watches = Watches::new(3, Duration::from_secs(10));
        let asked = Cell::new(0);
        let mut now = START;
        while now < START + 100 * SECOND {
            let oldest = |_| {
                asked.set(asked.get() + 1);
                Ok(None)
            };
            watches.look(now, oldest, &health).unwrap();
            now += watches.due_in(now).as_nanos() as Nanos;
        }
        assert_eq!(asked.get(), 30);
    }
}
