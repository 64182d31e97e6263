// SPDX-License-Identifier: Apache-2.0
//! Traces of slow requests, for `vhost-blk ctl trace`.
//!
//! Each trace has a bound. A disk tells the requests that exceed the least bound of its traces, and
//! notes no times while there is none.

use super::{Disks, Slot};
use crate::clock;
use crate::failure::Failure;
use crate::subscription::{Feed, Subscription, feed, lock};
use data_plane::{SlowRequest, Traced as Message};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// All traces.
#[derive(Debug, Default)]
pub(super) struct Traces(Mutex<All>);

#[derive(Debug, Default)]
struct All {
    traces: Vec<Trace>,
    /// The last message of all traces, and of later ones.
    last: Option<Value>,
}

#[derive(Debug)]
struct Trace {
    /// `None`: all disks.
    disk: Option<String>,
    slower_than: Duration,
    feed: Feed,
}

impl Trace {
    fn is_of(&self, disk: &str) -> bool {
        self.disk.as_deref().is_none_or(|own| own == disk)
    }
}

impl Traces {
    fn begin(&self, disk: Option<String>, slower_than: Duration) -> std::io::Result<Subscription> {
        let (feed, subscription) = feed(|lost| json!({"time": clock::now(), "lost": lost}))?;
        let mut all = lock(&self.0);
        all.last.iter().for_each(|last| feed.end(last));
        all.traces.push(Trace { disk, slower_than, feed });
        Ok(subscription)
    }

    /// The least bound of the traces of a disk.
    fn bound(&self, disk: &str) -> Option<Duration> {
        let traces = &mut lock(&self.0).traces;
        traces.retain(|trace| trace.feed.has_reader());
        traces.iter().filter(|trace| trace.is_of(disk)).map(|trace| trace.slower_than).min()
    }

    /// Tells a slow request, or a number of lost ones. Never waits for a client.
    pub(super) fn tell(&self, disk: &str, message: Message<'_>) {
        let all = lock(&self.0);
        let its = all.traces.iter().filter(|trace| trace.is_of(disk));
        match message {
            Message::Slow(slow) => {
                let wanted = its.filter(|trace| slow.total() >= trace.slower_than);
                wanted.for_each(|trace| trace.feed.push(request_value(disk, slow)));
            }
            Message::Lost(count) => its.for_each(|trace| trace.feed.lose(count)),
        }
    }

    /// Ends the traces of a disk that has gone.
    pub(super) fn end(&self, disk: &str) {
        let all = lock(&self.0);
        let its = all.traces.iter().filter(|trace| trace.disk.as_deref() == Some(disk));
        its.for_each(|trace| trace.feed.end(&json!({})));
    }

    /// Ends all traces, and later ones, with a last message.
    pub(super) fn end_all(&self, last: &Value) {
        let mut all = lock(&self.0);
        let last = all.last.get_or_insert_with(|| last.clone()).clone();
        all.traces.iter().for_each(|trace| trace.feed.end(&last));
    }

    /// Returns whether a client has not received its last message.
    pub(super) fn have_readers(&self) -> bool {
        lock(&self.0).traces.iter().any(|trace| trace.feed.has_reader())
    }
}

/// A slow request as JSON (`SlowRequest`).
fn request_value(disk: &str, slow: &SlowRequest) -> Value {
    let us = |time: Duration| time.as_micros() as u64;
    json!({
        "time": clock::now(),
        "disk": disk,
        "queue": slow.queue,
        "operation": slow.operation.name(),
        "sector": slow.sector,
        "bytes": slow.bytes,
        "failed": slow.failed,
        "total_us": us(slow.total()),
        "ring_us": slow.ring.map(us),
        "limit_us": us(slow.limit),
        "submit_us": us(slow.submit),
        "storage_us": us(slow.storage),
        "used_us": us(slow.used),
    })
}

/// A trace of a client. It ends with the drop.
pub struct Traced {
    /// `None` during the drop.
    subscription: Option<Subscription>,
    disks: Arc<Disks>,
}

impl Traced {
    /// The slow requests.
    pub fn subscription(&self) -> &Subscription {
        self.subscription.as_ref().expect("it is there until the drop")
    }
}

impl Disks {
    /// Traces requests that take as long as `slower_than`, of one disk or of all.
    ///
    /// # Errors
    /// [`Failure`] if no file descriptor is left.
    pub fn trace(
        self: &Arc<Self>,
        disk: Option<String>,
        slower_than: Duration,
    ) -> Result<Traced, Failure> {
        let begun = self.traces.begin(disk, slower_than).map_err(|error| {
            Failure::run("trace requests", error, "raise the limit on open files (ulimit -n)")
        })?;
        self.adopt_bounds();
        Ok(Traced { subscription: Some(begun), disks: Arc::clone(self) })
    }

    /// Names of the disks that cannot be traced: they run in the kernel, and its module is too old.
    pub fn untraceable(&self) -> Vec<String> {
        let state = self.lock();
        let cannot = |slot: &Slot| matches!(slot, Slot::Served(it) if !it.health.is_traceable());
        let names = state.table.iter().filter(|(_, slot)| cannot(slot));
        names.map(|(name, _)| name.clone()).collect()
    }

    /// Passes the bounds of the traces to all disks.
    pub(super) fn adopt_bounds(&self) {
        for (name, slot) in &self.lock().table {
            if let Slot::Served(entry) = slot {
                entry.health.trace(self.traces.bound(name));
            }
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        self.subscription = None;
        self.disks.adopt_bounds();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_plane::Operation;

    fn slow(ms: u64) -> SlowRequest {
        let (zero, storage) = (Duration::ZERO, Duration::from_millis(ms));
        SlowRequest {
            queue: 1,
            operation: Operation::Read,
            sector: Some(8),
            bytes: 512,
            failed: false,
            ring: None,
            limit: zero,
            submit: zero,
            storage,
            used: zero,
        }
    }

    #[test]
    fn each_trace_gets_the_requests_beyond_its_bound_and_the_disk_has_the_least_one() {
        let traces = Traces::default();
        let ms = Duration::from_millis;
        assert_eq!(traces.bound("a"), None);
        let all = traces.begin(None, ms(50)).unwrap();
        let one = traces.begin(Some("a".into()), ms(10)).unwrap();
        assert_eq!((traces.bound("a"), traces.bound("b")), (Some(ms(10)), Some(ms(50))));
        for (disk, took) in [("a", 9), ("a", 10), ("a", 60), ("b", 70)] {
            traces.tell(disk, Message::Slow(&slow(took)));
        }
        let times = |told: Vec<Value>| -> Vec<(String, u64)> {
            let pair = |it: &Value| (it["disk"].as_str().unwrap().into(), it["total_us"].as_u64());
            told.iter().map(pair).map(|(disk, us): (String, _)| (disk, us.unwrap())).collect()
        };
        assert_eq!(times(one.take()), [("a".into(), 10_000), ("a".into(), 60_000)]);
        assert_eq!(times(all.take()), [("a".into(), 60_000), ("b".into(), 70_000)]);
        traces.tell("b", Message::Lost(4));
        assert!(one.take().is_empty());
        assert_eq!(all.take()[0]["lost"], 4);
        traces.end("a");
        assert_eq!((one.end(), all.end()), (Some(json!({})), None));
        drop(one);
        assert_eq!(traces.bound("a"), Some(ms(50)));
        drop(all);
        assert_eq!(traces.bound("a"), None);
    }

    #[test]
    fn a_trace_that_begins_after_the_end_has_the_first_last_message() {
        let traces = Traces::default();
        traces.end_all(&json!("stopped"));
        traces.end_all(&json!("stopped again"));
        let late = traces.begin(None, Duration::ZERO).unwrap();
        assert_eq!(late.end(), Some(json!("stopped")));
    }
}
