// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl limit`.

use super::Named;
use crate::values::{self, Burst};
use clap::Args;
use serde_json::{Value, json};
use std::num::NonZeroU64;

/// Arguments of `vhost-blk ctl limit`.
#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("limits").required(true).multiple(true))]
pub struct LimitArgs {
    /// The disk.
    #[command(flatten)]
    pub disk: Named,
    /// Share the limits with all disks of this group of vhost-blk daemon. A new group needs limits;
    /// without them the disk adopts those of the group
    #[arg(long, value_name = "GROUP", value_parser = values::disk_name, group = "limits")]
    pub group: Option<String>,
    /// Requests per second at most, of any kind
    #[arg(long, value_name = "N", value_parser = |text: &str| or_none(values::iops(text)),
          group = "limits")]
    pub iops: Option<NonZeroU64>,
    /// Bytes per second that requests read, write or zero at most, with K, M, G or T (powers of 1024)
    #[arg(long, value_name = "SIZE",
          value_parser = |text: &str| or_none(values::rate_of_bytes(text)), group = "limits")]
    pub bandwidth: Option<NonZeroU64>,
    /// Unused time, in seconds, that requests may catch up on: 0.01 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "0.1", value_parser = values::burst)]
    pub burst_seconds: Burst,
    /// No limit. The disk leaves its group, which keeps its limits
    #[arg(long, group = "limits", conflicts_with_all = ["group", "iops", "bandwidth"])]
    pub none: bool,
    /// Write the limits into the file of the disk, too
    #[arg(long)]
    pub save: bool,
}

/// A limit; the error of another value names the way to have none.
fn or_none(limit: Result<NonZeroU64, String>) -> Result<NonZeroU64, String> {
    limit.map_err(|why| format!("{why}, or --none for no limit"))
}

impl LimitArgs {
    /// The parameters of the call.
    pub(super) fn parameters(&self) -> Value {
        let LimitArgs { disk, group, iops, bandwidth, burst_seconds, none: _, save } = self;
        let burst_ms = burst_seconds.0.as_millis() as u64;
        json!({
            "name": disk.name, "group": group, "iops": iops, "bandwidth": bandwidth,
            "burst_ms": burst_ms, "save": save,
        })
    }
}
