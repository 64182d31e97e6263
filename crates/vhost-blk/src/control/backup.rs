// SPDX-License-Identifier: Apache-2.0
//! The method `Backup`, whose client gets the progress with `more`, and cancels by hanging up.

use super::REPLY_MAX;
use super::client::Client;
use super::codec::Channel;
use super::protocol::{self, Call, CallError, text};
use crate::backup::{self, Order, Progress};
use crate::disks::Disks;
use crate::values::Format;
use serde_json::{Value, json};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// The parameters of the call.
pub(super) struct Request {
    disk: String,
    target: PathBuf,
    format: Format,
    bandwidth: Option<NonZeroU64>,
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
    let format = call.optional("format", super::methods::word)?.unwrap_or(Format::Raw);
    let bandwidth = call.optional("bandwidth", |value| NonZeroU64::new(value.as_u64()?))?;
    call.no_more()?;
    let disk = disks.resolve(wanted.as_deref())?;
    client.log("Backup", &disk);
    Ok(Request { disk, target, format, bandwidth, more: call.more })
}

/// Makes the backup. Returns the parameters of the last reply.
pub(super) fn run(
    disks: &Disks,
    client: &Client<'_>,
    channel: &Channel,
    request: &Request,
) -> Result<Value, CallError> {
    let Request { disk, target, format, bandwidth, more } = request;
    let order = Order { disk, target, format: *format, bandwidth: *bandwidth };
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
