// SPDX-License-Identifier: Apache-2.0
//! Upgrades of `serve`, whose command line may name another image than the present one.

use crate::common::{Daemon, Place, program};
use crate::{Device, FIRST, Rig, mount, read_and_write, text, upgrade};
use driver::Options;
use std::path::Path;

/// A daemon of `serve` with a configuration file of these lines; `@` stands for the directory.
fn configured(place: Place, lines: &str) -> Rig {
    write_config(&place, lines);
    let mut command = program();
    command.args(["serve", "--config"]).arg(place.path("disk.toml")).arg("--control-path");
    let control = place.path("ctl");
    let daemon = Daemon::start(command.arg(&control), &control);
    Rig { daemon, place }
}

fn write_config(place: &Place, lines: &str) {
    let lines = format!("socket-path = '@/disk.sock'\n{lines}");
    let lines = lines.replace('@', place.dir.path().to_str().unwrap());
    std::fs::write(place.path("disk.toml"), lines).unwrap();
}

fn guest(rig: &Rig) -> Device {
    Device::connect(&rig.place.socket, &Options::default()).unwrap()
}

fn create(path: &Path, options: &[&str]) {
    let words = ["qemu-img", "create", "-q", "-f", "qcow2"];
    mount::run(&[&words, options, &[text(path), "4M"]].concat());
}

/// Expects that an upgrade is refused, and that the guest goes on.
#[track_caller]
fn refused(rig: &Rig, device: &mut Device, words: &str) {
    let since_start = || rig.json("status")["queues"][0]["chains"].clone();
    let before = since_start();
    let line = rig.refused("upgrade", 1);
    assert!(line.contains(words) && line.contains("; "), "{line}");
    assert_eq!(since_start(), before, "the queue was stopped");
    device.write(0, &[1; 512]).unwrap();
}

#[test]
fn a_disk_goes_on_in_the_image_of_its_snapshot_or_its_commit() {
    let place = Place::new();
    std::fs::File::options().write(true).open(&place.image).unwrap().set_len(8 << 20).unwrap();
    let lines = "blk-file = '@/disk.img'";
    let rig = configured(place, lines);
    let mut device = guest(&rig);
    device.write(FIRST + 1, &[1; 512]).unwrap();
    rig.ok("snapshot --to middle");
    upgrade(&rig);
    device.write(FIRST + 2, &[2; 512]).unwrap();
    rig.ok("snapshot --to top");
    device.write(FIRST + 3, &[3; 512]).unwrap();
    // The configuration file may name the old image, or the present one.
    for (n, lines) in
        [lines, "blk-file = '@/top'\nformat = 'qcow2'\nallow-backing = 'same-dir'", lines]
            .iter()
            .enumerate()
    {
        write_config(&rig.place, lines);
        upgrade(&rig);
        read_and_write(&mut device, n as u64 + 1);
        let status = rig.json("status");
        assert!(status["disk"].as_str().unwrap().contains("with 2 backing files"), "{status}");
    }
    // Its name is not needed any more.
    std::fs::rename(rig.path("top"), rig.path("moved")).unwrap();
    upgrade(&rig);
    read_and_write(&mut device, 4);
    std::fs::rename(rig.path("moved"), rig.path("top")).unwrap();
    for _ in 0..2 {
        rig.ok("commit");
        upgrade(&rig);
        read_and_write(&mut device, 5);
    }
    let status = rig.json("status");
    assert!(status["disk"].as_str().unwrap().contains("disk.img"), "{status}");
    rig.ok("snapshot --to again");
    upgrade(&rig);
    read_and_write(&mut device, 6);
}

#[test]
fn a_qcow2_image_passes_on_while_the_options_name_it() {
    let place = Place::new();
    create(&place.path("base"), &[]);
    let base = place.path("base");
    create(&place.path("a.qcow2"), &["-b", text(&base), "-F", "qcow2"]);
    let lines = "blk-file = '@/a.qcow2'\nformat = 'qcow2'\nallow-backing = 'any'";
    let rig = configured(place, lines);
    let mut device = guest(&rig);
    upgrade(&rig);
    device.write(1, &[1; 512]).unwrap();
    for (changed, words) in [
        (lines.replace("'any'", "'off'"), "is not allowed; give --allow-backing"),
        (lines.replace("'qcow2'", "'raw'"), "the running disk has a qcow2 image"),
        (lines.replace("a.qcow2", "base"), "another file than the open one"),
        (lines.replace("a.qcow2", "none"), "no such file"),
        (format!("{lines}\ndirect = 'off'"), "another file than the open one"),
        (format!("{lines}\nlogical-block-size = 4096"), "logical block size"),
        (format!("{lines}\nread-only = true"), "--read-only"),
    ] {
        write_config(&rig.place, &changed);
        refused(&rig, &mut device, words);
    }
    write_config(&rig.place, lines);
    std::fs::rename(rig.path("a.qcow2"), rig.path("b.qcow2")).unwrap();
    refused(&rig, &mut device, "no such file");
    create(&rig.path("a.qcow2"), &[]);
    refused(&rig, &mut device, "another file than the open one");
    std::fs::rename(rig.path("b.qcow2"), rig.path("a.qcow2")).unwrap();
    upgrade(&rig);
    let mut data = [0; 512];
    device.read(1, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
}

#[test]
fn a_raw_disk_on_which_the_guest_has_written_a_qcow2_header_stays_raw() {
    let place = Place::new();
    create(&place.path("other"), &[]);
    let header = std::fs::read(place.path("other")).unwrap();
    let lines = "blk-file = '@/disk.img'\nformat = 'raw'";
    let rig = configured(place, lines);
    let mut device = guest(&rig);
    device.write(0, &header[..128 << 10]).unwrap();
    upgrade(&rig);
    write_config(&rig.place, &lines.replace("'raw'", "'qcow2'"));
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("the running disk has a raw image; give --format raw"), "{line}");
    write_config(&rig.place, &lines.replace("format = 'raw'", ""));
    upgrade(&rig);
    let mut data = [0; 512];
    device.read(0, &mut data).unwrap();
    assert!(data == header[..512]);
}
