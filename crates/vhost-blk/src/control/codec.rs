// SPDX-License-Identifier: Apache-2.0
//! The wire format of Varlink: JSON objects that end with a zero byte, and descriptors that arrive
//! with them.
//!
//! Our own instead of a library (`docs/decisions/0009-control-speaks-varlink.md`). Neither side
//! waits for the other without a bound, and no message takes more memory than its bound.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde_json::Value;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Maximum bytes of a call.
pub const CALL_BYTES_MAX: usize = 64 << 10;
/// Maximum bytes of a reply.
pub const REPLY_BYTES_MAX: usize = 16 << 20;
/// Maximum descriptors of a message.
pub const DESCRIPTORS_MAX: usize = 4;
/// Maximum bytes of one `recvmsg`.
const PART_BYTES: usize = 8 << 10;

/// An error of a connection.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The socket failed, or its peer was too slow.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// The message is longer than its bound.
    #[error("a message of more than {max} bytes")]
    TooLong {
        /// The bound.
        max: usize,
    },
    /// The message came with more descriptors than its bound.
    #[error("a message with more than {DESCRIPTORS_MAX} descriptors")]
    TooManyDescriptors,
    /// The message is not JSON.
    #[error("a message that is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The stream ended within a message.
    #[error("the connection ended within a message")]
    CutShort,
}

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// Its JSON value.
    pub value: Value,
    /// Its descriptors.
    pub descriptors: Vec<OwnedFd>,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    /// Bytes of the next messages.
    buffer: Vec<u8>,
    /// Descriptors of the next message.
    descriptors: Vec<OwnedFd>,
    /// Maximum bytes of a received message.
    bytes_max: usize,
}

impl Channel {
    /// A connection whose messages have at most `bytes_max` bytes.
    pub fn new(stream: UnixStream, bytes_max: usize) -> Self {
        Channel { stream, buffer: Vec::new(), descriptors: Vec::new(), bytes_max }
    }

    /// A connection of an earlier program, with the bytes that it had received of later messages.
    pub fn resume(stream: UnixStream, bytes_max: usize, unread: Vec<u8>) -> Self {
        Channel { buffer: unread, ..Channel::new(stream, bytes_max) }
    }

    /// The bytes of later messages, for [`Channel::resume`]. No descriptor has come with them: those
    /// that come belong to the first complete message.
    pub fn unread(&self) -> &[u8] {
        &self.buffer
    }

    /// Receives the next message; `None` at the end of the stream. The message has to be complete
    /// after `patience`.
    ///
    /// # Errors
    /// [`CodecError`]; the connection is of no use after it.
    pub fn receive(&mut self, patience: Option<Duration>) -> Result<Option<Message>, CodecError> {
        let deadline = patience.map(|patience| Instant::now() + patience);
        let mut searched = 0;
        loop {
            if let Some(at) = self.buffer[searched..].iter().position(|&byte| byte == 0) {
                return self.take(searched + at).map(Some);
            }
            searched = self.buffer.len();
            if searched > self.bytes_max {
                return Err(CodecError::TooLong { max: self.bytes_max });
            }
            if self.receive_part(deadline)? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { Err(CodecError::CutShort) };
            }
        }
    }

    /// The message of the first `end` bytes. Descriptors belong to the first message that is
    /// complete after them: a client that passes some waits for the reply.
    fn take(&mut self, end: usize) -> Result<Message, CodecError> {
        if end > self.bytes_max {
            return Err(CodecError::TooLong { max: self.bytes_max });
        }
        let value = serde_json::from_slice(&self.buffer[..end])?;
        self.buffer.drain(..=end);
        Ok(Message { value, descriptors: std::mem::take(&mut self.descriptors) })
    }

    fn receive_part(&mut self, deadline: Option<Instant>) -> Result<usize, CodecError> {
        let left = deadline.map(time_left).transpose()?;
        self.stream.set_read_timeout(left)?;
        let mut part = [0; PART_BYTES];
        // One more than the bound, so that too many are noticed.
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX + 1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut into = [IoSliceMut::new(&mut part)];
            match recvmsg(&self.stream, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => continue,
                received => break received.map_err(io::Error::from)?,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        if self.descriptors.len() > DESCRIPTORS_MAX {
            return Err(CodecError::TooManyDescriptors);
        }
        self.buffer.extend_from_slice(&part[..received.bytes]);
        Ok(received.bytes)
    }

    /// Sends a message before `patience` has passed.
    ///
    /// # Errors
    /// [`CodecError::Socket`]; a part of the message may have been sent.
    pub fn send(
        &self,
        value: &Value,
        descriptors: &[BorrowedFd<'_>],
        patience: Option<Duration>,
    ) -> Result<(), CodecError> {
        let mut bytes = serde_json::to_vec(value)?;
        bytes.push(0);
        let deadline = patience.map(|patience| Instant::now() + patience);
        let mut rest = &bytes[..];
        if !descriptors.is_empty() {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
                return Err(CodecError::TooManyDescriptors);
            }
            let sent =
                sendmsg(&self.stream, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL);
            rest = &rest[sent.map_err(io::Error::from)?..];
        }
        while !rest.is_empty() {
            self.stream.set_write_timeout(deadline.map(time_left).transpose()?)?;
            match (&self.stream).write(rest) {
                Ok(sent) => rest = &rest[sent..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Returns whether a short message can be sent without a wait, or the connection has ended.
    pub fn has_room(&self) -> bool {
        is_ready(&self.stream, PollFlags::OUT)
    }

    /// The stream.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Returns whether a socket has one of these conditions now, or an error.
pub(super) fn is_ready(stream: &UnixStream, wanted: PollFlags) -> bool {
    let mut socket = [PollFd::new(stream, wanted)];
    poll(&mut socket, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// The time left until `deadline`: at least a millisecond, because a socket takes 0 as no limit.
fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left < Duration::from_millis(1) { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs::File;

    /// A passing test does not reach it.
    const WAIT: Option<Duration> = Some(Duration::from_secs(10));

    fn pair(bytes_max: usize) -> (UnixStream, Channel) {
        let (peer, ours) = UnixStream::pair().unwrap();
        (peer, Channel::new(ours, bytes_max))
    }

    #[test]
    fn messages_arrive_one_by_one_however_the_bytes_arrive() {
        let (mut peer, mut channel) = pair(64);
        peer.write_all(b"{\"a\":1}\0{\"a\":2}\0{\"a\"").unwrap();
        assert_eq!(channel.receive(None).unwrap().unwrap().value, json!({"a": 1}));
        assert_eq!(channel.receive(None).unwrap().unwrap().value, json!({"a": 2}));
        peer.write_all(b":3}\0").unwrap();
        assert_eq!(channel.receive(None).unwrap().unwrap().value, json!({"a": 3}));
        drop(peer);
        assert!(channel.receive(None).unwrap().is_none());
    }

    #[test]
    fn a_message_of_the_bound_passes_and_a_longer_one_does_not() {
        let message = |bytes: usize| format!("\"{}\"\0", "x".repeat(bytes - 2));
        let (mut peer, mut channel) = pair(20_000);
        peer.write_all(message(20_000).as_bytes()).unwrap();
        assert!(channel.receive(WAIT).unwrap().is_some());
        peer.write_all(message(20_001).as_bytes()).unwrap();
        assert!(matches!(channel.receive(WAIT), Err(CodecError::TooLong { max: 20_000 })));
        let (mut peer, mut channel) = pair(100);
        peer.write_all(&[b' '; 101]).unwrap();
        assert!(matches!(channel.receive(WAIT), Err(CodecError::TooLong { max: 100 })));
    }

    #[test]
    fn a_half_message_is_waited_for_no_longer_than_wanted() {
        let (mut peer, mut channel) = pair(100);
        peer.write_all(b"{").unwrap();
        let error = channel.receive(Some(Duration::from_millis(20))).unwrap_err();
        let CodecError::Socket(error) = error else { panic!("{error}") };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(peer);
        assert!(matches!(channel.receive(WAIT), Err(CodecError::CutShort)));
    }

    #[test]
    fn a_peer_that_does_not_read_is_waited_for_no_longer_than_wanted() {
        let (_peer, channel) = pair(100);
        let long = Value::String("x".repeat(4 << 20));
        let error = channel.send(&long, &[], Some(Duration::from_millis(20))).unwrap_err();
        let CodecError::Socket(error) = error else { panic!("{error}") };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn descriptors_arrive_with_their_message_and_too_many_end_the_connection() {
        let (peer, mut channel) = pair(100);
        let sender = Channel::new(peer, 100);
        let file = File::open("/dev/null").unwrap();
        sender.send(&json!(1), &[file.as_fd(); DESCRIPTORS_MAX], None).unwrap();
        sender.send(&json!(2), &[], None).unwrap();
        assert_eq!(channel.receive(WAIT).unwrap().unwrap().descriptors.len(), DESCRIPTORS_MAX);
        assert!(channel.receive(WAIT).unwrap().unwrap().descriptors.is_empty());
        // In two parts of one message, and nothing of it remains open.
        let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        for _ in 0..2 {
            let descriptors = [file.as_fd(); 3];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            let part = [IoSlice::new(b" ")];
            sendmsg(sender.stream(), &part, &mut control, SendFlags::empty()).unwrap();
        }
        assert!(matches!(channel.receive(WAIT), Err(CodecError::TooManyDescriptors)));
        drop(channel);
        assert!(std::fs::read_dir("/proc/self/fd").unwrap().count() <= before + 2);
    }
}
