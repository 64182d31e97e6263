// SPDX-License-Identifier: Apache-2.0
//! Completed writes that would be lost without a word: by an error that another program got, and by the blocks of
//! O_DIRECT.

mod common;

use backend::conformance::{ManualEngine, Memory};
use backend::{BufList, Disk, File, FileOptions, Io, IoKind, Lane, Op, Slot, Step};
use common::{DISK, Image};
use kit::mount::{LossyDevice, may_not_mount};
use std::fs;
use std::os::unix::fs::FileExt;

const FINE: Step = Step::Done(Ok(()));

#[test]
fn a_new_lane_learns_of_a_loss_that_another_program_was_told_of() {
    if may_not_mount() {
        return;
    }
    let lossy = LossyDevice::new();
    let path = &lossy.device.path;
    let cached = FileOptions { direct: false, ..FileOptions::default() };
    let disk = File::open(path, cached).expect("the device opens");
    let of_lane = |lane: &mut Box<dyn Lane>, engine: &mut ManualEngine| {
        lane.start(&mut Io::new(IoKind::Flush, 0, 0, BufList::EMPTY), Slot(0), engine)
    };
    let mut engine = ManualEngine::new();
    let mut lane = disk.open_lane().expect("the lane opens");
    assert_eq!(of_lane(&mut lane, &mut engine), Step::Pending);
    lossy.lose();
    // A completed write of the page cache, and a program that syncs the device.
    let other = fs::File::options().write(true).open(path).expect("the device opens");
    other.write_all_at(&[1; 4096], 2 << 20).expect("the page cache takes it");
    assert!(other.sync_all().is_err());
    lossy.mend();
    other.sync_all().expect("the kernel has forgotten the loss");
    assert!(!disk.has_failed_sync());
    // As a resize, a backup or a mirror opens one, in place of the lane that would have got the error.
    drop(lane);
    let mut lane = disk.open_lane().expect("the lane opens");
    assert!(matches!(of_lane(&mut lane, &mut engine), Step::Done(Err(_))));
    assert!(disk.has_failed_sync() && disk.check_writes().is_err());
}

#[test]
fn blocks_of_o_direct_that_are_larger_than_clusters_are_given_up() {
    let image = Image::new(DISK, 16 << 20).expect("an image can be made");
    let mut disk = File::open(&image.path, FileOptions::default()).expect("the image opens");
    assert!(disk.info().memory_align_bytes > 1);
    disk.bound_direct_blocks(64 << 10);
    assert!(disk.info().description.ends_with("(direct)") && disk.notices().is_empty());
    disk.bound_direct_blocks(256);
    assert!(disk.info().description.ends_with("(cached)"), "{}", disk.info().description);
    assert!(disk.notices()[0].contains("its clusters have 256"), "{:?}", disk.notices());
    assert_eq!(disk.info().memory_align_bytes, 1);
    let (mut lane, mut engine) = (disk.open_lane().expect("the lane opens"), ManualEngine::new());
    // No read of a block precedes the write of a part of it, at any address of memory.
    let mut memory = Memory::new(&[512], 1);
    let mut write = Io::new(IoKind::Write, 512, 512, memory.bufs());
    assert_eq!(lane.start(&mut write, Slot(0), &mut engine), Step::Pending);
    let (op, token) = engine.take_one();
    assert!(matches!(op, Op::Write { .. }), "{op:?}");
    assert_eq!(lane.event(&mut write, token, 512, &mut engine), FINE);
    let own = lane.files()[0];
    let flags = fs::read_to_string(format!("/proc/self/fdinfo/{own}")).expect("flags");
    let flags = flags.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags");
    let flags = i32::from_str_radix(flags.trim(), 8).expect("octal");
    assert_eq!(flags & libc::O_DIRECT, 0, "the descriptor of the I/O");
    // An upgrade compares it with the options.
    assert!(disk.opened_as().expect("flags").direct);
}
