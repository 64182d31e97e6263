// SPDX-License-Identifier: Apache-2.0
//! Completion of work that another thread does for an I/O.
//!
//! A lane whose I/O needs a thread (metadata of an image format, a network library) takes a
//! [`Remote`] from its engine and sends it with the work. The other thread calls
//! [`Remote::complete`]; the engine delivers the event on the lane's own thread, as for an operation
//! of its own. The I/O is pending meanwhile, so a drain waits for it.

use crate::Token;
use std::fmt;
use std::sync::Arc;

/// The end of an engine that other threads may use.
pub trait Deliver: Send + Sync {
    /// Makes the engine deliver `result` to [`crate::Lane::event`] with `token`.
    fn deliver(&self, token: Token, result: i32);
}

/// A handle that delivers events from any thread to the engine that made it.
#[derive(Clone)]
pub struct Remote(Arc<dyn Deliver>);

impl Remote {
    /// A handle on `engine`.
    pub fn new(engine: Arc<dyn Deliver>) -> Self {
        Remote(engine)
    }

    /// Delivers `result` to the lane with `token`. Each pending token is completed once. After the
    /// end of the engine this has no effect.
    pub fn complete(&self, token: Token, result: i32) {
        self.0.deliver(token, result);
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}
