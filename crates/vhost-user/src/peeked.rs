// SPDX-License-Identifier: Apache-2.0
//! Messages that are handled before the `vhost` crate reads them
//! (`docs/decisions/0004-status-is-peeked.md`):
//!
//! * SET_STATUS and GET_STATUS, which the crate does not support;
//! * SET_MEM_TABLE, which it refuses if the message has room for unused regions, as that of User
//!   Mode Linux does;
//! * SET_BACKEND_REQ_FD, for which it provides a channel without CONFIG_CHANGE.

use crate::descriptor::take_socket_pair;
use crate::error::{ConnectionError, refusal};
use crate::message::{self, Header};
use crate::session::{Session, lock};
use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use vhost::vhost_user::VhostUserBackendReqHandlerMut;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserMemoryRegion, VhostUserMsgValidator, VhostUserProtocolFeatures,
};

/// Handles the next message, with the peeked `header`, if it is one of these messages. Returns
/// `false` if the message is unread.
pub(crate) fn handle(
    header: &Header,
    stream: &UnixStream,
    session: &Mutex<Session<'_>>,
) -> Result<bool, ConnectionError> {
    let session = &mut *lock(session);
    let Some(code) = FrontendReq::try_from(header.code).ok().filter(|&code| is_ours(code, session))
    else {
        return Ok(false);
    };
    let refused = |why: String| ConnectionError::Refused(format!("{}: {why}", header.name()));
    let (payload, files) = message::receive(stream, header)?;
    let outcome = act(session, code, &payload, files);
    let answer = outcome.as_ref().map_or(1, |value| value.unwrap_or(0));
    let is_asked = matches!(outcome, Ok(Some(_)));
    if is_asked || header.wants_ack() && session.has_protocol(VhostUserProtocolFeatures::REPLY_ACK)
    {
        message::reply(stream, header, answer)?;
    }
    outcome.map(|_| true).map_err(|why| refused(why.to_string()))
}

fn is_ours(code: FrontendReq, session: &Session<'_>) -> bool {
    match code {
        FrontendReq::SET_MEM_TABLE => true,
        FrontendReq::SET_STATUS | FrontendReq::GET_STATUS => {
            session.has_protocol(VhostUserProtocolFeatures::STATUS)
        }
        FrontendReq::SET_BACKEND_REQ_FD => {
            session.has_protocol(VhostUserProtocolFeatures::BACKEND_REQ)
        }
        _ => false,
    }
}

/// Carries out a message. Returns the value of the answer, if the message asks for one.
fn act(
    session: &mut Session<'_>,
    code: FrontendReq,
    payload: &[u8],
    files: Vec<File>,
) -> io::Result<Option<u64>> {
    if !files.is_empty() && matches!(code, FrontendReq::SET_STATUS | FrontendReq::GET_STATUS) {
        return Err(refusal("descriptors are not allowed in this message"));
    }
    match code {
        FrontendReq::GET_STATUS => return Ok(Some(session.status().into())),
        FrontendReq::SET_STATUS => session.set_status(longs(payload).next().unwrap_or(0) as u8),
        FrontendReq::SET_MEM_TABLE => {
            let regions = regions(payload, files.len())?;
            session.set_mem_table(&regions, files, None).map_err(io::Error::from)?;
        }
        _ => session.backend_channel.replace(channel(files)?),
    }
    Ok(None)
}

/// Parses the regions of a memory table; further bytes are unused room. Each region needs one of
/// the `descriptors`.
fn regions(payload: &[u8], descriptors: usize) -> io::Result<Vec<VhostUserMemoryRegion>> {
    const REGION: usize = size_of::<VhostUserMemoryRegion>();
    let (head, table) = payload.split_at_checked(8).unwrap_or_default();
    // The second word is padding.
    let count = longs(head).next().unwrap_or(0) as u32 as usize;
    if count == 0 || count > table.len() / REGION || !table.len().is_multiple_of(REGION) {
        let bytes = table.len();
        return Err(refusal(format!("num_regions: {count}, in {bytes} bytes of {REGION} each")));
    }
    if count != descriptors {
        return Err(refusal(format!("{descriptors} descriptors for {count} regions")));
    }
    let mut regions = Vec::with_capacity(count);
    for bytes in table.chunks_exact(REGION).take(count) {
        let mut fields = longs(bytes);
        let mut field = || fields.next().unwrap_or(0);
        let (guest, size, user, offset) = (field(), field(), field(), field());
        let region = VhostUserMemoryRegion::new(guest, size, user, offset);
        if !region.is_valid() {
            return Err(refusal(format!("a region of {size:#x} bytes at {guest:#x}")));
        }
        regions.push(region);
    }
    Ok(regions)
}

fn longs(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|long| u64::from_ne_bytes(long.try_into().expect("8 bytes")))
}

/// Checks the channel of SET_BACKEND_REQ_FD: one end of a socket pair.
fn channel(mut files: Vec<File>) -> io::Result<File> {
    let (Some(channel), true) = (files.pop(), files.is_empty()) else {
        return Err(refusal("not one descriptor"));
    };
    if !take_socket_pair(&channel)? {
        return Err(refusal("not an end of a pair of UNIX stream sockets"));
    }
    Ok(channel)
}
