// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl limit`.

use super::Named;
use super::text::{limits_text, saved_in};
use crate::values::{self, Burst};
use clap::Args;
use data_plane::Limits;
use serde_json::{Value, json};
use std::num::NonZeroU64;

/// The name of a group. The parts of a limit have `off`, and a group has not.
fn group(text: &str) -> Result<String, String> {
    match text {
        "off" => Err("give --none to leave the group".to_owned()),
        _ => values::disk_name(text),
    }
}

/// Arguments of `vhost-blk ctl limit`.
#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("limits").required(true).multiple(true))]
pub struct LimitArgs {
    /// The disk.
    #[command(flatten)]
    pub disk: Named,
    /// Share the limits with all disks of this group of vhost-blk daemon. A new group needs limits;
    /// without them the disk adopts those of the group
    #[arg(long, value_name = "GROUP", value_parser = group, group = "limits")]
    pub group: Option<String>,
    /// Maximum requests per second, of any kind; off: no such limit
    #[arg(long, value_name = "N|off", value_parser = |text: &str| or_off(text, values::iops),
          group = "limits")]
    pub iops: Option<Rate>,
    /// Maximum bytes per second that requests read, write or zero, with K, M, G or T (powers of 1024); off: no such
    /// limit
    #[arg(long, value_name = "SIZE|off", value_parser = bytes, group = "limits")]
    pub bandwidth: Option<Rate>,
    /// Unused time, in seconds, that requests may catch up on: 0.01 to 3600
    #[arg(long, value_name = "SECONDS", value_parser = values::burst, group = "limits")]
    pub burst_seconds: Option<Burst>,
    /// No limit. The disk leaves its group, which keeps its limits
    #[arg(long, group = "limits",
          conflicts_with_all = ["group", "iops", "bandwidth", "burst_seconds"])]
    pub none: bool,
    /// Write the limits into the file of the disk, too
    #[arg(long)]
    pub save: bool,
}

/// A limit or its removal.
#[derive(Clone, Copy, Debug)]
pub struct Rate(Option<NonZeroU64>);

impl Rate {
    /// The value of the parameter.
    pub(super) fn told(self) -> u64 {
        self.0.map_or(0, NonZeroU64::get)
    }
}

fn or_off(text: &str, limit: impl Fn(&str) -> Result<NonZeroU64, String>) -> Result<Rate, String> {
    match text {
        "off" => Ok(Rate(None)),
        _ => limit(text)
            .map(|rate| Rate(Some(rate)))
            .map_err(|why| format!("{why}, or off for no limit")),
    }
}

/// Bytes per second, or `off`.
pub(super) fn bytes(text: &str) -> Result<Rate, String> {
    or_off(text, values::rate_of_bytes)
}

impl LimitArgs {
    /// The parameters of the call.
    pub(super) fn parameters(&self) -> Value {
        let LimitArgs { disk, group, iops, bandwidth, burst_seconds, none, save } = self;
        let removed = none.then_some(0);
        let burst = burst_seconds.map(|burst| burst.0).or(none.then_some(Limits::BURST_DEFAULT));
        json!({
            "name": disk.name, "group": group,
            "iops": iops.map(Rate::told).or(removed),
            "bandwidth": bandwidth.map(Rate::told).or(removed),
            "burst_ms": burst.map(|burst| burst.as_millis() as u64), "save": save,
        })
    }
}

/// The reply: the limits in force.
pub(super) fn text(reply: &Value) -> String {
    let (limits, saved) = (limits_text(&reply["limits"]), saved_in(reply));
    let done = if reply["changed"] == false { "nothing to do" } else { "done" };
    format!("{done}; limits: {limits}{saved}\n")
}
