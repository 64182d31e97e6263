// SPDX-License-Identifier: Apache-2.0
//! Brings the message handler of the `vhost` crate into the state of an earlier negotiation.
//!
//! The handler keeps a copy of the negotiated features, which only messages set. So it is made on a
//! socket pair, gets the front-end's messages of that time from the other end, and then the
//! connection takes the place of the pair under the same descriptor number.
// UNSAFETY: the handler owns its socket and does not lend it, so that only the number is left to
// replace it by.
#![expect(unsafe_code)]

use crate::session::{Session, lock};
use crate::state::ConnectionState;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use vhost::vhost_user::BackendReqHandler;
use vhost::vhost_user::message::FrontendReq;

pub(crate) type Handler<'a> = BackendReqHandler<Mutex<Session<'a>>>;

/// Flags of a request without a wish for an answer: the version.
const FLAGS: u32 = 1;

/// A handler of `stream`, with the features of `state`, which it also sets in `session`.
///
/// # Errors
/// The session refuses the features.
pub(crate) fn handler<'a>(
    stream: UnixStream,
    session: &Arc<Mutex<Session<'a>>>,
    state: &ConnectionState,
) -> io::Result<Handler<'a>> {
    let (own, mut other) = UnixStream::pair()?;
    let number = own.as_raw_fd();
    let mut handler = BackendReqHandler::from_stream(own, Arc::clone(session));
    let mut said = Vec::new();
    if state.asked_features {
        said.push((FrontendReq::GET_FEATURES, None));
    }
    if state.protocol_features != 0 {
        said.push((FrontendReq::SET_PROTOCOL_FEATURES, Some(state.protocol_features)));
    }
    if state.features != 0 {
        said.push((FrontendReq::SET_FEATURES, Some(state.features)));
    }
    for (code, value) in said {
        other.write_all(&message(code, value))?;
        handler.handle_request().map_err(|error| io::Error::other(error.to_string()))?;
    }
    // The answers of the replay are lost with `other`.
    // SAFETY: `number` is the handler's open socket, which the call closes, and the handler owns
    // the copy of `stream` in its place.
    match unsafe { libc::dup3(stream.as_raw_fd(), number, libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => {
            debug_assert_eq!(lock(session).features, state.features);
            Ok(handler)
        }
    }
}

fn message(code: FrontendReq, value: Option<u64>) -> Vec<u8> {
    let payload = value.map(u64::to_ne_bytes);
    let payload = payload.as_ref().map_or(&[][..], |bytes| &bytes[..]);
    let header = [code.into(), FLAGS, payload.len() as u32].map(u32::to_ne_bytes).concat();
    [&header, payload].concat()
}
