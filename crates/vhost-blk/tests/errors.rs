// SPDX-License-Identifier: Apache-2.0
//! `--on-error` and `--io-timeout`, from the command line to the guest.

mod common;

use common::{Daemon, Place, program, run, stdout};
use driver::{Device, Options, Request};
use kit::mount;
use mount::{Mount, may_not_mount};
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;
use virtio_spec::blk::S_OK;

const MIB: u64 = 1 << 20;
const SECTORS: u64 = MIB / 512;

/// A daemon for `image` with a control socket.
fn served(place: &Place, image: &Path, more: &[&str]) -> (Daemon, PathBuf) {
    let control = place.path("control.sock");
    let _ = std::fs::remove_file(&control);
    let mut command = program();
    command.args(["serve", "--data-plane", "uring", "--num-queues", "1", "--blk-file"]);
    command.arg(image).arg("--socket-path").arg(&place.socket);
    command.arg("--control-path").arg(&control).args(more);
    (Daemon::start(&mut command, &control), control)
}

fn guest(place: &Place, packed: bool) -> Device {
    let limit = Duration::from_secs(60);
    let options = Options { packed, inflight: true, limit, ..Options::default() };
    Device::connect(&place.socket, &options).unwrap()
}

fn ctl(control: &Path, words: &[&str]) -> String {
    let mut arguments = vec!["ctl".into(), "--control-path".into(), control.to_path_buf()];
    arguments.extend(words.iter().map(PathBuf::from));
    let output = run(arguments);
    assert!(output.status.success(), "{output:?}");
    stdout(&output)
}

fn status(control: &Path) -> Value {
    serde_json::from_str(&ctl(control, &["--json", "status"])).unwrap()
}

/// Submits writes of whole MiBs until the disk halts; returns their number.
fn fill(place: &Place, device: &mut Device, control: &Path) -> u64 {
    let layout = device.layout();
    for at in 0..256 {
        device.queue(0).submit(&Request::write(at * SECTORS, &[7; MIB as usize]), &layout).unwrap();
        let finished = || {
            let told = status(control);
            told["halted"] != Value::Null || told["queues"][0]["completed"] == at + 1
        };
        place.wait_until("the write ends, or the disk halts", finished);
        if status(control)["halted"] != Value::Null {
            return at + 1;
        }
        assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    }
    panic!("a small file system took 256 MiB");
}

#[track_caller]
fn reads_as(device: &mut Device, at: u64, byte: u8) {
    let mut data = vec![0; MIB as usize];
    device.read(at * SECTORS, &mut data).unwrap();
    assert!(data.iter().all(|&found| found == byte), "MiB {at} holds {}", data[0]);
}

/// The format of an image that is served on a full file system.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Raw,
    Qcow2,
    /// Over a raw image full of nines.
    Overlay,
}

impl Kind {
    /// Makes an image of 256 MiB. The clusters of an overlay are larger than a write: the rest of a cluster is
    /// copied, and its commit finds no room.
    fn make(self, mount: &Mount, image: &Path) {
        let directory = mount.place.path().to_str().unwrap();
        let image = image.to_str().unwrap();
        let create = ["qemu-img", "create", "-qf", "qcow2"];
        match self {
            Kind::Raw => File::create(image).unwrap().set_len(256 * MIB).unwrap(),
            Kind::Qcow2 => drop(mount::run(&[&create[..], &[image, "256M"]].concat())),
            Kind::Overlay => {
                let base = format!("{directory}/base");
                std::fs::write(&base, vec![9; 4 << 20]).unwrap();
                let backing = ["-b", &base, "-F", "raw", "-o", "cluster_size=2M", image, "256M"];
                drop(mount::run(&[&create[..], &backing].concat()));
            }
        }
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            Kind::Raw => &["--format", "raw"],
            Kind::Qcow2 => &["--format", "qcow2"],
            Kind::Overlay => &["--format", "qcow2", "--allow-backing", "same-dir"],
        }
    }

    /// The byte in a MiB that was not written.
    fn below(self, at: u64) -> u8 {
        if self == Kind::Overlay && at < 4 { 9 } else { 0 }
    }
}

/// A full file system halts the disk. The daemon may be killed meanwhile. After the operator has
/// made room, the write succeeds.
fn full(mount: &Mount, kind: Kind, packed: bool, kill: bool) {
    let place = Place::new();
    let (image, filler) = (mount.path("image"), mount.path("filler"));
    kind.make(mount, &image);
    std::fs::write(&filler, vec![1; 8 << 20]).unwrap();
    let policy = [&["--on-error", "enospc"], kind.options()].concat();
    let (mut daemon, mut control) = served(&place, &image, &policy);
    let mut device = guest(&place, packed);
    let written = fill(&place, &mut device, &control);
    let told = status(&control);
    let reason = told["halted"]["reason"].as_str().unwrap();
    assert!(reason.contains("write of 1048576 bytes") && reason.contains("No space"), "{reason}");
    assert_eq!(told["queues"][0]["kept"], 1);
    assert!(ctl(&control, &["status"]).contains("state       halted since 20"));
    // There is no room yet.
    ctl(&control, &["resume"]);
    place.wait_until("it halts again", || status(&control)["halts"] == 2);
    if kill {
        daemon.signal(libc::SIGKILL);
        daemon.wait();
        (daemon, control) = served(&place, &image, &policy);
        device.reconnect(&place.socket).unwrap();
        daemon.log_line("the disk is halted");
    }
    assert!(device.queue(0).try_collect().unwrap().is_none());
    std::fs::remove_file(&filler).unwrap();
    ctl(&control, &["resume"]);
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    (0..written).for_each(|at| reads_as(&mut device, at, 7));
    device.flush().unwrap();
    reads_as(&mut device, written, kind.below(written));
    let told = status(&control);
    assert_eq!(told["halted"], Value::Null);
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    if kind != Kind::Raw {
        // No leaked cluster is left either.
        mount::run(&["qemu-img", "check", "-qf", "qcow2", image.to_str().unwrap()]);
    }
}

#[test]
fn a_full_tmpfs_halts_the_disk_until_there_is_room() {
    if may_not_mount() {
        return;
    }
    for (packed, kill) in [(false, false), (true, false), (false, true), (true, true)] {
        full(&Mount::tmpfs(32), Kind::Raw, packed, kill);
    }
}

#[test]
fn a_full_file_system_halts_a_qcow2_disk_until_there_is_room() {
    if may_not_mount() {
        return;
    }
    full(&Mount::tmpfs(16), Kind::Qcow2, true, true);
    full(&Mount::tmpfs(20), Kind::Overlay, false, false);
    full(&Mount::ext4(32), Kind::Overlay, false, true);
}

#[test]
fn a_full_ext4_halts_the_disk_until_there_is_room() {
    if may_not_mount() {
        return;
    }
    full(&Mount::ext4(48), Kind::Raw, false, false);
}

#[test]
fn sigterm_ends_a_halted_daemon_and_the_next_one_carries_out_what_it_kept() {
    for packed in [false, true] {
        let place = Place::new();
        let fails = ["--on-error", "stop", "--wrap", "fault:ops=write,errno=EIO"];
        let (mut daemon, control) = served(&place, &place.image, &fails);
        let mut device = guest(&place, packed);
        let layout = device.layout();
        for sector in 0..5 {
            let request = Request::write(sector, &[1 + sector as u8; 512]);
            device.queue(0).submit(&request, &layout).unwrap();
        }
        place.wait_until("it halts", || status(&control)["halted"] != Value::Null);
        daemon.log_line("the disk is halted");
        daemon.signal(libc::SIGTERM);
        assert_eq!(daemon.wait().code(), Some(0));
        let (_daemon, _) = served(&place, &place.image, &["--on-error", "stop"]);
        device.reconnect(&place.socket).unwrap();
        for _ in 0..5 {
            assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
        }
        for sector in 0..5 {
            let mut data = [0; 512];
            device.read(sector, &mut data).unwrap();
            assert_eq!(data, [1 + sector as u8; 512]);
        }
    }
}

#[test]
fn a_halted_guest_that_migrates_gets_errors_and_no_request_is_lost() {
    let place = Place::new();
    let fails = ["--on-error", "stop", "--wrap", "fault:ops=write,errno=EIO"];
    let (_daemon, control) = served(&place, &place.image, &fails);
    let mut device = guest(&place, false);
    let layout = device.layout();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    place.wait_until("it halts", || status(&control)["halted"] != Value::Null);
    let _log = device.start_log().unwrap();
    assert!(device.queue(0).try_collect().unwrap().is_none());
    device.session().stop_queue(0).unwrap();
    let (_, completion) = device.queue(0).collect().unwrap();
    assert_eq!(completion.status, Some(virtio_spec::blk::S_IOERR));
    assert_eq!(status(&control)["image_lock"], "released");
}

#[test]
fn storage_that_does_not_answer_is_told() {
    let place = Place::new();
    let slow = ["--io-timeout", "0.2", "--wrap", "delay:us=8000000,ops=read"];
    let (mut daemon, control) = served(&place, &place.image, &slow);
    let mut device = guest(&place, false);
    let layout = device.layout();
    device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
    daemon.log_line("the storage does not answer");
    assert_eq!(status(&control)["stalled_queues"], serde_json::json!([0]));
    assert!(ctl(&control, &["status"]).contains("does not answer, queues 0"));
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    daemon.log_line("the storage answers again");
    assert_eq!(status(&control)["stalls"], 1);
}
