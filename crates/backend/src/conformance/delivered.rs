// SPDX-License-Identifier: Apache-2.0
//! Events that other threads deliver to an engine of the suite.

use crate::{Deliver, Remote, Token};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// The events of other threads; empty and free of cost until [`Delivered::remote`].
#[derive(Debug, Default)]
pub struct Delivered(Option<(Sender<Event>, Receiver<Event>)>);

type Event = (Token, i32);

struct Sent(Sender<Event>);

impl Deliver for Sent {
    fn deliver(&self, token: Token, result: i32) {
        let _ = self.0.send((token, result)); // fails only if the engine is gone
    }
}

impl Delivered {
    /// A handle that delivers to this engine.
    pub fn remote(&mut self) -> Remote {
        let (sender, _) = self.0.get_or_insert_with(channel);
        Remote::new(Arc::new(Sent(sender.clone())))
    }

    /// The next event, if there is one.
    pub fn poll(&mut self) -> Option<(Token, i32)> {
        self.0.as_ref()?.1.try_recv().ok()
    }

    /// The next event; waits up to `limit` for it.
    pub fn wait(&mut self, limit: Duration) -> Option<(Token, i32)> {
        self.0.as_ref()?.1.recv_timeout(limit).ok()
    }
}
