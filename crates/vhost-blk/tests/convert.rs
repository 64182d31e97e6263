// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk convert`.

mod common;

use backend::{File as Image, FileOptions};
use common::{Daemon, Place, finish, one_line, program};
use kit::mount;
use mount::{Mount, loop_device, may_not_mount};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

const MIB: u64 = 1 << 20;

#[track_caller]
fn qemu(program: &str, directory: &Path, args: &[&str]) {
    let ran = Command::new(program).current_dir(directory).args(args).output();
    let ran = ran.expect("qemu-utils are installed; scripts/setup.sh does it");
    let text = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    assert!(ran.status.success(), "{program} {args:?}: {text}");
}

fn convert(directory: &Path, args: &[&str]) -> Output {
    finish(program().current_dir(directory).arg("convert").args(args))
}

/// A sparse raw image of 9 MiB and `tail` bytes with four pieces of data.
fn raw(path: &Path, tail: u64) {
    let file = File::create(path).unwrap();
    file.set_len(9 * MIB + tail).unwrap();
    for (at, byte) in [(0, 1), (3 * MIB - 700, 2), (5 * MIB, 3), (9 * MIB + tail - 900, 4)] {
        file.write_all_at(&[byte; 900], at).unwrap();
    }
}

/// Names and formats of images with the same content: raw, clusters of many sorts, overlays.
fn sources(directory: &Path) -> [(&'static str, &'static str); 6] {
    raw(&directory.join("a.raw"), 0);
    let made = ["convert", "-f", "raw", "a.raw", "-O", "qcow2"];
    for options in [
        &["plain"][..],
        &["-c", "compressed"],
        &["-o", "cluster_size=4k,preallocation=metadata", "allocated"],
        &["-o", "cluster_size=2M", "-S", "0", "large"],
    ] {
        qemu("qemu-img", directory, &[&made[..], options].concat());
    }
    // Zeroes and changed data over data of a raw file.
    fs::write(directory.join("base.raw"), vec![9; 9 << 20]).unwrap();
    let overlay = ["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", "top"];
    qemu("qemu-img", directory, &overlay);
    qemu("qemu-img", directory, &["convert", "-n", "-O", "qcow2", "a.raw", "top"]);
    [
        ("a.raw", "raw"),
        ("plain", "qcow2"),
        ("compressed", "qcow2"),
        ("allocated", "qcow2"),
        ("large", "qcow2"),
        ("top", "qcow2"),
    ]
}

#[test]
fn every_source_is_converted_to_every_target_and_qemu_agrees() {
    let place = Place::new();
    let directory = place.dir.path();
    let targets: [(&str, &[&str]); 5] = [
        ("raw", &[]),
        ("qcow2", &[]),
        ("qcow2", &["--cluster-size", "4K"]),
        ("qcow2", &["--cluster-size", "2M", "--preallocation", "metadata"]),
        ("qcow2", &["--preallocation", "full"]),
    ];
    for (source, format) in sources(directory) {
        let allow: &[&str] = if source == "top" { &["--allow-backing", "same-dir"] } else { &[] };
        for (output, options) in targets {
            let args = [&["-f", format, "-O", output, source, "new"], options, allow].concat();
            let ran = convert(directory, &args);
            assert!(ran.status.success() && ran.stderr.is_empty(), "{args:?}: {ran:?}");
            qemu("qemu-img", directory, &["compare", "-f", "raw", "-F", output, "a.raw", "new"]);
            if output == "qcow2" {
                qemu("qemu-img", directory, &["check", "-qf", "qcow2", "new"]);
            }
            let made = fs::metadata(directory.join("new")).unwrap();
            if !options.contains(&"full") && !options.contains(&"2M") {
                assert!(made.blocks() * 512 <= 5 * MIB, "{args:?}: {} blocks", made.blocks());
            }
            fs::remove_file(directory.join("new")).unwrap();
        }
    }
}

/// qcow2 counts sectors: the rest of the last one reads as zeroes.
#[test]
fn a_size_that_is_no_multiple_of_a_sector_is_kept_or_rounded_up() {
    let place = Place::new();
    let directory = place.dir.path();
    raw(&directory.join("odd"), 901);
    let sizes = [("raw", 9 * MIB + 901), ("qcow2", 9 * MIB + 1024)];
    for (output, size) in sizes {
        assert!(convert(directory, &["-O", output, "odd", "new"]).status.success());
        let back = convert(directory, &["-f", output, "new", "back"]);
        assert!(back.status.success(), "{back:?}");
        let (mut odd, back) = (fs::read(directory.join("odd")).unwrap(), directory.join("back"));
        odd.resize(size as usize, 0);
        assert!(fs::read(&back).unwrap() == odd, "{output}");
        fs::remove_file(back).unwrap();
        fs::remove_file(directory.join("new")).unwrap();
    }
}

#[test]
fn a_block_device_is_read() {
    if may_not_mount() {
        return;
    }
    let place = Place::new();
    let directory = place.dir.path();
    raw(&directory.join("a.raw"), 0);
    let device = loop_device(&directory.join("a.raw"));
    let ran = convert(directory, &["-O", "qcow2", device.path.to_str().unwrap(), "new"]);
    assert!(ran.status.success(), "{ran:?}");
    qemu("qemu-img", directory, &["compare", "-f", "raw", "-F", "qcow2", "a.raw", "new"]);
    let line = one_line(&convert(directory, &["--overwrite", "a.raw", "/dev/null"]), 1);
    assert!(line.contains("no regular file"), "{line}");
}

#[test]
fn a_copy_is_closed_to_those_who_may_not_read_the_source_or_its_backing_files() {
    let place = Place::new();
    let directory = place.dir.path();
    raw(&directory.join("base"), 0);
    qemu("qemu-img", directory, &["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top"]);
    for (base, top, copy) in
        [(0o600, 0o644, 0o600), (0o644, 0o640, 0o640), (0o444, 0o644, 0o644), (0o644, 0o600, 0o600)]
    {
        for (name, mode) in [("base", base), ("top", top)] {
            fs::set_permissions(directory.join(name), Permissions::from_mode(mode)).unwrap();
        }
        let ran =
            convert(directory, &["-f", "qcow2", "--allow-backing", "same-dir", "top", "copy"]);
        assert!(ran.status.success(), "{ran:?}");
        let mode = fs::metadata(directory.join("copy")).unwrap().mode() & 0o777;
        assert_eq!(mode & !0o022, copy, "base {base:o}, top {top:o}: {mode:o}");
        fs::remove_file(directory.join("copy")).unwrap();
    }
}

#[test]
fn an_image_is_replaced_with_overwrite_only_and_keeps_its_name_and_mode() {
    let place = Place::new();
    let directory = place.dir.path();
    raw(&directory.join("a.raw"), 0);
    fs::write(directory.join("old"), "precious").unwrap();
    fs::set_permissions(directory.join("old"), Permissions::from_mode(0o640)).unwrap();
    symlink("old", directory.join("link")).unwrap();
    let line = one_line(&convert(directory, &["a.raw", "link"]), 1);
    assert!(line.contains("exists already") && line.contains("--overwrite"), "{line}");
    assert_eq!(fs::read(directory.join("old")).unwrap(), b"precious");
    assert!(convert(directory, &["--overwrite", "a.raw", "link"]).status.success());
    assert!(fs::symlink_metadata(directory.join("link")).unwrap().is_symlink());
    let old = fs::metadata(directory.join("old")).unwrap();
    assert_eq!((old.len(), old.mode() & 0o777), (9 * MIB, 0o640));
    assert_eq!(place.files(), ["a.raw", "disk.img", "link", "old"]);
}

#[test]
fn bad_input_is_refused_and_leaves_nothing() {
    let place = Place::new();
    let directory = place.dir.path();
    sources(directory);
    fs::write(directory.join("empty"), "").unwrap();
    std::os::unix::fs::symlink("nothing", directory.join("dangling")).unwrap();
    let fifo = directory.join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    let before = place.files();
    let cases: [(&[&str], i32, &str); 18] = [
        (&["a.raw", "dangling"], 1, "a symbolic link to a file that does not exist"),
        (&["--overwrite", "a.raw", "dangling"], 1, "a symbolic link to a file that does not exist"),
        (&["--overwrite", "a.raw", "fifo"], 1, "no regular file"),
        (&["none", "new"], 1, "none: cannot be read"),
        (&["empty", "new"], 1, "empty"),
        (&["/dev/null", "new"], 1, "neither a regular file"),
        (&["plain", "new"], 1, "give --format qcow2"),
        (&["-f", "qcow2", "a.raw", "new"], 1, "not a qcow2 image"),
        (&["-f", "qcow2", "top", "new"], 1, "--allow-backing"),
        (&["a.raw", "none/new"], 1, "none/new"),
        (&["a.raw", "."], 1, "exists already"),
        (&["--overwrite", "a.raw", "."], 1, "no regular file"),
        (&["--overwrite", "a.raw", "a.raw"], 1, "it is the source"),
        (
            &["--overwrite", "-f", "qcow2", "--allow-backing", "any", "top", "base.raw"],
            1,
            "one of its backing files",
        ),
        (&["--cluster-size", "4K", "a.raw", "new"], 2, "no clusters"),
        (&["--preallocation", "metadata", "a.raw", "new"], 2, "no metadata"),
        (&["--allow-backing", "any", "a.raw", "new"], 2, "no backing files"),
        (&["-O", "qcow2", "--cluster-size", "5K", "a.raw", "new"], 2, "power of 2"),
    ];
    for (args, code, why) in cases {
        let line = one_line(&convert(directory, args), code);
        assert!(line.contains(why), "{args:?}: {line}");
        assert_eq!(place.files(), before, "{args:?}");
    }
}

#[test]
fn a_damaged_source_is_an_error_and_leaves_nothing() {
    let place = Place::new();
    let directory = place.dir.path();
    sources(directory);
    let plain = File::options().read(true).write(true).open(directory.join("plain")).unwrap();
    let word = |at| {
        let mut word = [0; 8];
        plain.read_exact_at(&mut word, at).unwrap();
        u64::from_be_bytes(word)
    };
    let l2 = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    // The first cluster lies far behind the end of the file.
    plain.write_all_at(&(1u64 << 63 | 1 << 40).to_be_bytes(), l2).unwrap();
    let before = place.files();
    let line = one_line(&convert(directory, &["-f", "qcow2", "plain", "new"]), 1);
    assert!(line.contains("reading at 0") && line.contains("wrong place"), "{line}");
    assert_eq!(place.files(), before);
}

#[test]
fn images_in_use_are_refused() {
    let place = Place::new();
    let directory = place.dir.path();
    raw(&directory.join("a.raw"), 0);
    fs::write(directory.join("old"), "precious").unwrap();
    let held = |name: &str| {
        let lock = Some(Duration::ZERO);
        Image::open(directory.join(name), FileOptions { lock, direct: false, ..Default::default() })
    };
    let writer = held("a.raw").unwrap();
    let line = one_line(&convert(directory, &["a.raw", "new"]), 1);
    assert!(line.contains("in use"), "{line}");
    assert!(convert(directory, &["--lock", "off", "a.raw", "new"]).status.success());
    drop(writer);
    let user = held("new").unwrap();
    let line = one_line(&convert(directory, &["--overwrite", "a.raw", "new"]), 1);
    // `--lock` is for the source.
    let told = line.contains("in use") && line.contains("stop that, or choose another name");
    assert!(told && !line.contains("--lock"), "{line}");
    drop(user);
    let output = convert(directory, &["--overwrite", "a.raw", "new"]);
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
}

#[test]
fn a_full_disk_is_an_error_and_the_old_image_stays() {
    if may_not_mount() {
        return;
    }
    let place = Place::new();
    let source = place.path("a.raw");
    fs::write(&source, vec![7; 8 << 20]).unwrap();
    let mount = Mount::tmpfs(4);
    fs::write(mount.path("old"), "precious").unwrap();
    let path = source.to_str().unwrap();
    for output in ["raw", "qcow2"] {
        for target in ["new", "old"] {
            let args = ["--overwrite", "-O", output, path, target];
            let line = one_line(&convert(mount.place.path(), &args), 1);
            assert!(line.contains("not enough space"), "{line}");
            let left: Vec<_> = fs::read_dir(mount.place.path()).unwrap().collect();
            assert_eq!(left.len(), 1, "{left:?}");
            assert_eq!(fs::read(mount.path("old")).unwrap(), b"precious");
        }
    }
}

#[test]
fn a_limit_on_file_sizes_is_an_error_and_leaves_nothing() {
    let place = Place::new();
    fs::write(place.path("a.raw"), vec![7; 8 << 20]).unwrap();
    let mut limited = Command::new("sh");
    limited.current_dir(place.dir.path()).args(["-c", "ulimit -f 4096; exec \"$@\"", "sh"]);
    limited.arg(program().get_program()).args(["convert", "-O", "qcow2", "a.raw", "new"]);
    let line = one_line(&finish(&mut limited), 1);
    assert!(line.contains("more than its file system allows"), "{line}");
    assert_eq!(place.files(), ["a.raw", "disk.img"]);
}

/// A qcow2 image of 1 TiB, each cluster of which is the same compressed one: a copy takes hours.
fn endless(directory: &Path) {
    qemu("qemu-img", directory, &["create", "-qf", "qcow2", "endless", "1T"]);
    qemu("qemu-io", directory, &["-f", "qcow2", "-c", "write -c -P 0 0 64k", "endless"]);
    let image = File::options().read(true).write(true).open(directory.join("endless")).unwrap();
    let word = |at| {
        let mut word = [0; 8];
        image.read_exact_at(&mut word, at).unwrap();
        word
    };
    let l1 = u64::from_be_bytes(word(40));
    let table = word(l1);
    let l2 = u64::from_be_bytes(table) & 0x00ff_ffff_ffff_fe00;
    image.write_all_at(&word(l2).repeat(8192), l2).unwrap();
    image.write_all_at(&table.repeat(2048), l1).unwrap();
}

#[test]
fn a_signal_ends_the_copy_and_leaves_nothing() {
    let place = Place::new();
    let directory = place.dir.path();
    endless(directory);
    fs::write(directory.join("old"), "precious").unwrap();
    for (signal, target) in [(libc::SIGINT, "new"), (libc::SIGTERM, "old"), (libc::SIGHUP, "new")] {
        let mut command = program();
        command.current_dir(directory).args(["convert", "--overwrite", "-f", "qcow2", "endless"]);
        let mut running = Daemon::spawn(command.arg(target));
        let has_part = || place.files().iter().any(|name| name.ends_with(".part"));
        place.wait_until("the copy begins", has_part);
        running.signal(signal);
        assert_eq!(running.wait().code(), Some(1));
        let told = running.rest_of_stderr();
        assert!(told.contains("stopped by a signal"), "{told}");
        assert_eq!(place.files(), ["disk.img", "endless", "old"]);
        assert_eq!(fs::read(directory.join("old")).unwrap(), b"precious");
    }
}

/// `script` gives the program a terminal.
#[test]
fn the_progress_is_shown_on_a_terminal() {
    let place = Place::new();
    raw(&place.path("a.raw"), 0);
    let built = program();
    let line = format!("'{}' convert a.raw new", built.get_program().display());
    let mut command = Command::new("script");
    command.current_dir(place.dir.path()).args(["-qec", &line, "typescript"]);
    let ran = finish(&mut command);
    assert!(ran.status.success(), "{ran:?}");
    let shown = common::stdout(&ran);
    assert!(shown.contains("9.00 MiB"), "{shown:?}");
    assert_eq!(fs::metadata(place.path("new")).unwrap().len(), 9 * MIB);
}
