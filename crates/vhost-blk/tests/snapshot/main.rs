// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl snapshot` and `commit`: a guest goes on in an overlay, and in its backing file.

#[path = "../common/mod.rs"]
mod common;
mod crash;
#[path = "../../../vhost-user/tests/common/load.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
mod load;
mod merged;
#[path = "../common/mount.rs"]
mod mount;
mod refused;
#[path = "../daemon/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;
mod taken;

use common::{pattern, wait_until};
use driver::{Device, Options};
use mount::run;
use rig::Rig;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Size of the images.
const BYTES: u64 = 16 << 20;
const QUEUES: u16 = 2;

/// An empty image in the folder of the rig.
fn image(rig: &Rig, name: &str, format: &str) -> PathBuf {
    let path = rig.path(name);
    run(&["qemu-img", "create", "-qf", format, text(&path), "16M"]);
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Adds the disk `name` in an image of that name, with two queues.
#[track_caller]
fn add(rig: &Rig, name: &str, options: &str) {
    rig.ok(&format!("add {name} --socket-path {name}.sock --num-queues {QUEUES} {options}"));
}

/// Adds the raw disk `a` in a new image.
#[track_caller]
fn add_raw(rig: &Rig) -> PathBuf {
    let path = image(rig, "a.img", "raw");
    add(rig, "a", "--blk-file a.img");
    path
}

fn guest(rig: &Rig, name: &str) -> Device {
    let limit = Duration::from_secs(60);
    let options = Options { num_queues: QUEUES, limit, ..Options::default() };
    Device::connect(rig.path(&format!("{name}.sock")), &options).unwrap()
}

/// The content of the disk, as its guest reads it.
fn content(guest: &mut Device) -> Vec<u8> {
    let mut data = vec![0; BYTES as usize];
    for (part, bytes) in (0..).zip(data.chunks_mut(256 << 10)) {
        guest.read(part * 512, bytes).unwrap();
    }
    data
}

/// The overlay that the mark of a file names.
fn mark(path: &Path) -> Option<PathBuf> {
    backend::mark::overlay_of(&File::open(path).unwrap()).unwrap()
}

/// Removes the mark, as `setfattr -x` does.
fn unmark(path: &Path) {
    rustix::fs::removexattr(path, "user.vhost-blk.overlay").unwrap();
}
