// SPDX-License-Identifier: Apache-2.0
//! Images that are refused, damaged or hostile.

mod common;

use backend::conformance::Request;
use backend::{Disk, IoKind};
use common::{MIB, directory, image, open, options, qemu_ok, rig};
use qcow2::{AllowBacking, Qcow2Disk};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

fn patch(path: &Path, offset: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).expect("the image opens");
    file.write_all_at(bytes, offset).expect("it is written");
}

fn refusal(path: &Path) -> String {
    open(path).map(|_| "opened").expect_err("it is refused").to_string()
}

#[test]
fn a_header_that_cannot_be_served_is_refused_with_its_remedy() {
    let cases: [(u64, &[u8], &str, &str); 12] = [
        (32, &[0, 0, 0, 2], "encrypted", "qemu-storage-daemon"),
        (79, &[1], "dirty", "qemu-img check -r all"),
        (79, &[2], "corrupt", "qemu-img check -r all"),
        (79, &[4], "external data file", "qemu-img convert"),
        (79, &[8], "zstd", "qemu-img convert"),
        (79, &[16], "extended L2", "qemu-img convert"),
        (79, &[32], "unknown incompatible features (0x20)", "qemu-img convert"),
        (7, &[2], "version 2", "qemu-img amend"),
        (7, &[9], "version 9", "qemu-img convert"),
        (23, &[9], "clusters of 2^9", "cluster_size=64k"),
        (24, &[0x7f; 8], "a disk of", "1 EiB"),
        (24, &[0, 0, 0, 0, 0, 0x80, 0, 7], "ends within a sector", "qemu-img resize"),
    ];
    for (offset, bytes, why, remedy) in cases {
        let directory = directory();
        let path = image(&directory, 8, "cluster_size=64k");
        patch(&path, offset, bytes);
        let text = refusal(&path);
        assert!(text.contains(why) && text.contains(remedy), "{offset}: {text}");
    }
}

/// A library that reads the extensions would panic, also at one behind many others.
#[test]
fn odd_header_extensions_are_refused() {
    let names = |bytes: u32| [&0x6803_f857_u32.to_be_bytes()[..], &bytes.to_be_bytes()].concat();
    let odd = [names(1), vec![0; 8]].concat();
    let entry = [names(48), vec![0; 48]].concat();
    let many = [&[[1, 0, 0, 0, 0, 0, 0, 0]; 64].concat()[..], &odd].concat();
    let long = names(1 << 20);
    // The list of the extensions ends with the name of the backing file, for a reader that knows of it.
    let format = [&0xe279_2aca_u32.to_be_bytes()[..], &[0, 0, 0, 3], b"raw\0\0\0\0\0"].concat();
    let name = [&format[..], b"base\0\0\0\0", &odd].concat();
    for (extensions, name_at, why) in [
        (&odd, 0, Some("its feature names take 1 bytes")),
        (&many, 0, Some("more than 64 extensions")),
        (&long, 0, Some("longer than its cluster")),
        (&name, format.len(), Some("has no end")),
        (&entry, 0, None),
    ] {
        let directory = directory();
        let path = image(&directory, 8, "cluster_size=64k");
        let header = fs::read(&path).expect("the image");
        let at = u32::from_be_bytes(header[100..104].try_into().expect("four bytes"));
        patch(&path, at.into(), &[&extensions[..], &[0; 8]].concat());
        if name_at > 0 {
            fs::write(directory.path().join("base"), [0; 4096]).expect("a base");
            patch(&path, 8, &(u64::from(at) + name_at as u64).to_be_bytes());
            patch(&path, 16, &4_u32.to_be_bytes());
        }
        let told = qcow2::inspect::inspect(&path).expect("facts");
        match why {
            Some(why) => {
                assert!(refusal(&path).contains(why), "{}", refusal(&path));
                let refused = told.serve.expect_err("it is refused");
                assert!(refused.what.contains(why), "{}", refused.what);
            }
            None => {
                open(&path).expect("it opens");
                told.serve.expect("it can be served");
            }
        }
    }
}

#[test]
fn a_raw_file_is_not_taken_for_qcow2() {
    let directory = directory();
    let path = directory.path().join("raw");
    fs::write(&path, vec![0; 1 << 20]).expect("a file");
    assert!(refusal(&path).contains("--format raw"));
}

#[test]
fn a_backing_file_needs_permission_and_a_format_and_no_loop() {
    let directory = directory();
    let at = directory.path();
    let path = image(&directory, 8, "cluster_size=64k");
    qemu_ok("qemu-img", at, &["create", "-qf", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "top"]);
    let refused = Qcow2Disk::open(&at.join("top"), &options(AllowBacking::Off, true));
    let text = refused.map(|_| "opened").expect_err("it is refused").to_string();
    assert!(text.contains("--allow-backing"), "{text}");
    assert!(open(&at.join("top")).is_ok());

    let other = common::directory();
    let elsewhere = other.path().join("top");
    let (base, format) = (path.display().to_string(), ["-F", "qcow2"]);
    let create = ["create", "-qf", "qcow2", "-b", &base, format[0], format[1], "top"];
    qemu_ok("qemu-img", other.path(), &create);
    assert!(refusal(&elsewhere).contains("not allowed"));
    assert!(Qcow2Disk::open(&elsewhere, &options(AllowBacking::Any, true)).is_ok());

    qemu_ok("qemu-img", at, &["rebase", "-u", "-b", "top", "-F", "qcow2", "a.qcow2"]);
    assert!(refusal(&path).contains("loop"));
}

#[test]
fn an_image_with_snapshots_is_read_only() {
    let directory = directory();
    let path = image(&directory, 8, "cluster_size=64k");
    qemu_ok("qemu-img", directory.path(), &["snapshot", "-c", "one", "a.qcow2"]);
    assert!(refusal(&path).contains("snapshots"));
    let mut read_only = options(AllowBacking::Off, true);
    read_only.file.read_only = true;
    assert!(Qcow2Disk::open(&path, &read_only).is_ok());
}

/// A write would copy the table, and free the old one before the L1 table is durable.
#[test]
fn an_image_with_a_table_that_may_be_shared_is_read_only() {
    for cluster in ["4k", "64k"] {
        let directory = directory();
        let path = image(&directory, 8, &format!("cluster_size={cluster}"));
        let mut first = rig(&open(&path).expect("it opens"));
        for at in (0..8 * MIB).step_by(MIB as usize) {
            first.write(at, &[1; 4096]);
        }
        drop(first);
        let header = fs::read(&path).expect("the image");
        let l1_at = u64::from_be_bytes(header[40..48].try_into().expect("eight bytes"));
        let last = u32::from_be_bytes(header[36..40].try_into().expect("four bytes")) - 1;
        let at = l1_at + u64::from(last) * 8;
        // The flag of exclusive clusters.
        patch(&path, at, &[header[at as usize] & 0x7f]);
        let text = refusal(&path);
        let named = format!("entry {last} of its L1 table names a table that it shares");
        assert!(text.contains(&named) && text.contains("--read-only"), "{text}");
        let mut read_only = options(AllowBacking::Off, true);
        read_only.file.read_only = true;
        let mut read_only = rig(&Qcow2Disk::open(&path, &read_only).expect("it opens"));
        assert_eq!(read_only.read(7 * MIB, 4096), [1; 4096]);
        let repair = ["check", "-q", "-r", "all", "a.qcow2"];
        qemu_ok("qemu-img", directory.path(), &repair);
        assert_eq!(rig(&open(&path).expect("it is repaired")).read(0, 4096), [1; 4096]);
    }
}

/// A new block for these clusters would take the place of the header.
#[test]
fn an_image_without_a_refcount_block_for_its_header_is_read_only() {
    for damage in ["the entry", "the size of the table", "the place of the table"] {
        let directory = directory();
        let path = image(&directory, 8, "cluster_size=4k");
        let mut first = rig(&open(&path).expect("it opens"));
        first.write(MIB, &[1; 4096]);
        drop(first);
        let header = fs::read(&path).expect("the image");
        let table_at = u64::from_be_bytes(header[48..56].try_into().expect("eight bytes"));
        match damage {
            "the entry" => patch(&path, table_at, &[0; 8]),
            "the size of the table" => patch(&path, 56, &[0; 4]),
            _ => patch(&path, 48, &(1_u64 << 40).to_be_bytes()),
        }
        let bytes = fs::read(&path).expect("the image");
        let text = refusal(&path);
        assert!(text.contains("no block for its first clusters"), "{damage}: {text}");
        assert_eq!(fs::read(&path).expect("the image"), bytes, "{damage}: it was written");
        let check = qemu_code(&directory);
        assert_ne!(check, 0, "{damage}: qemu-img finds no error");
    }
}

fn qemu_code(directory: &tempfile::TempDir) -> i32 {
    let ran = common::qemu("qemu-img", directory.path(), &["check", "-q", "a.qcow2"]);
    ran.status.code().expect("it ends by itself")
}

/// Positions of the tables of a fresh image with one L2 table: header, refcounts, L1, L2.
const TABLES: std::ops::Range<u64> = 0..6 << 12;

#[test]
fn random_damage_never_panics_and_never_touches_another_file() {
    let directory = directory();
    let base = directory.path().join("base.raw");
    fs::write(&base, vec![0x5a; 8 << 20]).expect("a base");
    let create = ["create", "-qf", "qcow2", "-o", "cluster_size=4k", "-b", "base.raw", "-F", "raw"];
    qemu_ok("qemu-img", directory.path(), &[&create[..], &["a.qcow2", "8M"]].concat());
    let path = directory.path().join("a.qcow2");
    let mut first = rig(&open(&path).expect("it opens"));
    first.write(0, &vec![1; MIB as usize]);
    drop(first);
    let good = fs::read(&path).expect("the image");
    let mut random = fastrand::Rng::with_seed(1);
    let mut opened = 0;
    for _ in 0..150 {
        let damaged = directory.path().join("damaged.qcow2");
        let mut bytes = good.clone();
        for _ in 0..random.u32(1..=4) {
            let at = TABLES.start + random.u64(..TABLES.end);
            bytes[at as usize] = random.u8(..);
        }
        fs::write(&damaged, bytes).expect("the image");
        common::compare(&damaged);
        let Ok(disk) = open(&damaged) else { continue };
        opened += 1;
        let (mut rig, end) = (rig(&disk), disk.info().capacity_sectors * 512);
        for at in (0..end.min(8 * MIB)).step_by(1 << 19) {
            let _ = rig.run(&mut Request::read(at, &[4096], 0));
            let _ = rig.run(&mut Request::write(at, &[7; 4096], &[4096], 0));
            let zeroes = IoKind::WriteZeroes { unmap: true };
            let _ = rig.run(&mut Request::command(zeroes, at + 8192, 4096));
        }
    }
    assert!(opened > 25, "{opened} of the images opened");
    assert!(fs::read(&base).expect("the base").iter().all(|byte| *byte == 0x5a));
}
