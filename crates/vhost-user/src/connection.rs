// SPDX-License-Identifier: Apache-2.0
//! One connection, from the first message to the last.

use crate::Device;
use crate::session::Session;
use crate::status;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use vhost::vhost_user::{BackendReqHandler, Error};

/// Why a connection was given up.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The front-end sent something that the protocol or the device does not allow.
    #[error("the front-end's message was refused: {0}")]
    Refused(String),
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
}

pub(crate) fn serve(device: &mut Device, stream: UnixStream) -> Result<(), ConnectionError> {
    let peeked = stream.try_clone()?;
    let session = Arc::new(Mutex::new(Session::new(device)));
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
    let result = loop {
        let step = match status::handle_if_status(&peeked, &session) {
            Ok(status::Peeked::Handled) => continue,
            Ok(status::Peeked::Other) => handler.handle_request(),
            Ok(status::Peeked::End) => break Ok(()),
            Err(error) => break Err(error.into()),
        };
        match step {
            Ok(()) | Err(Error::SocketRetry(_)) => {}
            Err(Error::Disconnected) => break Ok(()),
            Err(Error::ReqHandlerError(error)) => {
                break Err(ConnectionError::Refused(error.to_string()));
            }
            Err(error) => break Err(ConnectionError::Refused(error.to_string())),
        }
    };
    session.lock().unwrap_or_else(PoisonError::into_inner).end();
    result
}
