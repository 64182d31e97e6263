// SPDX-License-Identifier: Apache-2.0
//! The thread that works on the new storage of a mirror. No other thread of the process does: a storage that
//! hangs keeps nothing else waiting.
//!
//! | State | Begins | Next |
//! |---|---|---|
//! | opening | with the thread | copying; or the end of the thread, after an error |
//! | copying | the storage is made or opened, and locked | failed, taken, closed |
//! | failed | an act has failed, and the copier was dropped; each later act has the same error | closed |
//! | taken | [`Acts::last`] has the copier | closed |
//! | closed | [`Hand::close`] | the end of the thread |
//!
//! Acts are carried out in their order. An owner that does not wait any more leaves the thread alone; it drops
//! the copier, with an incomplete file, as soon as the storage answers. The owner waits for one act before it
//! orders the next, but for one of a completion that is refused, the last one and the close: the queue has four acts
//! at most.

use super::copier::{Copier, CopyError};
use super::state::CANCELLED;
use super::worker::Unfinished;
use crate::failure::Failure;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// Interval of the look at a cancel.
const LOOK: Duration = Duration::from_millis(20);
/// Wait for the storage at the end of a mirror.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// The thread for its owner.
pub(super) struct Hand {
    acts: Acts,
}

/// Orders acts of the thread.
#[derive(Clone)]
pub(super) struct Acts(Sender<Act>);

type Act = Box<dyn FnOnce(&mut State) + Send>;

enum State {
    /// The copier, and the sign that the storage is in use.
    Copying(Box<Copier>, Arc<()>),
    Failed(String),
    Taken,
}

impl Hand {
    /// Starts the thread, which makes or opens the storage; waits for that as long as `goes_on` says so. The
    /// thread drops `sign` when it does not use the storage any more.
    pub(super) fn start(
        name: &str,
        sign: Arc<()>,
        open: impl FnOnce() -> Result<Copier, Failure> + Send + 'static,
        goes_on: impl Fn() -> bool,
    ) -> Result<Hand, Failure> {
        let what = format!("{} {name}", super::WHAT);
        let (sender, acts) = channel::<Act>();
        let (reply, opened) = channel();
        let body = move || {
            let copier = match open() {
                Ok(copier) => copier,
                Err(failure) => {
                    drop(sign);
                    let _ = reply.send(Err(failure)); // the owner may have gone
                    return;
                }
            };
            let mut state = State::Copying(Box::new(copier), sign);
            if reply.send(Ok(())).is_ok() {
                acts.into_iter().for_each(|act| act(&mut state));
            }
        };
        let spawned = thread::Builder::new().name("mirror-target".into()).spawn(body);
        spawned
            .map_err(|why| Failure::run(&what, why, "raise the limit on threads (ulimit -u)"))?;
        loop {
            match opened.recv_timeout(LOOK) {
                Ok(opened) => return opened.map(|()| Hand { acts: Acts(sender) }),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::run(what, "its thread has gone", "see the log"));
                }
                Err(RecvTimeoutError::Timeout) if !goes_on() => {
                    // Unless the storage hangs, nothing is left of the mirror then.
                    if let Ok(Ok(())) = opened.recv_timeout(CLOSE_MAX) {
                        Hand { acts: Acts(sender) }.close();
                    }
                    return Err(Failure::run(
                        what,
                        "it was cancelled before its new storage was open",
                        "check that storage if it hangs, and repeat the command",
                    ));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Orders acts.
    pub(super) fn acts(&self) -> &Acts {
        &self.acts
    }

    /// Ends the thread. Waits for the end of its use of the storage. `false`: the storage hangs.
    pub(super) fn close(self) -> bool {
        let (reply, closed) = channel();
        let close: Act = Box::new(move |state| {
            *state = State::Failed(CANCELLED.to_owned());
            let _ = reply.send(()); // the owner may have gone
        });
        // The thread has ended if it takes no act.
        self.acts.0.send(close).is_err() || closed.recv_timeout(CLOSE_MAX).is_ok()
    }
}

impl Acts {
    /// Lets the thread act, and waits for that as long as `goes_on` says so. `None`: the copier is taken.
    /// An error of the act ends the mirror, also if nobody waits for it any more.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Copier) -> Result<T, CopyError> + Send + 'static,
        mut goes_on: impl FnMut() -> Result<(), Unfinished>,
    ) -> Result<Option<T>, Unfinished> {
        let gone = || Unfinished::Ended("its thread has gone; see the log".to_owned());
        let (reply, answer) = channel();
        let act: Act = Box::new(move |state| {
            let done = state.act(act);
            let _ = reply.send(done); // the owner may have gone
        });
        self.0.send(act).map_err(|_| gone())?;
        loop {
            match answer.recv_timeout(LOOK) {
                Ok(done) => return done.map_err(Unfinished::Ended),
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) => goes_on()?,
            }
        }
    }

    /// Orders the last act, which gets the copier. The result is dropped if nobody waits for it.
    pub(super) fn last<T: Send + 'static>(
        &self,
        act: impl FnOnce(Copier) -> Result<T, String> + Send + 'static,
    ) -> Receiver<Result<T, String>> {
        let (reply, answer) = channel();
        let act: Act = Box::new(move |state| {
            // The sign stays until a result that nobody waits for is dropped.
            let (done, _sign) = match std::mem::replace(state, State::Taken) {
                State::Copying(copier, sign) => (act(*copier), Some(sign)),
                State::Failed(told) => (Err(told), None),
                State::Taken => (Err(CANCELLED.to_owned()), None),
            };
            drop(reply.send(done)); // the owner may have gone
        });
        let _ = self.0.send(act); // the answer tells that the thread has gone
        answer
    }
}

impl State {
    fn act<T>(
        &mut self,
        act: impl FnOnce(&mut Copier) -> Result<T, CopyError>,
    ) -> Result<Option<T>, String> {
        let done = match self {
            State::Copying(copier, _) => act(copier).map_err(|error| error.to_string()),
            State::Failed(told) => return Err(told.clone()),
            State::Taken => return Ok(None),
        };
        done.map(Some).inspect_err(|told| *self = State::Failed(told.clone()))
    }
}
