// SPDX-License-Identifier: Apache-2.0
//! Target `image`: any bytes as a qcow2 image, with a backing file beside it.

use crate::Rng;
use backend::conformance::{Request, Rig, SyncEngine, TestEngine};
use backend::{Disk, FileOptions, IoKind};
use qcow2::check::check;
use qcow2::create::{NewImage, Preallocation};
use qcow2::{AllowBacking, Qcow2Disk, Qcow2Options};
use std::fs::{self, File};
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

const CLUSTER: u64 = 4096;
const DISK_BYTES: u64 = 64 * CLUSTER;
const BASE: &str = "base.raw";
const BASE_BYTE: u8 = 0x5a;
/// Bytes in front of the image: one for the kind, one for the place of each operation.
const OPERATIONS: usize = 2 * 12;

/// Opens the image and uses it.
pub fn image(data: &[u8]) {
    let Some((operations, bytes)) = data.split_at_checked(OPERATIONS) else { return };
    let folder = folder();
    let path = folder.path().join("image");
    fs::write(&path, bytes).expect("an image");
    let was_sound = is_sound(&path);
    match Qcow2Disk::open(&path, &options()) {
        Ok(disk) => run(&disk, operations, was_sound),
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
    let base = fs::read(folder.path().join(BASE)).expect("the backing file");
    assert!(base.iter().all(|byte| *byte == BASE_BYTE), "the backing file was written");
}

/// A folder with the backing file.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join(BASE), vec![BASE_BYTE; DISK_BYTES as usize]).expect("a file");
    folder
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
    let mut rig =
        Rig::of(disk, &(Box::new(|| Box::new(SyncEngine::new()) as Box<dyn TestEngine>) as _));
    let capacity = disk.info().capacity_sectors * 512;
    for (number, operation) in operations.chunks_exact(2).enumerate() {
        let len = (1 + u64::from(operation[0] >> 4)) * 512;
        let at = u64::from(operation[1]) * 1024;
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
    static SOUND: OnceLock<Vec<u8>> = OnceLock::new();
    let image = SOUND.get_or_init(sound);
    let mut data: Vec<u8> = (0..OPERATIONS).map(|_| rng.next() as u8).collect();
    data.extend(image);
    let clusters = image.len() as u64 / CLUSTER;
    for _ in 0..rng.below(4) {
        // Header, refcounts, L1 and L2 tables are in the first clusters; few of their entries are used.
        let table = rng.below(clusters.min(6));
        let entries = rng.pick(&[1, 4, 16, 512]);
        let entry = rng.below(entries);
        let at = OPERATIONS + (table * CLUSTER + 8 * entry) as usize;
        let place = rng.below(clusters + 2) * CLUSTER;
        let flags = rng.pick(&[0, 1, 1 << 62, 1 << 63, 1 << 63, 3 << 62, (1 << 63) + 1, 512]);
        data[at..at + 8].copy_from_slice(&(place | flags).to_be_bytes());
    }
    data
}

fn sound() -> Vec<u8> {
    let folder = folder();
    let path = folder.path().join("image");
    let new = NewImage {
        size_bytes: DISK_BYTES,
        cluster_bytes: CLUSTER,
        backing: Some((BASE.to_owned(), false)),
        preallocation: Preallocation::Off,
    };
    let file = File::create_new(&path).expect("a file");
    new.write(&file).expect("a new image");
    drop(file);
    let disk = Qcow2Disk::open(&path, &options()).expect("it opens");
    run(&disk, &[0x32, 0, 0x42, 9, 0x72, 40, 0x75, 60], true);
    drop(disk);
    fs::read(&path).expect("the image")
}
