// SPDX-License-Identifier: Apache-2.0
//! The check of an image agrees with `qemu-img check`.

mod common;

use common::{code, compare, content, directory, image, leak, qemu_ok};
use qcow2::check::{check, repair_leaks};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use tempfile::TempDir;

/// Options of images, with steps after their creation.
const KINDS: [(&str, &[&[&str]]); 12] = [
    ("cluster_size=4k", &[]),
    ("cluster_size=512", &[]),
    ("cluster_size=2M", &[]),
    ("refcount_bits=1,cluster_size=4k", &[]),
    ("refcount_bits=2,cluster_size=4k", &[]),
    ("refcount_bits=64,cluster_size=4k", &[&["snapshot", "-c", "one", "image"]]),
    ("compat=0.10,cluster_size=4k", &[&["snapshot", "-c", "one", "image"]]),
    ("extended_l2=on,cluster_size=16k", &[&["snapshot", "-c", "one", "image"]]),
    ("compression_type=zstd,cluster_size=4k", &[]),
    ("preallocation=metadata,cluster_size=4k", &[]),
    ("cluster_size=4k", &[&["bitmap", "--add", "image", "one"]]),
    (
        "cluster_size=4k",
        &[
            &["snapshot", "-c", "one", "image"],
            &["snapshot", "-c", "two", "image"],
            &["snapshot", "-d", "one", "image"],
        ],
    ),
];

/// An image with plain, zero and compressed clusters, before and after the steps.
fn build(directory: &TempDir, number: usize) -> PathBuf {
    let (options, steps) = KINDS[number];
    let at = directory.path();
    let write = |commands: &[&str]| {
        for command in commands {
            qemu_ok("qemu-io", at, &["-f", "qcow2", "-c", command, "image"]);
        }
    };
    qemu_ok("qemu-img", at, &["create", "-qf", "qcow2", "-o", options, "image", "6M"]);
    write(&["write -P 1 0 300k", "write -z 1M 64k", "write -P 3 5M 4k"]);
    if !options.starts_with("preallocation") {
        write(&["write -c -P 2 2M 2M"]); // QEMU compresses into free clusters only
    }
    for step in steps {
        qemu_ok("qemu-img", at, step);
        write(&["write -P 4 64k 100k", "discard 5M 64k"]);
    }
    at.join("image")
}

#[test]
fn sound_images_of_every_kind_are_clean() {
    for (number, kind) in KINDS.iter().enumerate() {
        let directory = directory();
        let path = build(&directory, number);
        assert_eq!(compare(&path), 0, "{kind:?}");
    }
}

#[test]
fn an_encrypted_image_is_checked() {
    let directory = directory();
    let options = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
    let secret = "secret,id=key,data=pass";
    let image = ["create", "-qf", "qcow2", "--object", secret, "-o", options, "image", "4M"];
    qemu_ok("qemu-img", directory.path(), &image);
    let path = directory.path().join("image");
    let report = check(&path, &File::open(&path).expect("it opens")).expect("it is checked");
    assert_eq!(code(&report), 0, "{report:#?}");
}

/// Damages each image in its tables, and in its header.
#[test]
fn verdicts_about_damaged_images_agree() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut codes = [0; 4];
    for number in 0..KINDS.len() {
        let directory = directory();
        let path = build(&directory, number);
        let good = fs::read(&path).expect("the image");
        let tables = good.len().min(12 << 12);
        for _ in 0..20 {
            let mut bytes = good.clone();
            for _ in 0..random.u32(1..=3) {
                let at = random.usize(..);
                let at = match random.u32(..4) {
                    0 => at % 112, // the header
                    1 => at % tables,
                    _ => {
                        let used = |at: &usize| good[*at] != 0;
                        (at % tables..tables).find(used).unwrap_or(at % tables)
                    }
                };
                bytes[at] ^= 1 << random.u32(..8);
            }
            fs::write(&path, bytes).expect("the image");
            codes[compare(&path) as usize] += 1;
        }
    }
    println!("clean, not checked, errors, leaks: {codes:?}");
    assert!(codes.iter().all(|found| *found > 0), "{codes:?}");
}

#[test]
fn leaks_are_freed_and_nothing_else_changes() {
    for number in [0, 6, 11] {
        let directory = directory();
        let path = build(&directory, number);
        leak(&path);
        let before = content(&path);
        assert_eq!(compare(&path), 3);
        let file = File::options().read(true).write(true).open(&path).expect("it opens");
        let report = repair_leaks(&path, &file).expect("it is repaired");
        assert_eq!((report.repaired_leaks, report.leaks, report.errors), (3, 0, 0));
        assert_eq!(compare(&path), 0);
        assert_eq!(content(&path), before);
    }
}

/// Without its snapshot, an image has clusters that are not marked exclusive.
#[test]
fn clusters_of_a_lost_snapshot_become_exclusive() {
    let directory = directory();
    let path = build(&directory, 5);
    let file = File::options().read(true).write(true).open(&path).expect("it opens");
    file.write_all_at(&[0; 12], 60).expect("the snapshots are gone");
    assert_eq!(compare(&path), 3);
    let report = repair_leaks(&path, &file).expect("it is repaired");
    assert!(report.repaired_leaks > 10 && report.errors == 0, "{report:#?}");
    assert_eq!(compare(&path), 0);
}

#[test]
fn leaks_of_a_damaged_image_stay() {
    let directory = directory();
    let path = build(&directory, 0);
    leak(&path);
    let file = File::options().read(true).write(true).open(&path).expect("it opens");
    let mut l1 = [0; 8];
    file.read_exact_at(&mut l1, 40).expect("the place of the L1 table");
    let l1 = u64::from_be_bytes(l1);
    file.write_all_at(&[0x80, 0, 0, 0xff], l1).expect("an entry is damaged");
    assert_eq!(compare(&path), 2);
    let damaged = fs::read(&path).expect("the image");
    let report = repair_leaks(&path, &file).expect("it is checked");
    assert_eq!((code(&report), report.repaired_leaks), (2, 0));
    assert!(fs::read(&path).expect("the image") == damaged);
}

#[test]
fn a_lost_refcount_block_is_an_error() {
    let directory = directory();
    let path = image(&directory, 6, "cluster_size=4k"); // without data, no flag shows the loss
    let file = File::options().read(true).write(true).open(&path).expect("it opens");
    let mut table = [0; 8];
    file.read_exact_at(&mut table, 48).expect("the place of the refcount table");
    file.write_all_at(&[0; 8], u64::from_be_bytes(table)).expect("the entry is gone");
    assert_eq!(compare(&path), 2);
}

/// The length of compressed data may reach behind the end of the file: that cluster has no refcount.
#[test]
fn a_reference_behind_the_end_of_the_file_is_compared() {
    let directory = directory();
    let path = image(&directory, 6, "cluster_size=4k");
    qemu_ok("qemu-io", directory.path(), &["-f", "qcow2", "-c", "write -c -P 2 0 4k", "a.qcow2"]);
    let file = File::options().read(true).write(true).open(&path).expect("it opens");
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).expect("a number");
        u64::from_be_bytes(bytes)
    };
    file.set_len(fs::metadata(&path).expect("the image").len().next_multiple_of(4096))
        .expect("a length");
    assert_eq!(compare(&path), 0);
    let l2_at = number(number(40)) & 0x00ff_ffff_ffff_fe00;
    // Nine sectors: one more than a cluster has.
    let entry = number(l2_at) & !(0xf << 58) | 8 << 58;
    file.write_all_at(&entry.to_be_bytes(), l2_at).expect("it is written");
    assert_eq!(compare(&path), 2);
}

#[test]
fn a_file_that_cannot_be_checked_is_refused() {
    let directory = directory();
    let path = build(&directory, 0);
    let file = File::options().read(true).write(true).open(&path).expect("it opens");
    let cases: [(u64, &[u8], &str); 8] = [
        (0, &[0], "not a qcow2 image"),
        (7, &[9], "version 9"),
        (23, &[30], "impossible size"),
        (40, &[1], "L1 table"),
        (48, &[1], "refcount table"),
        (72, &[1], "unknown incompatible features"),
        (79, &[4], "another file"),
        (100, &[1], "impossible length"),
    ];
    for (at, bytes, why) in cases {
        let mut good = vec![0; bytes.len()];
        file.read_exact_at(&mut good, at).expect("the header");
        file.write_all_at(bytes, at).expect("it is written");
        let text = check(&path, &file).expect_err("it is refused").to_string();
        assert!(text.contains(why), "{text}");
        file.write_all_at(&good, at).expect("it is written");
    }
    assert_eq!(compare(&path), 0);
}
