// SPDX-License-Identifier: Apache-2.0
//! Tests of the openings of disks.

use super::*;
use backend::create::create_with;
use backend::file::identity_of;
use clap::Parser;
use qcow2::create::{CLUSTER_BYTES, NewImage, Preallocation};

#[derive(Parser)]
struct Serve {
    #[command(flatten)]
    args: DiskArgs,
}

#[test]
fn without_an_image_there_is_no_disk_and_no_null_disk_in_its_place() {
    let args = Serve::parse_from(["serve", "--socket-path", "s"]).args;
    let Err(failure) = open(&args, From::Path, LockWait::No) else { panic!("a disk of nothing") };
    assert!(failure.to_string().contains("no image is given; give --blk-file PATH"), "{failure}");
}

/// The path of a locked image may get another file until its next opening.
#[test]
fn another_file_at_the_path_of_a_locked_one_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let image = NewImage {
        size_bytes: 1 << 20,
        cluster_bytes: CLUSTER_BYTES,
        backing: None,
        preallocation: Preallocation::Off,
    };
    for format in ["raw", "qcow2"] {
        let path = directory.path().join(format);
        let copied = path.with_extension("copied");
        for name in [&path, &copied] {
            let fill = |file: &fs::File| match format {
                "raw" => file.set_len(image.size_bytes),
                _ => image.write(file),
            };
            create_with(name, image.size_bytes, fill).unwrap();
        }
        let words = ["serve", "--socket-path", "s", "--format", format, "--blk-file"];
        let args = Serve::parse_from(words.into_iter().chain([path.to_str().unwrap()])).args;
        let of = |found: &Path| {
            let identity = identity_of(&fs::metadata(found).unwrap());
            open(&args, From::Locked { identity, first_bytes: None, known: None }, LockWait::No)
        };
        let Err(failure) = of(&copied) else { panic!("{format}: another file is served") };
        let told = failure.to_string();
        assert!(told.contains("another file or device is at this path by now"), "{told}");
        assert!(of(&path).is_ok(), "{format}");
    }
}
