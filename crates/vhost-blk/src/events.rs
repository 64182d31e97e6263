// SPDX-License-Identifier: Apache-2.0
//! Events of the disks, for `vhost-blk ctl events`.

use crate::clock;
use crate::subscription::{Feed, Subscription, feed, lock};
use crate::values::{OnError, word};
use data_plane::{ErrorRules, HealthEvent, Limits, Operation, StorageFailure};
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use vhost_user::Notice;

/// A change of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The disk is served from now on.
    Added,
    /// A disk of the directory could not be started, for this reason.
    StartFailed(String),
    /// The disk is drained and closed; or a disk that had failed to start is tried no more.
    Removed,
    /// The disk has left its name, and goes when its storage answers.
    GivenUp,
    /// A disk that was given up has gone.
    Released,
    /// A front-end has connected.
    Connected,
    /// A front-end has disconnected, for this reason if it was not the usual one.
    Disconnected(Option<String>),
    /// The device has changed.
    Device(Notice),
    /// The health of the storage has changed.
    Health(HealthEvent),
    /// The block device of the disk has gone.
    StorageGone(String),
    /// The disk cannot go on with the device at its path, for this reason.
    StorageRefused(String),
    /// The disk goes on with the device at this path.
    StorageReturned(PathBuf),
    /// Work has begun, with this target.
    WorkBegun(Work, String),
    /// The mirror has copied everything once, and can be completed.
    MirrorReady,
    /// Work is complete: its target is durable, and can be used.
    WorkCompleted(Work, String),
    /// Work has ended without a result; the disk goes on as before.
    WorkEnded(Work, Ended),
}

/// Work on a disk, and the words of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A copy of one moment.
    Backup,
    /// A merge of the image into its backing file.
    Commit,
    /// A copy that follows the guest, which goes on in it.
    Mirror,
    /// A new overlay.
    Snapshot,
}

impl Work {
    /// Its name in the control protocol and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Work::Backup => "backup",
            Work::Commit => "commit",
            Work::Mirror => "mirror",
            Work::Snapshot => "snapshot",
        }
    }
}

/// The end of work without a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The target that it does not have.
    pub target: String,
    /// The reason.
    pub reason: String,
    /// A client, or the end of the disk, has cancelled it.
    pub is_cancelled: bool,
}

impl Change {
    /// The end of work on a target. An error is the reason, and whether it was cancelled.
    pub fn of_end(work: Work, target: String, outcome: Result<(), (String, bool)>) -> Change {
        match outcome {
            Ok(()) => Change::WorkCompleted(work, target),
            Err((reason, is_cancelled)) => {
                Change::WorkEnded(work, Ended { target, reason, is_cancelled })
            }
        }
    }
}

/// All subscribers.
#[derive(Debug, Default)]
pub struct Events(Mutex<Subscribers>);

#[derive(Debug, Default)]
struct Subscribers {
    feeds: Vec<Feed>,
    /// An event for later subscribers, and their number.
    kept: Option<(Value, usize)>,
    /// The last message: the process ends.
    last: Option<Value>,
}

impl Events {
    /// Tells all subscribers. Never waits for one.
    pub fn tell(&self, disk: &str, change: &Change) {
        let mut subscribers = lock(&self.0);
        if subscribers.have_some() {
            subscribers.push(&event(disk, change));
        }
    }

    /// Number of subscribers.
    pub fn readers(&self) -> usize {
        let mut subscribers = lock(&self.0);
        subscribers.have_some();
        subscribers.feeds.len()
    }

    /// Reports an upgrade of the program: its versions, and the microseconds without a queue. The old program had so
    /// many subscribers, which have lost their connections: the event is kept for those that connect again, or for the
    /// next one if there was none.
    pub fn tell_upgraded(&self, from: &str, to: &str, pause_us: u64, readers: usize) {
        let event = json!({
            "time": clock::now(), "event": "upgraded", "from": from, "to": to, "pause_us": pause_us,
        });
        let mut subscribers = lock(&self.0);
        subscribers.have_some();
        subscribers.push(&event);
        let missing = readers.max(1).saturating_sub(subscribers.feeds.len());
        subscribers.kept = (missing > 0).then_some((event, missing));
    }

    /// A new subscriber, which receives the events from now on, and a kept one.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn subscribe(&self) -> io::Result<Subscription> {
        let (feed, subscription) =
            feed(|lost| json!({"time": clock::now(), "event": "lost", "lost": lost}))?;
        let mut subscribers = lock(&self.0);
        if let Some((event, missing)) = subscribers.kept.take() {
            subscribers.kept = (missing > 1).then(|| (event.clone(), missing - 1));
            feed.push(event);
        }
        subscribers.last.iter().for_each(|last| feed.end(last));
        subscribers.feeds.push(feed);
        Ok(subscription)
    }

    /// Ends the streams of all subscribers, and of later ones, with a last message.
    pub fn end(&self, last: &Value) {
        let mut subscribers = lock(&self.0);
        let last = subscribers.last.get_or_insert_with(|| last.clone()).clone();
        subscribers.feeds.iter().for_each(|feed| feed.end(&last));
    }

    /// Returns whether a subscriber has not received its last message.
    pub fn have_readers(&self) -> bool {
        lock(&self.0).have_some()
    }
}

impl Subscribers {
    /// Forgets those that have gone. Returns whether there are others.
    fn have_some(&mut self) -> bool {
        self.feeds.retain(Feed::has_reader);
        !self.feeds.is_empty()
    }

    fn push(&self, event: &Value) {
        self.feeds.iter().for_each(|feed| feed.push(event.clone()));
    }
}

/// The events of one disk, which end when it leaves its name: another disk may have that then.
#[derive(Debug)]
pub struct DiskEvents {
    events: Arc<Events>,
    disk: String,
    has_ended: Mutex<bool>,
}

impl DiskEvents {
    /// The events of a disk.
    pub fn new(events: Arc<Events>, disk: &str) -> Self {
        DiskEvents { events, disk: disk.to_owned(), has_ended: Mutex::new(false) }
    }

    /// Tells all subscribers, unless the events have ended. Never waits for one.
    pub fn tell(&self, change: &Change) {
        let has_ended = lock(&self.has_ended);
        if !*has_ended {
            self.events.tell(&self.disk, change);
        }
    }

    /// Tells the last event.
    pub fn end(&self, change: &Change) {
        let mut has_ended = lock(&self.has_ended);
        *has_ended = true;
        self.events.tell(&self.disk, change);
    }
}

/// Limits of a disk or of its group as JSON.
pub fn limits_value(limits: &Limits, group: Option<&str>) -> Value {
    json!({
        "group": group,
        "iops": limits.iops,
        "bandwidth": limits.bytes,
        "burst_ms": limits.burst.as_millis() as u64,
    })
}

/// The treatment of storage that fails or hangs as JSON (`ErrorRules`).
pub fn errors_value(rules: &ErrorRules) -> Value {
    json!({
        "on_error": word(OnError::from(rules.policies.others)),
        "on_read_error": word(OnError::from(rules.policies.reads)),
        "io_timeout": rules.io_timeout.map(|limit| limit.as_secs_f64()),
    })
}

/// A failure of the storage as JSON (`Failure`).
pub fn failure_value(failure: &StorageFailure) -> Value {
    json!({
        "kind": failure.kind.name(),
        "operation": failure.operation.map(Operation::name),
        "sector": failure.sector,
        "reason": failure.reason,
        "requests": failure.requests,
    })
}

/// The name of an event, and its further field.
type Named = (&'static str, Option<(&'static str, Value)>);

fn event(disk: &str, change: &Change) -> Value {
    let (name, fields) = match change {
        Change::WorkBegun(work, target) => {
            (format!("{}_begun", work.name()), json!({"target": target}))
        }
        Change::WorkCompleted(work, target) => {
            (format!("{}_completed", work.name()), json!({"target": target}))
        }
        Change::WorkEnded(work, Ended { target, reason, is_cancelled }) => {
            let fields = json!({"target": target, "reason": reason, "cancelled": is_cancelled});
            (format!("{}_ended", work.name()), fields)
        }
        other => {
            let (name, field) = of_disk(other);
            let fields = field.map(|(field, value)| json!({field: value}));
            (name.to_owned(), fields.unwrap_or_else(|| json!({})))
        }
    };
    let mut event = json!({"time": clock::now(), "disk": disk, "event": name});
    for (field, value) in fields.as_object().into_iter().flatten() {
        event[field] = value.clone();
    }
    event
}

/// A change with one further field at most.
fn of_disk(change: &Change) -> Named {
    match change {
        Change::Added => ("added", None),
        Change::StartFailed(reason) => ("start_failed", Some(("reason", reason.as_str().into()))),
        Change::Removed => ("removed", None),
        Change::GivenUp => ("given_up", None),
        Change::Released => ("released", None),
        Change::Connected => ("connected", None),
        Change::Disconnected(reason) => {
            ("disconnected", reason.as_ref().map(|reason| ("reason", reason.as_str().into())))
        }
        Change::StorageGone(reason) => ("storage_gone", Some(("reason", reason.as_str().into()))),
        Change::StorageRefused(reason) => {
            ("storage_refused", Some(("reason", reason.as_str().into())))
        }
        Change::StorageReturned(path) => ("storage_returned", Some(("target", shown(path)))),
        Change::MirrorReady => ("mirror_ready", None),
        Change::Device(notice) => of_device(notice),
        Change::Health(event) => of_health(event),
        Change::WorkBegun(..) | Change::WorkCompleted(..) | Change::WorkEnded(..) => {
            unreachable!("they have several fields")
        }
    }
}

fn of_device(notice: &Notice) -> Named {
    match notice {
        Notice::Paused => ("paused", None),
        Notice::Resumed => ("resumed", None),
        Notice::Switched(plane) => ("switched", Some(("data_plane", plane.to_string().into()))),
        Notice::Resized(bytes) => ("resized", Some(("capacity_bytes", (*bytes).into()))),
        Notice::Limited(limits, group) => {
            ("limited", Some(("limits", limits_value(limits, group.as_deref()))))
        }
        Notice::Faulted(queue) => ("faulted", Some(("queue", (*queue).into()))),
        Notice::ErrorsSet(rules) => ("errors_set", Some(("errors", errors_value(rules)))),
        Notice::CacheSet(writeback) => ("cache_set", Some(("writeback", (*writeback).into()))),
    }
}

fn of_health(event: &HealthEvent) -> Named {
    match event {
        HealthEvent::Halted(reason) => ("halted", Some(("reason", reason.as_str().into()))),
        HealthEvent::Resumed => ("halt_ended", None),
        HealthEvent::Stalled(queue) => ("stalled", Some(("queue", (*queue).into()))),
        HealthEvent::Failed(failure) => ("failed", Some(("failure", failure_value(failure)))),
        HealthEvent::Recovered(queue) => ("stall_ended", Some(("queue", (*queue).into()))),
    }
}

fn shown(path: &Path) -> Value {
    path.display().to_string().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subscription::RING_MAX;

    #[test]
    fn a_slow_subscriber_loses_events_and_is_told_how_many_and_a_quick_one_loses_none() {
        let events = Events::default();
        let (slow, quick) = (events.subscribe().unwrap(), events.subscribe().unwrap());
        let mut seen = 0;
        for _ in 0..RING_MAX + 3 {
            events.tell("a", &Change::Connected);
            seen += quick.take().len();
        }
        assert_eq!(seen, RING_MAX + 3);
        let told = slow.take();
        assert_eq!(told.len(), RING_MAX + 1);
        assert_eq!((&told[0]["event"], &told[0]["disk"]), (&json!("connected"), &json!("a")));
        assert_eq!(
            (&told[RING_MAX]["event"], &told[RING_MAX]["lost"]),
            (&json!("lost"), &json!(3))
        );
        events.tell("a", &Change::Removed);
        assert_eq!(slow.take().len(), 1);
        assert!(slow.take().is_empty());
    }

    #[test]
    fn the_last_message_reaches_a_full_subscriber_and_a_later_one() {
        let events = Events::default();
        let full = events.subscribe().unwrap();
        for _ in 0..=RING_MAX {
            events.tell("a", &Change::Connected);
        }
        events.end(&json!("stopped"));
        assert_eq!((full.end(), full.take().len()), (None, RING_MAX + 1));
        assert_eq!(full.end(), Some(json!("stopped")));
        assert_eq!(events.subscribe().unwrap().end(), Some(json!("stopped")));
        assert!(events.have_readers());
        drop(full);
        assert!(!events.have_readers());
    }

    #[test]
    fn a_subscriber_that_has_gone_is_forgotten() {
        let events = Events::default();
        drop(events.subscribe().unwrap());
        events.tell("a", &Change::Device(Notice::Paused));
        assert!(lock(&events.0).feeds.is_empty());
    }

    #[test]
    fn an_upgrade_is_told_to_all_subscribers_or_to_the_next_one() {
        let events = Events::default();
        drop(events.subscribe().unwrap());
        events.tell_upgraded("1", "2", 3, 0);
        events.tell("a", &Change::Connected);
        let (next, later) = (events.subscribe().unwrap(), events.subscribe().unwrap());
        let told = next.take();
        assert_eq!(told.len(), 1, "{told:?}");
        let fields = ["event", "from", "to", "pause_us"].map(|field| told[0][field].clone());
        assert_eq!(fields, [json!("upgraded"), json!("1"), json!("2"), json!(3)]);
        assert!(later.take().is_empty());
        events.tell_upgraded("2", "3", 4, 3);
        assert_eq!((next.take().len(), later.take().len()), (1, 1));
        let (third, fourth) = (events.subscribe().unwrap(), events.subscribe().unwrap());
        assert_eq!((third.take().len(), fourth.take().len()), (1, 0));
    }
}
