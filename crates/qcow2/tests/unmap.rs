// SPDX-License-Identifier: Apache-2.0
//! Discarded clusters leave the image, and no lane ever reads or writes other data in their places.

mod common;

use backend::conformance::{Request, Rig, SyncEngine, TestEngine};
use backend::{Disk, Io, IoKind, Lane, Slot, Step, mark};
use common::{
    MIB, PATIENCE, check, clusters, content, directory, end, image, options, qemu_ok, rig,
};
use kit::mount;
use mount::Mount;
use qcow2::{AllowBacking, Qcow2Disk};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

const CLUSTER: u64 = 64 << 10;

/// The image at `path`, which no other program may change.
fn open(path: &Path) -> Arc<Qcow2Disk> {
    let mut options = options(AllowBacking::SameDir, true);
    options.file.lock = Some(PATIENCE);
    Arc::new(Qcow2Disk::open(path, &options).expect("it opens"))
}

/// An empty image of 8 MiB in a directory of its own, which no other program may change.
fn disk() -> (TempDir, PathBuf, Arc<Qcow2Disk>) {
    let directory = directory();
    let (path, disk) = disk_in(&directory);
    (directory, path, disk)
}

fn disk_in(directory: &TempDir) -> (PathBuf, Arc<Qcow2Disk>) {
    let path = image(directory, 8, "cluster_size=64k");
    let disk = open(&path);
    (path, disk)
}

fn discard(rig: &mut Rig, at: u64, len: u64) {
    assert_eq!(rig.run(&mut Request::command(IoKind::Discard, at, len)), Ok(()), "{len} at {at}");
}

fn unmap(disk: &Qcow2Disk) {
    disk.unmap_discarded(PATIENCE).expect("the clusters leave");
}

fn is_filled(found: &[u8], byte: u8) -> bool {
    found.iter().all(|found| *found == byte)
}

#[test]
fn discarded_clusters_are_free_for_other_data() {
    free_for_other_data(&directory());
}

fn free_for_other_data(directory: &TempDir) {
    let (path, disk) = disk_in(directory);
    let mut rig = rig(&disk);
    rig.write(0, &vec![1; 3 * MIB as usize]);
    let size = fs::metadata(&path).expect("a file").len();
    discard(&mut rig, 0, MIB);
    let zeroes = IoKind::WriteZeroes { unmap: true };
    assert_eq!(rig.run(&mut Request::command(zeroes, 2 * MIB, MIB / 2)), Ok(()));
    unmap(&disk);
    assert_eq!((clusters(&path), disk.unmapped_bytes()), (24, 3 * MIB / 2));
    rig.write(5 * MIB, &vec![2; 3 * MIB as usize / 2]);
    assert_eq!(fs::metadata(&path).expect("a file").len(), size, "the places are used again");
    assert!(is_filled(&rig.read(0, MIB as usize), 0));
    drop(rig);
    end(disk);
    assert_eq!((check(&path), clusters(&path)), (Ok(()), 48));
    let found = content(&path);
    let part = |of: Range<u64>| &found[of.start as usize * 512..of.end as usize * 512];
    assert!(is_filled(part(0..2048), 0) && is_filled(part(2048..4096), 1));
    assert!(is_filled(part(4096..5120), 0) && is_filled(part(5120..6144), 1));
    assert!(is_filled(part(10240..13312), 2));
}

#[test]
fn the_end_of_a_disk_waits_for_discarded_clusters_to_leave() {
    let (_directory, path, disk) = disk();
    let mut rig = rig(&disk);
    rig.write(0, &vec![1; MIB as usize]);
    discard(&mut rig, 0, MIB);
    drop(rig);
    end(disk);
    assert_eq!((check(&path), clusters(&path)), (Ok(()), 0));
}

#[test]
fn a_cluster_leaves_when_its_last_part_is_discarded() {
    let (_directory, path, disk) = disk();
    let mut rig = rig(&disk);
    rig.write(0, &vec![1; CLUSTER as usize]);
    for at in (0..CLUSTER).step_by(8192).filter(|at| *at != 2 * 8192) {
        discard(&mut rig, at, 8192);
        unmap(&disk);
        assert_eq!(clusters(&path), 1, "a part is in use");
    }
    assert!(is_filled(&rig.read(2 * 8192, 8192), 1));
    discard(&mut rig, 2 * 8192, 8192);
    unmap(&disk);
    assert_eq!(clusters(&path), 0);
}

/// The other lane asks for nothing: it knows the place.
#[test]
fn data_that_another_lane_writes_after_a_discard_stays() {
    let (_directory, path, disk) = disk();
    let (mut one, mut other) = (rig(&disk), rig(&disk));
    one.write(0, &vec![1; 3 * CLUSTER as usize]);
    assert!(is_filled(&other.read(0, 512), 1));
    discard(&mut one, 0, 3 * CLUSTER);
    other.write(CLUSTER + 4096, &[2; 4096]);
    unmap(&disk);
    assert_eq!(clusters(&path), 1);
    for rig in [&mut one, &mut other] {
        let found = rig.read(0, 3 * CLUSTER as usize);
        let at = (CLUSTER + 4096) as usize;
        assert!(is_filled(&found[at..at + 4096], 2));
        assert!(is_filled(&found[..at], 0) && is_filled(&found[at + 4096..], 0));
    }
}

/// Without that each unmap would make each lane ask for all places that it uses.
#[test]
fn a_lane_asks_again_for_the_discarded_places_and_for_no_other() {
    let (_directory, path, disk) = disk();
    let (mut one, mut other) = (rig(&disk), rig(&disk));
    // Each MiB has a place of its own.
    for at in (0..8).rev().map(|n| n * MIB) {
        one.write(at, &vec![1; MIB as usize]);
    }
    let mut read_all = |questions: u64| {
        let before = disk.questions();
        for at in (0..8 * MIB).step_by(CLUSTER as usize) {
            let gone = (2 * MIB..2 * MIB + 3 * CLUSTER).contains(&at);
            let wanted = if disk.unmapped_bytes() > 0 && gone { 0 } else { 1 };
            assert!(is_filled(&other.read(at, CLUSTER as usize), wanted), "{at}");
        }
        assert_eq!(disk.questions() - before, questions);
    };
    // The answers have the places of the first 64 clusters, and of the others.
    read_all(2);
    read_all(0);
    for cluster in 0..3 {
        discard(&mut one, 2 * MIB + cluster * CLUSTER, CLUSTER);
        unmap(&disk);
    }
    assert_eq!(clusters(&path), 125);
    // The zero clusters are one range, which is known then.
    read_all(1);
    read_all(0);
}

/// A write of 4 KiB whose operation on the file is not executed until its end.
struct InFlight {
    lane: Box<dyn Lane>,
    engine: SyncEngine,
    io: Io,
    _request: Request,
}

impl InFlight {
    fn start(disk: &Qcow2Disk, at: u64, byte: u8) -> InFlight {
        let mut lane = disk.open_lane().expect("a lane");
        let mut engine = SyncEngine::new();
        engine.register(&lane.files()).expect("the files");
        let mut request = Request::write(at, &[byte; 4096], &[4096], 0);
        let bufs = request.memory.as_mut().expect("memory").bufs();
        let mut io = Io::new(IoKind::Write, at, 4096, bufs);
        // The lane asks for the place, and then pushes the operation.
        assert_eq!(lane.start(&mut io, Slot(0), &mut engine), Step::Pending);
        let (token, result) = engine.next_event(PATIENCE).expect("an answer");
        assert_eq!(lane.event(&mut io, token, result, &mut engine), Step::Pending);
        InFlight { lane, engine, io, _request: request }
    }

    fn end(mut self) {
        let (token, result) = self.engine.next_event(PATIENCE).expect("the write");
        let step = self.lane.event(&mut self.io, token, result, &mut self.engine);
        assert_eq!(step, Step::Done(Ok(())));
    }
}

/// Begins to unmap, and waits for a request in flight.
fn begin_unmap(disk: &Qcow2Disk) {
    let waits = disk.unmap_discarded(Duration::from_millis(50)).expect_err("an I/O is in flight");
    assert_eq!(waits.kind(), ErrorKind::TimedOut);
}

#[test]
fn clusters_stay_while_an_io_that_began_before_is_in_flight() {
    let (_directory, path, disk) = disk();
    let mut one = rig(&disk);
    one.write(0, &vec![1; 2 * CLUSTER as usize]);
    let write = InFlight::start(&disk, 0, 2);
    discard(&mut one, 0, 2 * CLUSTER);
    begin_unmap(&disk);
    assert_eq!(clusters(&path), 2);
    one.write(MIB, &vec![3; 2 * CLUSTER as usize]);
    write.end();
    unmap(&disk);
    assert_eq!(clusters(&path), 3, "the cluster without new data has left");
    assert!(is_filled(&one.read(0, 4096), 2) && is_filled(&one.read(4096, 4096), 0));
    assert!(is_filled(&one.read(MIB, 2 * CLUSTER as usize), 3));
}

/// The other lane asks for the place, and then writes without a question.
#[test]
fn a_cluster_that_is_asked_for_before_it_leaves_has_no_unknown_writer() {
    let (_directory, path, disk) = disk();
    let (mut one, mut other) = (rig(&disk), rig(&disk));
    one.write(0, &vec![1; 3 * CLUSTER as usize]);
    let write = InFlight::start(&disk, 2 * CLUSTER, 2);
    discard(&mut one, 0, 2 * CLUSTER);
    begin_unmap(&disk);
    assert!(is_filled(&other.read(0, 4096), 0));
    write.end();
    unmap(&disk);
    one.write(MIB, &vec![3; 2 * CLUSTER as usize]);
    other.write(0, &[4; 4096]);
    assert!(is_filled(&one.read(0, 4096), 4));
    assert!(is_filled(&one.read(MIB, 2 * CLUSTER as usize), 3));
    drop((one, other));
    end(disk);
    assert_eq!(check(&path), Ok(()));
}

#[test]
fn a_cluster_of_an_overlay_that_leaves_still_hides_the_backing_file() {
    let directory = directory();
    fs::write(directory.path().join("base.raw"), vec![0x5a; 4 << 20]).expect("a base");
    let create = ["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", "a.qcow2", "4M"];
    qemu_ok("qemu-img", directory.path(), &create);
    let path = directory.path().join("a.qcow2");
    let disk = open(&path);
    let mut rig = rig(&disk);
    rig.write(MIB, &vec![1; MIB as usize]);
    discard(&mut rig, MIB, MIB);
    unmap(&disk);
    assert_eq!(clusters(&path), 0);
    assert!(is_filled(&rig.read(MIB, MIB as usize), 0));
    drop(rig);
    end(disk);
    assert_eq!(check(&path), Ok(()));
    let found = content(&path);
    assert!(is_filled(&found[..1 << 20], 0x5a) && is_filled(&found[1 << 20..2 << 20], 0));
}

#[test]
fn a_settled_disk_changes_nothing_more_until_a_request() {
    let (_directory, path, disk) = disk();
    let mut rig = rig(&disk);
    rig.write(0, &vec![1; (MIB + CLUSTER) as usize]);
    // It changes no byte, and lets nothing leave before the disk has settled.
    let write = InFlight::start(&disk, MIB, 1);
    discard(&mut rig, 0, MIB);
    disk.settle(PATIENCE).expect("the tables are durable");
    let settled = fs::read(&path).expect("the image");
    write.end();
    unmap(&disk);
    assert!(fs::read(&path).expect("the image") == settled, "what was discarded is forgotten");
    discard(&mut rig, 0, 4096);
    unmap(&disk);
    assert_eq!(clusters(&path), 16);
}

/// A request that never ends holds its places, but not the end of the disk.
#[test]
fn the_end_of_a_disk_with_a_request_in_flight_frees_nothing_and_is_clean() {
    let (_directory, path, disk) = disk();
    let mut one = rig(&disk);
    one.write(0, &vec![1; 2 * CLUSTER as usize]);
    let write = InFlight::start(&disk, 0, 2);
    discard(&mut one, 0, 2 * CLUSTER);
    disk.close_within(Duration::from_millis(100), PATIENCE);
    drop((one, disk));
    let marked = mark::in_use(&File::open(&path).expect("it opens")).expect("the attribute");
    assert_eq!((marked, check(&path), clusters(&path)), (None, Ok(()), 2));
    write.end();
    assert!(is_filled(&content(&path)[..4096], 2));
}

/// The range of the last cluster ends with the disk, within the cluster, before the growth.
#[test]
fn a_disk_that_grows_forgets_what_was_discarded() {
    let directory = directory();
    let size = (3 * MIB + 512).to_string();
    let create = ["create", "-qf", "qcow2", "-o", "cluster_size=4k", "a.qcow2", &size];
    qemu_ok("qemu-img", directory.path(), &create);
    let path = directory.path().join("a.qcow2");
    let disk = open(&path);
    let mut small = rig(&disk);
    small.write(0, &vec![1; 3 * MIB as usize]);
    small.write(3 * MIB, &[1; 512]);
    // Another range waits, so that all later ones wait for the same epoch.
    let write = InFlight::start(&disk, 0, 2);
    discard(&mut small, 2 * MIB, 4096);
    begin_unmap(&disk);
    discard(&mut small, 3 * MIB, 512);
    disk.resize(Some(8 * MIB)).expect("it grows");
    let mut grown = rig(&disk);
    grown.write(4 * MIB, &vec![1; 2 * MIB as usize]);
    discard(&mut grown, 4 * MIB, 2 * MIB);
    write.end();
    unmap(&disk);
    assert_eq!((disk.unmapped_bytes(), clusters(&path)), (2 * MIB, 769), "whole clusters leave");
    drop((small, grown));
    end(disk);
    assert_eq!(check(&path), Ok(()));
}

#[test]
fn discarded_clusters_of_a_shared_image_stay() {
    let directory = directory();
    let path = image(&directory, 8, "cluster_size=64k");
    let disk = Qcow2Disk::open(&path, &options(AllowBacking::Off, true)).expect("it opens");
    let mut rig = rig(&disk);
    rig.write(0, &vec![1; MIB as usize]);
    discard(&mut rig, 0, MIB);
    unmap(&disk);
    assert_eq!(clusters(&path), 16);
}

/// The random requests of one lane, on the sectors `n` with `n % LANES == lane`, in pieces of 4 KiB: all
/// clusters belong to all lanes.
fn load(disk: &Qcow2Disk, lane: u64, rounds: u64) -> Vec<u8> {
    let mut rig = rig(disk);
    let mut model = vec![0; SIZE as usize];
    let seed = lane << 32 | u64::from(std::process::id());
    println!("lane {lane}: seed {seed}");
    let mut numbers = fastrand::Rng::with_seed(seed);
    let mut random = |below: u64| numbers.u64(..below);
    for round in 0..rounds {
        // Most of the time in few clusters, so that they fill and empty.
        let clusters = if random(4) == 0 { SIZE / SHARED } else { 8 };
        let cluster = random(clusters) * SHARED;
        let byte = (round % 255) as u8 + 1;
        let kind = random(8);
        for part in (cluster..cluster + SHARED).step_by(PART as usize) {
            if part / PART % LANES != lane {
                continue;
            }
            let at = part as usize..(part + PART) as usize;
            match kind {
                0..3 => {
                    rig.write(part, &[byte; PART as usize]);
                    model[at.clone()].fill(byte);
                }
                3..6 => {
                    discard(&mut rig, part, PART);
                    model[at.clone()].fill(0);
                }
                _ => {}
            }
            assert!(rig.read(part, PART as usize) == model[at], "lane {lane}: {part} is wrong");
        }
    }
    model
}

const LANES: u64 = 3;
const SIZE: u64 = 2 * MIB;
/// The clusters of the test.
const SHARED: u64 = 16 << 10;
const PART: u64 = 4 << 10;
/// A cluster that is filled and discarded again and again, and read in between.
const AGAIN: u64 = 3 * MIB;

#[test]
fn lanes_that_write_and_discard_parts_of_the_same_clusters_read_their_own_data() {
    loaded(&directory(), 1500);
}

/// On each file system whose holes count as exact. The directory of the other tests is on one of them.
#[test]
fn clusters_leave_on_each_file_system_whose_holes_are_exact() {
    if mount::may_not_mount() {
        return;
    }
    for mount in [Mount::ext4(256), Mount::xfs(384), Mount::btrfs(512), Mount::tmpfs(256)] {
        free_for_other_data(&mount.place);
        fs::remove_file(mount.path("a.qcow2")).expect("the image");
        loaded(&mount.place, 400);
    }
}

/// A commit that finds no space would end all writes of the disk.
#[test]
fn without_room_for_changed_tables_discarded_clusters_stay() {
    if mount::may_not_mount() {
        return;
    }
    let mount = Mount::tmpfs(60);
    let (path, disk) = disk_in(&mount.place);
    let mut rig = rig(&disk);
    rig.write(0, &vec![1; 2 * MIB as usize]);
    discard(&mut rig, 0, MIB);
    unmap(&disk);
    assert_eq!((disk.unmapped_bytes(), clusters(&path)), (0, 32));
    assert!(is_filled(&rig.read(0, MIB as usize), 0));
    mount.resize(256);
    discard(&mut rig, MIB, MIB / 2);
    unmap(&disk);
    assert_eq!((disk.unmapped_bytes(), clusters(&path)), (MIB / 2, 24));
    rig.write(0, &vec![3; MIB as usize]);
    drop(rig);
    end(disk);
    let found = content(&path);
    let mib = MIB as usize;
    assert!(is_filled(&found[..mib], 3) && is_filled(&found[mib..mib + mib / 2], 0));
    assert!(is_filled(&found[mib + mib / 2..2 * mib], 1));
    assert_eq!(check(&path), Ok(()));
}

/// Clusters leave all the time, and their places get other data, also while a reader reads one.
fn loaded(directory: &TempDir, rounds: u64) {
    let path = image(directory, 4, "cluster_size=16k");
    let disk = open(&path);
    let quiet = Mutex::new(());
    let is_over = AtomicBool::new(false);
    let works: [&(dyn Fn() + Sync); 3] = [
        &|| unmap(&disk),
        &|| {
            let mut rig = rig(&disk);
            let _quiet = quiet.lock().expect("no thread panics");
            rig.write(AGAIN, &[0xee; PART as usize]);
            discard(&mut rig, AGAIN, PART);
        },
        &|| {
            let mut reader = disk.reader().expect("a reader");
            let _quiet = quiet.lock().expect("no thread panics");
            for _ in 0..100 {
                assert!(is_filled(reader.read(AGAIN..AGAIN + PART).expect("data"), 0));
            }
        },
    ];
    let models: Vec<Vec<u8>> = thread::scope(|scope| {
        let start = |lane| {
            scope.spawn({
                let disk = &disk;
                move || load(disk, lane, rounds)
            })
        };
        let loads: Vec<_> = (0..LANES).map(start).collect();
        let works = works.map(|work| {
            scope.spawn({
                let is_over = &is_over;
                move || {
                    while !is_over.load(Ordering::Relaxed) {
                        work();
                    }
                }
            })
        });
        let models: Vec<_> = loads.into_iter().map(|load| load.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        works.into_iter().for_each(|work| work.join().expect("the right data"));
        models.into_iter().map(|model| model.expect("the right data")).collect()
    });
    assert!(disk.unmapped_bytes() > 0);
    end(disk);
    assert_eq!(check(&path), Ok(()));
    let found = content(&path);
    for part in (0..SIZE).step_by(PART as usize) {
        let at = part as usize..(part + PART) as usize;
        assert!(found[at.clone()] == models[(part / PART % LANES) as usize][at], "{part}");
    }
}
