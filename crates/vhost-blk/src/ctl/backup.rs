// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl backup`: asks for a backup, shows its progress, and waits for its end.

use super::add::absolute;
use super::ask::{Asker, Followed};
use super::text;
use crate::failure::{Failure, Sort};
use crate::image::progress;
use crate::nbd::Address;
use crate::values::{self, Format, Reflink, word};
use clap::Args;
use serde_json::{Value, json};
use std::fmt::Display;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

/// Arguments of `vhost-blk ctl backup`.
#[derive(Args, Clone, Debug)]
pub struct BackupArgs {
    /// The disk; may be left out if the daemon has one disk
    #[arg(value_parser = values::disk_name)]
    pub name: Option<String>,
    /// The new image, which must not exist; the daemon writes it. Or an export of an NBD server that
    /// is as large as the disk, for example of qemu-nbd or nbdkit: nbd:unix:PATH, where PATH is that of
    /// the server's socket, or nbd+unix:///EXPORT?socket=PATH
    #[arg(long, value_name = "FILE|nbd:unix:PATH", required_unless_present = "cancel")]
    pub to: Option<PathBuf>,
    /// Format of the new image [default: raw; qcow2 with --incremental]. An export has none
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Note the parts that the guest changes from the moment of the copy on, for incremental backups.
    /// Each may have a bitmap of its own: nightly and weekly ones, for example
    #[arg(long, value_name = "BITMAP", value_parser = values::disk_name, conflicts_with = "incremental")]
    pub bitmap: Option<String>,
    /// Copy only the parts that were changed since the last backup of this bitmap, into a qcow2 image
    /// whose backing file is that backup, or into the export that has that backup
    #[arg(long, value_name = "BITMAP", value_parser = values::disk_name)]
    pub incremental: Option<String>,
    /// Maximum bytes per second to copy, with K, M, G or T (powers of 1024). Data that the guest is about to
    /// overwrite is copied at once
    #[arg(long, value_name = "SIZE", value_parser = values::rate_of_bytes)]
    pub bandwidth: Option<NonZeroU64>,
    /// Read the complete copy again from its storage, and compare it with what was read from the disk.
    /// There is no new image if they differ. Of an export only the copied parts are read
    #[arg(long)]
    pub verify: bool,
    /// Share the space of the image where the file system can do that (XFS, btrfs): a full backup of the
    /// same format without --verify. It is no second copy of the data
    #[arg(long, value_name = "MODE", default_value = "never")]
    pub reflink: Reflink,
    /// Cancel the backup that another client waits for
    #[arg(long, conflicts_with_all = ["to", "format", "bitmap", "incremental", "bandwidth", "verify", "reflink"])]
    pub cancel: bool,
}

impl BackupArgs {
    /// The last reply as text.
    pub(super) fn text(&self) -> fn(&Value) -> String {
        if self.incremental.is_some() { text::increment } else { text::done }
    }
}

const WHAT: &str = "back up the disk";

/// The target with an absolute path.
fn place(to: &Path) -> Result<String, Failure> {
    let failed = |why: &dyn Display| Failure::usage(WHAT, why, "give another place");
    let Some(address) = to.to_str().and_then(Address::of) else { return absolute(to) };
    let address = address.map_err(|told| {
        let told = Failure::told(WHAT, format!("{}: {told}", to.display()));
        Failure::usage(told.what, told.why, told.remedy)
    })?;
    address.absolute().map(|address| address.to_string()).map_err(|why| failed(&why))
}

/// Asks for the backup and waits for it. Returns the last reply.
pub(super) fn run(args: &BackupArgs, asker: Asker<'_>) -> Result<Value, Failure> {
    let BackupArgs { name, format, bitmap, incremental, bandwidth, verify, reflink, .. } = args;
    // The daemon has another working directory.
    let target = args.to.as_deref().map(place).transpose()?;
    let parameters = json!({
        "name": name, "target": target, "format": format.map(word), "bandwidth": bandwidth,
        "bitmap": bitmap, "incremental": incremental, "verify": verify,
        "reflink": word(*reflink),
    });
    let bar = progress::bar()
        .map_err(|why| Failure::run("show the progress", why, "redirect standard error"))?;
    let last = asker.follow(WHAT, "Backup", &parameters, |reply| {
        let count = |name: &str| reply[name].as_u64().unwrap_or_default();
        bar.set_length(count("total_bytes"));
        bar.set_position(count("copied_bytes"));
        Ok(true)
    });
    bar.finish_and_clear();
    match last? {
        Followed::Last(reply) => Ok(reply),
        Followed::Enough | Followed::Gone => {
            let remedy = "start it, and repeat this: there is no copy. If it was killed, remove the file .*.part \
                          beside the place of the copy";
            let failure = Failure::run(WHAT, "the daemon has ended", remedy);
            Err(Failure { sort: Sort::NoAnswer, ..failure })
        }
    }
}
