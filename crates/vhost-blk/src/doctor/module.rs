// SPDX-License-Identifier: Apache-2.0
//! The kernel module: checks that it is loaded, accessible, and accepts the image.

use super::{Finding, Outcome};
use crate::module::{Device, is_loaded};
use backend::file::{File, FileOptions};
use backend::quoted;
use data_plane::{Coalesce, DEVICE_PATH, IoPoll, KernelOptions, Limits};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const CHECK: &str = "kernel_module";

pub(super) fn module(image: Option<&Path>) -> Finding {
    match (Device::look(), image) {
        (Device::Usable, Some(image)) => takes(image),
        (Device::Usable, None) => {
            let message = format!("{DEVICE_PATH} opens: --data-plane auto and kernel use it");
            Finding::new(CHECK, Outcome::Ok, message)
        }
        (Device::Forbidden, _) => forbidden(),
        (Device::Absent, _) => absent(),
        (Device::Failed(error), _) => {
            Finding::new(CHECK, Outcome::Warn, format!("{DEVICE_PATH} does not open: {error}"))
                .remedy("see the kernel log (dmesg); the data plane is io_uring until then")
        }
    }
}

/// The module knows no tables of an image, so that it is not asked.
pub(super) fn of_qcow2(image: &Path) -> Finding {
    let shown = image.display();
    let message = format!(
        "{DEVICE_PATH} does not take {shown}: it is qcow2, and the module serves raw content only; \
         --data-plane auto takes io_uring, and kernel is refused"
    );
    Finding::new(CHECK, Outcome::Info, message).remedy(format!(
        "for the kernel plane make a raw image: vhost-blk convert --format qcow2 {} NEW",
        quoted(image)
    ))
}

/// Attaches the image briefly, without a queue.
fn takes(image: &Path) -> Finding {
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let disk = match File::open(image, options) {
        Ok(disk) => disk,
        Err(error) => return Finding::new(CHECK, Outcome::Warn, format!("not tried: {error}")),
    };
    let options = KernelOptions {
        batch_size: None,
        path: DEVICE_PATH.into(),
        workers: 1,
        cpus: Vec::new(),
        poll_max: Duration::ZERO,
        pin_memory: false,
        coalesce: Coalesce::Auto,
        iopoll: IoPoll::Off,
        seg_max: vhost_user::SEG_MAX,
        num_queues: 1,
        queue_size_max: 256,
        limits: Limits::NONE,
        watches_time: false,
        errors: Default::default(),
    };
    match data_plane::check_kernel(Arc::new(disk), options) {
        Ok(()) => {
            Finding::new(CHECK, Outcome::Ok, format!("{DEVICE_PATH} takes {}", image.display()))
        }
        Err(why) => {
            let message = format!("{DEVICE_PATH} does not take {}: {why}", image.display());
            Finding::new(CHECK, Outcome::Warn, message)
        }
    }
}

fn forbidden() -> Finding {
    let facts = fs::metadata(DEVICE_PATH);
    let mode = facts.map_or(String::new(), |it| {
        format!(" (mode {:o}, owner {}, group {})", it.mode() & 0o7777, it.uid(), it.gid())
    });
    Finding::new(CHECK, Outcome::Warn, format!("{DEVICE_PATH}{mode} may not be used by this user"))
        .remedy(
            "add this user to the group of the node (vhost-blk by 60-vhost-blk.rules; in a unit \
             SupplementaryGroups=vhost-blk), and never the user of a VMM",
        )
}

fn absent() -> Finding {
    let (message, remedy) = match is_loaded() {
        true => (
            format!("the module vhost_blk is loaded, and there is no {DEVICE_PATH}"),
            "make the device node visible here (in a container: pass the device in)",
        ),
        false => (
            "not loaded; it is not needed, the data plane is io_uring".to_owned(),
            "to have the kernel run the queues: modprobe vhost_blk",
        ),
    };
    Finding::new(CHECK, Outcome::Info, message).remedy(remedy)
}
