// SPDX-License-Identifier: Apache-2.0
//! A disk that is copied while it is written: the suite, the waits, and the copy.

mod common;

use backend::conformance::{Delivered, MakeEngine, ManualEngine, Request, Rig, SyncEngine, Target};
use backend::file::Reader;
use backend::wrap::{CLUSTER_BYTES, Clusters, CopyFirst, Turn};
use backend::{BufList, Disk, File, FileOptions, Io, IoKind, Lane, Mem, Slot, Step, conformance};
use common::{DISK, Image, TMPFS, around_file};
use kit::mount;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SIZE: u64 = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// A thread that only frees the clusters that I/Os wait for; ends when dropped.
struct Freeing {
    clusters: Arc<Clusters>,
    thread: Option<JoinHandle<()>>,
}

impl Freeing {
    fn start(clusters: &Arc<Clusters>) -> Freeing {
        let of_thread = Arc::clone(clusters);
        let body = move || {
            while let Turn::Wanted(number) = of_thread.turn(Instant::now() + PATIENCE) {
                of_thread.free(number..number + 1);
            }
        };
        Freeing { clusters: Arc::clone(clusters), thread: Some(std::thread::spawn(body)) }
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        self.clusters.end();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn around(inner: Arc<dyn Disk>) -> Target {
    let clusters = Arc::new(Clusters::new(inner.info().capacity_sectors * 512).unwrap());
    let freeing = Freeing::start(&clusters);
    Target::new(CopyFirst::new(inner, clusters)).keeping(freeing)
}

conformance!(around_mem, Ok(around(Arc::new(Mem::new(SIZE).unwrap()))));
conformance!(around_direct_file, around_file(SIZE, around));

fn zeroing(first: u64, count: u64) -> Io {
    let kind = IoKind::WriteZeroes { unmap: false };
    Io::new(kind, first * CLUSTER_BYTES, count * CLUSTER_BYTES, BufList::EMPTY)
}

/// A lane around memory, its engine and the clusters.
fn lane(clusters: u64) -> (Box<dyn Lane>, ManualEngine, Arc<Clusters>) {
    let bytes = clusters * CLUSTER_BYTES;
    let state = Arc::new(Clusters::new(bytes).unwrap());
    let disk = CopyFirst::new(Arc::new(Mem::new(bytes).unwrap()), Arc::clone(&state));
    (disk.open_lane().unwrap(), ManualEngine::new(), state)
}

/// The slots whose wait has ended.
fn ended(delivered: &mut Delivered) -> Vec<u32> {
    std::iter::from_fn(|| delivered.poll()).map(|(token, _)| token.slot.0).collect()
}

#[test]
fn a_change_waits_until_all_of_its_clusters_are_free_and_a_read_does_not() {
    let (mut lane, mut engine, clusters) = lane(4);
    let mut io = zeroing(1, 2);
    assert_eq!(lane.start(&mut io, Slot(7), &mut engine), Step::Pending);
    for kind in [IoKind::Read, IoKind::Flush] {
        let mut io = Io::new(kind, 0, 0, BufList::EMPTY);
        assert_eq!(lane.start(&mut io, Slot(0), &mut engine), Step::Done(Ok(())));
    }
    assert_eq!(clusters.turn(Instant::now()), Turn::Wanted(1));
    clusters.free(1..2);
    assert_eq!(engine.delivered.poll(), None, "cluster 2 is held");
    assert_eq!(clusters.turn(Instant::now()), Turn::Wanted(2));
    clusters.free(2..3);
    let (token, result) = engine.delivered.poll().expect("the wait has ended");
    assert_eq!((token.slot, token.layer, result), (Slot(7), 1, 0));
    assert_eq!(lane.event(&mut io, token, result, &mut engine), Step::Done(Ok(())));
    assert_eq!(clusters.turn(Instant::now()), Turn::Own);
    assert_eq!(lane.start(&mut zeroing(2, 1), Slot(1), &mut engine), Step::Done(Ok(())));
    assert_eq!(clusters.freed_bytes(), 2 * CLUSTER_BYTES);
}

#[test]
fn a_long_change_does_not_delay_a_short_one() {
    let (mut lane, mut engine, clusters) = lane(200);
    assert_eq!(lane.start(&mut zeroing(0, 150), Slot(0), &mut engine), Step::Pending);
    assert_eq!(lane.start(&mut zeroing(180, 1), Slot(1), &mut engine), Step::Pending);
    let mut turns = 0;
    while ended(&mut engine.delivered).is_empty() {
        let Turn::Wanted(number) = clusters.turn(Instant::now()) else { panic!("nothing waits") };
        clusters.free(number..number + 1);
        turns += 1;
    }
    assert_eq!(turns, 2);
}

#[test]
fn the_end_of_the_copy_starts_all_that_waits_and_nothing_waits_afterwards() {
    let (mut lane, mut engine, clusters) = lane(4);
    assert_eq!(lane.start(&mut zeroing(0, 4), Slot(0), &mut engine), Step::Pending);
    assert_eq!(lane.start(&mut zeroing(3, 1), Slot(1), &mut engine), Step::Pending);
    clusters.end();
    assert_eq!(ended(&mut engine.delivered), [0, 1]);
    assert_eq!(clusters.turn(Instant::now()), Turn::Ended);
    assert_eq!(lane.start(&mut zeroing(2, 2), Slot(2), &mut engine), Step::Done(Ok(())));
}

#[test]
fn clusters_are_free_behind_the_capacity_of_the_first_moment() {
    let clusters = Arc::new(Clusters::new(CLUSTER_BYTES + 512).unwrap());
    let grown = Arc::new(Mem::new(4 * CLUSTER_BYTES).unwrap());
    let disk = CopyFirst::new(grown, Arc::clone(&clusters));
    let (mut lane, mut engine) = (disk.open_lane().unwrap(), ManualEngine::new());
    assert_eq!(lane.start(&mut zeroing(2, 2), Slot(0), &mut engine), Step::Done(Ok(())));
    assert_eq!(lane.start(&mut zeroing(1, 3), Slot(0), &mut engine), Step::Pending);
    assert_eq!((clusters.len(), clusters.bytes_of(0..2)), (2, 0..CLUSTER_BYTES + 512));
    clusters.free(0..2);
    assert_eq!(clusters.freed_bytes(), CLUSTER_BYTES + 512);
}

#[test]
fn runs_of_held_clusters_are_found() {
    let clusters = Clusters::new(100 * CLUSTER_BYTES).unwrap();
    clusters.free(0..10);
    clusters.free(63..66);
    assert_eq!(clusters.first_held(0..100, 16), Some(10..26));
    assert_eq!(clusters.first_held(60..100, 16), Some(60..63));
    assert_eq!(clusters.first_held(63..100, 50), Some(66..100));
    assert_eq!(clusters.first_held(0..10, 16), None);
}

/// Content of a sector before the copy.
fn sector(number: u64) -> [u8; 512] {
    std::array::from_fn(|at| (number as usize * 31 + at) as u8)
}

/// Copies by a reader until all clusters are free. Before `done` counts a round of changes, copies only what
/// changes wait for: a round ends within the copy, however late its thread begins.
fn copy(clusters: &Clusters, mut reader: Reader, done: &AtomicU64) -> Vec<u8> {
    let has_begun = || done.load(Ordering::Relaxed) > 0;
    let mut copied = vec![0; clusters.capacity_bytes() as usize];
    while let Some(held) = clusters.first_held(0..clusters.len(), 4) {
        let pause = if has_begun() { Duration::ZERO } else { Duration::from_millis(1) };
        let numbers = match clusters.turn(Instant::now() + pause) {
            Turn::Wanted(number) => number..number + 1,
            Turn::Own if !has_begun() => continue,
            Turn::Own => held,
            Turn::Ended => panic!("nobody ends it"),
        };
        let bytes = clusters.bytes_of(numbers.clone());
        let content = reader.read(bytes.clone()).expect("it is read");
        copied[bytes.start as usize..bytes.end as usize].copy_from_slice(content);
        clusters.free(numbers);
    }
    copied
}

/// Writes, discards and zeroes at random places until `stop`.
fn change(disk: &dyn Disk, seed: u64, done: &AtomicU64, stop: &AtomicU64) {
    let engine: MakeEngine = Box::new(|| Box::new(SyncEngine::new()));
    let mut rig = Rig::of(disk, &engine);
    let mut state = seed;
    let mut random = |below: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % below
    };
    while stop.load(Ordering::Relaxed) == 0 {
        let mut requests: Vec<_> = (0..6)
            .map(|_| {
                let count = 1 + random(8);
                let first = random(SIZE / 512 - 512);
                match random(8) {
                    0 => Request::command(IoKind::Discard, first * 512, 300 * 512),
                    1 => Request::command(IoKind::WriteZeroes { unmap: true }, first * 512, 512),
                    _ => {
                        let data = vec![0xee; count as usize * 512];
                        Request::write(first * 512, &data, &[data.len()], 0)
                    }
                }
            })
            .collect();
        for outcome in rig.run_all(&mut requests) {
            assert_eq!(outcome, Ok(()));
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Two lanes on two threads race the copier.
fn copied_under_changes(place: &str, options: FileOptions) {
    let image = Image::new(place, SIZE).unwrap();
    let content: Vec<u8> = (0..SIZE / 512).flat_map(sector).collect();
    std::fs::write(&image.path, &content).unwrap();
    let file = Arc::new(File::open(&image.path, options).unwrap());
    let reader = file.reader().unwrap();
    let clusters = Arc::new(Clusters::new(SIZE).unwrap());
    let disk = CopyFirst::new(file, Arc::clone(&clusters));
    let (done, stop) = (AtomicU64::new(0), AtomicU64::new(0));
    let copied = std::thread::scope(|scope| {
        for seed in [1, 2] {
            let (disk, done, stop) = (&disk, &done, &stop);
            scope.spawn(move || change(disk, seed, done, stop));
        }
        let copied = copy(&clusters, reader, &done);
        stop.store(1, Ordering::Relaxed);
        copied
    });
    assert!(done.load(Ordering::Relaxed) > 0);
    let differs = copied.chunks(512).zip(content.chunks(512)).position(|(a, b)| a != b);
    assert_eq!(differs, None, "a sector of the copy");
    assert_ne!(std::fs::read(&image.path).unwrap(), content, "the disk was changed");
}

#[test]
fn a_copy_has_the_content_of_the_first_moment_although_two_threads_change_the_disk() {
    copied_under_changes(DISK, FileOptions::default());
    copied_under_changes(DISK, FileOptions { direct: false, ..FileOptions::default() });
    copied_under_changes(TMPFS, FileOptions::default());
}

#[test]
fn a_reader_reads_any_range_and_skips_holes() {
    let image = Image::new(DISK, (1 << 20) + 512).unwrap();
    let raw = std::fs::File::options().write(true).open(&image.path).unwrap();
    raw.write_all_at(&[7; 4096], 512 << 10).unwrap();
    raw.write_all_at(&[9; 512], 1 << 20).unwrap();
    raw.sync_all().unwrap();
    for direct in [true, false] {
        let options = FileOptions { direct, ..FileOptions::default() };
        let mut reader = File::open(&image.path, options).unwrap().reader().unwrap();
        assert_eq!(reader.skip_hole(0..1 << 20).unwrap(), 512 << 10);
        assert_eq!(reader.skip_hole((512 << 10) + 512..1 << 20).unwrap(), (512 << 10) + 512);
        assert_eq!(reader.skip_hole(516 << 10..1 << 20).unwrap(), 1 << 20);
        let content = reader.read((512 << 10) - 512..(512 << 10) + 512).unwrap();
        assert!(content[..512] == [0; 512] && content[512..] == [7; 512]);
        assert_eq!(reader.read(1 << 20..(1 << 20) + 512).unwrap(), [9; 512]);
        let behind = reader.read(1 << 20..(1 << 20) + 1024).unwrap_err();
        assert_eq!(behind.kind(), std::io::ErrorKind::UnexpectedEof);
    }
}

/// A file whose sync fails may have data in a hole, unless its file system tells that.
#[test]
fn a_hole_is_trusted_after_a_sync_where_the_file_system_may_tell_of_one_with_data() {
    if mount::may_not_mount() {
        return;
    }
    let inexact = mount::Mount::ramfs();
    for (place, is_exact) in [(inexact.place.path(), false), (Path::new(TMPFS), true)] {
        let image = Image::new(place.to_str().unwrap(), SIZE).unwrap();
        let file = File::open(&image.path, FileOptions::default()).unwrap();
        let mut reader = file.reader().unwrap();
        reader.skip_hole(0..SIZE).expect("it is synced");
        file.sync_failed(libc::EIO);
        reader.skip_hole(0..SIZE).expect("one sync is for all holes");
        let later = file.reader().unwrap().skip_hole(0..SIZE);
        assert_eq!(later.is_ok(), is_exact, "{}: {later:?}", place.display());
    }
}

#[test]
fn a_reader_learns_that_the_lock_was_given_up() {
    let image = Image::new(DISK, SIZE).unwrap();
    let options = FileOptions { lock: Some(Duration::ZERO), ..FileOptions::default() };
    let file = File::open(&image.path, options).unwrap();
    let reader = file.reader().unwrap();
    assert!(!reader.was_handed_over());
    file.image_lock().give_up().unwrap();
    file.image_lock().take(Duration::ZERO).unwrap();
    assert!(reader.was_handed_over());
    assert!(!file.reader().unwrap().was_handed_over());
}
