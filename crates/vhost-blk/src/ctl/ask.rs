// SPDX-License-Identifier: Apache-2.0
//! The client's end of the control socket.

use crate::control::codec::{Channel, CodecError, REPLY_BYTES_MAX};
use crate::control::protocol::{INTERFACE, result};
use crate::failure::{Failure, Sort};
use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Maximum wait for the answer of a vhost-user back-end.
const FRONT_END_MAX: Duration = Duration::from_secs(1);

/// The end of a stream of replies.
pub(super) enum Followed {
    /// The parameters of the reply that says that it is the last one.
    Last(Value),
    /// The caller wants no more.
    Enough,
    /// The daemon has ended the connection: it has ended, or another program has replaced it.
    Gone,
}

/// A stream of replies that goes on after an upgrade of the daemon.
pub(super) struct Stream<'a> {
    pub(super) path: &'a Path,
    pub(super) patience: Option<Duration>,
    pub(super) what: &'static str,
    pub(super) method: &'static str,
    pub(super) parameters: Value,
}

impl Stream<'_> {
    /// As [`Asker::follow`], and connects again when the connection ends without a last reply. A new program answers at
    /// the same socket. `again` precedes the replies of a further connection, and also returns whether to go on.
    ///
    /// # Errors
    /// [`Failure`] also if no program answers then: the daemon has crashed.
    pub(super) fn follow(
        &self,
        mut each: impl FnMut(&Value) -> Result<bool, Failure>,
        mut again: impl FnMut() -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let connect = || Asker::connect(self.path, self.patience);
        let mut next = Some(connect()?);
        let mut is_first = true;
        while let Some(asker) = next {
            let mut is_answered = false;
            let followed = asker.follow(self.what, self.method, &self.parameters, |reply| {
                let is_again = !std::mem::replace(&mut is_answered, true) && !is_first;
                Ok((!is_again || again()?) && each(reply)?)
            });
            next = match followed {
                Ok(Followed::Last(_) | Followed::Enough) => None,
                // An end within a message, or of a further connection whose listener was about to go, is an error.
                Err(failure) if failure.sort != Sort::NoAnswer || (is_first && !is_answered) => {
                    return Err(failure);
                }
                Ok(Followed::Gone) | Err(_) => {
                    let again = is_answered.then(|| connect().ok()).flatten();
                    Some(again.ok_or_else(|| self.crashed())?)
                }
            };
            is_first = false;
        }
        Ok(())
    }

    /// The error of a stream without its end.
    fn crashed(&self) -> Failure {
        let path = self.path.display();
        let what = format!("{} from the daemon at {path}", self.what);
        let why = "it has ended without a stop: it has crashed, or was killed";
        let failure = Failure::run(what, why, "see its log, or that of the service manager");
        Failure { sort: Sort::NoAnswer, ..failure }
    }
}

/// A connection to a daemon.
pub(crate) struct Asker<'a> {
    path: &'a Path,
    channel: Channel,
    patience: Option<Duration>,
}

impl<'a> Asker<'a> {
    /// Connects to the daemon at `path`. Each reply has to arrive within `patience`.
    pub(crate) fn connect(path: &'a Path, patience: Option<Duration>) -> Result<Self, Failure> {
        let stream = UnixStream::connect(path).map_err(|error| unreachable_at(path, &error))?;
        Ok(Asker { path, channel: Channel::new(stream, REPLY_BYTES_MAX), patience })
    }

    /// Calls a method, passes a descriptor, and returns the parameters of the reply.
    pub(crate) fn ask(
        &mut self,
        what: &str,
        method: &str,
        parameters: &Value,
        descriptor: Option<&OwnedFd>,
    ) -> Result<Value, Failure> {
        let call = json!({"method": format!("{INTERFACE}.{method}"), "parameters": parameters});
        let descriptors: Vec<_> = descriptor.iter().map(|descriptor| descriptor.as_fd()).collect();
        // Read even after a failed send: a busy daemon sends an error and closes the connection.
        let sent = self.channel.send(&call, &descriptors, self.patience);
        match self.receive(self.patience)? {
            Some(reply) => result(reply, what),
            None => {
                sent.map_err(|error| self.failed(&error))?;
                Err(self.hung_up(&"it has ended without an answer"))
            }
        }
    }

    /// Calls a method that replies again and again, and `each` for the parameters of each reply, until
    /// it says to stop, or the stream or the daemon ends. Only the first reply has to arrive within the patience.
    pub(super) fn follow(
        mut self,
        what: &str,
        method: &str,
        parameters: &Value,
        mut each: impl FnMut(&Value) -> Result<bool, Failure>,
    ) -> Result<Followed, Failure> {
        let method = format!("{INTERFACE}.{method}");
        let call = json!({"method": method, "parameters": parameters, "more": true});
        self.channel.send(&call, &[], self.patience).map_err(|error| self.failed(&error))?;
        let mut patience = self.patience;
        while let Some(reply) = self.receive(patience)? {
            // The first one only says that the subscription holds.
            patience = None;
            let continues = reply["continues"] == true;
            let parameters = result(reply, what)?;
            let goes_on = each(&parameters)?;
            match (continues, goes_on) {
                (false, _) => return Ok(Followed::Last(parameters)),
                (true, false) => return Ok(Followed::Enough),
                (true, true) => {}
            }
        }
        Ok(Followed::Gone)
    }

    fn receive(&mut self, patience: Option<Duration>) -> Result<Option<Value>, Failure> {
        let received = self.channel.receive(patience);
        received.map(|message| message.map(|it| it.value)).map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &CodecError) -> Failure {
        match error {
            CodecError::Socket(why) if why.kind() == io::ErrorKind::WouldBlock => no_answer(
                self.path,
                format!("no answer in {} s", self.patience.unwrap_or_default().as_secs()),
                "check the disk, whose requests the daemon waits for; --timeout of ctl sets a longer wait",
            ),
            other => self.hung_up(other),
        }
    }

    /// The error of a connection that has ended without an answer.
    fn hung_up(&self, why: &dyn std::fmt::Display) -> Failure {
        match is_front_end_socket(self.path) {
            true => no_answer(
                self.path,
                "this is the vhost-user socket of a disk, not a control socket",
                "give the daemon's --control-path",
            ),
            false => unreachable_at(self.path, why),
        }
    }
}

/// Returns whether a socket answers the first message of a vhost-user front-end: `GET_FEATURES`.
fn is_front_end_socket(path: &Path) -> bool {
    const GET_FEATURES: [u32; 3] = [1, 1, 0]; // request, version 1, length
    let answer = || -> io::Result<[u8; 4]> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(FRONT_END_MAX))?;
        stream.write_all(&GET_FEATURES.map(u32::to_ne_bytes).concat())?;
        let mut request = [0; 4];
        stream.read_exact(&mut request)?;
        Ok(request)
    };
    answer().is_ok_and(|request| request == GET_FEATURES[0].to_ne_bytes())
}

fn unreachable_at(path: &Path, why: &dyn std::fmt::Display) -> Failure {
    let remedy = "see that it runs with this --control-path, as this user, or name another socket (--control-path, \
                  VHOST_BLK_CONTROL)";
    no_answer(path, why, remedy)
}

fn no_answer(path: &Path, why: impl std::fmt::Display, remedy: &str) -> Failure {
    let what = format!("ask the daemon at {}", path.display());
    Failure { sort: Sort::NoAnswer, ..Failure::run(what, why, remedy) }
}
