// SPDX-License-Identifier: Apache-2.0
//! The mail between the control plane and the threads of the io_uring data plane.

use crate::error::StartError;
use crate::event::QueueId;
use crate::limits::{Limiter, Share};
use crate::plane::{IoPoll, KeptRequests, QueueSetup, QueueState};
use backend::Lane;
use std::fs::File;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
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
    Stop(QueueId, KeptRequests, Sender<QueueState>),
    /// The queue has a new call eventfd.
    SetCall(QueueId, Arc<NewCall>),
    State(QueueId, Sender<QueueState>),
    /// Answer between two turns.
    Ping(Sender<()>),
    Exit,
}

/// The newest call eventfd of a queue that its thread has not taken. A front-end replaces the eventfd
/// without waiting, so at most one, and one mail about it, wait for the thread.
#[derive(Default)]
pub(crate) struct NewCall(Mutex<Option<Option<File>>>);

impl NewCall {
    /// Replaces the eventfd, and closes one that was not taken. Returns whether there was none: the
    /// thread gets a mail.
    pub(crate) fn put(&self, call: Option<File>) -> bool {
        let replaced = self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(call);
        replaced.is_none()
    }

    /// Takes the eventfd; `None`: there is no new one.
    pub(crate) fn take(&self) -> Option<Option<File>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A disk for a thread.
pub(crate) struct AddDisk {
    pub(crate) lane: Box<dyn Lane>,
    pub(crate) share: Arc<Share>,
    /// Use of the `IOPOLL` ring; `Auto`: the device has poll queues.
    pub(crate) iopoll: IoPoll,
    /// Operations are submitted by a thread of the kernel.
    pub(crate) submits_elsewhere: bool,
}

/// The pending answer of a thread.
#[must_use = "the thread answers"]
pub(crate) struct Answer<T>(Receiver<T>);

impl<T> Answer<T> {
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
    pub(crate) fn request<T>(&self, mail: impl FnOnce(Sender<T>) -> Mail) -> Answer<T> {
        let (reply, answer) = channel();
        self.send(mail(reply));
        Answer(answer)
    }

    /// Sends the mail that `mail` makes of a reply channel, and waits for the reply.
    pub(crate) fn ask<T>(&self, mail: impl FnOnce(Sender<T>) -> Mail) -> T {
        self.request(mail).wait()
    }
}
