// SPDX-License-Identifier: Apache-2.0
//! The method `Backup`, whose client gets the progress with `more`, and cancels by hanging up.

use super::REPLY_MAX;
use super::client::Client;
use super::codec::Channel;
use super::protocol::{self, Call, CallError, text};
use crate::backup::{self, Extent, Order, Progress};
use crate::disks::Disks;
use crate::failure::Failure;
use crate::values::{Format, disk_name};
use serde_json::{Value, json};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// The parameters of the call.
pub(super) struct Request {
    disk: String,
    target: PathBuf,
    format: Format,
    extent: Extent,
    bandwidth: Option<NonZeroU64>,
    verify: bool,
    /// The client takes several replies.
    more: bool,
}

/// Reads the parameters of a call.
pub(super) fn request(
    disks: &Disks,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Request, CallError> {
    let wanted = call.optional("name", text)?;
    let absolute = |value: &Value| text(value).map(PathBuf::from).filter(|path| path.is_absolute());
    let target = call.required("target", absolute)?;
    let format = call.optional("format", super::methods::word)?;
    let bitmap = |value: &Value| disk_name(value.as_str()?).ok();
    let (begins, goes_on) =
        (call.optional("bitmap", bitmap)?, call.optional("incremental", bitmap)?);
    let bandwidth = call.optional("bandwidth", |value| NonZeroU64::new(value.as_u64()?))?;
    let verify = call.optional("verify", Value::as_bool)?.unwrap_or(false);
    call.no_more()?;
    let disk = disks.resolve(wanted.as_deref())?;
    let refused = |why, remedy| Failure::run(format!("back up the disk {disk}"), why, remedy);
    let (extent, format) = match (begins, goes_on, format) {
        (Some(_), Some(_), _) => {
            let remedy = "give a bitmap for a full backup, or for an incremental one";
            return Err(refused("two bitmaps are given", remedy).into());
        }
        (_, Some(_), Some(Format::Raw)) => {
            let remedy = "give --format qcow2";
            return Err(refused("an incremental backup is a qcow2 image", remedy).into());
        }
        (_, Some(bitmap), _) => (Extent::Changes(bitmap), Format::Qcow2),
        (begins, None, format) => (Extent::Full(begins), format.unwrap_or(Format::Raw)),
    };
    client.log("Backup", &disk);
    Ok(Request { disk, target, format, extent, bandwidth, verify, more: call.more })
}

/// Makes the backup. Returns the parameters of the last reply.
pub(super) fn run(
    disks: &Disks,
    client: &Client<'_>,
    channel: &Channel,
    request: &Request,
) -> Result<Value, CallError> {
    let Request { disk, target, format, extent, bandwidth, verify, more } = request;
    let extent = extent.clone();
    let (format, bandwidth, verify) = (*format, *bandwidth, *verify);
    let order = Order { disk, target, format, extent, bandwidth, verify };
    let mut told = None;
    let mut goes_on = |progress: Option<Progress>| {
        let news = progress.filter(|now| *more && told.replace(*now) != Some(*now));
        let send = |now| channel.send(&protocol::reply(value(now), true), &[], Some(REPLY_MAX));
        news.is_none_or(|now| send(now).is_ok()) && client.is_connected()
    };
    Ok(value(backup::run(disks, &order, &mut goes_on)?))
}

fn value(progress: Progress) -> Value {
    let Progress { copied_bytes, total_bytes } = progress;
    json!({"copied_bytes": copied_bytes, "total_bytes": total_bytes})
}
