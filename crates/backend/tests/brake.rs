// SPDX-License-Identifier: Apache-2.0
//! A disk whose writes are slowed to the pace of a copy: the suite, and the bound of the changes.

mod common;

use backend::conformance::{ManualEngine, Target};
use backend::wrap::{Brake, Braked, Growth, Track, Written};
use backend::{BufList, Disk, Io, IoKind, Lane, Mem, Slot, Step, conformance};
use common::around_file;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const SIZE: u64 = 16 << 20;
const PART: u64 = 64 << 10;

fn braked(inner: Arc<dyn Disk>) -> (Arc<dyn Disk>, Arc<Brake>) {
    let written = Arc::new(Written::new(inner.info().capacity_sectors * 512));
    let brake = Arc::new(Brake::new(Arc::clone(&written)));
    let track = Track::new(inner, vec![written], Growth::Mirroring);
    (Arc::new(Braked::new(Arc::new(track), Arc::clone(&brake))), brake)
}

/// A thread that only takes the noted parts; ends when dropped.
struct Taking {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Taking {
    fn start(brake: Arc<Brake>) -> Taking {
        let stop = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&stop);
        let body = move || {
            while !of_thread.load(Ordering::Relaxed) {
                brake.written().take(u64::MAX).for_each(drop);
                brake.proceed();
                std::thread::sleep(Duration::from_micros(50));
            }
            brake.release();
        };
        Taking { stop, thread: Some(std::thread::spawn(body)) }
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A disk whose brake is on, with a bound of one part.
fn around(inner: Arc<dyn Disk>) -> Target {
    let (disk, brake) = braked(inner);
    brake.hold(PART);
    Target::of(disk).keeping(Taking::start(brake))
}

conformance!(around_mem, Ok(around(Arc::new(Mem::new(SIZE).unwrap()))));
conformance!(around_direct_file, around_file(SIZE, around));

fn zeroing(first: u64, count: u64) -> Io {
    let kind = IoKind::WriteZeroes { unmap: false };
    Io::new(kind, first * PART, count * PART, BufList::EMPTY)
}

fn lane() -> (Box<dyn Lane>, ManualEngine, Arc<Brake>) {
    let (disk, brake) = braked(Arc::new(Mem::new(SIZE).unwrap()));
    (disk.open_lane().unwrap(), ManualEngine::new(), brake)
}

#[test]
fn writes_wait_for_the_copy_of_earlier_changes_and_reads_do_not() {
    let (mut lane, mut engine, brake) = lane();
    brake.hold(2 * PART);
    for first in 0..2 {
        let step = lane.start(&mut zeroing(first, 1), Slot(0), &mut engine);
        assert_eq!(step, Step::Done(Ok(())));
    }
    assert_eq!(brake.written().bytes(), 2 * PART);
    let mut io = zeroing(2, 1);
    assert_eq!(lane.start(&mut io, Slot(1), &mut engine), Step::Pending);
    let mut read = Io::new(IoKind::Read, 0, 0, BufList::EMPTY);
    assert_eq!(lane.start(&mut read, Slot(2), &mut engine), Step::Done(Ok(())));
    let mut flush = Io::new(IoKind::Flush, 0, 0, BufList::EMPTY);
    assert_eq!(lane.start(&mut flush, Slot(2), &mut engine), Step::Done(Ok(())));
    brake.proceed();
    assert_eq!(engine.delivered.poll(), None, "nothing was copied");
    brake.written().take(u64::MAX).for_each(drop);
    brake.proceed();
    let (token, result) = engine.delivered.poll().expect("the write goes on");
    assert_eq!(lane.event(&mut io, token, result, &mut engine), Step::Done(Ok(())));
    assert_eq!((brake.written().bytes(), brake.waiting()), (PART, 0));
}

/// A rewrite of noted parts makes room when it ends: nothing is left in flight.
#[test]
fn the_count_of_writes_in_flight_ends_with_them() {
    let (mut lane, mut engine, brake) = lane();
    brake.hold(4 * PART);
    for _ in 0..100 {
        let step = lane.start(&mut zeroing(1, 2), Slot(0), &mut engine);
        assert_eq!(step, Step::Done(Ok(())));
    }
    assert_eq!(brake.written().bytes(), 2 * PART);
    // A failed one, too.
    let mut failing = Io { offset_bytes: SIZE, ..zeroing(0, 1) };
    assert!(matches!(lane.start(&mut failing, Slot(0), &mut engine), Step::Done(Err(_))));
    let step = lane.start(&mut zeroing(1, 2), Slot(0), &mut engine);
    assert_eq!(step, Step::Done(Ok(())));
}

#[test]
fn all_writes_go_on_after_the_release_and_while_the_brake_is_off() {
    let (mut lane, mut engine, brake) = lane();
    let step = lane.start(&mut zeroing(0, 30), Slot(0), &mut engine);
    assert_eq!(step, Step::Done(Ok(())));
    brake.hold(PART);
    let mut ios: Vec<_> = (0..3).map(|first| zeroing(first, 1)).collect();
    for (slot, io) in (1..).zip(&mut ios) {
        assert_eq!(lane.start(io, Slot(slot), &mut engine), Step::Pending);
    }
    brake.release();
    for io in &mut ios {
        let (token, result) = engine.delivered.poll().expect("it goes on");
        assert_eq!(lane.event(io, token, result, &mut engine), Step::Done(Ok(())));
    }
    let step = lane.start(&mut zeroing(0, 30), Slot(1), &mut engine);
    assert_eq!(step, Step::Done(Ok(())));
}

#[test]
fn a_mirrored_disk_does_not_grow_and_stays_off_the_kernel() {
    let (disk, _) = braked(Arc::new(Mem::new(SIZE).unwrap()));
    let told = disk.resize(Some(2 * SIZE)).unwrap_err().to_string();
    assert!(told.contains("mirror --cancel"), "{told}");
    assert!(disk.resize(None).is_ok() && disk.resize(Some(SIZE)).is_ok());
    assert!(disk.kernel_file().unwrap_err().contains("while it is mirrored"));
    let description = disk.info().description;
    assert!(description.ends_with("being mirrored, followed by a copy"), "{description}");
}
