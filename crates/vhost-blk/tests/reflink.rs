// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk convert` on file systems whose files can share space.

mod common;

use common::{Daemon, finish, one_line, program, stdout, wait_until};
use kit::mount;
use mount::{Mount, Sharing, loop_device, may_not_mount, run, sharing_of};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Output;

const MIB: u64 = 1 << 20;
/// More than one call of the kernel clones, and the end lies inside of a block.
const BYTES: u64 = 300 * MIB + 901;

/// The file systems that share space.
fn mounts() -> [Mount; 2] {
    [Mount::xfs(384), Mount::btrfs(512)]
}

fn convert(directory: &Path, words: &str) -> Output {
    finish(program().current_dir(directory).arg("convert").args(words.split_whitespace()))
}

/// The line of a conversion that succeeds.
#[track_caller]
fn told(directory: &Path, words: &str) -> String {
    let ran = convert(directory, words);
    assert!(ran.status.success() && ran.stderr.is_empty(), "{words}: {ran:?}");
    stdout(&ran)
}

/// A sparse image with data in each piece, `source`.
fn source(directory: &Path) -> File {
    let file = File::create_new(directory.join("source")).unwrap();
    file.set_len(BYTES).unwrap();
    for (at, byte) in [(0, 1), (100 * MIB, 2), (256 * MIB - 5000, 3), (BYTES - 5000, 4)] {
        file.write_all_at(&[byte; 5000], at).unwrap();
    }
    file
}

/// A qcow2 image of the content of `source`, and others that no image shares its space with.
fn qcow2_images(directory: &Path) {
    let qemu = |words: &str| {
        run(&[
            &["env", "-C", directory.to_str().unwrap()],
            &words.split(' ').collect::<Vec<_>>()[..],
        ]
        .concat())
    };
    qemu("qemu-img convert -f raw -O qcow2 source plain");
    qemu("qemu-img convert -f raw -O qcow2 -o cluster_size=4k source small");
    qemu("qemu-img create -q -f qcow2 -b plain -F qcow2 overlay");
    for (name, act) in [("snapshots", "snapshot -c one"), ("bitmaps", "bitmap --add")] {
        qemu(&format!("cp plain {name}"));
        let more = if name == "bitmaps" { " b" } else { "" };
        qemu(&format!("qemu-img {act} {name}{more}"));
    }
}

#[track_caller]
fn assert_same(directory: &Path, a: &str, b: &str) {
    let [a, b] = [a, b].map(|name| directory.join(name).display().to_string());
    run(&["cmp", &a, &b]);
}

#[test]
fn a_raw_image_shares_its_space_until_one_of_both_is_written() {
    if may_not_mount() {
        return;
    }
    for mount in mounts() {
        let directory = mount.place.path();
        let file = source(directory);
        for reflink in ["--reflink auto", "--reflink always"] {
            let line = told(directory, &format!("{reflink} source new"));
            assert_eq!(line, "new shares its space with source\n");
            assert_same(directory, "source", "new");
            assert_eq!(sharing_of(&directory.join("new")), Sharing::All);
            fs::remove_file(directory.join("new")).unwrap();
        }
        assert_eq!(told(directory, "--reflink never source own"), "");
        assert_same(directory, "source", "own");
        assert_eq!(sharing_of(&directory.join("source")), Sharing::None);
        told(directory, "--reflink auto source new");
        file.write_all_at(&[9; 5000], 100 * MIB).unwrap();
        assert_same(directory, "own", "new");
        let mut changed = [0; 5000];
        file.read_exact_at(&mut changed, 100 * MIB).unwrap();
        assert_eq!(changed, [9; 5000]);
    }
}

#[test]
fn a_clone_replaces_an_image_and_keeps_its_mode_and_owner() {
    if may_not_mount() {
        return;
    }
    let mount = Mount::btrfs(512);
    let directory = mount.place.path();
    source(directory);
    fs::write(directory.join("old"), "precious").unwrap();
    fs::set_permissions(directory.join("old"), Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(directory.join("old"), Some(7), Some(8)).unwrap();
    let line = one_line(&convert(directory, "source old"), 1);
    assert!(line.contains("exists already"), "{line}");
    told(directory, "--overwrite --reflink always source old");
    let old = fs::metadata(directory.join("old")).unwrap();
    assert_eq!((old.mode() & 0o777, old.uid(), old.gid()), (0o640, 7, 8));
    told(directory, "--reflink always source new");
    told(directory, "--reflink never source own");
    let [new, own] = ["new", "own"].map(|name| fs::metadata(directory.join(name)).unwrap());
    assert_eq!((new.mode(), new.uid()), (own.mode(), own.uid()));
    assert_same(directory, "source", "old");
}

#[test]
fn a_qcow2_image_shares_its_space_if_the_new_one_would_be_the_same() {
    if may_not_mount() {
        return;
    }
    for mount in mounts() {
        let directory = mount.place.path();
        source(directory);
        qcow2_images(directory);
        for words in ["plain new", "--cluster-size 4K small new"] {
            let line = told(directory, &format!("-f qcow2 -O qcow2 --reflink always {words}"));
            assert!(line.starts_with("new shares its space with "), "{line}");
            let new = directory.join("new");
            assert_eq!(sharing_of(&new), Sharing::All);
            let [source, new] =
                [directory.join("source"), new].map(|path| path.display().to_string());
            run(&["qemu-img", "check", "-qf", "qcow2", &new]);
            run(&["qemu-img", "compare", "-f", "raw", "-F", "qcow2", &source, &new]);
            fs::remove_file(new).unwrap();
        }
    }
}

/// Converts to `new`: `--reflink always` is refused with `why` and leaves no file, and `--reflink auto` copies.
#[track_caller]
fn copied_and_never_cloned(directory: &Path, words: &str, new: &Path, why: &str) {
    let own = directory.join(new);
    let count = || fs::read_dir(own.parent().unwrap()).unwrap().count();
    let (files, words) = (count(), format!("{words} {}", new.display()));
    let line = one_line(&convert(directory, &format!("--reflink always {words}")), 1);
    assert!(line.contains("cannot share the space") && line.contains(why), "{words}: {line}");
    assert!(line.contains("; give --reflink auto"), "{line}");
    assert!(!own.exists(), "{words}");
    assert_eq!(count(), files, "{words}");
    let line = told(directory, &format!("--reflink auto {words}"));
    let copied = format!("{} has space of its own: ", new.display());
    assert!(line.starts_with(&copied) && line.contains(why), "{line}");
}

/// Images whose clone would be another image than their copy.
#[test]
fn an_image_that_has_to_change_is_copied_and_always_is_refused() {
    if may_not_mount() {
        return;
    }
    let mount = Mount::xfs(1024);
    let directory = mount.place.path();
    source(directory);
    qcow2_images(directory);
    let own = directory.join("new");
    for (words, why) in [
        ("-O qcow2 source", "the formats differ"),
        ("-f qcow2 plain", "the formats differ"),
        ("--preallocation full source", "reserves space"),
        ("-f qcow2 -O qcow2 --preallocation metadata plain", "reserves space"),
        ("-f qcow2 -O qcow2 small", "clusters of 4096 bytes, and the new image of 65536"),
        ("-f qcow2 -O qcow2 --cluster-size 4K plain", "clusters of 65536 bytes"),
        ("-f qcow2 -O qcow2 --allow-backing same-dir overlay", "a backing file"),
        ("-f qcow2 -O qcow2 snapshots", "internal snapshots"),
        ("-f qcow2 -O qcow2 bitmaps", "dirty bitmaps"),
    ] {
        copied_and_never_cloned(directory, words, Path::new("new"), why);
        assert_eq!(sharing_of(&own), Sharing::None, "{words}");
        fs::remove_file(&own).unwrap();
    }
}

#[test]
fn a_file_system_that_cannot_share_is_a_reason_for_a_copy() {
    if may_not_mount() {
        return;
    }
    let (ext4, xfs) = (Mount::ext4(400), Mount::xfs(384));
    let (directory, other) = (ext4.place.path(), xfs.place.path());
    source(directory);
    let device = loop_device(&directory.join("source"));
    let far = other.join("new");
    let near = directory.join("new");
    for (from, to, why) in [
        ("source", &near, "shares no space between files"),
        ("source", &far, "on different file systems"),
        (device.path.to_str().unwrap(), &far, "a block device"),
    ] {
        assert_eq!(fs::read_dir(other).unwrap().count(), 0);
        copied_and_never_cloned(directory, from, to, why);
        // A device has whole sectors.
        let bytes = if from == "source" { BYTES } else { BYTES / 512 * 512 };
        assert_eq!(fs::metadata(to).unwrap().len(), bytes);
        let (bytes, from) = (bytes.to_string(), directory.join("source"));
        run(&["cmp", "-n", &bytes, from.to_str().unwrap(), to.to_str().unwrap()]);
        fs::remove_file(to).unwrap();
    }
}

/// Files with `chattr +C` and without it share nothing on btrfs.
#[test]
fn an_image_without_copy_on_write_has_a_clone_of_its_kind() {
    if may_not_mount() {
        return;
    }
    let mount = Mount::btrfs(512);
    let directory = mount.place.path();
    let path = |name: &str| directory.join(name).display().to_string();
    fs::write(directory.join("nocow"), "").unwrap();
    run(&["chattr", "+C", &path("nocow")]);
    source(directory);
    fs::write(directory.join("nocow"), vec![5; 1 << 20]).unwrap();
    told(directory, "--reflink always nocow new");
    assert_eq!(sharing_of(&directory.join("new")), Sharing::All);
    assert!(run(&["lsattr", &path("new")]).split(' ').next().unwrap().contains('C'));
    // The other way around, the directory says that its files are not to be copied on write.
    fs::create_dir(directory.join("sub")).unwrap();
    run(&["chattr", "+C", &path("sub")]);
    let line = one_line(&convert(directory, "--reflink always source sub/new"), 1);
    assert!(line.contains("refuses it for these two files: Invalid argument"), "{line}");
    assert!(told(directory, "--reflink auto source sub/new").contains("has space of its own"));
    assert_same(directory, "source", "sub/new");
}

/// The clone of a huge hole is many calls.
#[test]
fn a_signal_ends_the_clone_and_leaves_nothing() {
    if may_not_mount() {
        return;
    }
    let mount = Mount::xfs(384);
    let directory = mount.place.path();
    File::create(directory.join("huge")).unwrap().set_len(4 << 50).unwrap();
    let mut command = program();
    let mut running = Daemon::spawn(command.current_dir(directory).args([
        "convert",
        "--reflink",
        "always",
        "huge",
        "new",
    ]));
    let count = || fs::read_dir(directory).unwrap().count();
    wait_until("the clone begins", || count() == 2);
    running.signal(libc::SIGINT);
    assert_eq!(running.wait().code(), Some(1));
    assert!(running.rest_of_stderr().contains("stopped by a signal"));
    assert_eq!(count(), 1);
}
