// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl mirror`: a guest goes on in other storage.

#[path = "../common/mod.rs"]
mod common;
mod crash;
mod ended;
mod hangs;
#[path = "../common/images.rs"]
mod images;
#[path = "../../../vhost-user/tests/common/load.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
mod load;
#[path = "../common/moments.rs"]
mod moments;
mod moved;
mod refused;
#[path = "../common/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;
#[path = "../common/stamped.rs"]
mod stamped;
mod storage;

use common::{pattern, wait_until};
use driver::Device;
use images::{
    BYTES, PART, QUEUES, add, add_raw, begin, check_after_kill, content, error_of, fill, guest,
    image, text, while_rewritten,
};
use kit::mount;
use rig::Rig;
use serde_json::Value;
use std::fs::File;
use std::path::Path;

/// The storage that the mark of a former image names.
fn moved_to(path: &Path) -> Option<String> {
    let found = backend::mark::refusal(&File::open(path).unwrap(), path).unwrap()?;
    let told = found.to_string();
    Some(told.split_once("its disk was mirrored to ")?.1.split(',').next()?.to_owned())
}

/// The mirror of the disk `a`; null if there is none.
fn mirror(rig: &Rig) -> Value {
    rig.json("mirror a")["mirror"].clone()
}

/// Names of incomplete targets.
fn parts(rig: &Rig) -> Vec<String> {
    parts_in(rig.place.dir.path())
}

fn parts_in(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap().map(|found| found.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    names.filter(|name| name.ends_with(".part")).collect()
}

/// Threads of the daemon that work on a target.
fn target_threads(rig: &Rig) -> usize {
    rig.daemon.threads_named("mirror-target")
}

/// Expects that the guest goes on in `a.img`, which has no mark, and that nothing is left of the mirror.
#[track_caller]
fn in_old_storage(rig: &Rig, device: &mut Device) {
    wait_until("the end of the mirror", || mirror(rig).is_null());
    let disk = rig.json("status a")["disk"].as_str().unwrap().to_owned();
    assert!(disk.contains("a.img") && !disk.contains("mirrored"), "{disk}");
    assert_eq!(moved_to(&rig.path("a.img")), None);
    wait_until("the removal of the target", || parts(rig).is_empty());
    device.write(1, &[1; 512]).unwrap();
}
