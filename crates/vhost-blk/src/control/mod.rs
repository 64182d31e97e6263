// SPDX-License-Identifier: Apache-2.0
//! The control socket: one JSON request per line, one JSON answer per line.
//!
//! Each connection has its own thread, which only reads, asks the device and writes. The device
//! answers on the thread that serves the front-end, between two messages.

pub mod wire;

use crate::failure::Failure;
use crate::upgrade::{Upgraded, Upgrader};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use vhost_user::{ACCEPT_RETRY, Command, Control};
use wire::{Answer, Order, Request};

/// Maximum length of a request.
const REQUEST_BYTES_MAX: usize = 4096;
/// Maximum connections at the same time; further ones get an error.
const CONNECTIONS_MAX: usize = 8;

/// Serves `listener` until the process ends.
///
/// # Errors
/// [`Failure`] if no thread can be started.
pub fn start(
    listener: UnixListener,
    control: Control,
    upgrader: Arc<Upgrader>,
) -> Result<(), Failure> {
    let body = move || accept_all(&listener, &control, &upgrader);
    let spawned = std::thread::Builder::new().name("control".into()).spawn(body);
    spawned.map(drop).map_err(|error| {
        Failure::run("listen for commands", error, "raise the limit on threads (ulimit -u)")
    })
}

/// Answers the client of an upgrade when its disks run again, and serves it on.
///
/// # Errors
/// [`Failure`] if no thread can be started.
pub fn welcome(
    client: UnixStream,
    control: Control,
    upgrader: Arc<Upgrader>,
    upgraded: Upgraded,
) -> Result<(), Failure> {
    let body = move || {
        // The device handles commands after it has started its queues.
        let status = control.ask(Command::Status);
        let answered = upgraded.answer(status).write(&client);
        if let Err(error) = answered.and_then(|()| converse(&client, &control, &upgrader)) {
            tracing::debug!(%error, "a control connection ended");
        }
    };
    let spawned = std::thread::Builder::new().name("control-client".into()).spawn(body);
    spawned.map(drop).map_err(|error| {
        Failure::run("answer the upgrade", error, "raise the limit on threads (ulimit -u)")
    })
}

fn accept_all(listener: &UnixListener, control: &Control, upgrader: &Arc<Upgrader>) {
    let open = Arc::new(());
    loop {
        let accepted = listener.accept().and_then(|(stream, _)| {
            // One reference of this thread, one of each connection.
            if Arc::strong_count(&open) > CONNECTIONS_MAX {
                let why = format!("{CONNECTIONS_MAX} others are connected; try again later");
                return Answer::refused(why).write(&stream);
            }
            let (control, mine) = (control.try_clone()?, Arc::clone(&open));
            let upgrader = Arc::clone(upgrader);
            let body = move || {
                let _mine = mine;
                if let Err(error) = converse(&stream, &control, &upgrader) {
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

/// Answers one request after another until the client closes the connection.
fn converse(mut stream: &UnixStream, control: &Control, upgrader: &Upgrader) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        reader.by_ref().take(REQUEST_BYTES_MAX as u64 + 1).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        if line.len() > REQUEST_BYTES_MAX {
            let why = format!("a request of more than {REQUEST_BYTES_MAX} bytes");
            return Answer::refused(why).write(stream);
        }
        let answer = match serde_json::from_slice::<Request>(&line) {
            Ok(request) => match Order::from(request) {
                Order::Device(command) => match control.ask(command) {
                    Some(answer) => Answer::from(answer),
                    None => Answer::refused("the daemon is about to end"),
                },
                Order::Upgrade(program) => {
                    let error = upgrader.upgrade(program.as_deref(), stream.as_fd());
                    Answer::refused(error.to_string())
                }
            },
            Err(error) => Answer::refused(format!(
                "{error}; send {{\"command\":\"status\"}}, for example; docs/operations.md has all"
            )),
        };
        answer.write(stream)?;
        stream.flush()?;
    }
}
