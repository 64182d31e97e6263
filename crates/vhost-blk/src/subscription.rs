// SPDX-License-Identifier: Apache-2.0
//! Streams of messages to clients of the control socket.
//!
//! Each subscriber has a ring of its own with a bound. A slow subscriber loses messages and learns
//! their number; it delays no disk.

use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Maximum messages that wait for a subscriber.
pub const RING_MAX: usize = 256;

/// The message about so many lost ones.
type Lost = fn(u64) -> Value;

/// The writer's end of a subscription.
#[derive(Debug)]
pub struct Feed(Weak<Ring>);

/// The reader's end.
#[derive(Debug)]
pub struct Subscription(Arc<Ring>);

#[derive(Debug)]
struct Ring {
    waiting: Mutex<Waiting>,
    wake: OwnedFd,
    lost: Lost,
}

#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<Value>,
    lost: u64,
    /// The message of the end, which no bound keeps out.
    last: Option<Value>,
}

/// Both ends of a subscription. `lost` makes the message about lost ones.
///
/// # Errors
/// The error of the system call, if no file descriptor is left.
pub fn feed(lost: Lost) -> io::Result<(Feed, Subscription)> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let ring = Arc::new(Ring { waiting: Mutex::default(), wake, lost });
    Ok((Feed(Arc::downgrade(&ring)), Subscription(ring)))
}

impl Feed {
    /// Returns whether the subscriber is still there.
    pub fn has_reader(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Passes a message to the subscriber, or counts it as lost. Never waits.
    pub fn push(&self, message: Value) {
        self.change(|waiting| match waiting.messages.len() < RING_MAX {
            true => waiting.messages.push_back(message),
            false => waiting.lost += 1,
        });
    }

    /// Counts messages that were lost before they came here.
    pub fn lose(&self, count: u64) {
        self.change(|waiting| waiting.lost += count);
    }

    /// Ends the stream with `last` after the messages that wait. Only the first end counts.
    pub fn end(&self, last: &Value) {
        self.change(|waiting| {
            waiting.last.get_or_insert_with(|| last.clone());
        });
    }

    fn change(&self, change: impl FnOnce(&mut Waiting)) {
        let Some(ring) = self.0.upgrade() else { return };
        change(&mut lock(&ring.waiting));
        // The counter of an eventfd cannot overflow here; it only has to be more than 0.
        let _ = rustix::io::write(&ring.wake, &1u64.to_ne_bytes());
    }
}

impl Subscription {
    /// The messages that wait, and one about those that were lost after them.
    pub fn take(&self) -> Vec<Value> {
        let mut waiting = lock(&self.0.waiting);
        let _ = rustix::io::read(&self.0.wake, &mut [0; 8][..]); // EAGAIN: there was no signal
        let messages = std::mem::take(&mut waiting.messages);
        let lost = std::mem::take(&mut waiting.lost);
        messages.into_iter().chain((lost > 0).then(|| (self.0.lost)(lost))).collect()
    }

    /// The last message, after all those of [`Subscription::take`]; `None`: others come before it.
    pub fn end(&self) -> Option<Value> {
        let waiting = lock(&self.0.waiting);
        let is_empty = waiting.messages.is_empty() && waiting.lost == 0;
        waiting.last.clone().filter(|_| is_empty)
    }
}

impl AsFd for Subscription {
    /// Readable while messages wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_stream_ends_after_its_last_message() {
        let (feed, subscription) = feed(|lost| json!(lost)).unwrap();
        feed.push(json!("a"));
        feed.end(&json!("last"));
        feed.end(&json!("later"));
        assert_eq!(subscription.end(), None, "a message waits");
        assert_eq!(subscription.take(), [json!("a")]);
        assert_eq!(subscription.end(), Some(json!("last")));
        feed.lose(3);
        assert_eq!(subscription.end(), None, "lost messages are told before");
        assert_eq!(subscription.take(), [json!(3)]);
        assert_eq!(subscription.end(), Some(json!("last")));
        drop(subscription);
        assert!(!feed.has_reader());
        feed.push(json!("b"));
    }
}
