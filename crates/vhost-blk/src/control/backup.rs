// SPDX-License-Identifier: Apache-2.0
//! The method `Backup`, whose client gets the progress with `more`, and cancels by hanging up.

use super::REPLY_MAX;
use super::client::Client;
use super::codec::{Channel, CodecError};
use super::jobs::bandwidth;
use super::protocol::{self, Call, CallError, text};
use crate::backup::{self, Destination, Extent, Order, Progress};
use crate::disks::Disks;
use crate::failure::Failure;
use crate::nbd::Address;
use crate::values::{Format, Reflink, disk_name};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// The parameters of the call.
pub(super) struct Request {
    order: Arc<Order>,
    /// The client takes several replies.
    more: bool,
}

/// The parameter `target`.
enum Place {
    File(PathBuf),
    Export(Address),
    /// An address of NBD that cannot be used; the text has the remedy.
    Wrong(String),
}

/// Reads the absolute path of a file, or the address of an export whose socket has an absolute path.
fn place(value: &Value) -> Option<Place> {
    let told = text(value)?;
    match Address::of(&told) {
        None => Some(PathBuf::from(told)).filter(|path| path.is_absolute()).map(Place::File),
        Some(Ok(address)) => Some(address).filter(|it| it.socket.is_absolute()).map(Place::Export),
        Some(Err(told)) => Some(Place::Wrong(told)),
    }
}

/// Reads the parameters of a call.
pub(super) fn request(
    disks: &Disks,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Request, CallError> {
    let wanted = call.optional("name", text)?;
    let target = call.required("target", place)?;
    let format = call.optional("format", super::methods::word)?;
    let bitmap = |value: &Value| disk_name(value.as_str()?).ok();
    let (begins, goes_on) =
        (call.optional("bitmap", bitmap)?, call.optional("incremental", bitmap)?);
    let bandwidth = bandwidth(call)?;
    let verify = call.optional("verify", Value::as_bool)?.unwrap_or(false);
    let reflink = call.optional("reflink", super::methods::word)?.unwrap_or(Reflink::Never);
    call.no_more()?;
    let disk = disks.resolve(wanted.as_deref())?;
    let refused = |why: &str, remedy: &str| {
        CallError::from(Failure::run(format!("back up the disk {disk}"), why, remedy))
    };
    let extent = match (begins, goes_on) {
        (Some(_), Some(_)) => {
            let remedy = "give a bitmap for a full backup, or for an incremental one";
            return Err(refused("two bitmaps are given", remedy));
        }
        (_, Some(bitmap)) => Extent::Changes(bitmap),
        (begins, None) => Extent::Full(begins),
    };
    let target = match (target, &extent, format) {
        (Place::Wrong(told), _, _) => {
            return Err(Failure::told(format!("back up the disk {disk}"), told).into());
        }
        (Place::Export(_), _, Some(Format::Qcow2)) => {
            let remedy =
                "drop --format, and let the server keep the format (qemu-nbd --format qcow2)";
            return Err(refused("an NBD export has the content of the disk itself", remedy));
        }
        (Place::Export(address), _, _) => Destination::Export(address),
        (Place::File(_), Extent::Changes(_), Some(Format::Raw)) => {
            return Err(refused("an incremental backup is a qcow2 image", "give --format qcow2"));
        }
        (Place::File(path), Extent::Changes(_), _) => {
            Destination::File { path, format: Format::Qcow2 }
        }
        (Place::File(path), _, format) => {
            Destination::File { path, format: format.unwrap_or(Format::Raw) }
        }
    };
    client.means(&disk);
    let order = Arc::new(Order { disk, target, extent, bandwidth, verify, reflink });
    Ok(Request { order, more: call.more })
}

/// Makes the backup. Returns the parameters of the last reply.
pub(super) fn run(
    disks: &Arc<Disks>,
    client: &Client<'_>,
    channel: &Channel,
    request: &Request,
) -> Result<Value, CallError> {
    let Request { order, more } = request;
    let mut sent = None;
    let mut goes_on = |progress: Option<Progress>| {
        let progress = progress.filter(|_| *more);
        progress.is_none_or(|now| send(channel, &mut sent, now).is_ok()) && client.is_connected()
    };
    Ok(value(backup::run(disks, order, &mut goes_on)?))
}

/// Sends a progress other than the one `sent` last. A client that does not read gets no more of them, so that neither
/// a cancel nor the end of the disk waits for it.
fn send(channel: &Channel, sent: &mut Option<Progress>, now: Progress) -> Result<(), CodecError> {
    if *sent == Some(now) || !channel.has_room() {
        return Ok(());
    }
    *sent = Some(now);
    channel.send(&protocol::reply(value(now), true), &[], Some(REPLY_MAX))
}

fn value(progress: Progress) -> Value {
    let Progress { copied_bytes, total_bytes, is_shared } = progress;
    json!({"copied_bytes": copied_bytes, "total_bytes": total_bytes, "shared": is_shared})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::codec::CALL_BYTES_MAX;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_client_that_reads_no_progress_is_not_waited_for_and_one_that_has_gone_is_noticed() {
        let (peer, ours) = UnixStream::pair().unwrap();
        let channel = Channel::new(ours, CALL_BYTES_MAX);
        let mut sent = None;
        let mut send = |copied_bytes| {
            let now = Progress { copied_bytes, total_bytes: u64::MAX, is_shared: false };
            send(&channel, &mut sent, now)
        };
        // More than a socket takes.
        (0..100_000).for_each(|copied_bytes| send(copied_bytes).unwrap());
        drop(peer);
        send(0).unwrap_err();
    }
}
