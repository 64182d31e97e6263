// SPDX-License-Identifier: Apache-2.0
//! Target `image`: any bytes as a qcow2 image, with a raw and a qcow2 backing file beside it.

use crate::Rng;
use backend::conformance::{Request, Rig, SyncEngine, TestEngine};
use backend::{Disk, FileOptions, IoKind};
use qcow2::check::check;
use qcow2::create::{NewImage, Preallocation};
use qcow2::{AllowBacking, Qcow2Disk, Qcow2Options};
use std::fs::{self, File};
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

const CLUSTER: u64 = 4096;
/// Bytes of the disk that one L2 table has.
const BY_TABLE: u64 = CLUSTER / 8 * CLUSTER;
/// The disk has three L2 tables, the last of them in part.
const DISK_BYTES: u64 = 2 * BY_TABLE + 64 * CLUSTER;
const BASE: &str = "base.raw";
/// The backing file ends before the disk.
const BASE_BYTES: usize = 64 * CLUSTER as usize;
const BASE_BYTE: u8 = 0x5a;
/// A qcow2 image over [`BASE`], with a cluster of its own at [`MIDDLE_AT`].
const MIDDLE: &str = "middle.qcow2";
const MIDDLE_AT: u64 = 8 * CLUSTER;
/// Fields of the header that change: the size of the disk, the L1 table, and the refcount table.
const CHANGING: [Range<usize>; 2] = [24..32, 36..60];
/// Bytes of the header that are compared: without those of extensions, which autoclear bits may change, and the
/// place of the name behind them.
const HEADER: [Range<usize>; 3] = [0..8, 20..88, 96..104];
/// Bytes in front of the image: one for the kind, one for the place of each operation.
const OPERATIONS: usize = 2 * 12;

/// Opens the image and uses it.
pub fn image(data: &[u8]) {
    let Some((operations, bytes)) = data.split_at_checked(OPERATIONS) else { return };
    let directory = directory();
    let path = directory.path().join("image");
    fs::write(&path, bytes).expect("an image");
    let was_sound = is_sound(&path);
    match Qcow2Disk::open(&path, &options()) {
        Ok(disk) => {
            run(&disk, operations, was_sound);
            drop(disk);
            check_header(&path, bytes);
        }
        Err(why) => {
            let now = fs::read(&path).expect("the image");
            let first = now.iter().zip(bytes).position(|(now, before)| now != before);
            let (now, before) = (now.len(), bytes.len());
            // The last cluster of a file may be filled up with zeroes.
            let is_padded = now >= before && now - before < 2 << 20;
            assert!(first.is_none() && is_padded, "byte {first:?}, {before} to {now}: {why}");
        }
    }
    assert!(!was_sound || is_sound(&path), "a sound image was damaged");
    for (name, content) in below() {
        let now = fs::read(directory.path().join(name)).expect("the backing file");
        assert!(now == *content, "the backing file {name} was written");
    }
}

/// The header of an accepted image still describes it.
fn check_header(path: &Path, before: &[u8]) {
    let now = fs::read(path).expect("the image");
    for at in HEADER.into_iter().flatten() {
        let changes = CHANGING.iter().any(|field| field.contains(&at));
        assert!(changes || now[at] == before[at], "byte {at} of the header was written");
    }
    // The tables are sound enough for the next opening.
    if let Err(why) = Qcow2Disk::open(path, &options()) {
        panic!("an accepted image is refused afterwards: {why}");
    }
}

/// The backing files and their content.
fn below() -> &'static [(&'static str, Vec<u8>)] {
    static BELOW: OnceLock<Vec<(&str, Vec<u8>)>> = OnceLock::new();
    BELOW.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a directory");
        let (base, path) = (vec![BASE_BYTE; BASE_BYTES], directory.path().join(MIDDLE));
        fs::write(directory.path().join(BASE), &base).expect("a file");
        create(&path, BASE, false);
        let disk = Qcow2Disk::open(&path, &options()).expect("it opens");
        let content = [0x33; CLUSTER as usize];
        rig(&disk)
            .run(&mut Request::write(MIDDLE_AT, &content, &[content.len()], 0))
            .expect("a write");
        drop(disk);
        vec![(BASE, base), (MIDDLE, fs::read(&path).expect("the image"))]
    })
}

/// A directory with the backing files.
fn directory() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, content) in below() {
        fs::write(directory.path().join(name), content).expect("a file");
    }
    directory
}

/// Makes an image over another one.
fn create(path: &Path, below: &str, is_qcow2: bool) {
    let new = NewImage {
        size_bytes: DISK_BYTES,
        cluster_bytes: CLUSTER,
        backing: Some((below.to_owned(), is_qcow2)),
        preallocation: Preallocation::Off,
    };
    new.write(&File::create_new(path).expect("a file")).expect("a new image");
}

fn rig(disk: &Qcow2Disk) -> Rig {
    Rig::of(disk, &(Box::new(|| Box::new(SyncEngine::new()) as Box<dyn TestEngine>) as _))
}

fn options() -> Qcow2Options {
    let file = FileOptions { direct: false, ..FileOptions::default() };
    Qcow2Options { file, allow_backing: AllowBacking::SameDir, ..Qcow2Options::default() }
}

fn is_sound(path: &Path) -> bool {
    let file = File::open(path).expect("the image");
    check(path, &file).is_ok_and(|report| report.errors == 0)
}

/// Runs the operations. A sound image returns what was written.
fn run(disk: &Qcow2Disk, operations: &[u8], was_sound: bool) {
    let mut rig = rig(disk);
    let capacity = disk.info().capacity_sectors * 512;
    for (number, operation) in operations.chunks_exact(2).enumerate() {
        let len = (1 + u64::from(operation[0] >> 4)) * 512;
        // Around the start of each L2 table.
        let table = u64::from(operation[1] >> 6) % 3 * BY_TABLE;
        let at = (table + u64::from(operation[1] & 63) * 1024).saturating_sub(4 * CLUSTER);
        // Half of the operations reach the end of a disk that a header made large.
        let at = if operation[0] & 8 == 0 { at } else { capacity.saturating_sub(at) };
        if at % 512 != 0 || at + len > capacity {
            continue;
        }
        let content = vec![number as u8 + 1; len as usize];
        let kind = match operation[0] & 7 {
            0 | 1 => {
                let _ = rig.run(&mut Request::read(at, &[len as usize], 0));
                continue;
            }
            2..=4 => {
                let written = rig.run(&mut Request::write(at, &content, &[len as usize], 0));
                if was_sound && written.is_ok() {
                    assert!(rig.read(at, len as usize) == content, "a write is lost");
                }
                continue;
            }
            5 => IoKind::WriteZeroes { unmap: true },
            6 => IoKind::WriteZeroes { unmap: false },
            _ => IoKind::Discard,
        };
        let done = rig.run(&mut Request::command(kind, at, len));
        if was_sound && done.is_ok() && kind != IoKind::Discard {
            assert!(rig.read(at, len as usize).iter().all(|byte| *byte == 0), "no zeroes");
        }
    }
    let _ = rig.run(&mut Request::command(IoKind::Flush, 0, 0));
}

/// A sound image with a few clusters, and a few entries of its tables changed.
pub(crate) fn seed(rng: &mut Rng) -> Vec<u8> {
    static SOUND: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    let images = SOUND.get_or_init(|| [sound(BASE, false), sound(MIDDLE, true)]);
    let image = &images[rng.below(2) as usize];
    let mut data: Vec<u8> = (0..OPERATIONS).map(|_| rng.next() as u8).collect();
    data.extend(image);
    let clusters = image.len() as u64 / CLUSTER;
    for _ in 0..rng.below(4) {
        // Few entries of the tables are used.
        let table = rng.pick(&tables(image));
        let entries = rng.pick(&[1, 4, 16, 512]);
        let at = OPERATIONS + (table + 8 * rng.below(entries)) as usize;
        let place = rng.below(clusters + 2) * CLUSTER;
        let flags = rng.pick(&[0, 1, 1 << 62, 1 << 63, 1 << 63, 3 << 62, (1 << 63) + 1, 512]);
        // Half of the changes damage counts, of which one word has four.
        let word = if rng.one_in(2) { place | flags } else { flags >> rng.below(64) };
        data[at..at + 8].copy_from_slice(&word.to_be_bytes());
    }
    data
}

/// Places of the header and the tables of a sound image.
fn tables(image: &[u8]) -> Vec<u64> {
    const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
    let word = |at: u64| {
        let bytes = image[at as usize..at as usize + 8].try_into().expect("eight bytes");
        u64::from_be_bytes(bytes) & PLACE
    };
    let (l1, refcounts) = (word(40), word(48));
    let l2 = (0..3).map(|entry| word(l1 + 8 * entry)).filter(|place| *place != 0);
    [0, l1, refcounts, word(refcounts)].into_iter().chain(l2).collect()
}

/// A sound image with compressed clusters in its first L2 table, and others in all of them.
fn sound(below: &str, is_qcow2: bool) -> Vec<u8> {
    let directory = directory();
    let path = directory.path().join("image");
    create(&path, below, is_qcow2);
    let disk = Qcow2Disk::open(&path, &options()).expect("it opens");
    run(&disk, &[0x32, 0, 0x42, 9, 0x72, 40, 0x75, 60, 0x32, 0x52, 0x72, 0x9a], true);
    drop(disk);
    let mut image = fs::read(&path).expect("the image");
    compress(&mut image);
    fs::write(&path, &image).expect("the image");
    assert!(is_sound(&path), "the image with compressed clusters");
    image
}

/// Adds a cluster with the data of two compressed clusters to an image, which the last two entries of its first L2
/// table name.
fn compress(image: &mut Vec<u8>) {
    let found = tables(image);
    let (l2, block, number) = (found[4], found[3], image.len() as u64 / CLUSTER);
    let place = number * CLUSTER;
    // A block of deflate without compression, which is the last one: its length, and the complement of it.
    let mut stored = vec![1, 0, 0x10, 0xff, 0xef];
    stored.extend([0x77; CLUSTER as usize]);
    for part in [place, place + 4608] {
        image.resize(part as usize, 0);
        image.extend(&stored);
    }
    image.resize((place + 3 * CLUSTER) as usize, 0);
    // Each has nine sectors, of which the first one counts as none; the second cluster has both.
    for (entry, part) in [(510, place), (511, place + 4608)] {
        let value: u64 = 1 << 62 | 8 << (62 - 4) | part;
        let at = (l2 + 8 * entry) as usize;
        image[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }
    for (cluster, count) in [(number, 1u16), (number + 1, 2), (number + 2, 1)] {
        let at = (block + 2 * cluster) as usize;
        image[at..at + 2].copy_from_slice(&count.to_be_bytes());
    }
}
