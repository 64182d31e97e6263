// SPDX-License-Identifier: Apache-2.0
//! Disks of a rig in images of 16 MiB.
#![allow(dead_code, reason = "each test program uses its part")]

use crate::mount::run;
use crate::rig::Rig;
use driver::{Device, Options};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Size of the images.
pub(crate) const BYTES: u64 = 16 << 20;
pub(crate) const QUEUES: u16 = 2;
/// Bytes of a write that fills the disk.
pub(crate) const PART: u64 = 256 << 10;
const PARTS: u64 = BYTES / PART;

/// An empty image in the directory of the rig.
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

/// Fills the whole disk.
pub(crate) fn fill(guest: &mut Device, byte: u8) {
    for part in 0..PARTS {
        guest.write(part * PART / 512, &vec![byte; PART as usize]).unwrap();
    }
}

/// Rewrites the disk, which is full of ones, again and again while `act` runs. Verifies every byte before
/// it is rewritten, and in one more round after that.
pub(crate) fn while_rewritten<T>(mut guest: Device, act: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut data = vec![0; PART as usize];
            let (mut n, mut end) = (0, u64::MAX);
            while n < end {
                let (sector, round) = (n % PARTS * PART / 512, n / PARTS + 1);
                guest.read(sector, &mut data).unwrap();
                let told = format!("sector {sector} has {}, not {}", data[0], round as u8);
                assert!(data.iter().all(|byte| *byte == round as u8), "{told}");
                guest.write(sector, &vec![(round + 1) as u8; PART as usize]).unwrap();
                n += 1;
                if stop.load(Ordering::Acquire) {
                    end = end.min(n + PARTS);
                }
            }
        });
        let done = act();
        stop.store(true, Ordering::Release);
        writer.join().unwrap();
        done
    })
}

/// Begins `vhost-blk ctl` in the directory of the rig.
pub(crate) fn begin(rig: &Rig, words: &str) -> Child {
    rig.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The error of a client that fails.
#[track_caller]
pub(crate) fn error_of(client: Child) -> String {
    let ended = client.wait_with_output().unwrap();
    assert!(!ended.status.success());
    String::from_utf8(ended.stderr).unwrap()
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
