// SPDX-License-Identifier: Apache-2.0
//! Target `call`: bytes that a client of the control socket sends, in parts of any size, some with
//! descriptors. The options of a disk in a call reach their parser.
//!
//! The first byte is the size of the parts, the second one selects the parts that carry a descriptor.

use crate::Rng;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use vhost_blk::config::disk_of_table;
use vhost_blk::control::codec::{Channel, DESCRIPTORS_MAX};
use vhost_blk::control::protocol::{Call, reply, result, text};
use vhost_blk::disk_options::{differing, of_disk, table, to_disk};
use vhost_blk::options::DiskArgs;

/// Maximum bytes of a message; more than all the bytes of an input would never be reached.
const BYTES_MAX: usize = 500;

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
        let options = call.required("options", table);
        if let Ok(Ok(args)) = options.map(|options| disk_of_table("a test", &options)) {
            pass_on(&args);
        }
        let _ = (call.optional("name", text), call.required("mode", text), call.no_more());
        assert!(serde_json::to_vec(&reply(call.parameters.into(), false)).is_ok());
    }
}

/// Accepted options of a disk are the same after another way through the control protocol, and so are those of them
/// that a file gets (`Save`).
fn pass_on(args: &DiskArgs) {
    let utf8 = |path: &Path| path.to_str().map(str::to_owned).ok_or("a path of JSON is UTF-8");
    let told = of_disk(args, utf8).expect("UTF-8");
    assert_eq!(to_disk("a test", &told).as_ref(), Ok(args));
    let saved = Value::Object(differing(&told));
    assert_eq!(to_disk("a test", &saved).as_ref(), Ok(args));
}

/// Calls as a client sends them.
pub(crate) fn seed(rng: &mut Rng) -> Vec<u8> {
    const CALLS: [&str; 8] = [
        r#"{"method":"io.vhostblk.List"}"#,
        r#"{"method":"io.vhostblk.Pause","parameters":{"name":"a"},"oneway":true}"#,
        r#"{"method":"io.vhostblk.Events","more":true}"#,
        r#"{"error":"io.vhostblk.Refused","parameters":{"what":"a","why":"b","remedy":"c"}}"#,
        r#"{"method":"io.vhostblk.Add","parameters":{"name":"a","options":{},"image":0}}"#,
        r#"{"method":"io.vhostblk.Add","parameters":{"options":{"socket_path":"/s","blk_file":"/a","serial":"b","wrap":["delay:us=1"],"io_timeout":2.5}}}"#,
        r#"{"method":"io.vhostblk.Add","parameters":{"options":{"socket_path":"/s","backend":"mem","size":"1G","limit_iops":5,"limit_burst":0.25,"cache":"writethrough"}}}"#,
        r#"{"method":"io.vhostblk.Add","parameters":{"options":{"socket_path":"/s","blk_file":"/a","format":"qcow2","allow_backing":"same-dir","on_error":"enospc","num_queues":3,"read_only":true}}}"#,
    ];
    let mut bytes = vec![rng.below(64) as u8, rng.below(256) as u8];
    for _ in 0..1 + rng.below(4) {
        bytes.extend_from_slice(CALLS[rng.below(CALLS.len() as u64) as usize].as_bytes());
        bytes.push(0);
    }
    bytes
}
