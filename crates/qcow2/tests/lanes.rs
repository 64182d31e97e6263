// SPDX-License-Identifier: Apache-2.0
//! Several lanes of a disk, and its growth.

mod common;

use backend::conformance::Request;
use backend::{Disk, IoKind};
use common::{MIB, check, content, directory, image, open, qemu_ok, rig};
use kit::loop_device::LoopDevice;
use kit::mount;
use mount::{Mount, may_not_mount, run};
use qcow2::Qcow2Disk;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// A disk of 8 MiB over a backing file of so many bytes, which are all 0x5a.
fn overlay(directory: &TempDir, base_bytes: u64) -> Qcow2Disk {
    std::fs::write(directory.path().join("base.raw"), vec![0x5a; base_bytes as usize])
        .expect("a base");
    let create = ["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", "a.qcow2", "8M"];
    qemu_ok("qemu-img", directory.path(), &create);
    open(&directory.path().join("a.qcow2")).expect("it opens")
}

#[test]
fn a_lane_forgets_the_backing_extent_that_another_lane_replaces() {
    let directory = directory();
    let disk = overlay(&directory, 8 * MIB);
    let (mut one, mut other) = (rig(&disk), rig(&disk));
    for (at, byte) in [(MIB, 1), (3 * MIB, 2)] {
        assert_eq!(one.read(at, 4096), [0x5a; 4096]);
        other.write(at, &[byte; 4096]);
        assert_eq!(one.read(at, 4096), [byte; 4096]);
        assert_eq!(one.read(at + 4096, 4096), [0x5a; 4096]);
    }
    let zeroes = IoKind::WriteZeroes { unmap: true };
    assert_eq!(one.read(5 * MIB, 4096), [0x5a; 4096]);
    assert_eq!(other.run(&mut Request::command(zeroes, 5 * MIB, MIB)), Ok(()));
    assert_eq!(one.read(5 * MIB, 4096), [0; 4096]);
}

/// A write allocates the cluster around it; all other places stay known.
#[test]
fn a_write_over_a_backing_file_makes_lanes_ask_for_its_cluster_only() {
    let directory = directory();
    let disk = overlay(&directory, 8 * MIB);
    let (mut one, mut other) = (rig(&disk), rig(&disk));
    assert_eq!(one.read(0, 4096), [0x5a; 4096]);
    for (number, at) in (0..).zip([MIB, 3 * MIB, 5 * MIB]) {
        other.write(at, &[1; 4096]);
        let before = disk.questions();
        for around in [0, at - 4096, at + (64 << 10), 7 * MIB] {
            assert_eq!(one.read(around, 4096), [0x5a; 4096]);
        }
        assert_eq!(disk.questions(), before, "write {number}");
        assert_eq!(one.read(at, 8192), [[1; 4096], [0x5a; 4096]].concat());
        assert_eq!(disk.questions(), before + 1, "write {number}");
    }
}

#[test]
fn a_hole_is_asked_for_once_until_another_lane_writes_there() {
    let directory = directory();
    let disk = open(&image(&directory, 8, "cluster_size=64k")).expect("it opens");
    let (mut one, mut other) = (rig(&disk), rig(&disk));
    for at in (0..8 * MIB).step_by(1 << 16) {
        assert_eq!(one.read(at, 4096), [0; 4096]);
    }
    assert_eq!(disk.questions(), 1);
    other.write(MIB + 4096, &[3; 4096]);
    assert_eq!(one.read(MIB, 12288), [[0; 4096], [3; 4096], [0; 4096]].concat());
    let before = disk.questions();
    assert_eq!(one.read(MIB - 4096, 4096), [0; 4096]);
    assert_eq!(one.read(MIB + (64 << 10), 1 << 20), vec![0; 1 << 20]);
    assert_eq!(disk.questions(), before, "the rest of the hole is known");
    // A read that begins in data, and ends behind a hole with data.
    other.write(2 * MIB, &[4; 4096]);
    let mut expected = vec![0; (MIB + 4096) as usize];
    expected[4096..8192].fill(3);
    expected[MIB as usize..].fill(4);
    assert_eq!(one.read(MIB, expected.len()), expected);
}

/// The backing file ends within a cluster of the image, and within a sector: only the rest of the cluster
/// is written, and so gets a place in the image together with the part that another lane knows.
#[test]
fn a_lane_forgets_the_backing_extent_whose_cluster_another_lane_allocates_behind_its_end() {
    for (size, behind) in [(MIB + 4096, MIB + 8192), (MIB + 4096 + 100, MIB + 4096)] {
        for by_zeroes in [false, true] {
            let directory = directory();
            let disk = overlay(&directory, size);
            let (mut one, mut other) = (rig(&disk), rig(&disk));
            assert_eq!(one.read(MIB, 4096), [0x5a; 4096]);
            if by_zeroes {
                let zeroes = IoKind::WriteZeroes { unmap: false };
                assert_eq!(other.run(&mut Request::command(zeroes, behind, 512)), Ok(()));
            } else {
                other.write(behind, &[1; 512]);
            }
            other.write(MIB, &[2; 4096]);
            assert!(one.read(MIB, 4096) == [2; 4096], "{size} {by_zeroes}");
        }
    }
}

#[test]
fn a_disk_grows_and_a_new_lane_has_the_new_end() {
    let directory = directory();
    let path = image(&directory, 8, "cluster_size=4k");
    let disk = open(&path).expect("it opens");
    rig(&disk).write(8 * MIB - 4096, &[1; 4096]);
    disk.resize(Some(64 * MIB)).expect("it grows");
    assert_eq!(disk.info().capacity_sectors, 64 * MIB / 512);
    assert!(disk.resize(Some(MIB)).is_err());
    rig(&disk).write(64 * MIB - 4096, &[2; 4096]);
    drop(disk);
    assert_eq!(check(&path), Ok(()));
    let found = content(&path);
    assert_eq!(found.len() as u64, 64 * MIB);
    assert!(found[(8 * MIB - 4096) as usize..][..4096].iter().all(|byte| *byte == 1));
    assert!(found[(64 * MIB - 4096) as usize..].iter().all(|byte| *byte == 2));
}

/// A shrink leaves the rest of the last cluster as it is.
#[test]
fn a_disk_that_grows_again_after_a_shrink_reads_zeroes_behind_the_old_end() {
    for shrunk in [MIB - 512, MIB - 65536, MIB - 65536 + 512] {
        let directory = directory();
        let path = image(&directory, 1, "cluster_size=64k");
        rig(&open(&path).expect("it opens")).write(MIB - 2 * 65536, &[1; 2 * 65536]);
        let size = shrunk.to_string();
        let shrink = ["resize", "-q", "--shrink", "-f", "qcow2", "a.qcow2", &size];
        qemu_ok("qemu-img", directory.path(), &shrink);
        let disk = open(&path).expect("it opens");
        disk.resize(Some(2 * MIB)).expect("it grows");
        let mut lane = rig(&disk);
        let kept = (shrunk - (MIB - 2 * 65536)) as usize;
        assert!(lane.read(MIB - 2 * 65536, kept).iter().all(|byte| *byte == 1), "{shrunk}");
        let behind = lane.read(shrunk, (2 * MIB - shrunk) as usize);
        assert!(behind.iter().all(|byte| *byte == 0), "{shrunk}");
        drop((lane, disk));
        assert_eq!(check(&path), Ok(()));
    }
}

/// A lane that knows many clusters of a part of the disk asks for all of them with one question.
#[test]
fn a_lane_learns_clusters_in_random_order_by_few_questions() {
    const CLUSTER: u64 = 4096;
    let directory = directory();
    let base = image(&directory, 4, "cluster_size=4k");
    let mut random = fastrand::Rng::with_seed(5);
    let mut order: Vec<u64> = (0..4 * MIB / CLUSTER).collect();
    // A third of the clusters is in the backing file, a third in the image, and a third nowhere.
    let byte = |cluster: u64| if cluster % 3 == 2 { 0 } else { (cluster % 251) as u8 + 1 };
    let mut write = |path: &Path, part: u64| {
        let disk = open(path).expect("it opens");
        let mut lane = rig(&disk);
        random.shuffle(&mut order);
        for cluster in order.iter().filter(|cluster| **cluster % 3 == part) {
            lane.write(cluster * CLUSTER, &[byte(*cluster); CLUSTER as usize]);
        }
    };
    write(&base, 0);
    std::fs::rename(&base, directory.path().join("base.qcow2")).expect("another name");
    let create = ["create", "-qf", "qcow2", "-o", "cluster_size=4k", "-b", "base.qcow2"];
    let create = [&create[..], &["-F", "qcow2", "a.qcow2"]].concat();
    qemu_ok("qemu-img", directory.path(), &create);
    write(&base, 1);
    let disk = open(&base).expect("it opens");
    let mut lane = rig(&disk);
    random.shuffle(&mut order);
    for cluster in order {
        let found = lane.read(cluster * CLUSTER, CLUSTER as usize);
        assert!(found == [byte(cluster); CLUSTER as usize], "cluster {cluster}");
    }
    // There are two pages. The questions about one ask for 64 clusters, 128, 256, and 512.
    assert!(disk.questions() <= 2 * 5, "{} questions", disk.questions());
}

/// The growth moves the table to the end of the file.
#[test]
fn an_empty_disk_grows_and_its_file_has_the_table_of_zeroes() {
    let directory = directory();
    let path = image(&directory, 4, "cluster_size=4k");
    let disk = open(&path).expect("it opens");
    disk.resize(Some(4 * MIB + 512)).expect("it grows");
    check(&path).expect("a good image");
}

/// The old end is within a cluster that is allocated, within one that is not, or between two; the new end is
/// before or behind that of the backing file.
#[test]
fn an_overlay_that_grows_over_a_larger_backing_file_reads_zeroes_there() {
    const BASE: u64 = 6 * MIB + 4096;
    for (format, old, new, is_written) in [
        ("raw", 4 * MIB, 8 * MIB, false),
        ("raw", 4 * MIB + 4096, 5 * MIB + 512, false),
        ("raw", 4 * MIB + 4096, 8 * MIB, true),
        ("qcow2", 4 * MIB + 4096, 8 * MIB, false),
        ("qcow2", 4 * MIB + 512, 4 * MIB + 8192, true),
    ] {
        let directory = directory();
        let (size, name) = (BASE.to_string(), format!("base.{format}"));
        let run = |program: &str, args: &[&str]| qemu_ok(program, directory.path(), args);
        run("qemu-img", &["create", "-qf", format, &name, &size]);
        run("qemu-io", &["-f", format, "-c", &format!("write -P 90 0 {BASE}"), &name]);
        let create = ["create", "-qf", "qcow2", "-b", &name, "-F", format, "a.qcow2"];
        run("qemu-img", &[&create[..], &[&old.to_string()]].concat());
        let path = directory.path().join("a.qcow2");
        let disk = open(&path).expect("it opens");
        let mut expected = vec![0; new as usize];
        expected[..old as usize].fill(0x5a);
        let mut before = rig(&disk);
        if is_written {
            before.write(4 * MIB, &[7; 512]);
            expected[4 * MIB as usize..][..512].fill(7);
        }
        let tail = (4 * MIB - 4096) as usize;
        let last = (old as usize - tail).min(4096);
        assert_eq!(before.read(tail as u64, last), expected[tail..tail + last]);
        disk.resize(Some(new)).expect("it grows");
        let mut rig = rig(&disk);
        assert!(rig.read(0, new as usize) == expected, "{format} {old} {new}");
        // An extent of before names the backing file no more where the cluster has moved.
        rig.write(old - 512, &[8; 512]);
        expected[old as usize - 512..][..512].fill(8);
        assert_eq!(before.read(old - 512, 512), [8; 512]);
        drop((rig, before, disk));
        assert_eq!(check(&path), Ok(()));
        assert!(content(&path) == expected, "{format} {old} {new}, as QEMU reads it");
        let checked = std::fs::File::open(&path).expect("it opens");
        assert_eq!(qcow2::check::check(&path, &checked).expect("a report").leaks, 0);
    }
}

/// The first byte of a cluster of the image is elsewhere than its last one.
#[test]
fn backing_files_with_other_clusters_and_odd_ends_are_read_as_qemu_reads_them() {
    for (middle, top) in [("4k", "64k"), ("64k", "4k"), ("4k", "2M"), ("2M", "4k")] {
        let directory = directory();
        // The raw file ends within a cluster of any size.
        let base: Vec<u8> = (0..(5 << 20) + 1536).map(|at| (at / 512 % 251) as u8 + 1).collect();
        std::fs::write(directory.path().join("base.raw"), base).expect("a base");
        let of = |cluster: &str| format!("cluster_size={cluster}");
        let create = ["create", "-qf", "qcow2", "-F"];
        let run = |args: &[&str]| {
            qemu_ok("qemu-img", directory.path(), &[&create[..], args].concat());
        };
        run(&["raw", "-b", "base.raw", "-o", &of(middle), "middle.qcow2", "9M"]);
        for command in ["write -P 7 2M 300k", "write -z 3M 1M", "write -P 8 7M 4608"] {
            let args = ["-f", "qcow2", "-c", command, "middle.qcow2"];
            qemu_ok("qemu-io", directory.path(), &args);
        }
        run(&["qcow2", "-b", "middle.qcow2", "-o", &of(top), "a.qcow2", "12M"]);
        let path = directory.path().join("a.qcow2");
        qemu_ok(
            "qemu-io",
            directory.path(),
            &["-f", "qcow2", "-c", "write -P 9 4M 512", "a.qcow2"],
        );
        let expected = content(&path);
        for block in [512, 4096, MIB as usize] {
            let disk = Arc::new(open(&path).expect("it opens"));
            let (mut lane, mut reader) = (rig(&disk), disk.reader().expect("a reader"));
            for (part, wanted) in (0..).zip(expected.chunks(block)) {
                let at = part * block as u64;
                assert!(lane.read(at, block) == wanted, "{middle} {top}: {block} bytes at {at}");
                let read = reader.read(at..at + block as u64).expect("a range of the disk");
                assert!(read == wanted, "{middle} {top}: {block} bytes at {at}, by the reader");
            }
        }
    }
}

/// The other content of the cluster is in the backing file, in the image, or compressed.
#[test]
fn zeroes_in_a_disk_smaller_than_a_cluster_leave_the_rest_of_it() {
    const SIZE: u64 = MIB;
    for start in ["backing", "written", "compressed"] {
        let directory = directory();
        let run = |program: &str, args: &str| {
            qemu_ok(program, directory.path(), &args.split(' ').collect::<Vec<_>>());
        };
        std::fs::write(directory.path().join("base.raw"), vec![0x5a; SIZE as usize])
            .expect("a base");
        match start {
            "compressed" => {
                run("qemu-img", "convert -c -f raw -O qcow2 -o cluster_size=2M base.raw a.qcow2");
            }
            _ => {
                let create = "create -qf qcow2 -b base.raw -F raw -o cluster_size=2M a.qcow2";
                run("qemu-img", create);
            }
        }
        let path = directory.path().join("a.qcow2");
        let disk = open(&path).expect("it opens");
        let (mut lane, mut expected) = (rig(&disk), vec![0x5a; SIZE as usize]);
        if start == "written" {
            lane.write(0, &[7; 512]);
            expected[..512].fill(7);
        }
        for (at, len) in [(64 << 10, 4096), (512, 1024), (SIZE - 512, 512)] {
            let mut zeroes = Request::command(IoKind::WriteZeroes { unmap: false }, at, len);
            assert_eq!(lane.run(&mut zeroes), Ok(()));
            expected[at as usize..(at + len) as usize].fill(0);
            assert!(lane.read(0, SIZE as usize) == expected, "{start}: {len} bytes at {at}");
        }
        drop((lane, disk));
        assert_eq!(check(&path), Ok(()));
        assert!(content(&path) == expected, "{start}, as QEMU reads it");
    }
}

#[test]
fn a_reader_reads_compressed_clusters_and_skips_what_is_known_to_be_zero() {
    let directory = directory();
    let content: Vec<u8> = (0..3 * MIB).map(|at| (at / 4096) as u8 | 1).collect();
    std::fs::write(directory.path().join("a.raw"), &content).expect("a raw image");
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "a.raw", "a.qcow2"];
    qemu_ok("qemu-img", directory.path(), &convert);
    qemu_ok("qemu-img", directory.path(), &["resize", "-q", "a.qcow2", "8M"]);
    let disk = Arc::new(open(&directory.path().join("a.qcow2")).expect("it opens"));
    let mut reader = disk.reader().expect("a reader");
    assert!(reader.read(512..3 * MIB).expect("data") == &content[512..]);
    assert_eq!(reader.skip_zeroes(3 * MIB..8 * MIB).expect("a range"), 8 * MIB);
    assert_eq!(reader.skip_zeroes(MIB..8 * MIB).expect("a range"), MIB);
    rig(&disk).write(5 * MIB, &[9; 512]);
    let found = reader.skip_zeroes(3 * MIB..8 * MIB).expect("a range");
    assert!((4 * MIB..=5 * MIB).contains(&found), "{found}");
    assert!(reader.read(5 * MIB..5 * MIB + 512).expect("data").iter().all(|byte| *byte == 9));
}

/// The zeroes over compressed clusters have commits of their own, and the last step has the size alone.
#[test]
fn an_overlay_grows_beyond_a_compressed_backing_file_that_is_larger() {
    let directory = directory();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("base.raw"), vec![0x5a; (5 << 20) + 512]).expect("a raw file");
    let compress = "convert -c -O qcow2 -o cluster_size=4k base.raw base.qcow2";
    let create = "create -qf qcow2 -b base.qcow2 -F qcow2 -o cluster_size=4k a.qcow2 4M";
    for words in [compress, create] {
        qemu_ok("qemu-img", directory.path(), &words.split(' ').collect::<Vec<_>>());
    }
    let disk = open(&path("a.qcow2")).expect("it opens");
    let mut expected = vec![0x5a; 4 << 20];
    for size in [4 * MIB + 512, 5 * MIB + 512, 6 * MIB, 6 * MIB + 512] {
        disk.resize(Some(size)).expect("it grows");
        expected.resize(size as usize, 0);
        assert!(rig(&disk).read(0, size as usize) == expected, "{size}");
        assert!(content(&path("a.qcow2")) == expected, "{size}, as QEMU reads it");
    }
    drop(disk);
    assert_eq!(check(&path("a.qcow2")), Ok(()));
}

/// The first growth ends within a cluster, which is a zero cluster then.
#[test]
fn an_overlay_grows_twice_within_a_cluster_of_a_larger_backing_file() {
    for (cluster, old) in [("4k", 4 * MIB), ("4k", 4 * MIB + 512), ("64k", 4 * MIB)] {
        let directory = directory();
        std::fs::write(directory.path().join("base.raw"), vec![0x5a; 6 << 20]).expect("a base");
        let of = format!("cluster_size={cluster}");
        let create = ["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", "-o", &of];
        let size = old.to_string();
        qemu_ok("qemu-img", directory.path(), &[&create[..], &["a.qcow2", &size]].concat());
        let path = directory.path().join("a.qcow2");
        let disk = open(&path).expect("it opens");
        for step in 1..=9 {
            disk.resize(Some(old + step * 512)).expect("it grows");
        }
        let mut rig = rig(&disk);
        rig.write(old + 1024, &[7; 512]);
        let mut expected = vec![0; 9 * 512];
        expected[1024..1536].fill(7);
        assert!(rig.read(old, 9 * 512) == expected);
        assert_eq!(rig.read(old - 512, 512), [0x5a; 512]);
        drop((rig, disk));
        assert_eq!(check(&path), Ok(()));
        assert!(content(&path)[old as usize..] == expected);
    }
}

/// QEMU would trust a bitmap that lacks the guest's writes. A lane writes where the image has places already, without
/// a commit, and a kill may follow.
#[test]
fn an_open_image_declares_no_bitmap_of_qemu_valid() {
    let directory = directory();
    let path = image(&directory, 8, "preallocation=metadata");
    let name = path.file_name().expect("a name").to_str().expect("text");
    qemu_ok("qemu-img", directory.path(), &["bitmap", "--add", "--enable", name, "b"]);
    let autoclear = || std::fs::read(&path).expect("an image")[88..96].to_vec();
    assert_eq!(autoclear(), 1_u64.to_be_bytes());
    let disk = open(&path).expect("it opens");
    assert_eq!(autoclear(), [0; 8]);
    rig(&disk).write(MIB, &[1; 4096]);
    drop(disk);
    assert_eq!(autoclear(), [0; 8]);
    assert_eq!(check(&path), Ok(()));
}

/// The guest's blocks have 512 bytes, those of the storage 4096.
#[test]
fn lanes_that_write_parts_of_one_block_of_the_storage_wait_for_each_other() {
    if may_not_mount() {
        return;
    }
    let memory = Mount::tmpfs(128);
    let file = memory.path("device");
    std::fs::File::create(&file).expect("a file").set_len(64 * MIB).expect("its size");
    let device = LoopDevice::attach(&file, &["--sector-size=4096"]).expect("a device");
    run(&["mkfs.ext4", "-q", "-b", "4096", device.path.to_str().expect("UTF-8")]);
    let mount = Mount::of(&device.path);
    qemu_ok("qemu-img", mount.place.path(), &["create", "-qf", "qcow2", "a.qcow2", "8M"]);
    let disk = open(&mount.path("a.qcow2")).expect("it opens");
    std::thread::scope(|scope| {
        for sector in 0..2 {
            let disk = &disk;
            scope.spawn(move || {
                let mut lane = rig(disk);
                for byte in (1..=255).cycle().take(2000) {
                    lane.write(sector * 512, &[byte; 512]);
                    assert_eq!(lane.read(sector * 512, 512), [byte; 512]);
                }
            });
        }
    });
}
