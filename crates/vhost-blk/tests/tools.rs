// SPDX-License-Identifier: Apache-2.0
//! `doctor` and `create`.

mod common;

use common::{Daemon, Place, finish, one_line, pattern, program};
use driver::{Device, Options};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// `doctor` in a home without kernels, so that it boots none of the user's.
fn doctor(place: &Place) -> Command {
    let mut command = program();
    command.arg("doctor").env("HOME", place.dir.path());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The line of one check.
#[track_caller]
fn line_of<'a>(text: &'a str, check: &str) -> &'a str {
    text.lines().find(|line| line.split_whitespace().nth(1) == Some(check)).unwrap()
}

#[test]
fn doctor_reports_every_check_in_one_line() {
    let place = Place::new();
    let output = finish(doctor(&place).arg("--blk-file").arg(&place.image));
    let text = text(&output);
    for check in [
        "kernel",
        "io_uring",
        "o_direct",
        "lock",
        "memlock",
        "kernel_module",
        "hugepages",
        "cpus",
        "qemu",
        "kvm",
    ] {
        let outcome = line_of(&text, check).split_whitespace().next().unwrap();
        assert!(["ok", "info", "warn", "fail"].contains(&outcome), "{outcome}");
    }
    assert_eq!(output.status.success(), text.ends_with("serving a disk works here\n"), "{text}");
}

#[test]
fn commands_fail_if_their_output_is_lost() {
    let place = Place::new();
    let of_program = |word: &str| {
        let mut command = program();
        command.arg(word);
        command
    };
    for mut command in [doctor(&place), of_program("--help"), of_program("--version")] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let child = command.stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("cannot write the output"), "{told}");
    }
}

#[test]
fn doctor_fails_for_a_missing_image() {
    let place = Place::new();
    let output = finish(doctor(&place).args(["--blk-file", "/no/such.img"]));
    assert_eq!(output.status.code(), Some(1));
    let text = text(&output);
    assert!(line_of(&text, "image").starts_with("fail"), "{text}");
    assert!(line_of(&text, "image").contains("vhost-blk create"), "{text}");
    // A directory, too, is no image that could be locked.
    let of_directory = finish(doctor(&place).arg("--blk-file").arg(place.dir.path()));
    assert_eq!(of_directory.status.code(), Some(1));
    for text in [text, self::text(&of_directory)] {
        let checks = text.lines().filter_map(|line| line.split_whitespace().nth(1));
        assert!(checks.into_iter().all(|it| !["o_direct", "lock"].contains(&it)), "{text}");
    }
}

#[test]
fn doctor_speaks_json_that_agrees_with_its_exit_code() {
    let place = Place::new();
    let output = finish(doctor(&place).arg("--json"));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["works"], output.status.success());
    assert!(report["checks"].as_array().unwrap().len() >= 9);
}

#[test]
fn doctor_warns_of_more_queues_than_cpus() {
    let place = Place::new();
    let cpus = std::thread::available_parallelism().unwrap().get();
    let output = finish(doctor(&place).args(["--num-queues", "64"]));
    let wanted = if cpus < 64 { "warn" } else { "ok" };
    assert!(line_of(&text(&output), "cpus").starts_with(wanted));
}

#[test]
fn doctor_tells_that_an_image_is_being_served_and_leaves_it_alone() {
    let place = Place::new();
    let free = finish(doctor(&place).arg("--blk-file").arg(&place.image));
    assert!(line_of(&text(&free), "lock").starts_with("ok"));
    let daemon = Daemon::start(&mut place.serve(), &place.socket);
    let mut guest = Device::connect(&place.socket, &Options::default()).unwrap();
    let data = pattern(1 << 20, 1);
    guest.write(0, &data).unwrap();
    guest.flush().unwrap();
    let image = || {
        let about = fs::metadata(&place.image).unwrap();
        let times = (about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec());
        (about.len(), times, fs::read(&place.image).unwrap())
    };
    let before = image();
    assert!(before.2 == data);
    let held = finish(doctor(&place).arg("--blk-file").arg(&place.image));
    let held = text(&held);
    let line = line_of(&held, "lock");
    let user = format!("in use by vhost-blk (process {})", daemon.id());
    assert!(line.starts_with("fail") && line.contains(&user), "{line}");
    assert!(image() == before, "the doctor has changed the image");
    let mut found = vec![0; data.len()];
    guest.read(0, &mut found).unwrap();
    assert!(found == data);
    guest.write(8, &[7; 512]).unwrap();
    guest.read(8, &mut found[..512]).unwrap();
    assert_eq!(found[..512], [7; 512]);
}

#[test]
fn doctor_describes_an_image_with_the_options_and_refusals_of_info() {
    let place = Place::new();
    let qemu_img = |args: &[&str]| {
        let ran = Command::new("qemu-img").current_dir(place.dir.path()).args(args).status();
        assert!(ran.expect("qemu-img runs; scripts/setup.sh installs it").success(), "{args:?}");
    };
    let report = |image: &str| {
        text(&finish(doctor(&place).current_dir(place.dir.path()).args(["--blk-file", image])))
    };
    qemu_img(&["create", "-qf", "qcow2", "-b", "disk.img", "-F", "raw", "top", "8M"]);
    let told = report("top");
    let line = line_of(&told, "image");
    assert!(line.starts_with("ok") && line.contains("qcow2, version 3"), "{line}");
    assert!(line.contains("backing file disk.img (raw)"), "{line}");
    let options = "serve it with --blk-file top --format qcow2 --allow-backing same-dir";
    assert!(line.ends_with(options), "{line}");
    let line = line_of(&told, "kernel_module");
    assert!(line.starts_with("info") && line.contains("does not take top: it is qcow2"), "{line}");
    qemu_img(&["create", "-qf", "qcow2", "-o", "extended_l2=on", "extended", "8M"]);
    let told = report("extended");
    let line = line_of(&told, "image");
    assert!(line.starts_with("fail") && line.contains("extended L2 entries"), "{line}");
    assert!(told.ends_with("serving a disk fails here\n"), "{told}");
    let line_of_raw = line_of(&report("disk.img"), "image").to_owned();
    assert!(line_of_raw.ends_with("raw; serve it with --blk-file disk.img"), "{line_of_raw}");
    let (path, flags) = (place.path("disk.img"), rustix::fs::XattrFlags::empty());
    rustix::fs::setxattr(path, "user.vhost-blk.moved", b"/new", flags).unwrap();
    let told = report("disk.img");
    let line = line_of(&told, "image");
    assert!(line.starts_with("fail") && line.contains("was mirrored to /new"), "{line}");
    assert!(told.ends_with("serving a disk fails here\n"), "{told}");
}

fn create(path: &Path, more: &[&str]) -> Output {
    finish(program().arg("create").arg(path).args(more))
}

#[test]
fn a_new_image_is_sparse_and_has_its_size() {
    let place = Place::new();
    let path = place.path("new.img");
    assert!(create(&path, &["64M"]).status.success());
    let made = std::fs::metadata(&path).unwrap();
    assert_eq!((made.len(), made.blocks()), (64 << 20, 0));
}

#[test]
fn a_preallocated_image_has_its_blocks() {
    let place = Place::new();
    let path = place.path("new.img");
    assert!(create(&path, &["4M", "--preallocate", "full"]).status.success());
    let made = std::fs::metadata(&path).unwrap();
    assert!(made.blocks() * 512 >= made.len(), "{made:?}");
}

#[test]
fn an_image_that_exists_is_not_overwritten() {
    let place = Place::new();
    std::fs::write(&place.image, "precious").unwrap();
    let line = one_line(&create(&place.image, &["1M"]), 1);
    assert!(line.contains("disk.img"), "{line}");
    assert_eq!(std::fs::read_to_string(&place.image).unwrap(), "precious");
}

#[test]
fn wrong_sizes_and_places_are_refused_and_leave_nothing() {
    let place = Place::new();
    one_line(&create(&place.path("a"), &["100"]), 2);
    one_line(&create(&place.path("a"), &["much"]), 2);
    one_line(&create(&place.path("a"), &["1M", "--preallocate", "some"]), 2);
    one_line(&create(&place.path("none/a"), &["1M"]), 1);
    one_line(&create(&place.path("a"), &["8000000T"]), 1);
    let over = ["--format", "qcow2", "--backing", "none.img", "--backing-format"];
    for format in ["raw", "qcow2"] {
        let line = one_line(&create(&place.path("a"), &[&over[..], &[format]].concat()), 1);
        let told = line.contains("none.img: cannot be read: No such file");
        assert!(told && !line.contains("vhost-blk check"), "{line}");
    }
    assert_eq!(place.files(), ["disk.img"]);
}
