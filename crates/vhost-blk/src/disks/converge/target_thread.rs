// SPDX-License-Identifier: Apache-2.0
//! The thread that works on the new storage of a copy. No other thread of the process does: a storage that
//! hangs keeps nothing else waiting. It also waits for the old storage of a drained disk ([`TargetQueue::on_old`]).
//!
//! | State | Begins | Next |
//! |---|---|---|
//! | opening | with the thread | copying; or the end of the thread, after an error |
//! | copying | the storage is made or opened, and locked | failed, taken, closed |
//! | failed | an act has failed, and the copier was dropped; each later act has the same error | closed |
//! | taken | [`TargetQueue::last`] has the copier; the new disk is kept open | closed |
//! | closed | [`TargetThread::close`] | the end of the thread |
//!
//! Acts are carried out in their order. An owner that does not wait any more leaves the thread alone; it drops the
//! copier, with an incomplete file, as soon as the storage answers. An unused new disk is closed on this thread, and a
//! value that was made with it ([`OwnedByTarget`]) is dropped here, so that a drained disk waits for neither. The owner
//! waits for each act before it orders the next, with three exceptions: an act of a refused convergence, the last act
//! and the close. So the queue has at most four acts.

use super::{DRAINED_MAX, Unfinished};
use crate::disk::Opened;
use crate::failure::Failure;
use backend::Disk;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// Interval of the look at a cancel.
const LOOK: Duration = Duration::from_millis(20);
/// Wait for the storage at the end of a copy.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// The words of the work for its user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    /// Name of the thread of the target.
    pub(crate) thread: &'static str,
    /// The target.
    pub(crate) target: &'static str,
    /// The reason of an end by a cancel.
    pub(crate) cancelled: &'static str,
}

/// Works on a target: only the thread of a [`TargetThread`] has it.
pub(crate) trait TargetUser: Sized + 'static {
    const WORDS: Words;
    /// Has the remedy.
    type Error: fmt::Display;
}

/// Alive as long as the thread uses the storage.
pub(crate) type Sign = Arc<dyn Any + Send + Sync>;

/// The thread for its owner.
pub(crate) struct TargetThread<C> {
    acts: TargetQueue<C>,
}

/// Orders acts of the thread.
pub(crate) struct TargetQueue<C>(Sender<Act<C>>);

type Act<C> = Box<dyn FnOnce(&mut State<C>) + Send>;

type Task = Box<dyn FnOnce() + Send>;

enum State<C> {
    Copying(Box<C>, Sign),
    Failed(String),
    /// The sign has its end after the disk.
    Taken {
        _disk: Option<Arc<dyn Disk>>,
        sign: Option<Sign>,
    },
}

impl<C> Clone for TargetQueue<C> {
    fn clone(&self) -> Self {
        TargetQueue(self.0.clone())
    }
}

impl<C: TargetUser> TargetThread<C> {
    /// Starts the thread, which makes or opens the storage; waits for that as long as `goes_on` says so. The
    /// thread drops `sign` when it does not use the storage any more. `what`: the act for an error.
    pub(crate) fn start(
        what: String,
        sign: Sign,
        open: impl FnOnce() -> Result<C, Failure> + Send + 'static,
        goes_on: impl Fn() -> bool,
    ) -> Result<TargetThread<C>, Failure> {
        let (sender, acts) = channel::<Act<C>>();
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
        let spawned = thread::Builder::new().name(C::WORDS.thread.into()).spawn(body);
        spawned
            .map_err(|why| Failure::run(&what, why, "raise the limit on threads (ulimit -u)"))?;
        loop {
            match opened.recv_timeout(LOOK) {
                Ok(opened) => return opened.map(|()| TargetThread { acts: TargetQueue(sender) }),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::run(what, "its thread has gone", "see the log"));
                }
                Err(RecvTimeoutError::Timeout) if !goes_on() => {
                    // Unless the storage hangs, nothing is left of the copy then.
                    if let Ok(Ok(())) = opened.recv_timeout(CLOSE_MAX) {
                        TargetThread { acts: TargetQueue(sender) }.close();
                    }
                    return Err(Failure::run(
                        what,
                        format!("it was cancelled before its {} was open", C::WORDS.target),
                        "check that storage if it hangs, and repeat the command",
                    ));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Orders acts.
    pub(crate) fn acts(&self) -> &TargetQueue<C> {
        &self.acts
    }

    /// Ends the thread. Waits for the end of its use of the storage. `false`: the storage hangs.
    pub(crate) fn close(self) -> bool {
        let (reply, closed) = channel();
        let close: Act<C> = Box::new(move |state| {
            *state = State::Failed(C::WORDS.cancelled.to_owned());
            let _ = reply.send(()); // the owner may have gone
        });
        // The thread has ended if it takes no act.
        self.acts.0.send(close).is_err() || closed.recv_timeout(CLOSE_MAX).is_ok()
    }
}

impl<C: TargetUser> TargetQueue<C> {
    /// Lets the thread act, and waits for that as long as `goes_on` says so. `None`: the copier is taken.
    /// An error of the act ends the copy, also if no thread waits for it any more.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut C) -> Result<T, C::Error> + Send + 'static,
        mut goes_on: impl FnMut() -> Result<(), Unfinished>,
    ) -> Result<Option<T>, Unfinished> {
        let gone = || Unfinished::Ended("its thread has gone; see the log".to_owned());
        let (reply, answer) = channel();
        let act: Act<C> = Box::new(move |state| {
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

    /// The same, for an owner that has not ordered the last act.
    pub(crate) fn act<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut C) -> Result<T, C::Error> + Send + 'static,
        goes_on: impl FnMut() -> Result<(), Unfinished>,
    ) -> Result<T, Unfinished> {
        let done = self.ask(act, goes_on)?;
        done.ok_or_else(|| Unfinished::Ended(C::WORDS.cancelled.to_owned()))
    }

    /// Orders the last act, which gets the copier, and opens the new disk. The result is dropped if no
    /// thread waits for it.
    pub(super) fn last<T: Send + 'static>(
        &self,
        act: impl FnOnce(C) -> Result<New<T>, String> + Send + 'static,
    ) -> Receiver<Result<New<T>, String>> {
        let (reply, answer) = channel();
        let act: Act<C> = Box::new(move |state| {
            let (done, sign) =
                match std::mem::replace(state, State::Taken { _disk: None, sign: None }) {
                    State::Copying(copier, sign) => (act(*copier), Some(sign)),
                    State::Failed(told) => (Err(told), None),
                    State::Taken { sign, .. } => (Err(C::WORDS.cancelled.to_owned()), sign),
                };
            let disk = done.as_ref().ok().map(|new| Arc::clone(&new.opened.disk));
            *state = State::Taken { _disk: disk, sign };
            drop(reply.send(done)); // the owner may have gone
        });
        let _ = self.0.send(act); // the answer tells that the thread has gone
        answer
    }

    /// Lets the thread work on the old storage of the drained disk. If that hangs, the guest goes on in it; the
    /// work gets a check that fails then. `what`: the work, for the error.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(in crate::disks) fn on_old<T: Send + 'static>(
        &self,
        what: &str,
        act: impl FnOnce(&dyn Fn() -> Result<(), String>) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let is_late = Arc::new(AtomicBool::new(false));
        let late = Arc::clone(&is_late);
        let check = move || match late.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(C::WORDS.cancelled.to_owned()),
        };
        let done = self.own_on_target(()).act(move |()| act(&check), DRAINED_MAX);
        done.unwrap_or_else(|| {
            is_late.store(true, Ordering::Release);
            let limit = DRAINED_MAX.as_secs();
            Err(format!(
                "{what} took more than {limit} s, and the guest goes on as before; check the storage of its image, \
                 and repeat the command"
            ))
        })
    }

    /// Wraps a value so that the thread drops it.
    pub(super) fn own_on_target<T: Send + 'static>(&self, value: T) -> OwnedByTarget<T> {
        let acts = self.0.clone();
        let run = Arc::new(move |act: Task| {
            let act: Act<C> = Box::new(move |_| act());
            let _ = acts.send(act); // without the thread, the storage has answered
        });
        OwnedByTarget { value: Some(value), run }
    }
}

/// The result of the last act.
pub(in crate::disks) struct New<T> {
    pub(in crate::disks) opened: Opened,
    /// Bytes that were copied, if there is a copy.
    pub(in crate::disks) rest_bytes: Option<u64>,
    /// Anything that was made with the disk.
    pub(in crate::disks) made: T,
}

/// A value whose drop, and whose last act, may wait for the storage. Its owner does not: the thread does that.
pub(in crate::disks) struct OwnedByTarget<T: Send + 'static> {
    value: Option<T>,
    run: Arc<dyn Fn(Task) + Send + Sync>,
}

impl<T: Send + 'static> OwnedByTarget<T> {
    /// The value, whose drop does not wait any more.
    pub(in crate::disks) fn into_inner(mut self) -> Option<T> {
        self.value.take()
    }

    /// Lets the thread act. `None`: the storage hangs, or the thread has gone.
    pub(in crate::disks) fn act<R: Send + 'static>(
        mut self,
        act: impl FnOnce(T) -> R + Send + 'static,
        patience: Duration,
    ) -> Option<R> {
        let (value, (reply, answer)) = (self.value.take()?, channel());
        // The owner may have gone.
        (self.run)(Box::new(move || drop(reply.send(act(value)))));
        answer.recv_timeout(patience).ok()
    }

    /// As [`OwnedByTarget::act`], with a value that takes the place of this one.
    pub(in crate::disks) fn then<U: Send + 'static, E: Send + 'static>(
        self,
        act: impl FnOnce(T) -> Result<U, E> + Send + 'static,
        patience: Duration,
    ) -> Option<Result<OwnedByTarget<U>, E>> {
        let run = Arc::clone(&self.run);
        let done = self.act(act, patience)?;
        Some(done.map(|value| OwnedByTarget { value: Some(value), run }))
    }
}

impl<T: Send + 'static> Drop for OwnedByTarget<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            (self.run)(Box::new(move || drop(value)));
        }
    }
}

impl<C: TargetUser> State<C> {
    fn act<T>(
        &mut self,
        act: impl FnOnce(&mut C) -> Result<T, C::Error>,
    ) -> Result<Option<T>, String> {
        let done = match self {
            State::Copying(copier, _) => act(copier).map_err(|error| error.to_string()),
            State::Failed(told) => return Err(told.clone()),
            State::Taken { .. } => return Ok(None),
        };
        done.map(Some).inspect_err(|told| *self = State::Failed(told.clone()))
    }
}
