// SPDX-License-Identifier: Apache-2.0
//! Messages as bytes: peeks at the header of each message, and reads those messages that the
//! `vhost` crate does not handle (`docs/decisions/0004-status-is-peeked.md`).

use crate::error::HeaderError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, RecvMsg, ReturnFlags, SendFlags, recvmsg,
};
use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{
    FrontendReq, MAX_ATTACHED_FD_ENTRIES, MAX_MSG_SIZE, VhostUserInflight, VhostUserLog,
    VhostUserMemory, VhostUserMemoryRegion, VhostUserSingleMemoryRegion, VhostUserVringAddr,
};

/// Request code, flags, payload size (vhost-user, "Header").
const HEADER_BYTES: usize = 12;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// A message's header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) code: u32,
    flags: u32,
    size: u32,
}

impl Header {
    fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Header { code: word(0), flags: word(4), size: word(8) }
    }

    /// The request's name in the specification.
    pub(crate) fn name(&self) -> String {
        let known = FrontendReq::try_from(self.code);
        known.map_or_else(|()| format!("message {}", self.code), |code| format!("{code:?}"))
    }

    pub(crate) fn wants_ack(&self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// The error of the header, if there is one: field, value and valid values.
    pub(crate) fn flaw(&self) -> Option<HeaderError> {
        let Header { code, flags, size } = *self;
        if flags & VERSION_MASK != VERSION {
            let found = flags & VERSION_MASK;
            return Some(HeaderError::Version { found, expected: VERSION });
        }
        let not_allowed = flags & !(VERSION_MASK | FLAG_NEED_REPLY);
        if not_allowed != 0 {
            return Some(HeaderError::Flags(not_allowed));
        }
        let Ok(known) = FrontendReq::try_from(code) else {
            return Some(HeaderError::Code);
        };
        let (least, most) = payload_bytes(known);
        match (least..=most).contains(&(size as usize)) {
            true => None,
            false if least == most => Some(HeaderError::Size { size, expected: least }),
            false => Some(HeaderError::Bounds { size, least, most }),
        }
    }
}

/// Minimum and maximum payload in bytes.
fn payload_bytes(code: FrontendReq) -> (usize, usize) {
    use FrontendReq as Req;
    const TABLE: usize = size_of::<VhostUserMemory>();
    const REGION: usize = size_of::<VhostUserMemoryRegion>();
    let exactly = |bytes: usize| (bytes, bytes);
    match code {
        Req::GET_FEATURES | Req::SET_OWNER | Req::RESET_OWNER | Req::GET_PROTOCOL_FEATURES => {
            exactly(0)
        }
        Req::GET_QUEUE_NUM | Req::SET_BACKEND_REQ_FD | Req::RESET_DEVICE => exactly(0),
        Req::GET_MAX_MEM_SLOTS | Req::GET_STATUS => exactly(0),
        Req::SET_FEATURES | Req::SET_PROTOCOL_FEATURES | Req::SET_STATUS => exactly(8),
        Req::SET_VRING_NUM | Req::SET_VRING_BASE | Req::GET_VRING_BASE => exactly(8),
        Req::SET_VRING_KICK | Req::SET_VRING_CALL | Req::SET_VRING_ERR => exactly(8),
        Req::SET_VRING_ENABLE => exactly(8),
        Req::SET_VRING_ADDR => exactly(size_of::<VhostUserVringAddr>()),
        Req::SET_MEM_TABLE => (TABLE + REGION, TABLE + MAX_ATTACHED_FD_ENTRIES * REGION),
        Req::ADD_MEM_REG | Req::REM_MEM_REG => exactly(size_of::<VhostUserSingleMemoryRegion>()),
        Req::SET_LOG_BASE => exactly(size_of::<VhostUserLog>()),
        Req::GET_INFLIGHT_FD | Req::SET_INFLIGHT_FD => exactly(size_of::<VhostUserInflight>()),
        _ => (0, MAX_MSG_SIZE),
    }
}

/// The state of the next message, which stays in the stream.
pub(crate) enum Arrival {
    /// No byte has arrived.
    Nothing,
    /// The stream has ended.
    End,
    /// The message cannot be handled yet.
    Incomplete(Missing),
    /// The message is complete, or its header has a [flaw](Header::flaw). Its reply has room.
    Whole(Header),
}

/// The reason for which a message cannot be handled yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// The rest of the header or of the payload.
    Bytes,
    /// Room for the reply in the socket.
    ReplyRoom,
}

/// Looks at the next message. Does not wait.
///
/// # Errors
/// [`io::ErrorKind::UnexpectedEof`] if the stream ends inside a message.
/// [`io::ErrorKind::InvalidData`] if the stream has an out-of-band byte: a look counts it on some kernels, and
/// a read does not return it, so that the read would wait.
pub(crate) fn arrival(stream: &UnixStream) -> io::Result<Arrival> {
    use rustix::io::Errno;
    // Before the look at the data: the front-end may send the rest and hang up in between.
    let has_hung_up = has_hung_up(stream)?;
    let mut bytes = [0; HEADER_BYTES + MAX_MSG_SIZE];
    let look = peek(stream, &mut bytes);
    // After the look: a later out-of-band byte is behind the bytes of the look.
    let events = ready(stream, PollFlags::PRI | PollFlags::OUT)?;
    if events.contains(PollFlags::PRI) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message with out-of-band bytes"));
    }
    let look = match look {
        Ok(look) if look.bytes == 0 => return Ok(Arrival::End),
        Ok(look) => look,
        Err(Errno::CONNRESET) => return Ok(Arrival::End),
        Err(Errno::INTR | Errno::AGAIN) => return Ok(Arrival::Nothing),
        Err(error) => return Err(error.into()),
    };
    let header = bytes[..look.bytes].first_chunk().map(Header::parse);
    // A look ends after a part with descriptors, whatever follows.
    let arrived = match look.flags.contains(ReturnFlags::CTRUNC) {
        true => rustix::io::ioctl_fionread(stream)?.max(look.bytes as u64),
        false => look.bytes as u64,
    };
    let is_whole = |header: &Header| {
        header.flaw().is_some() || arrived >= HEADER_BYTES as u64 + u64::from(header.size)
    };
    match header.filter(is_whole) {
        // A UNIX socket is ready for writing while three quarters of its buffer are free, so that a reply fits.
        Some(header) if events.contains(PollFlags::OUT) => Ok(Arrival::Whole(header)),
        Some(_) => Ok(Arrival::Incomplete(Missing::ReplyRoom)),
        None if has_hung_up => Err(io::ErrorKind::UnexpectedEof.into()),
        None => Ok(Arrival::Incomplete(Missing::Bytes)),
    }
}

/// Looks at the bytes in a stream, which stay there, up to the first part with descriptors. Does not wait.
fn peek(stream: &UnixStream, bytes: &mut [u8]) -> Result<RecvMsg, rustix::io::Errno> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut RecvAncillaryBuffer::default(), flags)
}

/// Returns whether a front-end that is not yet served may wait: it has not hung up, and has sent no descriptor and
/// less than the largest message.
pub(crate) fn may_wait(stream: &UnixStream) -> io::Result<bool> {
    use rustix::io::Errno;
    let mut bytes = [0; HEADER_BYTES + MAX_MSG_SIZE];
    let look = peek(stream, &mut bytes);
    // An out-of-band byte ends a look, whatever follows.
    let ends_waiting = PollFlags::RDHUP | PollFlags::PRI;
    let has_ended = !ready(stream, ends_waiting)?.is_empty();
    Ok(match look {
        Ok(look) => {
            let has_descriptors = look.flags.contains(ReturnFlags::CTRUNC);
            !has_ended && !has_descriptors && look.bytes < HEADER_BYTES + MAX_MSG_SIZE
        }
        Err(Errno::AGAIN | Errno::INTR) => !has_ended,
        Err(error) => return Err(error.into()),
    })
}

/// Reads a message that has arrived, without a [flaw](Header::flaw). Returns its payload and
/// descriptors.
pub(crate) fn receive(stream: &UnixStream, header: &Header) -> io::Result<(Vec<u8>, Vec<File>)> {
    let mut bytes = vec![0; HEADER_BYTES + header.size as usize];
    let (mut got, mut files) = (0, Vec::new());
    while got < bytes.len() {
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED_FD_ENTRIES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut rest = [IoSliceMut::new(&mut bytes[got..])];
        let part = match recvmsg(stream, &mut rest, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(part) => part,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                files.extend(fds.map(File::from));
            }
        }
        let too_many = part.flags.contains(ReturnFlags::CTRUNC);
        if too_many || files.len() > MAX_ATTACHED_FD_ENTRIES {
            let why = format!("a message with more than {MAX_ATTACHED_FD_ENTRIES} descriptors");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        match part.bytes {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => got += bytes,
        }
    }
    Ok((bytes.split_off(HEADER_BYTES), files))
}

/// Returns whether the peer's end receives nothing any more, although the peer has not closed it:
/// [`crate::descriptor::take_socket_pair`] was called for that end.
pub(crate) fn is_own_end_taken(stream: &UnixStream) -> io::Result<bool> {
    let probe = rustix::net::send(stream, &[], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    Ok(probe == Err(rustix::io::Errno::PIPE) && !has_hung_up(stream)?)
}

/// Returns whether the peer has closed its end.
pub(crate) fn has_hung_up(stream: &UnixStream) -> io::Result<bool> {
    Ok(!ready(stream, PollFlags::RDHUP)?.is_empty())
}

/// Returns which of these events there are.
fn ready(stream: &UnixStream, events: PollFlags) -> io::Result<PollFlags> {
    let mut fds = [PollFd::new(stream, events)];
    rustix::io::retry_on_intr(|| poll(&mut fds, Some(&Timespec::default())))?;
    Ok(fds[0].revents())
}

/// Answers a message with a number.
pub(crate) fn reply(mut stream: &UnixStream, header: &Header, value: u64) -> io::Result<()> {
    let mut reply = Vec::with_capacity(HEADER_BYTES + 8);
    for word in [header.code, VERSION | FLAG_REPLY, 8] {
        reply.extend_from_slice(&word.to_ne_bytes());
    }
    reply.extend_from_slice(&value.to_ne_bytes());
    stream.write_all(&reply)
}
