// SPDX-License-Identifier: Apache-2.0
//! Discards give space back to the host, and QEMU agrees with the content afterwards.

mod common;

use backend::conformance::{Request, Rig};
use backend::{Disk, IoKind};
use common::{MIB, check, clusters, content, directory, image, open, options, qemu_ok, rig};
use proptest::prelude::*;
use qcow2::{AllowBacking, Qcow2Disk};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const DISK: u64 = 4 * MIB;

fn discard(rig: &mut Rig, at: u64, len: u64) {
    assert_eq!(rig.run(&mut Request::command(IoKind::Discard, at, len)), Ok(()), "{len} at {at}");
}

/// Bytes that the file takes on the host.
fn taken(path: &Path) -> u64 {
    fs::metadata(path).expect("the image").blocks() * 512
}

/// Bytes that do not compress.
fn noise(len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    bytes
}

/// An image of 4 MiB whose clusters are compressed by a half.
fn compressed(directory: &TempDir, cluster: &str) -> PathBuf {
    let mut data = noise(DISK);
    data.chunks_mut(2048).for_each(|part| part[..1024].fill(7));
    fs::write(directory.path().join("a.raw"), data).expect("a raw image");
    let of = format!("cluster_size={cluster}");
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &of, "a.raw", "a.qcow2"];
    qemu_ok("qemu-img", directory.path(), &convert);
    directory.path().join("a.qcow2")
}

/// With `--discard off` the freed data stays in the file.
#[test]
fn a_new_cluster_in_the_place_of_freed_data_has_none_of_it() {
    let directory = directory();
    let path = compressed(&directory, "64k");
    qemu_ok("qemu-img", directory.path(), &["resize", "-q", "a.qcow2", "12M"]);
    let mut options = options(AllowBacking::Off, true);
    options.file.discard = false;
    let disk = Qcow2Disk::open(&path, &options).expect("it opens");
    let mut rig = rig(&disk);
    let mut expected = vec![0; 12 * MIB as usize];
    for at in (0..DISK).step_by(64 << 10) {
        rig.write(at, &[1; 64 << 10]);
        expected[at as usize..][..64 << 10].fill(1);
    }
    let end = fs::metadata(&path).expect("the image").len();
    for at in (2 * DISK..3 * DISK).step_by(64 << 10) {
        rig.write(at + 8192, &[2; 512]);
        expected[at as usize + 8192..][..512].fill(2);
    }
    assert!(fs::metadata(&path).expect("the image").len() < end + DISK, "places were reused");
    assert!(rig.read(0, expected.len()) == expected);
    drop((rig, disk));
    assert_eq!(check(&path), Ok(()));
    assert!(content(&path) == expected);
}

/// A disk cannot shrink: no next start would serve it.
#[test]
fn a_disk_does_not_grow_to_a_size_that_the_next_start_refuses() {
    for (cluster, most) in [("cluster_size=4k", 8 << 40), ("cluster_size=2M", 1 << 60)] {
        let directory = directory();
        let path = image(&directory, 4, cluster);
        let disk = open(&path).expect("it opens");
        let too_large = disk.resize(Some(most + 512)).expect_err("a larger size").to_string();
        assert!(too_large.contains(&format!("at most {most} bytes")), "{too_large}");
        disk.resize(Some(64 * MIB)).expect("it grows");
        drop(disk);
        open(&path).expect("it opens again");
    }
}

#[test]
fn a_discard_of_written_data_gives_its_space_back() {
    let directory = directory();
    let path = image(&directory, 4, "cluster_size=64k");
    let disk = open(&path).expect("it opens");
    let mut rig = rig(&disk);
    rig.write(0, &noise(2 * MIB));
    let before = taken(&path);
    discard(&mut rig, 0, MIB);
    // The file system may need a block to describe the hole.
    assert!(taken(&path) + MIB <= before + (16 << 10), "{} of {before} bytes", taken(&path));
    assert!(rig.read(0, MIB as usize).iter().all(|byte| *byte == 0));
    drop((rig, disk));
    assert_eq!(check(&path), Ok(()));
}

#[test]
fn a_discard_of_compressed_data_frees_its_clusters_and_their_space() {
    let directory = directory();
    let path = compressed(&directory, "64k");
    let (before, all) = (taken(&path), content(&path));
    assert_eq!(clusters(&path), DISK >> 16);
    let disk = open(&path).expect("it opens");
    let mut rig = rig(&disk);
    discard(&mut rig, MIB + 512, 2 * MIB);
    let back = before - taken(&path);
    assert!((900 << 10..1200 << 10).contains(&back), "{back} of {before} bytes");
    drop((rig, disk));
    assert_eq!((check(&path), clusters(&path)), (Ok(()), (DISK >> 16) - 31));
    let (found, from, to) = (content(&path), (MIB + (64 << 10)) as usize, 3 * MIB as usize);
    assert!(found[..from] == all[..from] && found[to..] == all[to..]);
    assert!(found[from..to].iter().all(|byte| *byte == 0));
}

#[test]
fn freed_clusters_stay_in_the_file_of_a_disk_without_discard() {
    let directory = directory();
    let path = compressed(&directory, "64k");
    let before = taken(&path);
    let mut options = options(AllowBacking::Off, true);
    options.file.discard = false;
    let disk = Qcow2Disk::open(&path, &options).expect("it opens");
    let mut rig = rig(&disk);
    let zeroes = IoKind::WriteZeroes { unmap: false };
    assert_eq!(rig.run(&mut Request::command(zeroes, 0, DISK)), Ok(()));
    assert!(taken(&path) >= before, "{} of {before} bytes", taken(&path));
    drop((rig, disk));
    assert_eq!((check(&path), clusters(&path)), (Ok(()), 0));
}

/// Also the last cluster, in which the backing file ends, and no cluster of which a part stays.
#[test]
fn a_discard_of_backing_data_reads_as_zeroes_in_every_lane() {
    let directory = directory();
    fs::write(directory.path().join("base.raw"), vec![0x5a; (2 * MIB + 4096) as usize])
        .expect("a base");
    let create = ["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", "a.qcow2", "4M"];
    qemu_ok("qemu-img", directory.path(), &create);
    let path = directory.path().join("a.qcow2");
    let disk = open(&path).expect("it opens");
    let (mut one, mut other) = (rig(&disk), rig(&disk));
    assert!(one.read(0, 2 * MIB as usize + 4096).iter().all(|byte| *byte == 0x5a));
    discard(&mut other, MIB - 4096, MIB + (64 << 10) + 4096);
    for rig in [&mut one, &mut other] {
        let found = rig.read(0, DISK as usize);
        assert!(found[..MIB as usize].iter().all(|byte| *byte == 0x5a));
        assert!(found[MIB as usize..].iter().all(|byte| *byte == 0));
    }
    drop((one, other, disk));
    assert_eq!(check(&path), Ok(()));
    let found = content(&path);
    assert!(found[..MIB as usize].iter().all(|byte| *byte == 0x5a));
    assert!(found[MIB as usize..].iter().all(|byte| *byte == 0));
}

#[derive(Clone, Debug)]
enum Step {
    Write(u8),
    Zero(bool),
    Discard,
    Grow,
}

fn steps() -> impl Strategy<Value = Vec<(Step, usize, u64, u64)>> {
    let step = prop_oneof![
        3 => (1..=255u8).prop_map(Step::Write),
        2 => any::<bool>().prop_map(Step::Zero),
        4 => Just(Step::Discard),
        1 => Just(Step::Grow),
    ];
    // Half of the ranges are of whole 4 KiB.
    let place =
        (0..DISK / 512, 1..1200u64, any::<bool>()).prop_map(|(at, len, whole)| match whole {
            true => (at / 8 * 8, len.next_multiple_of(8)),
            false => (at, len),
        });
    let step = (step, 0..2usize, place).prop_map(|(step, lane, (at, len))| (step, lane, at, len));
    prop::collection::vec(step, 1..24)
}

/// Runs the steps on two lanes. The model knows which bytes a discard may leave.
fn follow(path: &Path, steps: &[(Step, usize, u64, u64)]) -> Result<(), TestCaseError> {
    let mut model = content(path);
    let disk = open(path).expect("it opens");
    let mut rigs = [rig(&disk), rig(&disk)];
    let mut size = model.len() as u64;
    for (step, lane, at, len) in steps {
        let (at, rig) = (at * 512, &mut rigs[*lane]);
        let len = (len * 512).min(size - at);
        let range = at as usize..(at + len) as usize;
        match step {
            Step::Write(byte) => {
                rig.write(at, &vec![*byte; len as usize]);
                model[range].fill(*byte);
            }
            Step::Zero(unmap) => {
                let zeroes = IoKind::WriteZeroes { unmap: *unmap };
                prop_assert_eq!(rig.run(&mut Request::command(zeroes, at, len)), Ok(()));
                model[range].fill(0);
            }
            Step::Discard => {
                discard(rig, at, len);
                let found = rig.read(at, len as usize);
                for (sector, old) in found.chunks(512).zip(model[range.clone()].chunks(512)) {
                    prop_assert!(sector == old || sector.iter().all(|byte| *byte == 0));
                }
                model[range].copy_from_slice(&found);
            }
            Step::Grow => {
                size += 64 << 10;
                disk.resize(Some(size)).expect("it grows");
                model.resize(size as usize, 0);
                rigs = [self::rig(&disk), self::rig(&disk)];
            }
        }
        for rig in &mut rigs {
            prop_assert!(rig.read(0, size as usize) == model, "after {step:?} of {len} at {at}");
        }
    }
    drop((rigs, disk));
    prop_assert_eq!(check(path), Ok(()));
    prop_assert!(content(path) == model, "as QEMU reads it");
    Ok(())
}

/// Few sequences, unless `PROPTEST_CASES` says otherwise (`scripts/qcow2-long.sh`).
fn config() -> ProptestConfig {
    let asked = ProptestConfig::default();
    let cases = std::env::var_os("PROPTEST_CASES").map_or(3, |_| asked.cases);
    ProptestConfig { cases, ..asked }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn discards_on_an_overlay_leave_what_qemu_reads(steps in steps(), top in 0..2usize) {
        let directory = directory();
        let middle = compressed(&directory, "16k");
        qemu_ok("qemu-io", directory.path(), &["-f", "qcow2", "-c", "write -z 1M 100k", "a.qcow2"]);
        fs::rename(middle, directory.path().join("middle.qcow2")).expect("a name");
        let of = format!("cluster_size={}", ["4k", "64k"][top]);
        let create = ["create", "-qf", "qcow2", "-F", "qcow2", "-b", "middle.qcow2", "-o", &of];
        qemu_ok("qemu-img", directory.path(), &[&create[..], &["top.qcow2", "4200960"]].concat());
        follow(&directory.path().join("top.qcow2"), &steps)?;
    }

    #[test]
    fn discards_on_compressed_clusters_leave_what_qemu_reads(steps in steps(), of in 0..2usize) {
        let directory = directory();
        let path = compressed(&directory, ["4k", "64k"][of]);
        follow(&path, &steps)?;
    }
}
