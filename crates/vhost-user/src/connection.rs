// SPDX-License-Identifier: Apache-2.0
//! One connection, from the first message to the last.

use crate::Device;
use crate::control::Mailbox;
use crate::session::Session;
use crate::status;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vhost::vhost_user::{BackendReqHandler, Error};

/// Longest wait for the rest of a message: whoever sends a part must not keep the operator out.
pub(crate) const MESSAGE_LIMIT: Duration = Duration::from_secs(5);

/// Why a connection was given up.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The front-end sent something that the protocol or the device does not allow.
    #[error("the front-end's message was refused: {0}")]
    Refused(String),
    /// Queues were stopped and no data plane could start them again. A front-end that connects
    /// again gets them back, and loses nothing if it keeps an in-flight region.
    #[error("the queues could not be started again: {0}")]
    Lost(String),
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
}

pub(crate) fn serve(
    device: &mut Device,
    stream: UnixStream,
    mailbox: Option<&Mailbox>,
) -> Result<(), ConnectionError> {
    stream.set_read_timeout(Some(MESSAGE_LIMIT))?;
    let peeked = stream.try_clone()?;
    let session = Arc::new(Mutex::new(Session::new(device)));
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
    let result = loop {
        match mailbox.map(|mailbox| wait(&peeked, mailbox)).transpose() {
            Err(error) => break Err(error.into()),
            Ok(None | Some(Came::Message)) => {}
            Ok(Some(Came::Command(mailbox))) => {
                let mut session = lock(&session);
                mailbox.handle(&mut session, true);
                match session.lost.take() {
                    Some(why) => break Err(ConnectionError::Lost(why)),
                    None => continue,
                }
            }
        }
        let step = match status::handle_if_status(&peeked, &session) {
            Ok(status::Peeked::Handled) => continue,
            Ok(status::Peeked::Other) => handler.handle_request(),
            Ok(status::Peeked::End) => break Ok(()),
            Err(error) => break Err(error.into()),
        };
        match step {
            // The body did not follow its header.
            Err(Error::SocketRetry(why)) if why.kind() == io::ErrorKind::WouldBlock => {
                break Err(status::cut_short().into());
            }
            Ok(()) | Err(Error::SocketRetry(_)) => {}
            Err(Error::Disconnected) => break Ok(()),
            Err(Error::ReqHandlerError(error)) => {
                break Err(ConnectionError::Refused(error.to_string()));
            }
            Err(error) => break Err(ConnectionError::Refused(error.to_string())),
        }
    };
    lock(&session).end();
    result
}

fn lock<'a, 'b>(session: &'a Mutex<Session<'b>>) -> MutexGuard<'a, Session<'b>> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the connection's thread woke up for.
enum Came<'a> {
    /// A message of the front-end, or its end.
    Message,
    /// Something from the operator.
    Command(&'a Mailbox),
}

/// Sleeps until there is something to do. A front-end that says much does not keep the operator
/// out: commands come first, and each is one message's delay.
fn wait<'a>(stream: &UnixStream, mailbox: &'a Mailbox) -> io::Result<Came<'a>> {
    let readable = PollFlags::IN;
    let mut fds = [PollFd::new(stream, readable), PollFd::new(mailbox, readable)];
    loop {
        match poll(&mut fds, None) {
            Ok(_) if !fds[1].revents().is_empty() => return Ok(Came::Command(mailbox)),
            Ok(_) if !fds[0].revents().is_empty() => return Ok(Came::Message),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
