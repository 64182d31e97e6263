// SPDX-License-Identifier: Apache-2.0
//! Serves one connection.

use crate::Device;
use crate::backend_channel::QUIET;
use crate::control::{Mailbox, Peer};
use crate::error::ConnectionError;
use crate::handover::Inherited;
use crate::message::{self, Arrival, Header, Missing};
use crate::peeked;
use crate::replay::{self, Handler};
use crate::session::{Session, lock};
use crate::state::StateError;
use crate::waiting::LOOK;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vhost::vhost_user::{BackendReqHandler, Error};

/// Pause after a failed `accept`: if no descriptor is left, the next one would fail, too.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Maximum wait for the rest of a message, and then for room for its reply. Commands are handled
/// meanwhile.
const MESSAGE_LIMIT: Duration = Duration::from_secs(5);

/// Maximum wait of a read. A message is read after it has arrived, so that no read waits. Exception: beside
/// descriptors, Linux 6.17 counts bytes again that were read before.
const READ_LIMIT: Duration = Duration::from_millis(1);

/// Minimum interval between two connections that are accepted while another front-end is served.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(10);

/// Interval between two looks at a message that is incomplete, or whose reply has no room. The front-end's
/// socket is ready for all that time, so that no event tells.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The source of the front-ends that follow.
#[derive(Clone, Copy, Debug)]
pub struct Next<'a> {
    /// The listening socket.
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
    // Before anything fails: the next front-end must not get it.
    let inherited = device.inherited.take();
    stream.set_read_timeout(Some(READ_LIMIT))?;
    let peeked_stream = stream.try_clone()?;
    let faults = device.faults.try_clone()?;
    let commands = Commands { mailbox, faults: &faults };
    let session = Arc::new(Mutex::new(Session::new(device)));
    let silent = inherited.as_ref().is_none_or(|inherited| inherited.state.silent);
    let now = Instant::now();
    let begin_deadline = next.filter(|_| silent).map(|next| now + next.patience);
    let mut handler = match begin(stream, &session, inherited) {
        Ok(handler) => handler,
        Err(error) => {
            lock(&session).end();
            return Err(ConnectionError::Lost(error.to_string()));
        }
    };
    let mut conversation = Conversation {
        stream: &peeked_stream,
        commands,
        listener: next.map(|next| next.listener),
        accept_from: now,
        begin_deadline,
        silent,
        incomplete: None,
    };
    let result = conversation.run(&session, &mut handler);
    lock(&session).end();
    result
}

/// A running connection.
struct Conversation<'a> {
    /// The connection.
    stream: &'a UnixStream,
    commands: Commands<'a>,
    /// The socket at which other front-ends connect meanwhile.
    listener: Option<BorrowedFd<'a>>,
    /// Time from which on the next one is accepted.
    accept_from: Instant,
    /// Until a message has come: the time from which on a waiting front-end replaces this one.
    begin_deadline: Option<Instant>,
    /// No message has come.
    silent: bool,
    /// The missing part of the present message, and the time since then.
    incomplete: Option<(Missing, Instant)>,
}

/// The next step of a connection.
enum Step {
    /// Handles the message with this header.
    Handle(Header),
    /// Waits for the message, or for room for its reply.
    Wait,
    /// Ends the connection.
    End,
}

impl<'a> Conversation<'a> {
    /// Handles messages and commands until the connection ends.
    fn run<'s>(
        &mut self,
        session: &Mutex<Session<'s>>,
        handler: &mut Handler<'s>,
    ) -> Result<(), ConnectionError> {
        loop {
            let tells = lock(session).owes_config_change();
            match self.wait(session, tells.then_some(QUIET))? {
                Wakeup::Quiet => lock(session).announce_config_change(),
                Wakeup::Fault => lock(session).pass_faults_on(),
                Wakeup::FrontEnd => match self.step()? {
                    Step::Handle(header) => {
                        if !handle(&header, self.stream, session, handler)? {
                            return Ok(());
                        }
                        if message::is_own_end_taken(self.stream)? {
                            let why = "the own end of the connection as a descriptor";
                            let name = header.name();
                            return Err(ConnectionError::Refused(format!("{name}: {why}")));
                        }
                    }
                    Step::Wait => {}
                    Step::End => return Ok(()),
                },
                Wakeup::Next => return Err(ConnectionError::Silent),
                Wakeup::Command(mailbox) => {
                    let mut session = lock(session);
                    let peer = Peer { stream: self.stream, silent: self.silent };
                    mailbox.handle(&mut session, Some(&peer));
                    if let Some(why) = session.lost.take() {
                        return Err(ConnectionError::Lost(why));
                    }
                }
            }
        }
    }

    /// Looks at the front-end's next message.
    fn step(&mut self) -> Result<Step, ConnectionError> {
        let arrival = message::arrival(self.stream)?;
        if !matches!(arrival, Arrival::Nothing) {
            (self.begin_deadline, self.silent) = (None, false);
        }
        let missing = match arrival {
            Arrival::Nothing => return Ok(Step::Wait),
            Arrival::End => return Ok(Step::End),
            Arrival::Whole(header) => {
                self.incomplete = None;
                return Ok(Step::Handle(header));
            }
            Arrival::Incomplete(missing) => missing,
        };
        let before = self.incomplete.filter(|(before, _)| *before == missing);
        let since = before.map_or_else(Instant::now, |(_, since)| since);
        self.incomplete = Some((missing, since));
        let seconds = MESSAGE_LIMIT.as_secs();
        match missing {
            _ if since.elapsed() < MESSAGE_LIMIT => Ok(Step::Wait),
            Missing::Bytes => Err(ConnectionError::Incomplete { seconds }),
            Missing::ReplyRoom => Err(ConnectionError::Deaf { seconds }),
        }
    }

    /// Sleeps until there is an event. Commands precede messages: a busy front-end does not delay
    /// the operator by more than one message. Front-ends that connect meanwhile are accepted, one in each
    /// [`ACCEPT_INTERVAL`]. After `quiet` without another event, that is an event.
    fn wait(
        &mut self,
        session: &Mutex<Session<'_>>,
        quiet: Option<Duration>,
    ) -> io::Result<Wakeup<'a>> {
        let Commands { mailbox, faults } = self.commands;
        let quiet_at = quiet.map(|quiet| Instant::now() + quiet);
        loop {
            let now = Instant::now();
            let has_successor = lock(session).device.waiting.look();
            let listener = self.listener.filter(|_| self.accept_from <= now);
            let front_end = self.incomplete.is_none().then_some(self.stream);
            let sources = [
                mailbox.map(|mailbox| (Source::Mailbox(mailbox), mailbox.as_fd())),
                Some((Source::Faults, faults.as_fd())),
                front_end.map(|stream| (Source::FrontEnd, stream.as_fd())),
                listener.map(|listener| (Source::Listener(listener), listener)),
            ];
            let silence_ends = self.begin_deadline.filter(|_| has_successor);
            let wakeups = [
                self.incomplete.map(|_| now + LOOK_AGAIN),
                self.listener.map(|_| self.accept_from).filter(|from| *from > now),
                has_successor.then_some(now + LOOK),
                silence_ends,
                quiet_at,
            ];
            let first = wakeups.into_iter().flatten().min();
            let timeout = first.map(|at| at.saturating_duration_since(now));
            let has_passed = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
            match ready(sources.into_iter().flatten(), timeout)? {
                Some(Source::Mailbox(mailbox)) => return Ok(Wakeup::Command(mailbox)),
                Some(Source::Faults) => return Ok(Wakeup::Fault),
                Some(Source::FrontEnd) => return Ok(Wakeup::FrontEnd),
                Some(Source::Listener(listener)) => self.accept(session, listener),
                None if self.incomplete.is_some() => return Ok(Wakeup::FrontEnd),
                None if has_passed(silence_ends) => return Ok(Wakeup::Next),
                None if has_passed(quiet_at) => return Ok(Wakeup::Quiet),
                None => {}
            }
        }
    }

    fn accept(&mut self, session: &Mutex<Session<'_>>, listener: BorrowedFd<'_>) {
        let accepted = lock(session).device.waiting.accept(listener);
        let pause = accepted.map_or(ACCEPT_RETRY, |()| ACCEPT_INTERVAL);
        self.accept_from = Instant::now() + pause;
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

/// Handles the message with this header; returns `false` at the end of the connection.
fn handle<'a>(
    header: &Header,
    stream: &UnixStream,
    session: &Mutex<Session<'a>>,
    handler: &mut BackendReqHandler<Mutex<Session<'a>>>,
) -> Result<bool, ConnectionError> {
    let refused = |why: String| Err(ConnectionError::Refused(format!("{}: {why}", header.name())));
    if let Some(flaw) = header.flaw() {
        return refused(flaw.to_string());
    }
    if peeked::handle(header, stream, session)? {
        return Ok(true);
    }
    match handler.handle_request() {
        // See `READ_LIMIT`.
        Err(Error::SocketRetry(why)) if why.kind() == io::ErrorKind::WouldBlock => Err(why.into()),
        Ok(()) | Err(Error::SocketRetry(_)) => Ok(true),
        Err(Error::Disconnected) => Ok(false),
        Err(Error::ReqHandlerError(error)) => refused(error.to_string()),
        Err(error) => refused(format!("payload or descriptors: {error}")),
    }
}

/// The sources of events besides the front-end, if the device has them.
#[derive(Clone, Copy)]
struct Commands<'a> {
    mailbox: Option<&'a Mailbox>,
    faults: &'a File,
}

/// An event that wakes the thread of the connection.
enum Wakeup<'a> {
    /// The front-end has sent something, or the time for another look at its message has come.
    FrontEnd,
    /// A command of the operator.
    Command(&'a Mailbox),
    /// A queue has faulted.
    Fault,
    /// Another front-end waits, and this one is silent.
    Next,
    /// There was no other event for the given time.
    Quiet,
}

/// The sources of [`Wakeup`], in the order of their precedence.
enum Source<'a> {
    Mailbox(&'a Mailbox),
    Faults,
    FrontEnd,
    Listener(BorrowedFd<'a>),
}

/// Waits for the sources as long as `timeout`. Returns the first one that is ready.
fn ready<'a>(
    sources: impl Iterator<Item = (Source<'a>, BorrowedFd<'a>)>,
    timeout: Option<Duration>,
) -> io::Result<Option<Source<'a>>> {
    let (sources, fds): (Vec<_>, Vec<_>) = sources.unzip();
    let mut fds = Vec::from_iter(fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
    let timeout = timeout.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
    rustix::io::retry_on_intr(|| poll(&mut fds, timeout.as_ref()))?;
    let mut events = fds.iter().map(PollFd::revents);
    Ok(sources.into_iter().find(|_| events.next().is_some_and(|events| !events.is_empty())))
}
