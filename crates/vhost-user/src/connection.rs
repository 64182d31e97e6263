// SPDX-License-Identifier: Apache-2.0
//! Serves one connection.

use crate::Device;
use crate::backend_channel::QUIET;
use crate::control::{Mailbox, Peer};
use crate::error::ConnectionError;
use crate::handover::Inherited;
use crate::message::{self, MESSAGE_LIMIT};
use crate::peeked;
use crate::replay::{self, Handler};
use crate::session::{Session, lock};
use crate::state::StateError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketFlags;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vhost::vhost_user::{BackendReqHandler, Error};

/// Pause after a failed `accept`: if no descriptor is left, the next one would fail, too.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Waiting front-ends; one of them replaces a silent front-end.
#[derive(Clone, Copy, Debug)]
pub struct Next<'a> {
    /// The listening socket: readable while a front-end waits.
    pub listener: BorrowedFd<'a>,
    /// Maximum time between the connection and the first message while another front-end waits.
    /// QEMU may take long (it allocates the guest's memory first): without another front-end there
    /// is no limit.
    pub patience: Duration,
}

pub(crate) fn serve(
    device: &mut Device,
    stream: UnixStream,
    next: Option<Next<'_>>,
    mailbox: Option<&Mailbox>,
) -> Result<(), ConnectionError> {
    stream.set_read_timeout(Some(MESSAGE_LIMIT))?;
    let peeked = stream.try_clone()?;
    let faults = device.faults.as_ref().map(File::try_clone).transpose()?;
    let commands = Commands { mailbox, faults: faults.as_ref() };
    let inherited = device.inherited.take();
    let session = Arc::new(Mutex::new(Session::new(device)));
    let silent = inherited.as_ref().is_none_or(|inherited| inherited.state.silent);
    let first = next.map(|next| (next.listener, Instant::now() + next.patience));
    let mut handler = match begin(stream, &session, inherited) {
        Ok(handler) => handler,
        Err(error) => {
            lock(&session).end();
            return Err(ConnectionError::Lost(error.to_string()));
        }
    };
    let mut conversation =
        Conversation { peeked: &peeked, commands, first: first.filter(|_| silent), silent };
    let result = conversation.run(&session, &mut handler);
    lock(&session).end();
    result
}

/// A running connection.
struct Conversation<'a> {
    /// The connection.
    peeked: &'a UnixStream,
    commands: Commands<'a>,
    /// The listening socket of the next front-end, and the end of the patience with this one.
    first: Option<(BorrowedFd<'a>, Instant)>,
    /// No message has come.
    silent: bool,
}

impl Conversation<'_> {
    /// Handles messages and commands until the connection ends.
    fn run<'s>(
        &mut self,
        session: &Mutex<Session<'s>>,
        handler: &mut Handler<'s>,
    ) -> Result<(), ConnectionError> {
        loop {
            let tells = lock(session).owes_config_change();
            match wait(self.peeked, self.commands, self.first, tells.then_some(QUIET))? {
                Wakeup::Quiet => lock(session).announce_config_change(),
                Wakeup::Fault => lock(session).pass_faults_on(),
                Wakeup::Message => {
                    (self.first, self.silent) = (None, false);
                    if !handle(self.peeked, session, handler)? {
                        return Ok(());
                    }
                }
                Wakeup::Next(stream) => {
                    lock(session).device.waiting = Some(stream);
                    return Err(ConnectionError::Silent);
                }
                Wakeup::NextFailed => {
                    let again = Instant::now() + ACCEPT_RETRY;
                    self.first = self.first.map(|(listener, _)| (listener, again));
                }
                Wakeup::Command(mailbox) => {
                    let mut session = lock(session);
                    let peer = Peer { stream: self.peeked, silent: self.silent };
                    mailbox.handle(&mut session, Some(&peer));
                    if let Some(why) = session.lost.take() {
                        return Err(ConnectionError::Lost(why));
                    }
                }
            }
        }
    }
}

/// Begins the connection, or continues that of an earlier program.
fn begin<'a>(
    stream: UnixStream,
    session: &Arc<Mutex<Session<'a>>>,
    inherited: Option<Inherited>,
) -> Result<Handler<'a>, StateError> {
    let Some(Inherited { state, mut descriptors }) = inherited else {
        return Ok(BackendReqHandler::from_stream(stream, Arc::clone(session)));
    };
    let handler = replay::handler(stream, session, &state)?;
    lock(session).restore(state, &mut descriptors)?;
    Ok(handler)
}

/// Handles one message; returns `false` at the end of the connection.
fn handle<'a>(
    stream: &UnixStream,
    session: &Mutex<Session<'a>>,
    handler: &mut BackendReqHandler<Mutex<Session<'a>>>,
) -> Result<bool, ConnectionError> {
    let Some(header) = message::peek(stream)? else { return Ok(false) };
    if !message::has_room_for_reply(stream)? {
        return Err(ConnectionError::Deaf { seconds: MESSAGE_LIMIT.as_secs() });
    }
    if peeked::handle(&header, stream, session)? {
        return Ok(true);
    }
    let refused = |why: String| Err(ConnectionError::Refused(format!("{}: {why}", header.name())));
    match handler.handle_request() {
        // The payload did not follow the header.
        Err(Error::SocketRetry(why)) if why.kind() == io::ErrorKind::WouldBlock => {
            Err(message::cut_short().into())
        }
        Ok(()) | Err(Error::SocketRetry(_)) => Ok(true),
        Err(Error::Disconnected) => Ok(false),
        Err(Error::ReqHandlerError(error)) => refused(error.to_string()),
        // The library reports most errors alike: find errors of the header here.
        Err(error) => match header.flaw() {
            Some(flaw) => refused(flaw.to_string()),
            None => refused(format!("payload or descriptors: {error}")),
        },
    }
}

/// The sources of events besides the front-end, if the device has them.
#[derive(Clone, Copy)]
struct Commands<'a> {
    mailbox: Option<&'a Mailbox>,
    faults: Option<&'a File>,
}

/// An event that wakes the thread of the connection.
enum Wakeup<'a> {
    /// A message of the front-end, or the end of the stream.
    Message,
    /// A command of the operator.
    Command(&'a Mailbox),
    /// A queue has faulted.
    Fault,
    /// Another front-end waits, and this one is silent.
    Next(UnixStream),
    /// The waiting front-end cannot be accepted.
    NextFailed,
    /// There was no other event for the given time.
    Quiet,
}

/// Sleeps until there is an event. Commands precede messages: a busy front-end does not delay the
/// operator by more than one message. `first` applies until the first message: after its time,
/// another waiting front-end is an event, unless it has hung up while it waited. After `quiet`
/// without another event, that is an event.
fn wait<'a>(
    stream: &UnixStream,
    Commands { mailbox, faults }: Commands<'a>,
    first: Option<(BorrowedFd<'_>, Instant)>,
    quiet: Option<Duration>,
) -> io::Result<Wakeup<'a>> {
    let readable = PollFlags::IN;
    loop {
        let left = first.map(|(_, until)| until.saturating_duration_since(Instant::now()));
        let timeout = left.filter(|left| !left.is_zero());
        let mut fds = vec![PollFd::new(stream, readable)];
        fds.extend(mailbox.map(|mailbox| PollFd::new(mailbox, readable)));
        fds.extend(faults.map(|faults| PollFd::new(faults, readable)));
        if let (Some((listener, _)), None) = (first, timeout) {
            fds.push(PollFd::from_borrowed_fd(listener, readable));
        }
        // There is no `first` while queues run, and no `quiet` before.
        let timeout = timeout.or(quiet).map(Timespec::try_from).transpose();
        let timeout = timeout.map_err(io::Error::other)?;
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) if quiet.is_some() => return Ok(Wakeup::Quiet),
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |at: usize| !fds[at].revents().is_empty();
        match mailbox {
            Some(mailbox) if is_ready(1) => return Ok(Wakeup::Command(mailbox)),
            _ if faults.is_some() && is_ready(1 + usize::from(mailbox.is_some())) => {
                return Ok(Wakeup::Fault);
            }
            _ if is_ready(0) => return Ok(Wakeup::Message),
            _ => {}
        }
        let Some((listener, _)) = first else { continue };
        match accept(listener) {
            Ok(waiting) if !has_hung_up(&waiting) => return Ok(Wakeup::Next(waiting)),
            Ok(_) => {}
            Err(_) => return Ok(Wakeup::NextFailed),
        }
    }
}

fn accept(listener: BorrowedFd<'_>) -> io::Result<UnixStream> {
    Ok(rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?.into())
}

/// Returns whether the peer has closed its end.
fn has_hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
