// SPDX-License-Identifier: Apache-2.0
//! Messages of a vhost-user front-end, as much of them as a device needs that only looks like one.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

const HEADER_BYTES: usize = 12;
const PAYLOAD_BYTES_MAX: usize = 0x2000;
const FDS_MAX: usize = 16;

/// Version 1.
const FLAG_VERSION: u32 = 1;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// "The configuration has changed", from the device.
const BACKEND_CONFIG_CHANGED: u32 = 2;

/// In the payload of messages with one descriptor: there is none.
const NO_FILE: u64 = 1 << 8;

/// Messages that mean something here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    GetFeatures,
    SetFeatures,
    SetMemTable,
    SetVringNum,
    SetVringAddr,
    SetVringBase,
    GetVringBase,
    SetVringKick,
    SetVringCall,
    GetProtocolFeatures,
    GetQueueNum,
    SetBackendReqFd,
    GetConfig,
    Other,
}

impl Code {
    fn from_wire(code: u32) -> Self {
        match code {
            1 => Self::GetFeatures,
            2 => Self::SetFeatures,
            5 => Self::SetMemTable,
            8 => Self::SetVringNum,
            9 => Self::SetVringAddr,
            10 => Self::SetVringBase,
            11 => Self::GetVringBase,
            12 => Self::SetVringKick,
            13 => Self::SetVringCall,
            15 => Self::GetProtocolFeatures,
            17 => Self::GetQueueNum,
            21 => Self::SetBackendReqFd,
            24 => Self::GetConfig,
            _ => Self::Other,
        }
    }
}

/// A message as it came.
pub(super) struct Message {
    number: u32,
    pub(super) code: Code,
    pub(super) wants_ack: bool,
    pub(super) payload: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

impl Message {
    /// Four bytes of the payload.
    pub(super) fn word(&self, at: usize) -> Result<u32> {
        let bytes = self.payload.get(at..at + 4).context("the payload is short")?;
        Ok(u32::from_le_bytes(bytes.try_into()?))
    }

    /// Eight bytes of the payload.
    pub(super) fn quad(&self, at: usize) -> Result<u64> {
        let bytes = self.payload.get(at..at + 8).context("the payload is short")?;
        Ok(u64::from_le_bytes(bytes.try_into()?))
    }

    /// A queue's number and a value.
    pub(super) fn state(&self) -> Result<(u32, u32)> {
        Ok((self.word(0)?, self.word(4)?))
    }

    /// A queue's number and its eventfd, if there is one.
    pub(super) fn vring_file(&mut self) -> Result<(u32, Option<File>)> {
        let value = self.quad(0)?;
        let file = (value & NO_FILE == 0).then(|| self.fds.pop()).flatten();
        Ok(((value & 0xff) as u32, file.map(File::from)))
    }
}

/// A vhost-user socket, the device's end.
pub(super) struct Channel<'a> {
    stream: &'a UnixStream,
}

impl<'a> Channel<'a> {
    pub(super) fn new(stream: &'a UnixStream) -> Self {
        Self { stream }
    }

    /// Waits for a message; false if none came in time.
    pub(super) fn wait(&self, time: Duration) -> Result<bool> {
        let mut fds = [PollFd::new(self.stream, PollFlags::IN)];
        let limit = Timespec::try_from(time)?;
        Ok(poll(&mut fds, Some(&limit))? > 0)
    }

    /// The next message; nothing when the front-end has gone.
    pub(super) fn receive(&self) -> Result<Option<Message>> {
        let mut header = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut header)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let got = recvmsg(self.stream, &mut slices, &mut ancillary, flags)?.bytes;
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        match got {
            0 => return Ok(None),
            HEADER_BYTES => {}
            short => bail!("a header of {short} bytes"),
        }
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let (number, flags, size) = (word(0), word(4), word(8) as usize);
        if size > PAYLOAD_BYTES_MAX {
            bail!("a payload of {size} bytes");
        }
        let mut payload = vec![0; size];
        let mut from = self.stream;
        from.read_exact(&mut payload)?;
        let wants_ack = flags & FLAG_NEED_REPLY != 0;
        Ok(Some(Message { number, code: Code::from_wire(number), wants_ack, payload, fds }))
    }

    /// Answers a message.
    pub(super) fn reply(&self, to: &Message, payload: &[u8]) -> Result<()> {
        self.send(to.number, FLAG_VERSION | FLAG_REPLY, payload)
    }

    /// Says that the configuration is another one now.
    pub(super) fn tell_config_changed(&self) -> Result<()> {
        self.send(BACKEND_CONFIG_CHANGED, FLAG_VERSION, &[])
    }

    fn send(&self, number: u32, flags: u32, payload: &[u8]) -> Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        for word in [number, flags, u32::try_from(payload.len())?] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(payload);
        let mut to = self.stream;
        Ok(to.write_all(&bytes)?)
    }
}
