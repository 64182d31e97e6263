// SPDX-License-Identifier: Apache-2.0
//! The methods for snapshots and commits.

use super::client::Client;
use super::jobs::bandwidth;
use super::protocol::{Call, CallError, text};
use crate::disks::snapshot::Wanted;
use crate::disks::{Disks, merge};
use qcow2::inspect::FileFacts;
use serde_json::{Value, json};
use std::sync::Arc;

/// `Snapshot`.
pub(super) fn take(
    disks: &Arc<Disks>,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Value, CallError> {
    let wanted_name = call.optional("name", text)?;
    let wanted = Wanted {
        overlay: call.required("overlay", text)?.into(),
        update_config: call.optional("update_config", Value::as_bool)?.unwrap_or(false),
        no_mark: call.optional("no_mark", Value::as_bool)?.unwrap_or(false),
    };
    let name = client.disk_of(disks, call, wanted_name.as_deref())?;
    let taken = disks.snapshot(&name, &wanted, || client.is_connected())?;
    tracing::info!(disk = name, overlay = %taken.overlay.display(), "snapshot");
    Ok(json!({
        "overlay": taken.overlay.display().to_string(),
        "options": taken.options,
        "config": taken.config.map(|file| file.display().to_string()),
        "marked": taken.is_marked,
        "pause_us": taken.pause.as_micros() as u64,
    }))
}

/// The answer of `Snapshots`.
pub(super) fn rows(files: &[FileFacts]) -> Value {
    let file = |file: &FileFacts| {
        json!({
            "path": file.path.display().to_string(),
            "format": if file.qcow2.is_some() { "qcow2" } else { "raw" },
            "virtual_bytes": file.virtual_bytes,
            "disk_bytes": file.disk_bytes,
        })
    };
    json!({"files": files.iter().map(file).collect::<Vec<_>>()})
}

/// `Commit`.
pub(super) fn commit(
    disks: &Arc<Disks>,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Value, CallError> {
    let wanted = call.optional("name", text)?;
    let options = merge::Wanted {
        update_config: call.optional("update_config", Value::as_bool)?.unwrap_or(false),
        bandwidth: bandwidth(call)?,
    };
    let name = client.disk_of(disks, call, wanted.as_deref())?;
    let merged = disks.merge(&name, &options, || client.is_connected())?;
    tracing::info!(disk = name, image = %merged.image.display(), "merged");
    Ok(json!({
        "image": merged.image.display().to_string(),
        "merged": merged.overlay.display().to_string(),
        "options": merged.options,
        "config": merged.config.map(|file| file.display().to_string()),
        "pause_us": merged.pause.as_micros() as u64,
    }))
}
