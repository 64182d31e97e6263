// SPDX-License-Identifier: Apache-2.0
//! Any bytes as a vhost-user message, with any descriptors, for protocol misuse tests. Sends them
//! without checks.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Maximum number of descriptors of one message here; more than any daemon may accept.
const FDS_MAX: usize = 64;
/// Version 1 in the flags of the message header.
const FLAG_VERSION: u32 = 1;
/// "An answer is wanted" in the flags of the message header.
const FLAG_NEED_REPLY: u32 = 1 << 3;
/// Largest payload that is read as a reply.
const REPLY_BYTES_MAX: usize = 0x1000;

/// A vhost-user socket for arbitrary messages.
#[derive(Debug)]
pub struct RawChannel {
    stream: UnixStream,
}

/// A reply as it was received.
#[derive(Debug)]
pub struct RawReply {
    /// The request code that it answers.
    pub code: u32,
    /// Header flags.
    pub flags: u32,
    /// Payload of the length that the header declares.
    pub payload: Vec<u8>,
    /// Descriptors that came with the reply.
    pub fds: Vec<OwnedFd>,
}

impl RawReply {
    /// The payload as a number, if it has 8 bytes.
    pub fn value(&self) -> Option<u64> {
        Some(u64::from_le_bytes(self.payload.as_slice().try_into().ok()?))
    }
}

impl RawChannel {
    /// Connects to a socket.
    pub fn connect(path: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self::from_stream(UnixStream::connect(path)?))
    }

    /// Talks on a connected socket.
    pub fn from_stream(stream: UnixStream) -> Self {
        Self { stream }
    }

    /// The socket.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a message with every field chosen; `size` need not be the payload's length.
    pub fn send(
        &self,
        code: u32,
        flags: u32,
        size: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(12 + payload.len());
        for word in [code, flags, size] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(payload);
        self.send_bytes(&bytes, fds)
    }

    /// Sends bytes that need not be a message at all.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other(format!("more than {FDS_MAX} descriptors")));
        }
        let sent =
            sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        if sent < bytes.len() {
            return Err(io::Error::other(format!("only {sent} of {} bytes went out", bytes.len())));
        }
        Ok(())
    }

    /// Sends a well-formed message.
    pub fn message(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send(code, FLAG_VERSION, payload.len() as u32, payload, fds)
    }

    /// Sends a well-formed message that asks for an answer (REPLY_ACK) and reads it.
    pub fn message_with_ack(
        &self,
        code: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> io::Result<RawReply> {
        let flags = FLAG_VERSION | FLAG_NEED_REPLY;
        self.send(code, flags, payload.len() as u32, payload, fds)?;
        self.reply(limit)
    }

    /// Reads a reply. `UnexpectedEof`: the daemon hung up; `WouldBlock`: the time limit has passed.
    pub fn reply(&self, limit: Duration) -> io::Result<RawReply> {
        self.stream.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        let reply = self.reply_blocking();
        self.stream.set_read_timeout(None)?;
        reply
    }

    fn reply_blocking(&self) -> io::Result<RawReply> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut header)];
        let got = recvmsg(&self.stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        (&self.stream).read_exact(&mut header[got..])?;
        let word = |i: usize| u32::from_le_bytes([0, 1, 2, 3].map(|b| header[4 * i + b]));
        let size = word(2) as usize;
        if size > REPLY_BYTES_MAX {
            return Err(io::Error::other(format!("a reply declares {size} bytes")));
        }
        let mut payload = vec![0; size];
        (&self.stream).read_exact(&mut payload)?;
        Ok(RawReply { code: word(0), flags: word(1), payload, fds })
    }

    /// True if the daemon hangs up within the time; discards replies until then.
    pub fn hangs_up_within(&self, limit: Duration) -> io::Result<bool> {
        loop {
            match self.reply(limit) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
                    ) =>
                {
                    return Ok(true);
                }
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn message_and_descriptors_arrive_as_sent() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (sender, receiver) = (RawChannel::from_stream(ours), RawChannel::from_stream(theirs));
        let fd = sender.stream().as_fd();
        sender.send(99, 0xdead, 8, &7_u64.to_le_bytes(), &[fd, fd]).unwrap();
        let got = receiver.reply(Duration::from_secs(5)).unwrap();
        assert_eq!((got.code, got.flags, got.value()), (99, 0xdead, Some(7)));
        assert_eq!(got.fds.len(), 2);
    }

    #[test]
    fn silence_is_not_a_hang_up() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let channel = RawChannel::from_stream(ours);
        assert!(!channel.hangs_up_within(Duration::from_millis(5)).unwrap());
        drop(theirs);
        assert!(channel.hangs_up_within(Duration::from_secs(5)).unwrap());
    }
}
