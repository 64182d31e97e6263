// SPDX-License-Identifier: Apache-2.0
//! The mail between the control plane and the threads of the io_uring data plane.

use crate::plane::{KeptRequests, QueueSetup, QueueState};
use backend::Disk;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use virtqueue::{GuestMemory, VirtQueue};
use vmm_sys_util::eventfd::EventFd;

/// A command of the control plane to a thread. Numbers are the thread's numbers of its queues.
pub(crate) enum Mail {
    Start(Box<(QueueSetup, VirtQueue)>, Sender<u16>),
    Stop(u16, KeptRequests, Sender<QueueState>),
    SetCall(u16, Option<File>),
    State(u16, Sender<QueueState>),
    /// The limits of the disk have changed.
    Limits,
    /// The disk is no longer halted.
    Wake,
    /// Open the lane of the disk anew. No queue runs.
    OpenLane(Arc<dyn Disk>, Sender<io::Result<()>>),
    Memory(Option<Arc<GuestMemory>>, Sender<io::Result<()>>),
    Exit,
}

/// The pending answer of a thread.
#[must_use = "the thread answers"]
pub(crate) struct Answer<T>(Receiver<T>);

impl<T> Answer<T> {
    pub(crate) fn wait(self) -> T {
        self.0.recv().expect("the thread answers before it ends")
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
