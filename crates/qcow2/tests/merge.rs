// SPDX-License-Identifier: Apache-2.0
//! Merges of an image into a backing file whose clusters are larger: a cluster of the backing file gets its
//! content in several pieces.

mod common;

use backend::IoKind;
use backend::conformance::Request;
use common::{MIB, check, content, directory, open, qemu_ok, rig};
use qcow2::AllowBacking;
use qcow2::merge::Merge;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// A chain of 8 MiB: a raw file, an image with the clusters, and one with clusters of 64 KiB.
fn chain(directory: &TempDir, cluster: &str) {
    std::fs::write(directory.path().join("deep.raw"), vec![9; 8 << 20]).expect("a raw file");
    let create = |name: &str, options: &str, below: [&str; 2]| {
        let [backing, format] = below;
        let backed = ["-b", backing, "-F", format, name, "8M"];
        let args = [&["create", "-qf", "qcow2", "-o", options][..], &backed].concat();
        qemu_ok("qemu-img", directory.path(), &args);
    };
    create("base.qcow2", &format!("cluster_size={cluster}"), ["deep.raw", "raw"]);
    create("top.qcow2", "cluster_size=64k", ["base.qcow2", "qcow2"]);
}

/// Merges `top.qcow2` into `base.qcow2`, with a sync after each piece if `syncs`.
fn merge(directory: &Path, syncs: bool) {
    let top = Arc::new(open(&directory.join("top.qcow2")).expect("it opens"));
    let base = directory.join("base.qcow2");
    let merge = Merge::open(top, &base, true, AllowBacking::SameDir);
    let (mut merge, mut range) = (merge.expect("it opens"), 0..8 * MIB);
    while !range.is_empty() {
        merge.copy_piece(&mut range, 1 << 20).expect("a copy");
        if syncs {
            merge.sync().expect("a sync");
        }
    }
    merge.sync().expect("a sync");
}

#[test]
fn another_file_at_the_path_of_the_image_or_of_its_backing_file_gets_no_change() {
    for moved in ["base.qcow2", "top.qcow2"] {
        let directory = directory();
        chain(&directory, "64k");
        let path = |name: &str| directory.path().join(name);
        let top = Arc::new(open(&path("top.qcow2")).expect("it opens"));
        std::fs::rename(path(moved), path("moved")).expect("a new name");
        std::fs::copy(path("moved"), path(moved)).expect("a copy");
        let before = std::fs::read(path("base.qcow2")).expect("a file");
        let merge = Merge::open(top, &path("base.qcow2"), true, AllowBacking::SameDir);
        let why = merge.err().expect("it is another file").to_string();
        assert!(why.contains("another file is at this path by now"), "{moved}: {why}");
        assert!(std::fs::read(path("base.qcow2")).expect("a file") == before, "{moved}");
        let base = std::fs::File::open(path("base.qcow2")).expect("a file");
        assert_eq!(backend::mark::in_use(&base).expect("a mark or none"), None, "{moved}");
    }
}

/// 8 MiB whose compressed clusters have places of their own: three quarters do not shrink.
fn half_compressible() -> Vec<u8> {
    let mut random = 1u64;
    let mut byte = |at: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if at % 4096 < 3072 { (random >> 56) as u8 } else { 7 }
    };
    (0..8 * MIB).map(&mut byte).collect()
}

/// The image reads the rest of a cluster of its backing file where it was.
#[test]
fn compressed_clusters_that_are_larger_than_those_of_the_image_are_refused() {
    for (cluster, is_refused) in [("2M", true), ("64k", false), ("4k", false)] {
        let directory = directory();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("deep.raw"), half_compressible()).expect("a raw file");
        let options = format!("cluster_size={cluster}");
        let compress = ["convert", "-c", "-O", "qcow2", "-o", &options, "deep.raw", "base.qcow2"];
        qemu_ok("qemu-img", directory.path(), &compress);
        let above = ["-b", "base.qcow2", "-F", "qcow2", "-o", "cluster_size=64k", "top.qcow2"];
        qemu_ok("qemu-img", directory.path(), &[&["create", "-qf", "qcow2"][..], &above].concat());
        let top = Arc::new(open(&path("top.qcow2")).expect("it opens"));
        let mut rig = rig(&top);
        rig.write(20 << 10, &vec![8; 64 << 10]);
        rig.write(3 * MIB, &vec![8; 1 << 20]);
        let before = rig.read(0, 8 << 20);
        let opened =
            Merge::open(Arc::clone(&top), &path("base.qcow2"), true, AllowBacking::SameDir);
        let mut merge = match opened {
            Err(why) => {
                assert!(is_refused && why.to_string().contains("compressed clusters"), "{why}");
                let base = std::fs::File::open(path("base.qcow2")).expect("a file");
                assert_eq!(backend::mark::in_use(&base).expect("a mark or none"), None);
                continue;
            }
            Ok(merge) => merge,
        };
        assert!(!is_refused, "{cluster}");
        let mut range = 0..8 * MIB;
        while !range.is_empty() {
            merge.copy_piece(&mut range, 64 << 10).expect("a copy");
            merge.sync().expect("a sync");
            assert!(rig.read(0, 8 << 20) == before, "{cluster} {range:?}");
        }
    }
}

/// As there: a write to such a cluster gives it another place, and frees the old one.
#[test]
fn larger_clusters_without_the_flag_copied_are_refused() {
    let directory = directory();
    chain(&directory, "2M");
    let path = |name: &str| directory.path().join(name);
    qemu_ok("qemu-io", directory.path(), &["-f", "qcow2", "-c", "write 0 2M", "base.qcow2"]);
    let mut base = std::fs::read(path("base.qcow2")).expect("an image");
    let entry_of =
        |base: &[u8], at: usize| u64::from_be_bytes(base[at..at + 8].try_into().expect("an entry"));
    let place = |entry: u64| (entry & 0x00ff_ffff_ffff_fe00) as usize;
    let l1_at = entry_of(&base, 40) as usize;
    let l2_at = place(entry_of(&base, l1_at));
    assert_eq!(entry_of(&base, l2_at) >> 63, 1, "the flag COPIED");
    base[l2_at] &= 0x7f;
    std::fs::write(path("base.qcow2"), &base).expect("a file");
    let top = Arc::new(open(&path("top.qcow2")).expect("it opens"));
    let merge = Merge::open(top, &path("base.qcow2"), true, AllowBacking::SameDir);
    let why = merge.err().expect("it is refused").to_string();
    assert!(why.contains("without the flag COPIED"), "{why}");
    assert!(std::fs::read(path("base.qcow2")).expect("a file") == base);
}

#[test]
fn pieces_of_one_cluster_of_the_backing_file_keep_each_other() {
    for cluster in ["2M", "64k", "4k"] {
        for syncs in [false, true] {
            let directory = directory();
            chain(&directory, cluster);
            let top = open(&directory.path().join("top.qcow2")).expect("it opens");
            let mut rig = rig(&top);
            rig.write(20 << 10, &vec![1; 3 << 20]);
            rig.write(5 * MIB, &vec![2; 256 << 10]);
            let zeroes = IoKind::WriteZeroes { unmap: true };
            assert_eq!(rig.run(&mut Request::command(zeroes, 5 * MIB + (512 << 10), MIB)), Ok(()));
            drop((rig, top));
            let expected = content(&directory.path().join("top.qcow2"));
            merge(directory.path(), syncs);
            let base = directory.path().join("base.qcow2");
            let found = content(&base);
            let differs = found.iter().zip(&expected).position(|(found, wanted)| found != wanted);
            assert_eq!(differs, None, "clusters of {cluster}, a sync after each piece: {syncs}");
            assert_eq!(check(&base), Ok(()));
        }
    }
}

/// The first piece ends with the raw file; then the guest writes to the cluster with that end.
#[test]
fn a_raw_backing_file_that_ends_within_a_sector_leaves_whole_sectors_to_copy() {
    let directory = directory();
    let (top, base) = (directory.path().join("top.qcow2"), directory.path().join("base.raw"));
    std::fs::write(&base, vec![9; MIB as usize + 4097]).expect("a raw file");
    let create = ["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2", "8M"];
    qemu_ok("qemu-img", directory.path(), &create);
    let disk = Arc::new(open(&top).expect("it opens"));
    let mut rig = rig(&disk);
    let merge = Merge::open(Arc::clone(&disk), &base, false, AllowBacking::SameDir);
    let (mut merge, mut range) = (merge.expect("it opens"), 0..8 * MIB);
    merge.grow(8 * MIB).expect("it grows");
    while range.start <= MIB {
        merge.copy_piece(&mut range, MIB).expect("a piece below");
    }
    rig.write(MIB, &vec![1; 64 << 10]);
    while !range.is_empty() {
        merge.copy_piece(&mut range, MIB).expect("a piece of the changed cluster");
    }
    let mut changed = MIB..MIB + (64 << 10);
    while !changed.is_empty() {
        merge.copy_piece(&mut changed, MIB).expect("a copy");
    }
    merge.sync().expect("a sync");
    assert!(std::fs::read(&base).expect("a file") == rig.read(0, 8 << 20));
}
