// SPDX-License-Identifier: Apache-2.0
//! The mail between the control plane and the threads of the io_uring data plane.

use crate::error::StartError;
use crate::event::QueueId;
use crate::limits::{Limiter, Share};
use crate::plane::{AtStop, IoPoll, QueueSetup, QueueState};
use backend::Lane;
use std::fs::File;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use virtqueue::{GuestMemory, VirtQueue};
use vmm_sys_util::eventfd::EventFd;

/// A command of the control plane to a thread. Numbers of disks and queues are those of the thread.
pub(crate) enum Mail {
    AddDisk(AddDisk, Sender<Result<u16, StartError>>),
    /// Remove a disk and return its lane. No queue of the disk runs.
    RemoveDisk(u16, Sender<Box<dyn Lane>>),
    /// Replace the lane of a disk and return the lane that is not in use. No queue of the disk runs.
    ReplaceLane(u16, Box<dyn Lane>, Sender<(Box<dyn Lane>, io::Result<()>)>),
    Memory(u16, Option<Arc<GuestMemory>>, Sender<io::Result<()>>),
    /// These limits have changed, for all disks that have them.
    LimitsChanged(Arc<Limiter>),
    /// A disk has a share in other limits.
    Share(u16, Arc<Share>),
    Start(u16, Box<(QueueSetup, VirtQueue)>, Sender<QueueId>),
    /// A disk is no longer halted.
    Wake(u16),
    Stop(QueueId, AtStop, Sender<QueueState>),
    /// The queue has a new call eventfd.
    SetCall(QueueId, Arc<NewCall>),
    State(QueueId, Sender<QueueState>),
    /// Answer between two turns.
    Ping(Sender<()>),
    Exit,
}

/// The newest call eventfd of a queue that its thread has not taken. A front-end replaces the eventfd
/// without waiting, so at most one, and one mail about it, wait for the thread.
///
/// The front-end may have left the thread the last descriptor of a socket. Its close ends what the socket holds, such
/// as files of a FUSE server, and may take any time. So the thread closes none: it gives the old one back.
#[derive(Default)]
pub(crate) struct NewCall(Mutex<Calls>);

#[derive(Default)]
struct Calls {
    /// `None`: the thread has the newest one.
    new: Option<Option<File>>,
    /// The eventfd that the thread had before.
    old: Option<File>,
}

impl NewCall {
    /// Replaces the eventfd, and closes one that was not taken and one that was given back. Returns whether the thread
    /// gets a mail: none is on the way.
    pub(crate) fn put(&self, call: Option<File>) -> bool {
        let mut calls = self.lock();
        let (not_taken, old) = (calls.new.replace(call), calls.old.take());
        // The thread waits for no close.
        drop(calls);
        drop(old);
        not_taken.is_none()
    }

    /// Puts the new eventfd in the place of `call`. Returns whether there is a new one.
    pub(crate) fn take(&self, call: &mut Option<File>) -> bool {
        let mut calls = self.lock();
        let Some(new) = calls.new.take() else { return false };
        // A put before this new one has closed the last of them.
        debug_assert!(calls.old.is_none());
        calls.old = std::mem::replace(call, new);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk for a thread.
pub(crate) struct AddDisk {
    pub(crate) lane: Box<dyn Lane>,
    pub(crate) share: Arc<Share>,
    /// Use of the `IOPOLL` ring; `Auto`: the device has poll queues.
    pub(crate) iopoll: IoPoll,
    /// Submits operations with IOSQE_ASYNC, because issuing one may block.
    pub(crate) force_async: bool,
}

/// A reply of a thread that may not have arrived.
#[must_use = "the thread answers"]
pub(crate) struct PendingReply<T>(Receiver<T>);

impl<T> PendingReply<T> {
    pub(crate) fn wait(self) -> T {
        self.0.recv().expect("the thread answers before it ends")
    }

    /// Returns whether the answer arrives before the deadline.
    pub(crate) fn arrives_before(self, deadline: Instant) -> bool {
        self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok()
    }
}

/// The control plane's end of a thread's mail.
pub(crate) struct Postbox {
    mail: Sender<Mail>,
    /// Signalled after each mail.
    wake: EventFd,
}

impl Postbox {
    /// A postbox, and the thread's end of it.
    pub(crate) fn new(wake: EventFd) -> (Self, Receiver<Mail>) {
        let (mail, inbox) = channel();
        (Postbox { mail, wake }, inbox)
    }

    pub(crate) fn send(&self, mail: Mail) {
        self.mail.send(mail).expect("the thread ends only when told to");
        self.wake.write(1).expect("the mail counter never fills up");
    }

    /// Sends the mail that `mail` makes of a reply channel.
    pub(crate) fn request<T>(&self, mail: impl FnOnce(Sender<T>) -> Mail) -> PendingReply<T> {
        let (reply, answer) = channel();
        self.send(mail(reply));
        PendingReply(answer)
    }

    /// Sends the mail that `mail` makes of a reply channel, and waits for the reply.
    pub(crate) fn ask<T>(&self, mail: impl FnOnce(Sender<T>) -> Mail) -> T {
        self.request(mail).wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeReader, Read, pipe};

    /// A call descriptor, and a pipe that ends with its close.
    fn call() -> (Option<File>, PipeReader) {
        let (end, call) = pipe().unwrap();
        rustix::io::ioctl_fionbio(&end, true).unwrap();
        (Some(File::from(std::os::fd::OwnedFd::from(call))), end)
    }

    fn is_closed(end: &mut PipeReader) -> bool {
        matches!(end.read(&mut [0]), Ok(0))
    }

    #[test]
    fn the_thread_closes_no_call_descriptor() {
        let cell = NewCall::default();
        let ((first, mut first_end), (second, mut second_end)) = (call(), call());
        let ((third, mut third_end), mut current) = (call(), None);
        assert!(cell.put(first) && cell.take(&mut current));
        assert!(!cell.take(&mut current), "there is no new one");
        assert!(cell.put(second) && cell.take(&mut current));
        assert!(!is_closed(&mut first_end), "the thread has closed it");
        assert!(cell.put(third) && is_closed(&mut first_end));
        assert!(!cell.put(None), "the mail about the third one is on the way");
        assert!(is_closed(&mut third_end) && !is_closed(&mut second_end));
        assert!(cell.take(&mut current) && current.is_none() && !is_closed(&mut second_end));
        drop(cell);
        assert!(is_closed(&mut second_end));
    }
}
