// SPDX-License-Identifier: Apache-2.0
//! The methods for bitmaps.

use super::client::Client;
use super::protocol::{Call, CallError, text};
use crate::clock;
use crate::disks::{BitmapFacts, Disks};
use serde_json::{Value, json};

/// The answer of `Bitmaps`.
pub(super) fn rows(bitmaps: &[BitmapFacts]) -> Value {
    let row = |bitmap: &BitmapFacts| {
        json!({
            "name": bitmap.name,
            "part_bytes": bitmap.part_bytes,
            "changed_bytes": bitmap.changed_bytes,
            "backup": bitmap.backup,
            "since": bitmap.since.map(clock::told),
            "busy": bitmap.is_busy,
            "problem": bitmap.problem,
        })
    };
    json!({"bitmaps": bitmaps.iter().map(row).collect::<Vec<_>>()})
}

/// `RemoveBitmap`.
pub(super) fn remove(
    disks: &Disks,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Value, CallError> {
    let wanted = call.optional("name", text)?;
    let bitmap = call.required("bitmap", text)?;
    let name = client.disk_of(disks, call, wanted.as_deref())?;
    disks.remove_bitmap(&name, &bitmap, || client.is_connected())?;
    Ok(json!({}))
}
