// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl add`: the options of a disk for the daemon.

use crate::disk_options;
use crate::failure::Failure;
use crate::nbd::Address;
use crate::options::DiskArgs;
use crate::values;
use clap::Args;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Arguments of `vhost-blk ctl add`.
#[derive(Args, Clone, Debug)]
#[command(next_display_order = None)]
pub struct AddArgs {
    /// The name of the new disk
    #[arg(value_parser = values::disk_name)]
    pub name: String,
    /// Open the image here and pass it to the daemon, which need not be able to see its path
    #[arg(long, help_heading = "Disk")]
    pub pass_file: bool,
    /// Write a file with these options to the daemon's --config-dir: the disk is served again after a
    /// restart of the daemon
    #[arg(long, help_heading = "Disk")]
    pub save: bool,
    /// Options of the disk.
    #[command(flatten)]
    pub disk: DiskArgs,
}

impl AddArgs {
    /// The parameters of the call, and the image to pass.
    pub(super) fn parameters(&self) -> Result<(Value, Option<OwnedFd>), Failure> {
        self.disk.check()?;
        let image = match (self.pass_file, &self.disk.blk_file) {
            (true, Some(path)) => Some(self.open(path)?),
            (true, None) => {
                return Err(Failure::usage(
                    "pass the image",
                    "none is given",
                    "give --blk-file PATH, or drop --pass-file",
                ));
            }
            (false, _) => None,
        };
        let index = image.as_ref().map(|_| 0);
        // The daemon has another working directory.
        let options = disk_options::of_disk(&self.disk, absolute)?;
        Ok((
            json!({"name": self.name, "options": options, "image": index, "save": self.save}),
            image,
        ))
    }

    fn open(&self, path: &Path) -> Result<OwnedFd, Failure> {
        let mut open = OpenOptions::new();
        open.read(true).write(!self.disk.read_only.is_on());
        open.open(path).map(OwnedFd::from).map_err(|error| {
            Failure::run(format!("open {}", path.display()), error, "check the path and its mode")
        })
    }
}

pub(super) fn absolute(path: &Path) -> Result<String, Failure> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::usage(format!("use {}", path.display()), why, "give another path")
    };
    if path.to_str().is_some_and(|text| Address::of(text).is_some()) {
        return Err(failed(&"it is an address of NBD, which only the target of a backup can be"));
    }
    let absolute = std::path::absolute(path).map_err(|error| failed(&error))?;
    match absolute.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(failed(&"it is not UTF-8")),
    }
}
