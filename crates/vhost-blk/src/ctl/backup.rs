// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl backup`: asks for a backup, shows its progress, and waits for its end.

use super::add::absolute;
use super::ask::Asker;
use crate::failure::Failure;
use crate::image::progress;
use crate::values::{self, Format, word};
use clap::Args;
use serde_json::{Value, json};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// Arguments of `vhost-blk ctl backup`.
#[derive(Args, Clone, Debug)]
pub struct BackupArgs {
    /// The disk; may be left out if the daemon has one disk
    #[arg(value_parser = values::disk_name)]
    pub name: Option<String>,
    /// The new image, which must not exist. The daemon writes it
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
    /// Format of the new image
    #[arg(long, value_name = "FORMAT", default_value = "raw")]
    pub format: Format,
    /// Bytes per second that are copied at most, with K, M, G or T. Data that the guest is about to
    /// overwrite is copied at once
    #[arg(long, value_name = "SIZE", value_parser = values::rate_of_bytes)]
    pub bandwidth: Option<NonZeroU64>,
}

const WHAT: &str = "back up the disk";

/// Asks for the backup and waits for it. Returns the last reply.
pub(super) fn run(args: &BackupArgs, asker: Asker<'_>) -> Result<Value, Failure> {
    let BackupArgs { name, to, format, bandwidth } = args;
    // The daemon has another working directory.
    let target = absolute(to)?;
    let parameters =
        json!({"name": name, "target": target, "format": word(*format), "bandwidth": bandwidth});
    let bar = progress::bar()
        .map_err(|why| Failure::run("show the progress", why, "redirect standard error"))?;
    let last = asker.follow(WHAT, "Backup", &parameters, |reply| {
        let count = |name: &str| reply[name].as_u64().unwrap_or_default();
        bar.set_length(count("total_bytes"));
        bar.set_position(count("copied_bytes"));
        Ok(true)
    });
    bar.finish_and_clear();
    last?.ok_or_else(|| {
        Failure::run(WHAT, "the daemon has ended", "start it, and repeat this: there is no copy")
    })
}
