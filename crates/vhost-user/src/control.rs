// SPDX-License-Identifier: Apache-2.0
//! What an operator asks of a running device, and the answers.
//!
//! Commands come as mail to the thread that serves the connection, which handles them between two
//! messages of the front-end: no lock, and no message sees half a change.

use crate::session::Session;
use data_plane::PlaneKind;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// How things are.
    Status,
    /// Moves the running queues to a plane, and those of later front-ends.
    Switch(PlaneKind),
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Command::Status`].
    Status(Box<Status>),
    /// To [`Command::Switch`]: done; so many running queues were moved.
    Switched(usize),
    /// To [`Command::Switch`]: not done, and why; everything is as it was, unless it says that the
    /// front-end is disconnected.
    Refused(String),
}

/// The state of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The disk in a few words.
    pub disk: String,
    /// The plane that queues run on.
    pub plane: PlaneKind,
    /// Why it is this one.
    pub why: String,
    /// Whether a front-end is connected.
    pub connected: bool,
    /// The features that it and the driver took.
    pub features: u64,
    /// Whether the guest has the write-back cache switched on.
    pub writeback: bool,
    /// All queues, by number.
    pub queues: Vec<QueueStatus>,
    /// What the kernel module tells of itself, line by line, while it runs queues.
    pub kernel_counters: Vec<(String, String)>,
}

/// The state of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueStatus {
    /// The plane that runs it, if it runs.
    pub plane: Option<PlaneKind>,
    /// Its descriptors; 0 before the front-end said it.
    pub size: u16,
    /// What it did since it was started, by name.
    pub counts: Vec<(String, u64)>,
}

/// Asks a device things, from any thread.
#[derive(Debug)]
pub struct Control {
    mail: Sender<Mail>,
    wake: EventFd,
}

#[derive(Debug)]
struct Mail {
    command: Command,
    reply: Sender<Answer>,
}

/// The device's end.
#[derive(Debug)]
pub(crate) struct Mailbox {
    inbox: Receiver<Mail>,
    mail: Sender<Mail>,
    wake: EventFd,
}

impl Control {
    /// Asks and waits for the answer; `None` when the device is gone.
    pub fn ask(&self, command: Command) -> Option<Answer> {
        let (reply, answer) = channel();
        self.mail.send(Mail { command, reply }).ok()?;
        self.wake.write(1).ok()?;
        answer.recv().ok()
    }

    /// Another one, for another thread.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Control { mail: self.mail.clone(), wake: self.wake.try_clone()? })
    }
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        let (mail, inbox) = channel();
        Ok(Mailbox { inbox, mail, wake: EventFd::new(EFD_NONBLOCK)? })
    }

    pub(crate) fn control(&self) -> io::Result<Control> {
        Ok(Control { mail: self.mail.clone(), wake: self.wake.try_clone()? })
    }

    /// Handles all that came.
    pub(crate) fn handle(&self, session: &mut Session<'_>, connected: bool) {
        let _ = self.wake.read(); // EAGAIN: somebody else's reason to look
        while let Ok(Mail { command, reply }) = self.inbox.try_recv() {
            let answer = match command {
                Command::Status => Answer::Status(Box::new(session.report(connected))),
                Command::Switch(to) => match session.switch(to) {
                    Ok(moved) => Answer::Switched(moved),
                    Err(why) => Answer::Refused(why),
                },
            };
            let _ = reply.send(answer); // whoever asked may be gone
        }
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        borrow(&self.wake)
    }
}

// UNSAFETY: `EventFd` lends its descriptor only as a number.
#[expect(unsafe_code)]
fn borrow(eventfd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as the eventfd that is borrowed.
    unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) }
}
