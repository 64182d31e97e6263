// SPDX-License-Identifier: Apache-2.0
//! A copy has the content of the disk at the start, whatever the guest writes meanwhile.

use crate::common::{Daemon, Place, finish, program, run};
use crate::load::{Done, Load};
use crate::served::served;
use crate::{Client, MIB, assert_same, fill};
use driver::{Device, Options};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sets its flag at the end of the scope, also after a failure.
struct AtEnd<'a>(&'a AtomicBool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs all loads, each on its thread, while `act` runs. Each load writes something: a copy may end before
/// the machine has run its thread.
pub(crate) fn under<T>(loads: &mut [Load], act: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _at_end = AtEnd(&stop);
        for load in loads {
            let stop = &stop;
            let mut start = None;
            let goes_on = move |done: &Done| {
                done.writes == *start.get_or_insert(done.writes) || !stop.load(Ordering::Relaxed)
            };
            scope.spawn(move || load.run_on(goes_on));
        }
        act()
    })
}

/// Lets each load write so many requests.
pub(crate) fn write_some(loads: &mut [Load], count: u64) {
    std::thread::scope(|scope| {
        for load in loads {
            let mut start = None;
            let goes_on =
                move |done: &Done| done.writes < *start.get_or_insert(done.writes) + count;
            scope.spawn(move || load.run_on(goes_on));
        }
    });
}

/// The content of an image, which both `qemu-img` and this program read.
fn content_of(image: &Path, format: &str) -> Vec<u8> {
    if format == "raw" {
        return std::fs::read(image).unwrap();
    }
    let image = image.to_str().unwrap();
    let checked = Command::new("qemu-img").args(["check", "-q", "-f", format, image]).status();
    assert!(checked.expect("qemu-utils are installed").success());
    let raw = format!("{image}.raw");
    assert!(run(["convert", "-f", format, image, &raw]).status.success());
    std::fs::read(raw).unwrap()
}

/// The content of a qcow2 image, which may be served, as QEMU reads it.
pub(crate) fn content_by_qemu(image: &Path) -> Vec<u8> {
    let raw = image.with_extension("seen");
    let (image, seen) = (image.to_str().unwrap(), raw.to_str().unwrap());
    let convert = ["convert", "-U", "-f", "qcow2", "-O", "raw", image, seen];
    let converted = Command::new("qemu-img").args(convert).status();
    assert!(converted.expect("qemu-utils are installed").success());
    std::fs::read(raw).unwrap()
}

/// As [`backed_up_under_load`], of a raw image.
fn raw_backed_up_under_load(packed: bool, format: &str, bandwidth: Option<u64>, rounds: usize) {
    backed_up_under_load(false, packed, format, bandwidth, rounds);
}

/// The load stops, the image is read, the backup begins, and the load goes on at once. `in_overlay`:
/// the image is a qcow2 overlay over what the load has written before.
fn backed_up_under_load(
    in_overlay: bool,
    packed: bool,
    format: &str,
    bandwidth: Option<u64>,
    rounds: usize,
) {
    let served = served(&[]);
    let options = Options { num_queues: 2, packed, ..Options::default() };
    let device = Device::connect(&served.place.socket, &options).unwrap();
    let layout = device.layout();
    let (_session, queues) = device.into_parts();
    let load = |(first, queue)| Load::new(queue, layout.clone(), first..first + 8192).of_up_to(64);
    let mut loads: Vec<Load> = (0..).step_by(8192).zip(queues).map(load).collect();
    let image = match in_overlay {
        false => served.place.image.clone(),
        true => {
            write_some(&mut loads, 100);
            let overlay = served.place.path("overlay");
            let taken = served.ctl(&["snapshot", "--to", overlay.to_str().unwrap()]);
            assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
            overlay
        }
    };
    let content_of_source = || match in_overlay {
        false => std::fs::read(&image).unwrap(),
        true => content_by_qemu(&image),
    };
    for round in 0..rounds {
        write_some(&mut loads, if in_overlay { 20 } else { 200 });
        let content = content_of_source();
        let target = served.place.path(&format!("copy-{round}"));
        let options = json!({"format": format, "bandwidth": bandwidth});
        let mut client = Client::start(&served.control, &target, options);
        let last = under(&mut loads, || client.finish());
        assert_eq!(
            last["parameters"],
            json!({"copied_bytes": 8 * MIB, "total_bytes": 8 * MIB, "shared": false})
        );
        assert!(content_of_source() != content, "nothing was written");
        assert_same(&content_of(&target, format), &content);
        assert!(!served.status()["disk"].to_string().contains("backed up"));
    }
    for load in loads {
        load.run(|_| false); // reads everything
    }
}

#[test]
fn a_copy_is_the_disk_at_its_start_although_two_queues_write() {
    raw_backed_up_under_load(false, "raw", None, 4);
    raw_backed_up_under_load(true, "raw", None, 4);
}

#[test]
fn a_slow_copy_is_the_disk_at_its_start_although_two_queues_write() {
    raw_backed_up_under_load(false, "raw", Some(8 * MIB), 2);
}

#[test]
fn a_qcow2_copy_is_the_disk_at_its_start_although_two_queues_write() {
    raw_backed_up_under_load(false, "qcow2", None, 2);
    raw_backed_up_under_load(true, "qcow2", Some(8 * MIB), 1);
}

#[test]
fn a_copy_of_an_overlay_is_the_disk_at_its_start_although_two_queues_write() {
    backed_up_under_load(true, false, "raw", None, 4);
    backed_up_under_load(true, true, "qcow2", Some(8 * MIB), 2);
}

#[test]
fn a_copy_is_sparse_and_the_command_tells_its_size() {
    let served = served(&[]);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    device.write(8000, &[5; 4096]).unwrap();
    let told = |words: &[&str]| {
        let output = served.ctl(words);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let target = |name: &str| served.place.path(name).to_str().unwrap().to_owned();
    let (raw, qcow2) = (target("copy"), target("copy.qcow2"));
    assert!(told(&["backup", "--to", &raw]).contains("8388608 bytes (8M)"));
    let reply = told(&["--json", "backup", "--to", &qcow2, "--format", "qcow2"]);
    let reply: serde_json::Value = serde_json::from_str(&reply).unwrap();
    assert_eq!(reply, json!({"copied_bytes": 8 * MIB, "total_bytes": 8 * MIB, "shared": false}));
    let content = std::fs::read(&served.place.image).unwrap();
    assert_same(&content_of(Path::new(&raw), "raw"), &content);
    assert_same(&content_of(Path::new(&qcow2), "qcow2"), &content);
    for (image, most) in [(raw, 128 << 10), (qcow2, 512 << 10)] {
        let meta = std::fs::metadata(&image).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o600);
        let used = meta.blocks() * 512;
        assert!(used <= most, "{image} has {used} bytes");
    }
}

/// A daemon of another image.
fn serve(place: &Place, image: &Path, control: &Path) -> Daemon {
    let mut command = program();
    command.args(["serve", "--data-plane", "uring", "--blk-file"]).arg(image);
    command.arg("--socket-path").arg(place.path("other.sock"));
    Daemon::start(command.arg("--control-path").arg(control), control)
}

/// The file ends inside a block of O_DIRECT and inside a cluster; its last bytes are no whole sector.
#[test]
fn a_disk_of_an_odd_size_is_copied_to_its_last_sector() {
    let place = Place::new();
    File::options().write(true).open(&place.image).unwrap().set_len(MIB + 700).unwrap();
    let content = fill(&place.image);
    let (control, target) = (place.path("other.ctl"), place.path("copy"));
    let _daemon = serve(&place, &place.image, &control);
    Client::start(&control, &target, json!({})).finish();
    assert_same(&std::fs::read(target).unwrap(), &content[..MIB as usize + 512]);
}

/// The progress of a slow copy, and the sync at its end, may take longer than `--timeout`.
#[test]
fn the_command_waits_for_a_slow_copy() {
    let place = Place::new();
    File::options().write(true).open(&place.image).unwrap().set_len(192 << 10).unwrap();
    let content = fill(&place.image);
    // The daemon syncs the image before its first reply.
    File::open(&place.image).unwrap().sync_all().unwrap();
    let (control, target) = (place.path("other.ctl"), place.path("copy"));
    let _daemon = serve(&place, &place.image, &control);
    // 64 KiB in 1.6 s.
    let mut command = program();
    command.args(["ctl", "--timeout", "1", "--control-path"]).arg(control).arg("backup");
    let output = finish(command.args(["--bandwidth", "40K", "--to"]).arg(&target));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_same(&std::fs::read(target).unwrap(), &content);
}
