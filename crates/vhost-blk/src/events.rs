// SPDX-License-Identifier: Apache-2.0
//! Events of the disks, for `vhost-blk ctl events`.
//!
//! Each subscriber has a ring of its own with a bound. A slow subscriber loses events and is told
//! their number; it delays no disk.

use data_plane::{HealthEvent, Limits, Operation, StorageFailure};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{SystemTime, UNIX_EPOCH};
use vhost_user::Notice;

/// Maximum events that wait for a subscriber.
pub const RING_MAX: usize = 256;

/// A change of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The disk is served from now on.
    Added,
    /// The disk is drained and closed.
    Removed,
    /// A front-end has connected.
    Connected,
    /// A front-end has disconnected, for this reason if it was not the usual one.
    Disconnected(Option<String>),
    /// The device has changed.
    Device(Notice),
    /// The health of the storage has changed.
    Health(HealthEvent),
}

/// An event as a JSON object.
pub type Event = Value;

/// All subscribers.
#[derive(Debug, Default)]
pub struct Events(Mutex<Vec<Weak<Ring>>>);

/// The events of one subscriber.
#[derive(Debug)]
pub struct Subscription(Arc<Ring>);

#[derive(Debug)]
struct Ring {
    waiting: Mutex<Waiting>,
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct Waiting {
    events: VecDeque<Event>,
    lost: u64,
}

impl Events {
    /// Tells all subscribers. Never waits for one.
    pub fn tell(&self, disk: &str, change: &Change) {
        let mut rings = lock(&self.0);
        rings.retain(|ring| ring.strong_count() > 0);
        if rings.is_empty() {
            return;
        }
        let event = event(disk, change);
        rings.iter().filter_map(Weak::upgrade).for_each(|ring| ring.push(event.clone()));
    }

    /// A new subscriber, which receives the events from now on.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn subscribe(&self) -> io::Result<Subscription> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let ring = Arc::new(Ring { waiting: Mutex::default(), wake });
        lock(&self.0).push(Arc::downgrade(&ring));
        Ok(Subscription(ring))
    }
}

impl Ring {
    fn push(&self, event: Event) {
        let mut waiting = lock(&self.waiting);
        match waiting.events.len() < RING_MAX {
            true => waiting.events.push_back(event),
            false => waiting.lost += 1,
        }
        // The counter of an eventfd cannot overflow here; it only has to be more than 0.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Subscription {
    /// The events that wait, and one about those that were lost after them.
    pub fn take(&self) -> Vec<Event> {
        let mut waiting = lock(&self.0.waiting);
        let _ = rustix::io::read(&self.0.wake, &mut [0; 8][..]); // EAGAIN: there was no signal
        let Waiting { events, lost } = std::mem::take(&mut *waiting);
        let told = json!({"time_ms": now_ms(), "event": "lost", "lost": lost});
        events.into_iter().chain((lost > 0).then_some(told)).collect()
    }
}

impl AsFd for Subscription {
    /// Readable while events wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
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

fn event(disk: &str, change: &Change) -> Event {
    let mut event = json!({"time_ms": now_ms(), "disk": disk});
    let mut set = |name: &str, value: Value| event[name] = value;
    let name = match change {
        Change::Added => "added",
        Change::Removed => "removed",
        Change::Connected => "connected",
        Change::Disconnected(reason) => {
            if let Some(reason) = reason {
                set("reason", reason.as_str().into());
            }
            "disconnected"
        }
        Change::Device(notice) => match notice {
            Notice::Paused => "paused",
            Notice::Resumed => "resumed",
            Notice::Switched(plane) => {
                set("data_plane", plane.to_string().into());
                "switched"
            }
            Notice::Resized(bytes) => {
                set("capacity_bytes", (*bytes).into());
                "resized"
            }
            Notice::Limited(limits, group) => {
                set("limits", limits_value(limits, group.as_deref()));
                "limited"
            }
            Notice::Faulted(queue) => {
                set("queue", (*queue).into());
                "faulted"
            }
            Notice::CacheSet(writeback) => {
                set("writeback", (*writeback).into());
                "cache_set"
            }
        },
        Change::Health(health) => match health {
            HealthEvent::Halted(reason) => {
                set("reason", reason.as_str().into());
                "halted"
            }
            HealthEvent::Resumed => "halt_ended",
            HealthEvent::Stalled(queue) => {
                set("queue", (*queue).into());
                "stalled"
            }
            HealthEvent::Failed(failure) => {
                set("failure", failure_value(failure));
                "failed"
            }
            HealthEvent::Recovered(queue) => {
                set("queue", (*queue).into());
                "stall_ended"
            }
        },
    };
    set("event", name.into());
    event
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_subscriber_that_has_gone_is_forgotten() {
        let events = Events::default();
        drop(events.subscribe().unwrap());
        events.tell("a", &Change::Device(Notice::Paused));
        assert!(lock(&events.0).is_empty());
    }
}
