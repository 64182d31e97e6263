// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl jobs`: shows backups, commits and mirrors in progress, limits them, and cancels them.

use super::limit::{self, Rate};
use super::{Call, text};
use crate::values;
use clap::Args;
use serde_json::json;

/// Arguments of `vhost-blk ctl jobs`.
#[derive(Args, Clone, Debug)]
pub struct JobsArgs {
    /// The disk. Without it, all jobs are shown; a change needs it if the daemon has several disks
    #[arg(value_parser = values::disk_name)]
    pub name: Option<String>,
    /// Maximum bytes per second to copy from now on, with K, M, G or T (powers of 1024); off: no limit
    #[arg(long, value_name = "SIZE|off", value_parser = limit::bytes, conflicts_with = "cancel")]
    pub bandwidth: Option<Rate>,
    /// Cancel the job. A backup leaves no copy, a commit and a mirror leave the guest in its storage
    #[arg(long)]
    pub cancel: bool,
}

impl JobsArgs {
    pub(super) fn call(&self) -> Call {
        let name = self.name.as_deref();
        match self.bandwidth {
            _ if self.cancel => cancel(name, None),
            Some(bandwidth) => {
                let parameters = json!({"name": name, "bandwidth": bandwidth.told()});
                Call::new("limit the copy of the disk", "SetJobBandwidth", parameters)
            }
            None => Call::new("show the jobs", "Jobs", json!({ "name": name }))
                .told(text::jobs)
                .of_member("jobs"),
        }
    }
}

/// Cancels a job of a disk, or one of this kind.
pub(super) fn cancel(name: Option<&str>, kind: Option<&str>) -> Call {
    let parameters = json!({"name": name, "kind": kind});
    Call::new("cancel the job of the disk", "CancelJob", parameters)
}
