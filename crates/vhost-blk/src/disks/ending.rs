// SPDX-License-Identifier: Apache-2.0
//! The last message of all streams: the process ends because it was asked to. A stream that ends without it tells its
//! client of a crash.

use super::Disks;
use crate::clock;
use crate::signals::Remaining;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Maximum wait for clients to receive the last message: one that does not read delays the end no longer.
const STREAMS_MAX: Duration = Duration::from_millis(200);
/// Interval of the looks at their streams.
const STREAMS_LOOK: Duration = Duration::from_millis(1);

/// The cause of the end of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A client of the control socket has stopped the daemon.
    Command,
    /// A signal with this name.
    Signal(&'static str),
    /// The connection of `--fd` has ended.
    Connection,
}

impl StopReason {
    /// The event `stopped`.
    fn event(self, is_drained: bool) -> Value {
        let (reason, signal) = match self {
            StopReason::Command => ("command", None),
            StopReason::Signal(name) => ("signal", Some(name)),
            StopReason::Connection => ("connection", None),
        };
        let mut event = json!({
            "time": clock::now(), "event": "stopped", "reason": reason, "drained": is_drained,
        });
        if let Some(signal) = signal {
            event["signal"] = signal.into();
        }
        event
    }
}

impl Disks {
    /// Requests the stop of all disks for this reason.
    pub fn stop_for(&self, reason: StopReason) {
        // Only the first one counts.
        let _ = self.stop_reason.set(reason);
        self.stop();
    }

    /// Returns the work that is left after the request to stop.
    pub fn remaining(&self) -> Remaining {
        let state = self.lock();
        Remaining { requests: state.count() > state.closing, closing: state.closing > 0 }
    }

    /// Ends the streams of all clients with the event `stopped`, and waits a moment until they have it.
    pub fn end_streams(&self, is_drained: bool) {
        let reason = *self.stop_reason.get_or_init(|| StopReason::Connection);
        let last = json!({"event": reason.event(is_drained)});
        self.events.end(&last);
        self.traces.end_all(&last);
        let deadline = Instant::now() + STREAMS_MAX;
        while (self.events.have_readers() || self.traces.have_readers())
            && Instant::now() < deadline
        {
            std::thread::sleep(STREAMS_LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::starting::tests::disks;

    #[test]
    fn a_client_that_does_not_read_keeps_the_end_for_a_moment_only() {
        let disks = disks();
        let slow = disks.events.subscribe().unwrap();
        disks.stop_for(StopReason::Command);
        // Never returns without the bound.
        disks.end_streams(true);
        let last = slow.end().unwrap();
        assert_eq!(last["event"]["reason"], "command");
        // The first end counts.
        disks.end_streams(false);
        assert_eq!(slow.end(), Some(last));
    }

    #[test]
    fn the_event_names_the_cause() {
        let event = StopReason::Signal("SIGTERM").event(true);
        let told = ["event", "reason", "signal", "drained"].map(|field| event[field].clone());
        assert_eq!(told, [json!("stopped"), json!("signal"), json!("SIGTERM"), json!(true)]);
        let event = StopReason::Command.event(false);
        assert_eq!(
            (&event["reason"], event.get("signal"), &event["drained"]),
            (&json!("command"), None, &json!(false))
        );
    }
}
