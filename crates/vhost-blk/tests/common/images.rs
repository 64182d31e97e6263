// SPDX-License-Identifier: Apache-2.0
//! Disks of a rig in images of 16 MiB.
#![allow(dead_code, reason = "each test program uses its part")]

use crate::mount::run;
use crate::rig::Rig;
use driver::{Device, Options};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Size of the images.
pub(crate) const BYTES: u64 = 16 << 20;
pub(crate) const QUEUES: u16 = 2;

/// An empty image in the folder of the rig.
pub(crate) fn image(rig: &Rig, name: &str, format: &str) -> PathBuf {
    let path = rig.path(name);
    run(&["qemu-img", "create", "-qf", format, text(&path), "16M"]);
    path
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Adds the disk `name` in an image of that name, with two queues.
#[track_caller]
pub(crate) fn add(rig: &Rig, name: &str, options: &str) {
    rig.ok(&format!("add {name} --socket-path {name}.sock --num-queues {QUEUES} {options}"));
}

/// Adds the raw disk `a` in a new image.
#[track_caller]
pub(crate) fn add_raw(rig: &Rig) -> PathBuf {
    let path = image(rig, "a.img", "raw");
    add(rig, "a", "--blk-file a.img");
    path
}

pub(crate) fn guest(rig: &Rig, name: &str) -> Device {
    let limit = Duration::from_secs(60);
    let options = Options { num_queues: QUEUES, limit, ..Options::default() };
    Device::connect(rig.path(&format!("{name}.sock")), &options).unwrap()
}

/// The content of the disk, as its guest reads it.
pub(crate) fn content(guest: &mut Device) -> Vec<u8> {
    let mut data = vec![0; BYTES as usize];
    for (part, bytes) in (0..).zip(data.chunks_mut(256 << 10)) {
        guest.read(part * 512, bytes).unwrap();
    }
    data
}

/// Begins `vhost-blk ctl` in the folder of the rig.
pub(crate) fn begin(rig: &Rig, words: &str) -> Child {
    rig.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Expects that the image has no error for `qemu-img`. A kill may leak clusters.
#[track_caller]
pub(crate) fn check_after_kill(path: &Path) {
    let checked = Command::new("qemu-img").args(["check", "-qU"]).arg(path).output().unwrap();
    assert!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
}

/// The overlay that the mark of a file names.
pub(crate) fn mark(path: &Path) -> Option<PathBuf> {
    backend::mark::overlay_of(&File::open(path).unwrap()).unwrap()
}

/// Removes the mark, as `setfattr -x` does.
pub(crate) fn unmark(path: &Path) {
    rustix::fs::removexattr(path, "user.vhost-blk.overlay").unwrap();
}
