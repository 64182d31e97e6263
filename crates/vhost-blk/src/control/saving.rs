// SPDX-License-Identifier: Apache-2.0
//! Disks and options that outlive a restart of the daemon.

use super::client::Client;
use super::protocol::{Call, CallError};
use crate::disks::{Disks, Live};
use crate::failure::Failure;
use serde_json::{Value, json};
use vhost_user::Status;

/// The parameter `save` of a call.
pub(super) fn is_wanted(call: &mut Call) -> Result<bool, CallError> {
    Ok(call.optional("save", Value::as_bool)?.unwrap_or_default())
}

/// Saves a disk with its present options.
pub(super) fn save(disks: &Disks, client: &Client<'_>, name: &str) -> Result<Value, Failure> {
    save_part(disks, client, name, Live::All)
}

fn save_part(disks: &Disks, client: &Client<'_>, name: &str, part: Live) -> Result<Value, Failure> {
    let path = disks.save(name, part, || client.is_connected())?;
    Ok(json!({"config": path}))
}

/// Saves these options of a disk, whose change holds, and adds the file to the reply.
pub(super) fn with_saved(
    disks: &Disks,
    client: &Client<'_>,
    (name, part): (&str, Option<Live>),
    mut reply: Value,
) -> Result<Value, CallError> {
    if let Some(part) = part {
        let saved = save_part(disks, client, name, part).map_err(unsaved)?;
        reply["config"] = saved["config"].clone();
    }
    Ok(reply)
}

/// The error of a change that holds, and could not be saved.
fn unsaved(failure: Failure) -> Failure {
    let why = format!("the change holds until the disk ends, and is not saved: {}", failure.why);
    Failure { why, ..failure }
}

/// Adds the options with which a disk runs to its status.
pub(super) fn add_options(
    disks: &Disks,
    name: &str,
    status: &Status,
    value: &mut Value,
) -> Result<(), Failure> {
    let (options, origin) = disks.options_of(name, status)?;
    value["options"] = options;
    value["origin"] = json!(origin);
    Ok(())
}
