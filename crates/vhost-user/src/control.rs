// SPDX-License-Identifier: Apache-2.0
//! Commands of an operator to a running device, their answers, and notices of its changes.
//!
//! The thread that serves the connection receives commands as mail and handles them between two
//! messages of the front-end. This needs no lock, and no message sees a partial change. A device
//! that waits for its storage answers late: its mailbox is bounded, and the sender can limit its
//! wait.

use crate::handover::{Exported, Frozen};
use crate::replace::{Order, Replace, Replacing};
use crate::session::Session;
use data_plane::{
    ErrorPolicies, ErrorPolicy, ErrorRules, HealthReport, LimitChange, Limits, PlaneKind,
    QueueReport, QueueStats,
};
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, TrySendError, channel,
    sync_channel,
};
use std::sync::{Arc, Weak};
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Maximum commands that wait for a device.
const MAILBOX_MAX: usize = 64;
/// Ends ([`Control::end_with`]) that have room besides: that of a backup, and that of a merge or a mirror.
const ENDS_MAX: usize = 2;

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Gets the state of the device.
    Status,
    /// Moves the running queues and the queues of later front-ends to a data plane.
    Switch(PlaneKind),
    /// Enlarges the disk to so many bytes, or adopts the present size of its storage (`None`).
    Resize(Option<u64>),
    /// Takes no request from now on. The ones in flight complete first.
    Pause,
    /// Ends [`Command::Pause`] and a halt by an error: the requests that failed are tried again.
    Resume,
    /// Ends a halt whose cause has gone. A paused disk stays as it is, until [`Command::Resume`].
    EndHalt,
    /// Changes a part of the limits of the disk, or of its group; with a name it joins that group before. The group
    /// keeps a limit: only a change that removes all takes the disk out of it.
    Limit(Option<Arc<str>>, LimitChange),
    /// Sets the cache mode: write-back if `true`. The guest keeps the mode that it has read, so that
    /// only a change to write-through is safe while a front-end is connected.
    SetCache(bool),
    /// Changes the treatment of storage that fails or hangs.
    SetErrors(ErrorChange),
}

/// A change of [`ErrorRules`]; `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorChange {
    /// The errors of reads that halt the disk.
    pub reads: Option<ErrorPolicy>,
    /// The errors of other requests that halt the disk.
    pub others: Option<ErrorPolicy>,
    /// The time after which a request in flight is a stall, or none.
    pub io_timeout: Option<Option<Duration>>,
}

impl ErrorChange {
    /// The change from any rules to these.
    pub fn to(rules: ErrorRules) -> Self {
        ErrorChange {
            reads: Some(rules.policies.reads),
            others: Some(rules.policies.others),
            io_timeout: Some(rules.io_timeout),
        }
    }

    /// The rules after the change of `old`.
    pub fn of(self, old: ErrorRules) -> ErrorRules {
        ErrorRules {
            policies: ErrorPolicies {
                reads: self.reads.unwrap_or(old.policies.reads),
                others: self.others.unwrap_or(old.policies.others),
            },
            io_timeout: self.io_timeout.unwrap_or(old.io_timeout),
        }
    }
}

/// The answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Answer to [`Command::Status`].
    Status(Box<Status>),
    /// [`Command::Switch`] succeeded: number of moved queues.
    Switched(usize),
    /// [`Command::Resize`] succeeded: capacity of the disk in bytes.
    Resized(u64),
    /// [`Command::Pause`], [`Command::Resume`], [`Command::SetCache`] or [`Command::SetErrors`] succeeded: whether it
    /// changed anything.
    Changed(bool),
    /// [`Command::Limit`] succeeded: whether it changed anything, the limits in force, and their group.
    Limited(bool, Limits, Option<Arc<str>>),
    /// The command failed for this reason. The state is unchanged, unless the text says that the
    /// front-end is disconnected.
    Refused(String),
}

/// A change of a device. [`crate::Device::observe`] receives it from the thread of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// No request is taken until the resume.
    Paused,
    /// The pause has ended.
    Resumed,
    /// The queues have another data plane.
    Switched(PlaneKind),
    /// The disk has so many bytes.
    Resized(u64),
    /// The disk has other limits, by itself or with its group.
    Limited(Limits, Option<Arc<str>>),
    /// The write-back cache is on or off.
    CacheSet(bool),
    /// Storage that fails or hangs is treated in this way.
    ErrorsSet(ErrorRules),
    /// A ring fault has stopped this queue until the guest resets the device.
    Faulted(u16),
}

/// The state of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Description of the disk.
    pub disk: String,
    /// Data plane of the queues.
    pub plane: PlaneKind,
    /// Reason for this data plane.
    pub why: String,
    /// Size of the disk.
    pub capacity_bytes: u64,
    /// A front-end is connected.
    pub connected: bool,
    /// No request is taken until [`Command::Resume`].
    pub paused: bool,
    /// Halts by errors of the storage, and requests that it does not answer.
    pub health: HealthReport,
    /// Limits of the disk.
    pub limits: Limits,
    /// Name of the group of disks that share the limits.
    pub limit_group: Option<Arc<str>>,
    /// The lock of the image.
    pub image_lock: ImageLockState,
    /// Number of front-ends so far.
    pub front_ends: u64,
    /// Negotiated features.
    pub features: u64,
    /// The write-back cache is on.
    pub writeback: bool,
    /// The cache mode that a command has set. The guest may have chosen another one since.
    pub cache_set: Option<bool>,
    /// The treatment of storage that fails or hangs.
    pub errors: ErrorRules,
    /// All queues, by index.
    pub queues: Vec<QueueStatus>,
    /// Name and value of each counter of the kernel module, while it runs queues.
    pub kernel_counters: Vec<(String, String)>,
}

/// The lock of a device's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageLockState {
    /// The device locks nothing.
    Off,
    /// The device holds the lock.
    Held,
    /// The device waits for a guest, or its guest has migrated away: it writes nothing.
    Released,
}

/// The state of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueStatus {
    /// Data plane of a running queue.
    pub plane: Option<PlaneKind>,
    /// Number of descriptors; 0 before the front-end has set it.
    pub size: u16,
    /// A running queue, with its counters since its start.
    pub running: Option<QueueReport>,
    /// Counters of all its starts together, on both data planes.
    pub total: QueueStats,
}

/// Sends commands to a device from any thread.
#[derive(Debug)]
pub struct Control {
    mail: SyncSender<Mail>,
    /// Number of the mails that wait, without ends. Alive as long as the mailbox.
    waiting: Weak<AtomicUsize>,
    wake: EventFd,
}

#[derive(Debug)]
enum Mail {
    Command(Command, Sender<Answer>),
    Replace(Order, Sender<Result<Duration, String>>),
    End(Order, Sender<Result<Duration, String>>),
    Snapshot(Sender<Exported>),
    Freeze(Sender<Frozen>),
}

/// The reasons for which a device does not get a mail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unsent {
    /// Too many wait.
    Full,
    /// The device no longer exists.
    Gone,
}

/// The refusal by a full mailbox.
fn full() -> String {
    format!(
        "{MAILBOX_MAX} commands wait for this disk already, whose storage does not answer; check the \
         storage"
    )
}

/// The front-end of the session that handles commands.
pub(crate) struct Peer<'a> {
    pub(crate) stream: &'a UnixStream,
    /// It has sent no message.
    pub(crate) silent: bool,
}

/// A command that was sent, and has an answer of this type.
#[derive(Debug)]
pub struct Posted<T = Answer>(Option<Receiver<T>>);

impl<T> Posted<T> {
    /// Returns whether there will be no answer: the device no longer exists.
    pub fn is_lost(&self) -> bool {
        let Some(answer) = &self.0 else { return true };
        matches!(answer.try_recv(), Err(TryRecvError::Disconnected))
    }

    /// Waits for the answer as long as `patience`.
    ///
    /// # Errors
    /// [`RecvTimeoutError::Disconnected`] if the device no longer exists.
    pub fn receive(&self, patience: Duration) -> Result<T, RecvTimeoutError> {
        let answer = self.0.as_ref().ok_or(RecvTimeoutError::Disconnected)?;
        answer.recv_timeout(patience)
    }

    /// Waits for the answer, or as long as `patience`. `None`: the device no longer exists, or the
    /// time has passed.
    pub fn wait(&self, patience: Option<Duration>) -> Option<T> {
        let answer = self.0.as_ref()?;
        match patience {
            None => answer.recv().ok(),
            Some(patience) => answer.recv_timeout(patience).ok(),
        }
    }
}

/// The device's end of the commands.
#[derive(Debug)]
pub(crate) struct Mailbox {
    inbox: Receiver<Mail>,
    mail: SyncSender<Mail>,
    waiting: Arc<AtomicUsize>,
    wake: EventFd,
}

impl Control {
    /// Sends a command and waits for the answer; `None` if the device no longer exists.
    pub fn ask(&self, command: Command) -> Option<Answer> {
        self.post(command).wait(None)
    }

    /// Sends a command. The device carries it out even if the answer is not waited for.
    pub fn post(&self, command: Command) -> Posted {
        self.send_or(|reply| Mail::Command(command, reply), || Answer::Refused(full()))
    }

    /// Asks for the state of the device, for a later program. Its queues run on: their positions are
    /// out of date. A full mailbox counts as a device that no longer exists.
    pub fn snapshot(&self) -> Posted<Exported> {
        self.send(Mail::Snapshot)
    }

    /// Stops the device until the answer, or the [`Posted`] without one, is dropped: its requests in flight
    /// complete, and it handles no message and no other command. A full mailbox as for
    /// [`Control::snapshot`].
    pub fn freeze(&self) -> Posted<Frozen> {
        self.send(Mail::Freeze)
    }

    /// Replaces the storage of the device: [`Replace`]. A full mailbox is an error of the answer.
    pub fn replace_storage(&self, replace: Replace) -> Replacing {
        let (order, state) = Order::new(replace);
        let posted = self.send_or(|reply| Mail::Replace(order, reply), || Err(full()));
        Replacing::new(posted, state)
    }

    /// As [`Control::replace_storage`], for the end of a use of the storage that such an order has begun. It has
    /// room in a full mailbox, and is carried out even while the guest runs elsewhere.
    pub fn end_with(&self, replace: Replace) -> Replacing {
        let (order, state) = Order::new(replace);
        let posted = self.send_or(|reply| Mail::End(order, reply), || Err(full()));
        Replacing::new(posted, state)
    }

    fn send<T>(&self, mail: impl FnOnce(Sender<T>) -> Mail) -> Posted<T> {
        let (reply, answer) = channel();
        Posted(self.put(mail(reply)).is_ok().then_some(answer))
    }

    /// The same; `refusal` is the answer of a full mailbox.
    fn send_or<T>(
        &self,
        mail: impl FnOnce(Sender<T>) -> Mail,
        refusal: impl FnOnce() -> T,
    ) -> Posted<T> {
        let (reply, answer) = channel();
        match self.put(mail(reply.clone())) {
            Ok(()) => Posted(Some(answer)),
            Err(Unsent::Full) => {
                let _ = reply.send(refusal()); // `answer` is alive
                Posted(Some(answer))
            }
            Err(Unsent::Gone) => Posted(None),
        }
    }

    fn put(&self, mail: Mail) -> Result<(), Unsent> {
        let waiting = self.waiting.upgrade().ok_or(Unsent::Gone)?;
        let is_end = matches!(mail, Mail::End(..));
        // Only a number: the channel orders the mail itself.
        if !is_end && waiting.fetch_add(1, Ordering::Relaxed) >= MAILBOX_MAX {
            waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(Unsent::Full);
        }
        match self.mail.try_send(mail) {
            Ok(()) => self.wake.write(1).map_err(|_| Unsent::Gone),
            Err(TrySendError::Full(_)) => Err(Unsent::Full),
            Err(TrySendError::Disconnected(_)) => Err(Unsent::Gone),
        }
    }

    /// A second handle, for another thread.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        let waiting = Weak::clone(&self.waiting);
        Ok(Control { mail: self.mail.clone(), waiting, wake: self.wake.try_clone()? })
    }
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        let (mail, inbox) = sync_channel(MAILBOX_MAX + ENDS_MAX);
        let waiting = Arc::new(AtomicUsize::new(0));
        Ok(Mailbox { inbox, mail, waiting, wake: EventFd::new(EFD_NONBLOCK)? })
    }

    pub(crate) fn control(&self) -> io::Result<Control> {
        let waiting = Arc::downgrade(&self.waiting);
        Ok(Control { mail: self.mail.clone(), waiting, wake: self.wake.try_clone()? })
    }

    /// Handles all pending commands.
    pub(crate) fn handle(&self, session: &mut Session<'_>, peer: Option<&Peer<'_>>) {
        let _ = self.wake.read(); // EAGAIN: there was no signal
        while let Ok(mail) = self.inbox.try_recv() {
            if !matches!(mail, Mail::End(..)) {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            }
            // The sender may no longer wait.
            match mail {
                Mail::Command(command, reply) => {
                    let _ = reply.send(carry_out(session, command, peer.is_some()));
                }
                Mail::Replace(order, reply) => {
                    let _ = reply.send(session.replace_storage(order).map_err(|it| it.to_string()));
                }
                Mail::End(order, reply) => {
                    let _ =
                        reply.send(session.drain_and_exchange(order).map_err(|it| it.to_string()));
                }
                Mail::Snapshot(reply) => {
                    let _ = reply.send(session.export(peer));
                }
                Mail::Freeze(reply) => session.freeze(peer, &reply),
            }
        }
    }
}

fn carry_out(session: &mut Session<'_>, command: Command, connected: bool) -> Answer {
    let refused = |error: &dyn Display| Answer::Refused(error.to_string());
    match command {
        Command::Status => match session.report(connected) {
            Ok(status) => Answer::Status(Box::new(status)),
            Err(error) => Answer::Refused(format!(
                "the counters of the kernel module cannot be read: {error}; try again"
            )),
        },
        Command::Switch(to) => {
            session.switch(to).map_or_else(|error| refused(&error), Answer::Switched)
        }
        Command::Resize(bytes) => {
            session.resize(bytes).map_or_else(|error| refused(&error), Answer::Resized)
        }
        Command::Pause => session.pause().map_or_else(|error| refused(&error), Answer::Changed),
        Command::Limit(group, change) => match session.limit(group.as_deref(), change) {
            Ok(changed) => {
                let (limits, group) = session.device.limits();
                Answer::Limited(changed, limits, group)
            }
            Err(error) => refused(&error),
        },
        Command::SetCache(on) => {
            session.set_cache(on, connected).map_or_else(|error| refused(&error), Answer::Changed)
        }
        Command::SetErrors(change) => {
            session.set_errors(change).map_or_else(|error| refused(&error), Answer::Changed)
        }
        Command::EndHalt => {
            session.end_halt().map_or_else(|error| refused(&error), Answer::Changed)
        }
        Command::Resume => session.resume().map_or_else(|error| refused(&error), Answer::Changed),
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        borrow(&self.wake)
    }
}

// UNSAFETY: `EventFd` provides its descriptor only as a number.
#[expect(unsafe_code)]
fn borrow(eventfd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as the borrowed eventfd.
    unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(replacing: &Replacing) -> Result<Result<Duration, String>, RecvTimeoutError> {
        replacing.wait(Duration::ZERO)
    }

    #[test]
    fn a_full_mailbox_refuses_orders_but_ends_and_one_that_has_gone_answers_nothing() {
        let mailbox = Mailbox::new().unwrap();
        let control = mailbox.control().unwrap();
        let replace = || -> Replace { Box::new(|_| Err("not called".to_owned())) };
        let waiting = Vec::from_iter((0..MAILBOX_MAX).map(|_| control.replace_storage(replace())));
        assert!(waiting.iter().all(|order| answer(order) == Err(RecvTimeoutError::Timeout)));
        let refused = answer(&control.replace_storage(replace())).unwrap().unwrap_err();
        assert!(refused.contains("64 commands wait for this disk already"), "{refused}");
        let command = control.post(Command::Pause).receive(Duration::ZERO).unwrap();
        assert_eq!(command, Answer::Refused(refused));
        let ends = [(); ENDS_MAX].map(|()| control.end_with(replace()));
        assert!(ends.iter().all(|end| answer(end) == Err(RecvTimeoutError::Timeout)));
        drop(mailbox);
        for gone in ends.iter().chain(&waiting) {
            assert_eq!(answer(gone), Err(RecvTimeoutError::Disconnected));
        }
        let late = [control.replace_storage(replace()), control.end_with(replace())];
        assert!(late.iter().all(|late| answer(late) == Err(RecvTimeoutError::Disconnected)));
        assert!(control.post(Command::Pause).is_lost());
    }
}
