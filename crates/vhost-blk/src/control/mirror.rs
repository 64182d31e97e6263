// SPDX-License-Identifier: Apache-2.0
//! The methods for mirrors.

use super::client::Client;
use super::jobs::bandwidth;
use super::methods::{only_disk, word};
use super::protocol::{Call, CallError, text};
use crate::disks::Disks;
use crate::disks::mirror::{Facts, Wanted};
use serde_json::{Value, json};
use std::sync::Arc;

/// `Mirror`.
pub(super) fn begin(
    disks: &Arc<Disks>,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Value, CallError> {
    let wanted_name = call.optional("name", text)?;
    let wanted = Wanted {
        target: call.required("target", text)?.into(),
        format: call.optional("format", word)?,
        bandwidth: bandwidth(call)?,
        overwrite: call.optional("overwrite", Value::as_bool)?.unwrap_or(false),
        update_config: call.optional("update_config", Value::as_bool)?,
    };
    let name = client.disk_of(disks, call, wanted_name.as_deref())?;
    disks.mirror(&name, &wanted, || client.is_connected())?;
    Ok(json!({}))
}

/// `MirrorStatus`.
pub(super) fn status(disks: &Disks, call: &mut Call) -> Result<Value, CallError> {
    let name = only_disk(disks, call)?;
    let (facts, ended) = (disks.mirror_facts(&name)?, disks.mirror_ended(&name)?);
    Ok(json!({"mirror": facts.as_ref().map(value), "ended": ended}))
}

/// `CompleteMirror`.
pub(super) fn complete(
    disks: &Disks,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Value, CallError> {
    let wanted = call.optional("name", text)?;
    let update_config = call.optional("update_config", Value::as_bool)?.unwrap_or(false);
    let name = client.disk_of(disks, call, wanted.as_deref())?;
    let done = disks.complete_mirror(&name, update_config, || client.is_connected())?;
    Ok(json!({
        "image": done.image.display().to_string(),
        "before": done.before.display().to_string(),
        "options": done.options,
        "config": done.config.map(|file| file.display().to_string()),
        "marked": done.is_marked,
        "pause_us": done.pause.as_micros() as u64,
    }))
}

/// The state of a mirror (`Mirror`).
pub(super) fn value(facts: &Facts) -> Value {
    json!({
        "target": facts.target.display().to_string(),
        "state": facts.phase.name(),
        "copied_bytes": facts.copied_bytes,
        "total_bytes": facts.total_bytes,
        "changed_bytes": facts.changed_bytes,
    })
}
