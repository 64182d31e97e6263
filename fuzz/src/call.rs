// SPDX-License-Identifier: Apache-2.0
//! Target `call`: bytes that a client of the control socket sends, in parts of any size, some with
//! descriptors.
//!
//! The first byte is the size of the parts, the second one selects the parts that carry a descriptor.

use crate::Rng;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use vhost_blk::control::codec::{Channel, DESCRIPTORS_MAX};
use vhost_blk::control::protocol::{Call, reply, result, text};

/// Maximum bytes of a message; more than all the bytes of an input would never be reached.
const BYTES_MAX: usize = 200;

/// Receives the bytes as the daemon does. A received message is within its bounds, and a call is the
/// same after another way through the codec.
pub fn call(data: &[u8]) {
    let [size, select, bytes @ ..] = data else { return };
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let file = File::open("/dev/null").expect("/dev/null");
    for (n, part) in (0..).zip(bytes.chunks(usize::from(*size).max(1))) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd()];
        if select >> (n % 8) & 1 == 1 {
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        }
        let flags = SendFlags::DONTWAIT;
        // The buffer of the socket may be full of descriptors.
        if sendmsg(&theirs, &[IoSlice::new(part)], &mut control, flags).is_err() {
            break;
        }
    }
    theirs.shutdown(Shutdown::Write).expect("an open socket");
    let mut channel = Channel::new(ours, BYTES_MAX);
    while let Ok(Some(message)) = channel.receive(None) {
        assert!(message.descriptors.len() <= DESCRIPTORS_MAX);
        let _ = result(message.value.clone(), "a test");
        let Some(mut call) = Call::of(message.value) else { continue };
        let _ = (call.optional("name", text), call.required("mode", text), call.no_more());
        assert!(serde_json::to_vec(&reply(call.parameters.into(), false)).is_ok());
    }
}

/// Calls as a client sends them.
pub(crate) fn seed(rng: &mut Rng) -> Vec<u8> {
    const CALLS: [&str; 5] = [
        r#"{"method":"io.vhostblk.List"}"#,
        r#"{"method":"io.vhostblk.Pause","parameters":{"name":"a"},"oneway":true}"#,
        r#"{"method":"io.vhostblk.Events","more":true}"#,
        r#"{"error":"io.vhostblk.Refused","parameters":{"what":"a","why":"b","remedy":"c"}}"#,
        r#"{"method":"io.vhostblk.Add","parameters":{"name":"a","options":{},"image":0}}"#,
    ];
    let mut bytes = vec![rng.below(64) as u8, rng.below(256) as u8];
    for _ in 0..1 + rng.below(4) {
        bytes.extend_from_slice(CALLS[rng.below(CALLS.len() as u64) as usize].as_bytes());
        bytes.push(0);
    }
    bytes
}
