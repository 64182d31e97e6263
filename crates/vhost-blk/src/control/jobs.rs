// SPDX-License-Identifier: Apache-2.0
//! The methods for backups, commits and mirrors in progress.

use super::client::Client;
use super::protocol::{Call, CallError, text};
use super::values::job_value;
use crate::disks::Disks;
use crate::events::Work;
use crate::pace::Bandwidth;
use serde_json::{Value, json};
use std::num::NonZeroU64;
use std::sync::Arc;

/// Reads the optional parameter `bandwidth` of the begin of a copy.
pub(super) fn bandwidth(call: &mut Call) -> Result<Arc<Bandwidth>, CallError> {
    let bandwidth = call.optional("bandwidth", |value| NonZeroU64::new(value.as_u64()?))?;
    Ok(Arc::new(Bandwidth::new(bandwidth)))
}

/// `Jobs`.
pub(super) fn list(disks: &Disks, call: &mut Call) -> Result<Value, CallError> {
    let name = call.optional("name", text)?;
    call.no_more()?;
    let jobs = disks.jobs(name.as_deref())?;
    let jobs: Vec<_> = jobs.iter().map(|(disk, job)| job_value(disk, job)).collect();
    Ok(json!({"jobs": jobs}))
}

/// `CancelJob`.
pub(super) fn cancel(
    disks: &Disks,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Value, CallError> {
    let wanted = call.optional("name", text)?;
    let kind = |value: &Value| {
        let name = value.as_str()?;
        [Work::Backup, Work::Commit, Work::Mirror].into_iter().find(|work| work.name() == name)
    };
    let kind = call.optional("kind", kind)?;
    let name = client.disk_of(disks, call, wanted.as_deref())?;
    Ok(json!({"changed": disks.cancel_job(&name, kind, || client.is_connected())?}))
}

/// `SetJobBandwidth`.
pub(super) fn set_bandwidth(
    disks: &Disks,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<Value, CallError> {
    let wanted = call.optional("name", text)?;
    let bandwidth = call.required("bandwidth", Value::as_u64)?;
    let name = client.disk_of(disks, call, wanted.as_deref())?;
    Ok(json!({"changed": disks.set_job_bandwidth(&name, NonZeroU64::new(bandwidth))?}))
}
