// SPDX-License-Identifier: Apache-2.0
//! The control socket: the Varlink interface `io.vhostblk`.
//!
//! Each connection has its own thread, which only reads, asks the disks and writes. A disk answers on
//! its own thread, between two messages of its front-end.

mod audit;
mod backup;
mod bitmaps;
mod client;
pub mod codec;
mod jobs;
mod methods;
mod mirror;
mod places;
pub mod protocol;
mod saving;
mod snapshot;
mod values;
mod version;

use crate::disks::Disks;
use crate::failure::{Failure, Sort};
use crate::os;
use crate::subscription::Subscription;
use crate::upgrade::{Caller, TakenClient, Upgraded};
use audit::Audit;
use client::Client;
use codec::{CALL_BYTES_MAX, Channel, CodecError};
use methods::Done;
use places::CONNECTIONS_MAX;
pub use places::Places;
use protocol::{Call, CallError};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
pub(crate) use values::percentile_below_us;
use vhost_user::{ACCEPT_RETRY, Answer, Command};

/// Maximum time to the next call, from its connection or the previous reply.
const CALL_MAX: Duration = Duration::from_secs(60);
/// Maximum wait of a new program for the disks that it has taken over.
const RESTART_MAX: Duration = Duration::from_secs(10);
/// Maximum time in which a client has to take a reply.
const REPLY_MAX: Duration = Duration::from_secs(60);

/// Serves `listener` until the process ends.
///
/// # Errors
/// [`Failure`] if no thread can be started.
pub fn start(listener: UnixListener, disks: Arc<Disks>, places: Places) -> Result<(), Failure> {
    let body = move || accept_all(&listener, &disks, &places);
    let spawned = std::thread::Builder::new().name("control".into()).spawn(body);
    spawned.map(drop).map_err(|error| {
        Failure::run("listen for commands", error, "raise the limit on threads (ulimit -u)")
    })
}

/// Answers the client of an upgrade when the disks run again, and serves it on.
///
/// # Errors
/// [`Failure`] if no thread can be started.
pub fn welcome(
    client: TakenClient,
    disks: Arc<Disks>,
    upgraded: Upgraded,
    places: Places,
) -> Result<(), Failure> {
    // Before others can take all of them.
    let connection = places.connect();
    let body = move || {
        let _connection = connection;
        let deadline = Instant::now() + RESTART_MAX;
        let answer = upgraded.answer(&disks.events, |disk| is_connected(&disks, disk, deadline));
        let outcome = answer.map_err(|failure| {
            tracing::error!("{failure}");
            CallError::from(failure)
        });
        let TakenClient { mut channel, wants_answer } = client;
        if let Ok(client) = Client::of(channel.stream()) {
            Audit::of_upgrade().end(&client, outcome.as_ref().map(drop));
        }
        let reply = match outcome {
            Ok(parameters) => protocol::reply(parameters, false),
            Err(error) => protocol::error(error),
        };
        let answered = match wants_answer {
            true => channel.send(&reply, &[], Some(REPLY_MAX)),
            false => Ok(()),
        };
        if let Err(error) = answered.and_then(|()| converse(&mut channel, &disks, &places)) {
            tracing::debug!(%error, "a control connection ended");
        }
    };
    let spawned = std::thread::Builder::new().name("control-client".into()).spawn(body);
    spawned.map(drop).map_err(|error| {
        Failure::run("answer the upgrade", error, "raise the limit on threads (ulimit -u)")
    })
}

/// Returns whether a disk runs with its front-end; it handles commands after the start of its queues.
fn is_connected(disks: &Disks, disk: &str, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    let answer = disks.post(disk, Command::Status).ok().and_then(|posted| posted.wait(Some(left)));
    matches!(answer, Some(Answer::Status(status)) if status.connected)
}

fn accept_all(listener: &UnixListener, disks: &Arc<Disks>, places: &Places) {
    loop {
        let accepted = listener.accept().and_then(|(stream, _)| {
            let channel = Channel::new(stream, CALL_BYTES_MAX);
            let Some(connection) = places.connect() else {
                refuse(&channel, format!("{CONNECTIONS_MAX} others are connected"), Sort::Busy);
                return Ok(());
            };
            let (disks, places) = (Arc::clone(disks), places.clone());
            let body = move || {
                let _connection = connection;
                let mut channel = channel;
                if let Err(error) = converse(&mut channel, &disks, &places) {
                    tracing::debug!(%error, "a control connection ended");
                }
            };
            std::thread::Builder::new().name("control-client".into()).spawn(body).map(drop)
        });
        if let Err(error) = accepted {
            tracing::warn!(%error, "a control connection failed");
            std::thread::sleep(ACCEPT_RETRY);
        }
    }
}

/// Tells a client that its connection ends. Does not wait for it.
fn refuse(channel: &Channel, why: String, sort: Sort) {
    let failure = Failure::run("serve the control connection", why, "try again later");
    let failure = Failure { sort, ..failure };
    let _ = channel.send(&protocol::error(failure.into()), &[], Some(Duration::from_millis(10)));
}

/// Answers one call after another until the client closes the connection.
fn converse(channel: &mut Channel, disks: &Arc<Disks>, places: &Places) -> Result<(), CodecError> {
    loop {
        let message = match channel.receive(Some(CALL_MAX)) {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(()),
            Err(error) => {
                let why = Failure::run("read the call", &error, "see docs/ctl.md");
                let _ = channel.send(&protocol::error(why.into()), &[], Some(ACCEPT_RETRY));
                return Err(error);
            }
        };
        let Some(call) = Call::of(message.value) else {
            refuse(channel, "a message is no Varlink call".into(), Sort::Run);
            return Ok(());
        };
        let is_oneway = call.oneway;
        let stream: UnixStream = channel.stream().try_clone()?;
        let client = Client::of(&stream)?;
        let audit = Audit::of(&call);
        audit.iter().for_each(|audit| audit.begin(&client));
        let end = |outcome| audit.iter().for_each(|audit| audit.end(&client, outcome));
        // Until the reply.
        let place = places.take(&call.method);
        let done = match &place {
            Ok(_) => methods::carry_out(disks, &client, call, message.descriptors),
            Err(failure) => Err(failure.clone().into()),
        };
        let done = match done {
            Ok(Done::Reply(parameters)) => Ok(parameters),
            Ok(Done::Backup(request)) => backup::run(disks, &client, channel, &request),
            Ok(Done::Upgrade(program)) => {
                let caller = Caller { channel, wants_answer: !is_oneway };
                Err(upgrade(disks, program.as_deref(), &caller).into())
            }
            Ok(Done::Stop) => {
                end(Ok(()));
                return stop(channel);
            }
            Ok(Done::Events) => {
                return follow(channel, &disks.events.subscribe()?, "event", json!({}));
            }
            Ok(Done::Trace(traced, first)) => {
                end(Ok(()));
                return follow(channel, traced.subscription(), "request", first);
            }
            Err(error) => Err(error),
        };
        end(done.as_ref().map(drop));
        let reply = match done {
            Ok(parameters) => protocol::reply(parameters, false),
            Err(error) => protocol::error(error),
        };
        if !is_oneway {
            channel.send(&reply, &[], Some(REPLY_MAX))?;
        }
    }
}

/// Returns only if the upgrade fails: the new program answers the caller.
fn upgrade(disks: &Disks, program: Option<&Path>, caller: &Caller<'_>) -> Failure {
    match disks.upgrader.get() {
        Some(upgrader) => Failure::told(methods::UPGRADE, upgrader.upgrade(disks, program, caller)),
        None => Failure::run(methods::UPGRADE, "the daemon is about to start", "try again"),
    }
}

/// Replies, and ends the daemon as SIGTERM does.
fn stop(channel: &Channel) -> Result<(), CodecError> {
    let sent = channel.send(&protocol::reply(json!({}), false), &[], Some(ACCEPT_RETRY));
    kill_process(getpid(), Signal::TERM).map_err(std::io::Error::from)?;
    sent
}

/// Sends `first` and then each message as `member`, until the client closes the connection or the
/// stream ends with its last message.
fn follow(
    channel: &Channel,
    subscription: &Subscription,
    member: &str,
    first: Value,
) -> Result<(), CodecError> {
    let send = |parameters: Value, continues| {
        channel.send(&protocol::reply(parameters, continues), &[], Some(REPLY_MAX))
    };
    send(first, true)?;
    loop {
        if let Some(last) = subscription.end() {
            return send(last, false);
        }
        // A client that sends something is not waited for: it has no other call to make here.
        let [has_message, is_done] = os::wait_readable([subscription.as_fd(), channel.as_fd()])?;
        if is_done {
            return Ok(());
        }
        if has_message {
            let mut messages = subscription.take().into_iter();
            messages.try_for_each(|message| send(json!({member: message}), true))?;
        }
    }
}
