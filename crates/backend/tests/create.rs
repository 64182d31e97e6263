// SPDX-License-Identifier: Apache-2.0
//! Making images and reading sizes.

mod common;

use backend::create::{Allocation, CreateError, create, create_with, parse_size, remove_own};
use common::{DISK, TMPFS, allocated_bytes};
use rustix::process::{Uid, getuid};
use rustix::thread::set_thread_res_uid;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::thread;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn directory(place: &str) -> TempDir {
    TempDir::new_in(place).expect("a directory can be made")
}

#[test]
fn a_sparse_image_has_its_size_and_takes_no_space() {
    let directory = directory(DISK);
    let path = directory.path().join("disk.raw");
    create(&path, 64 * MIB, Allocation::Sparse).expect("there is room");
    assert_eq!(fs::metadata(&path).unwrap().len(), 64 * MIB);
    assert!(allocated_bytes(&path) < MIB);
}

#[test]
fn a_full_image_has_its_size_and_takes_its_space() {
    let directory = directory(DISK);
    let path = directory.path().join("disk.raw");
    create(&path, 8 * MIB, Allocation::Full).expect("there is room");
    assert_eq!(fs::metadata(&path).unwrap().len(), 8 * MIB);
    assert!(allocated_bytes(&path) >= 8 * MIB);
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
}

/// The directory may be written and not be read, so that it cannot be synced.
#[test]
fn an_image_whose_name_cannot_be_made_durable_is_removed() {
    const NOBODY: u32 = 65_534;
    let outer = tempfile::tempdir().unwrap();
    fs::set_permissions(outer.path(), Permissions::from_mode(0o711)).unwrap();
    let inner = outer.path().join("directory");
    fs::create_dir(&inner).unwrap();
    fs::set_permissions(&inner, Permissions::from_mode(0o333)).unwrap();
    let path = inner.join("disk.raw");
    let made = thread::scope(|scope| {
        let create = scope.spawn(|| {
            if getuid().is_root() {
                // This thread alone: root may read every directory.
                let nobody = Uid::from_raw(NOBODY);
                set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            fs::write(inner.join("other"), "").expect("the directory may be written");
            create(&path, MIB, Allocation::Sparse)
        });
        create.join().unwrap()
    });
    assert!(made.unwrap_err().to_string().contains("Permission denied"));
    fs::set_permissions(&inner, Permissions::from_mode(0o700)).unwrap();
    assert_eq!(fs::read_dir(&inner).unwrap().count(), 1, "the other file");
}

#[test]
fn an_existing_file_is_neither_overwritten_nor_removed() {
    let directory = directory(DISK);
    let path = directory.path().join("disk.raw");
    fs::write(&path, "precious").unwrap();
    for allocation in [Allocation::Sparse, Allocation::Full] {
        let why = create(&path, MIB, allocation).expect_err("it exists");
        assert!(matches!(why, CreateError::Exists { .. }), "{why}");
        assert!(why.to_string().contains("not overwritten"), "{why}");
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn only_the_own_file_is_removed() {
    let directory = directory(DISK);
    let path = directory.path().join("disk.raw");
    let made = create_with(&path, MIB, |file| file.set_len(MIB)).unwrap();
    fs::rename(&path, directory.path().join("moved")).unwrap();
    fs::write(&path, "precious").unwrap();
    remove_own(&path, &made);
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    fs::rename(directory.path().join("moved"), &path).unwrap();
    remove_own(&path, &made);
    assert!(!path.exists());
}

#[test]
fn an_image_that_does_not_fit_is_removed() {
    let directory = directory(TMPFS);
    let path = directory.path().join("disk.raw");
    let why = create(&path, 1 << 50, Allocation::Full).expect_err("1 PiB of memory");
    assert!(matches!(why, CreateError::NoSpace { .. } | CreateError::TooLarge { .. }), "{why}");
    assert!(!path.exists());
}

#[test]
fn a_missing_directory_is_named() {
    let directory = directory(DISK);
    let path = directory.path().join("no/disk.raw");
    let why = create(&path, MIB, Allocation::Sparse).expect_err("no such directory").to_string();
    assert!(why.contains("no/disk.raw") && why.contains("No such file or directory"), "{why}");
}

#[test]
fn sizes_are_read_with_powers_of_1024() {
    let table = [
        ("512", 512),
        ("1K", 1024),
        ("1k", 1024),
        ("3M", 3 << 20),
        ("10G", 10 << 30),
        ("2T", 2 << 40),
        ("512KiB", 512 << 10),
        ("3MiB", 3 << 20),
        ("10gib", 10 << 30),
        ("2TiB", 2 << 40),
        ("1.5G", 3 << 29),
        ("0.25MiB", 256 << 10),
        ("9223372036854775296", 9_223_372_036_854_775_296),
    ];
    for (text, bytes) in table {
        assert_eq!(parse_size(text), Ok(bytes), "{text}");
    }
}

#[test]
fn bad_sizes_say_what_to_write_instead() {
    let malformed = [
        "",
        "G",
        "1.5",
        ".5G",
        "1.G",
        "1.2.3G",
        "1.0000000005G",
        "1iB",
        "-1G",
        "+1G",
        "1GB",
        "1P",
        " 1G",
        "1 G",
        "1G ",
        "0x10",
        "١G",
    ];
    for text in malformed {
        let why = parse_size(text).expect_err(text).to_string();
        assert!(why.contains("is not a size") && why.contains("10G"), "{text}: {why}");
    }
    for text in ["0", "0G", "1", "511", "513", "1000", "1.1G"] {
        let why = parse_size(text).expect_err(text).to_string();
        assert!(why.contains("multiple of 512"), "{text}: {why}");
    }
    for text in ["8388608T", "9223372036854775808", "99999999999999999999", "18446744073709551615K"]
    {
        let why = parse_size(text).expect_err(text).to_string();
        assert!(why.contains("too large"), "{text}: {why}");
    }
    assert_eq!(parse_size("8388607T"), Ok(8_388_607 << 40));
}
