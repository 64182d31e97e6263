// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk info` and `vhost-blk check`.

mod common;

use common::{Daemon, Place, finish, one_line, program, stdout};
use kit::mount;
use mount::{loop_device, may_not_mount};
use rustix::fs::XattrFlags;
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Output};

fn qemu_img(directory: &Path, args: &[&str]) {
    let ran = Command::new("qemu-img").current_dir(directory).args(args).output();
    let ran = ran.expect("qemu-img runs; scripts/setup.sh installs it");
    assert!(ran.status.success(), "qemu-img {args:?}: {ran:?}");
}

fn tool(directory: &Path, args: &[&str]) -> Output {
    finish(program().current_dir(directory).args(args))
}

#[track_caller]
fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|why| panic!("{why}: {output:?}"))
}

#[track_caller]
fn info(directory: &Path, image: &str) -> Value {
    let output = tool(directory, &["info", "--json", image]);
    assert!(output.status.success(), "{output:?}");
    json(&output)
}

/// Starts `serve` with these options, and returns the line of its refusal, if it does not serve.
fn serve(place: &Place, options: &str) -> Option<String> {
    let _ = fs::remove_file(&place.socket);
    let mut command = program();
    command.current_dir(place.dir.path()).arg("serve").arg("--socket-path").arg(&place.socket);
    command.args(options.split(' '));
    let mut daemon = Daemon::spawn(&mut command);
    let mut refusal = None;
    place.wait_until("it serves or ends", || place.socket.exists() || !is_running(daemon.id()));
    if !place.socket.exists() {
        daemon.wait();
        refusal = Some(daemon.rest_of_stderr());
    }
    refusal
}

/// Returns whether the process has not ended; it may be a zombie then.
fn is_running(id: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Images that are served, with the options of `info` beside `--blk-file`.
#[test]
fn an_image_is_served_with_the_options_that_info_tells() {
    let place = Place::new();
    let at = place.dir.path();
    qemu_img(at, &["create", "-qf", "qcow2", "plain", "8M"]);
    qemu_img(at, &["create", "-qf", "qcow2", "-b", "disk.img", "-F", "raw", "top", "8M"]);
    fs::create_dir(at.join("sub")).unwrap();
    qemu_img(at, &["create", "-qf", "qcow2", "-b", "../top", "-F", "qcow2", "sub/far", "8M"]);
    qemu_img(at, &["create", "-qf", "qcow2", "kept", "8M"]);
    qemu_img(at, &["snapshot", "-c", "one", "kept"]);
    let cases = [
        ("disk.img", "", 1),
        ("plain", " --format qcow2", 1),
        ("top", " --format qcow2 --allow-backing same-dir", 2),
        ("sub/far", " --format qcow2 --allow-backing any", 3),
        ("kept", " --format qcow2 --read-only", 1),
    ];
    for (image, wanted, files) in cases {
        let told = info(at, image);
        let options = told["serve"]["options"].as_str().unwrap();
        assert_eq!(options, format!("--blk-file {image}{wanted}"), "{told:#}");
        assert_eq!(told["files"].as_array().unwrap().len(), files, "{told:#}");
        assert_eq!(serve(&place, options), None, "{image}");
        // Each of the options is necessary.
        let words: Vec<&str> = options.split(' ').collect();
        if let Some(last) = words.iter().rposition(|word| word.starts_with("--")).filter(|n| *n > 0)
        {
            assert!(serve(&place, &words[..last].join(" ")).is_some(), "{image}");
        }
    }
}

/// The mark of the image before a snapshot, a commit and a move.
#[test]
fn a_marked_image_is_served_with_the_options_that_info_tells_and_the_newer_one_is_named() {
    let place = Place::new();
    let at = place.dir.path();
    qemu_img(at, &["create", "-qf", "qcow2", "old", "8M"]);
    let cases = [
        ("overlay", "overlay", "overlay:     /new (the daemon refuses to write to it)"),
        ("merged", "merged_into", "merged into: /new (has newer data: serve that)"),
        ("moved", "moved_to", "moved to:    /new (has newer data: serve that)"),
    ];
    for (image, format) in [("old", " --format qcow2"), ("disk.img", "")] {
        for (mark, key, line) in cases {
            let attribute = format!("user.vhost-blk.{mark}");
            let path = at.join(image);
            rustix::fs::setxattr(&path, &attribute, b"/new", XattrFlags::empty()).unwrap();
            let told = info(at, image);
            for (_, other, _) in cases {
                let wanted = if other == key { Value::from("/new") } else { Value::Null };
                assert_eq!(told["files"][0][other], wanted, "{told:#}");
            }
            let options = told["serve"]["options"].as_str().unwrap();
            assert_eq!(options, format!("--blk-file {image}{format} --read-only"), "{mark}");
            assert_eq!(serve(&place, options), None, "{mark}");
            let refusal = serve(&place, options.trim_end_matches(" --read-only"));
            assert!(refusal.is_some_and(|line| line.contains("/new")), "{mark}");
            let text = stdout(&tool(at, &["info", image]));
            assert!(text.contains(line), "{text}");
            rustix::fs::removexattr(&path, &attribute).unwrap();
        }
    }
}

#[test]
fn a_refused_image_is_described_with_the_reason_of_serve() {
    let place = Place::new();
    let at = place.dir.path();
    let patch = |name: &str, offset: u64, bytes: &[u8]| {
        qemu_img(at, &["create", "-qf", "qcow2", name, "8M"]);
        let file = File::options().write(true).open(at.join(name)).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    };
    patch("encrypted", 32, &[0, 0, 0, 2]);
    patch("dirty", 79, &[1]);
    patch("corrupt", 79, &[2]);
    qemu_img(at, &["create", "-qf", "qcow2", "-o", "compression_type=zstd", "zstd", "8M"]);
    qemu_img(at, &["create", "-qf", "qcow2", "-o", "extended_l2=on", "extended", "8M"]);
    qemu_img(at, &["create", "-qf", "qcow2", "-o", "compat=0.10", "old", "8M"]);
    qemu_img(at, &["create", "-uqf", "qcow2", "-b", "gone", "-F", "raw", "broken", "8M"]);
    qemu_img(at, &["create", "-uqf", "qcow2", "-b", "b", "-F", "qcow2", "a", "8M"]);
    qemu_img(at, &["create", "-uqf", "qcow2", "-b", "a", "-F", "qcow2", "b", "8M"]);
    qemu_img(at, &["create", "-uqf", "qcow2", "-b", "zstd", "-F", "qcow2", "above", "8M"]);
    qemu_img(at, &["create", "-uqf", "qcow2", "-b", "disk.img", "-F", "vdi", "vdi", "8M"]);
    let cases = [
        ("encrypted", "the image is encrypted", "encrypted (LUKS)"),
        ("dirty", "dirty bit", "dirty (not closed properly)"),
        ("corrupt", "it is marked corrupt", "marked corrupt"),
        ("zstd", "zstd", "zstd compression"),
        ("extended", "extended L2 entries", "extended L2 entries"),
        ("old", "version 2", ""),
        ("broken", "No such file", ""),
        ("a", "loop", ""),
        ("above", "zstd", ""),
        ("vdi", "the format vdi", ""),
    ];
    for (image, why, feature) in cases {
        let told = info(at, image);
        assert_eq!(told["serve"]["accepted"], false, "{told:#}");
        assert!(told["serve"]["reason"].as_str().unwrap().contains(why), "{told:#}");
        assert_ne!(told["serve"]["remedy"], "", "{told:#}");
        let features = told["files"][0]["qcow2"]["features"].as_array().unwrap();
        assert!(feature.is_empty() || features.contains(&feature.into()), "{told:#}");
        let options = format!("--blk-file {image} --format qcow2 --allow-backing any");
        let refusal = serve(&place, &options).expect("it is refused");
        assert!(refusal.contains(why), "{image}: {refusal}");
        let text = stdout(&tool(at, &["info", image]));
        assert!(text.contains("refused: ") && text.contains(why), "{text}");
    }
}

#[test]
fn info_and_check_work_beside_a_running_disk_and_change_nothing() {
    let place = Place::new();
    let at = place.dir.path();
    qemu_img(at, &["create", "-qf", "qcow2", "plain", "8M"]);
    let mut command = program();
    command.current_dir(at).args(["serve", "--format", "qcow2", "--blk-file", "plain"]);
    let mut daemon = Daemon::start(command.arg("--socket-path").arg(&place.socket), &place.socket);
    let state = || {
        let found = fs::metadata(at.join("plain")).unwrap();
        (found.mtime(), found.mtime_nsec(), found.ctime_nsec(), fs::read(at.join("plain")).unwrap())
    };
    let before = state();
    let told = info(at, "plain");
    let holder = format!("vhost-blk (process {})", daemon.id());
    assert_eq!(told["files"][0]["user"]["holder"], holder, "{told:#}");
    assert_eq!(told["files"][0]["user"]["writes"], true);
    let text = stdout(&tool(at, &["info", "plain"]));
    assert!(text.contains(&format!("in use by:   {holder}, which may write")), "{text}");
    for repair in [&[][..], &["--repair", "leaks"]] {
        let line = one_line(&tool(at, &[&["check", "plain"], repair].concat()), 1);
        assert!(line.contains("in use by"), "{line}");
    }
    assert_eq!(tool(at, &["check", "--lock", "off", "plain"]).status.code(), Some(0));
    assert!(state() == before);
    // No lock is left or taken: QEMU can open the image next.
    daemon.signal(libc::SIGTERM);
    daemon.wait();
    assert_eq!(info(at, "plain")["files"][0]["user"], Value::Null);
    qemu_img(at, &["check", "-q", "plain"]);
}

#[test]
fn sizes_are_told() {
    let place = Place::new();
    let at = place.dir.path();
    fs::write(at.join("raw"), vec![1; 1 << 20]).unwrap();
    File::options().write(true).open(at.join("raw")).unwrap().set_len(3 << 20).unwrap();
    let told = info(at, "raw");
    let file = &told["files"][0];
    let blocks = fs::metadata(at.join("raw")).unwrap().blocks();
    assert_eq!(
        (file["virtual_bytes"].as_u64(), file["format"].as_str()),
        (Some(3 << 20), Some("raw"))
    );
    assert_eq!(file["disk_bytes"].as_u64(), Some(blocks * 512));
    let text = stdout(&tool(at, &["info", "raw"]));
    assert!(text.contains("size:        3 MiB (3145728 bytes)"), "{text}");
    let options = ["create", "-qf", "qcow2", "-o", "cluster_size=4k,refcount_bits=8", "q", "1G"];
    qemu_img(at, &options);
    let told = info(at, "q");
    let qcow2 = &told["files"][0]["qcow2"];
    assert_eq!(told["files"][0]["virtual_bytes"], 1 << 30);
    assert_eq!((&qcow2["cluster_bytes"], &qcow2["refcount_bits"]), (&4096.into(), &8.into()));
}

#[test]
fn a_block_device_is_described() {
    if may_not_mount() {
        return;
    }
    let place = Place::new();
    let device = loop_device(&place.image);
    let told = info(place.dir.path(), device.path.to_str().unwrap());
    let file = &told["files"][0];
    assert_eq!((&file["block_device"], &file["virtual_bytes"]), (&true.into(), &(1 << 20).into()));
    assert_eq!(told["serve"]["accepted"], true);
}

#[test]
fn a_file_without_an_image_is_an_error() {
    let place = Place::new();
    let at = place.dir.path();
    for args in [&["info", "none"][..], &["info", "/dev/null"], &["info", "."]] {
        one_line(&tool(at, args), 1);
    }
    qemu_img(at, &["create", "-qf", "qcow2", "cut", "1M"]);
    std::fs::File::options().write(true).open(at.join("cut")).unwrap().set_len(40).unwrap();
    let line = one_line(&tool(at, &["info", "cut"]), 1);
    assert!(line.contains("header; the image is damaged: restore it from a copy"), "{line}");
    for command in ["info", "check"] {
        let output = tool(at, &[command, "--json", "none"]);
        let told: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!(
            (&told["exit_code"], output.status.code()),
            (&Value::from(1), Some(1)),
            "{told}"
        );
        assert!(told["why"].as_str().unwrap().contains("No such file"), "{told}");
    }
    let cases: [(&[&str], &str); 6] = [
        (&["check", "none"], "No such file"),
        (&["check", "/dev/null"], "no regular file"),
        (&["check", "disk.img"], "not a qcow2 image"),
        // 2 means errors in the image.
        (&["check"], "PATH"),
        (&["check", "--repair", "all", "disk.img"], "leaks"),
        (&["check", "--repair", "leaks", "--lock", "off", "disk.img"], "--lock"),
    ];
    for (args, why) in cases {
        let line = one_line(&tool(at, args), 1);
        assert!(line.contains(why), "{args:?}: {line}");
    }
}

/// An image with 3 leaked clusters.
fn leaking(directory: &Path) {
    qemu_img(directory, &["create", "-qf", "qcow2", "leaks", "8M"]);
    let image = File::options().read(true).write(true).open(directory.join("leaks")).unwrap();
    let clusters = image.metadata().unwrap().len().div_ceil(65536);
    image.set_len((clusters + 3) * 65536).unwrap();
    for cluster in clusters..clusters + 3 {
        // The refcount block is the third cluster.
        image.write_all_at(&[0, 1], 2 * 65536 + cluster * 2).unwrap();
    }
}

#[test]
fn the_exit_code_of_a_check_is_that_of_qemu_img() {
    let place = Place::new();
    let at = place.dir.path();
    leaking(at);
    let output = tool(at, &["check", "leaks"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(
        text.contains("3 leaked clusters without data (192 KiB)")
            && text.contains("--repair leaks"),
        "{text}"
    );
    let report = json(&tool(at, &["check", "--json", "leaks"]));
    assert_eq!((&report["leaks"], &report["errors"]), (&3.into(), &0.into()), "{report:#}");
    let output = tool(at, &["check", "--repair", "leaks", "leaks"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(stdout(&output).contains("freed 3 leaked clusters"), "{output:?}");
    qemu_img(at, &["check", "-q", "leaks"]);
    assert!(stdout(&tool(at, &["check", "leaks"])).contains("no errors were found"));

    let image = File::options().write(true).open(at.join("leaks")).unwrap();
    image.write_all_at(&[0, 0], 2 * 65536).unwrap(); // the header is counted as free
    let output = tool(at, &["check", "leaks"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stdout(&output).contains("1 error: data is damaged"), "{output:?}");
}
