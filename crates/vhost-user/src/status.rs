// SPDX-License-Identifier: Apache-2.0
//! SET_STATUS and GET_STATUS, which the `vhost` crate's message layer does not know: looked at
//! before it reads, and handled here.
// UNSAFETY: `recv` with MSG_PEEK has no safe form in the standard library.
#![expect(unsafe_code)]

use crate::connection::MESSAGE_LIMIT;
use crate::session::Session;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

const SET_STATUS: u32 = 39;
const GET_STATUS: u32 = 40;
/// Message header: request code, flags, payload size (vhost-user, "Header").
const HEADER_BYTES: usize = 12;
const FLAG_VERSION: u32 = 1;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// What was found at the front of the stream.
pub(crate) enum Peeked {
    /// The front-end hung up.
    End,
    /// A status message, now handled.
    Handled,
    /// Another message, still unread.
    Other,
}

/// Waits for a message and handles it if it is SET_STATUS or GET_STATUS.
pub(crate) fn handle_if_status(
    mut stream: &UnixStream,
    session: &Mutex<Session<'_>>,
) -> io::Result<Peeked> {
    let header = match peek_header(stream)? {
        Some(header) => header,
        None => return Ok(Peeked::End),
    };
    let word = |at: usize| {
        u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let (code, flags, size) = (word(0), word(4), word(8));
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    if !matches!(code, SET_STATUS | GET_STATUS) || !session.status_negotiated() {
        return Ok(Peeked::Other);
    }
    let expected = if code == SET_STATUS { 8 } else { 0 };
    if size != expected || flags & !FLAG_NEED_REPLY != FLAG_VERSION {
        return Ok(Peeked::Other); // refused there as an unknown message
    }
    let mut message = [0; HEADER_BYTES + 8];
    let message = &mut message[..HEADER_BYTES + size as usize];
    stream.read_exact(message)?;
    let answer = if code == SET_STATUS {
        let payload: [u8; 8] = message[HEADER_BYTES..].try_into().expect("the size was checked");
        session.set_status(u64::from_ne_bytes(payload) as u8);
        0
    } else {
        u64::from(session.status())
    };
    let wants_ack = flags & FLAG_NEED_REPLY != 0 && session.reply_ack_negotiated();
    if code == GET_STATUS || wants_ack {
        let mut reply = Vec::with_capacity(HEADER_BYTES + 8);
        for word in [code, FLAG_VERSION | FLAG_REPLY, 8] {
            reply.extend_from_slice(&word.to_ne_bytes());
        }
        reply.extend_from_slice(&answer.to_ne_bytes());
        stream.write_all(&reply)?;
    }
    Ok(Peeked::Handled)
}

/// The next message's header, left in the stream; `None` at the end of it.
fn peek_header(stream: &UnixStream) -> io::Result<Option<[u8; HEADER_BYTES]>> {
    let mut header = [0u8; HEADER_BYTES];
    let mut first_part = None;
    loop {
        let flags = libc::MSG_PEEK; // which never waits for more than the first byte
        // SAFETY: the buffer is valid for the length given.
        let got = unsafe {
            libc::recv(stream.as_raw_fd(), header.as_mut_ptr().cast(), HEADER_BYTES, flags)
        };
        match usize::try_from(got) {
            Ok(0) => return Ok(None),
            Ok(HEADER_BYTES) => return Ok(Some(header)),
            Ok(_) if first_part.get_or_insert_with(Instant::now).elapsed() > MESSAGE_LIMIT => {
                return Err(cut_short());
            }
            Ok(_) if more_may_come(stream)? => {}
            // A header cut short by the end of the stream.
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(_) => {
                let error = io::Error::last_os_error();
                match error.kind() {
                    // Nothing for as long as the stream waits: there may be something later.
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                    io::ErrorKind::ConnectionReset => return Ok(None),
                    _ => return Err(error),
                }
            }
        }
    }
}

/// Only a part of a message came within [`MESSAGE_LIMIT`].
pub(crate) fn cut_short() -> io::Error {
    let limit = MESSAGE_LIMIT.as_secs();
    let why = format!("a part of a message, and nothing more for {limit} s");
    io::Error::new(io::ErrorKind::TimedOut, why)
}

/// Waits a moment for the rest of a header that came in pieces; `false` when the front-end has hung
/// up. Data that is already there would end a wait for data at once.
fn more_may_come(stream: &UnixStream) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut hang_up = [PollFd::new(stream, PollFlags::RDHUP)];
    let moment = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    match poll(&mut hang_up, Some(&moment)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => Ok(true),
        Ok(_) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
