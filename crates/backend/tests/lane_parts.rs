// SPDX-License-Identifier: Apache-2.0
//! Long copies in parts, and syncs that were not carried out.

mod common;

use backend::conformance::{ManualEngine, Memory};
use backend::{
    BufList, Disk, File, FileOptions, Io, IoError, IoKind, Lane, Mem, Op, Slot, Step, Token,
};
use common::{DISK, Image, TMPFS};

const FAILED: fn(i32) -> Step = |errno| Step::Done(Err(IoError::Errno(errno)));
const FINE: Step = Step::Done(Ok(()));
const MIB: usize = 1 << 20;

fn lane_in(place: &str) -> (Image, Box<dyn Lane>) {
    let image = Image::new(place, 16 << 20).expect("an image can be made");
    let file = File::open(&image.path, FileOptions::default()).expect("the image opens");
    let lane = file.open_lane().expect("the lane opens");
    (image, lane)
}

#[test]
fn long_segments_of_a_file_in_memory_are_copied_in_parts() {
    let (_image, mut lane) = lane_in(TMPFS);
    let mut engine = ManualEngine::new();
    // The second segment does not fit into the rest of the first part.
    for (segments, copied) in [(&[5 * MIB][..], 2 * MIB), (&[3 * MIB / 2, 7 * MIB / 2], 2 * MIB)] {
        let mut memory = Memory::new(segments, 7);
        for kind in [IoKind::Write, IoKind::Read] {
            let mut io = Io::new(kind, 4096, 5 << 20, memory.bufs());
            assert_eq!(lane.start(&mut io, Slot(3), &mut engine), Step::Pending, "{kind:?}");
            let (op, token) = engine.take_one();
            let (Op::Read { bufs, offset, .. } | Op::Write { bufs, offset, .. }) = op else {
                panic!("{op:?}");
            };
            let rest = 5 * MIB - copied;
            assert_eq!((offset as usize, bufs.total_bytes() as usize), (4096 + copied, rest));
            assert_eq!(lane.event(&mut io, token, rest as i32, &mut engine), FINE, "{kind:?}");
        }
    }
}

#[test]
fn a_long_request_of_a_disk_in_memory_is_carried_out_in_parts() {
    let disk = Mem::new(16 << 20).expect("the disk can be made");
    let (mut lane, mut engine) = (disk.open_lane().expect("the lane opens"), ManualEngine::new());
    let mut memory = Memory::new(&[5 * MIB], 7);
    let zeroes = IoKind::WriteZeroes { unmap: false };
    for kind in [IoKind::Write, IoKind::Read, zeroes, IoKind::Discard] {
        let mut io = Io::new(kind, 512, 5 << 20, memory.bufs());
        let mut step = lane.start(&mut io, Slot(3), &mut engine);
        for part in 1..=2 {
            assert_eq!(step, Step::Pending, "{kind:?}, {part}");
            assert_eq!((512 + io.done_bytes) % 4096, 0, "{kind:?}, {part}");
            let (op, token) = engine.take_one();
            assert!(matches!(op, Op::Nop), "{op:?}");
            step = lane.event(&mut io, token, 0, &mut engine);
        }
        assert_eq!(step, FINE, "{kind:?}");
    }
}

/// Gives the sync of `leader` this result until it ends, and returns its end.
fn end_sync(
    lane: &mut dyn Lane,
    io: &mut Io,
    engine: &mut ManualEngine,
    leader: u32,
    result: i32,
) -> Step {
    let token = Token { slot: Slot(leader), layer: 0 };
    for _ in 0..=16 {
        let at = engine
            .pushed
            .iter()
            .position(|(op, of)| matches!(op, Op::Fdatasync { .. }) && *of == token);
        engine.pushed.remove(at.expect("its sync"));
        let step = lane.event(io, token, result, engine);
        if step != Step::Pending {
            return step;
        }
    }
    panic!("it is tried again and again");
}

#[test]
fn a_sync_that_was_not_carried_out_is_no_failed_sync_and_covers_no_other_flush() {
    let (_image, mut lane) = lane_in(DISK);
    let mut engine = ManualEngine::new();
    let mut ios = [0; 3].map(|_| Io::new(IoKind::Flush, 0, 0, BufList::EMPTY));
    for (slot, io) in (0..).zip(&mut ios) {
        assert_eq!(lane.start(io, Slot(slot), &mut engine), Step::Pending);
    }
    // The second one leads the next sync, and the third one follows.
    assert_eq!(end_sync(&mut *lane, &mut ios[0], &mut engine, 0, 0), FINE);
    let cancelled = end_sync(&mut *lane, &mut ios[1], &mut engine, 1, -libc::ECANCELED);
    assert_eq!(cancelled, FAILED(libc::ECANCELED));
    assert!(!engine.pushed.iter().any(|(op, _)| matches!(op, Op::Nop)), "no sync covers it");
    assert_eq!(end_sync(&mut *lane, &mut ios[2], &mut engine, 2, 0), FINE);
    // A sync that fails is remembered.
    let mut io = Io::new(IoKind::Flush, 0, 0, BufList::EMPTY);
    assert_eq!(lane.start(&mut io, Slot(0), &mut engine), Step::Pending);
    assert_eq!(end_sync(&mut *lane, &mut io, &mut engine, 0, -libc::EIO), FAILED(libc::EIO));
    assert_eq!(lane.start(&mut io, Slot(0), &mut engine), FAILED(libc::EIO));
}
