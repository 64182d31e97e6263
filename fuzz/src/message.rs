// SPDX-License-Identifier: Apache-2.0
//! Target `message`: a script of vhost-user messages, true or not, against a whole device: control
//! plane, data plane with its io_uring, and a disk in memory.
//!
//! A script is the head of guest memory (length in 2 bytes, then bytes) and records of `code,
//! header flags, number of descriptors, correction of the declared size, payload length, kinds of
//! descriptors, payload`.

use crate::guest::memfd;
use backend::Mem;
use data_plane::{Coalesce, IoPoll, UringOptions, UringPlane};
use driver::RawChannel;
use rustix::event::{EventfdFlags, eventfd};
use std::cell::RefCell;
use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use vhost_user::{ConnectionError, Device, DeviceOptions};

/// Bytes of guest memory behind a descriptor of kind [`MEMORY`].
pub(crate) const MEMORY_BYTES: u64 = 0x1_0000;
pub(crate) const MEMORY: u8 = 0;
pub(crate) const EVENT: u8 = 1;
pub(crate) const SHORT_FILE: u8 = 2;
const NULL_DEVICE: u8 = 3;
const PIPE: u8 = 4;
/// All messages are sent before the device reads: they must fit into the socket's buffers, and so
/// must the replies.
const MESSAGES_MAX: usize = 40;
const FDS_MAX: u8 = 9;

thread_local! {
    static DEVICE: RefCell<Option<Device>> = const { RefCell::new(None) };
}

/// Plays the script against a device.
pub fn message(data: &[u8]) {
    // A refusal is correct; a hang or a panic is a finding.
    let _ = converse(data);
}

/// Result of the connection, and guest memory; `None`: the bytes hold no script.
fn converse(data: &[u8]) -> Option<(Result<(), ConnectionError>, File)> {
    let (memory, script) = guest_memory(data)?;
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    // The time limit of the run finds a device that never answers.
    ours.set_write_timeout(Some(Duration::from_secs(5))).expect("a time limit");
    let channel = RawChannel::from_stream(ours);
    send_all(&channel, &memory, script);
    channel.stream().shutdown(Shutdown::Write).expect("an end");
    let result =
        DEVICE.with_borrow_mut(|device| device.get_or_insert_with(new_device).serve(theirs, None));
    Some((result, memory))
}

fn new_device() -> Device {
    let disk = Arc::new(Mem::new(1 << 20).expect("memory for a disk"));
    let options = UringOptions {
        threads: 1,
        cpus: Vec::new(),
        poll_max: Duration::ZERO,
        batch_size: None,
        pin_memory: false,
        coalesce: Coalesce::Off,
        iopoll: IoPoll::Off,
    };
    let plane = UringPlane::new(disk.clone(), &options).expect("a data plane");
    let options = DeviceOptions {
        num_queues: 2,
        queue_size_max: 256,
        serial: "fuzz".into(),
        packed: true,
        writeback: true,
    };
    Device::new(disk, plane, options).expect("a descriptor is left")
}

fn guest_memory(data: &[u8]) -> Option<(File, &[u8])> {
    let (len, rest) = data.split_first_chunk::<2>()?;
    let (head, script) = rest.split_at_checked(u16::from_le_bytes(*len).into())?;
    let file = memfd(MEMORY_BYTES);
    file.write_all_at(head, 0).expect("guest memory");
    Some((file, script))
}

fn send_all(channel: &RawChannel, memory: &File, mut script: &[u8]) {
    for _ in 0..MESSAGES_MAX {
        let Some(rest) = send_one(channel, memory, script) else { return };
        script = rest;
    }
}

fn send_one<'a>(channel: &RawChannel, memory: &File, script: &'a [u8]) -> Option<&'a [u8]> {
    let ([code, flags, fds, correction, len], rest) = script.split_first_chunk::<5>()?;
    let (kinds, rest) = rest.split_at_checked((fds % FDS_MAX).into())?;
    let (payload, rest) = rest.split_at_checked((*len).into())?;
    let fds: Vec<OwnedFd> = kinds.iter().map(|kind| descriptor(*kind, memory)).collect();
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let size = (payload.len() as u32).wrapping_add_signed((*correction as i8).into());
    channel.send((*code).into(), (*flags).into(), size, payload, &fds).ok()?;
    Some(rest)
}

fn descriptor(kind: u8, memory: &File) -> OwnedFd {
    match kind % 5 {
        MEMORY => memory.try_clone().expect("a descriptor").into(),
        EVENT => eventfd(1, EventfdFlags::NONBLOCK).expect("an eventfd"),
        SHORT_FILE => memfd(100).into(),
        NULL_DEVICE => File::open("/dev/null").expect("the null device").into(),
        PIPE => rustix::pipe::pipe().expect("a pipe").0,
        _ => unreachable!("the remainder of 5"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Rng, message_seed};

    #[test]
    fn most_seeds_reach_the_data_plane() {
        let (mut refused, mut served) = (Vec::new(), 0);
        for iteration in 0..200 {
            let data = message_seed::seed(&mut Rng::new(1, iteration));
            let (result, memory) = converse(&data).expect("a script");
            let mut after = vec![0; 0x300];
            memory.read_exact_at(&mut after, 0).expect("guest memory");
            // A used ring (split) or a used descriptor (packed) has changed.
            served += usize::from(after != data[2..0x302]);
            refused.extend(result.err().map(|error| format!("{iteration}: {error}")));
        }
        assert!(served > 150, "{served} of 200 were served; refused: {refused:#?}");
    }
}
