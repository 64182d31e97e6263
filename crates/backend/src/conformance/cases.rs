// SPDX-License-Identifier: Apache-2.0
//! The cases. Each takes a fresh target of at least 8 MiB.

pub use super::model::agrees_with_a_plain_vector;
use super::{Request, Rig, Target};
use crate::{IoError, IoKind, RangeLimits};

/// Bytes that differ between blocks and within each block.
pub(super) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

fn block(rig: &Rig) -> usize {
    rig.info.logical_block_bytes as usize
}

fn capacity(rig: &Rig) -> u64 {
    rig.info.capacity_sectors * 512
}

/// The values of [`crate::Info`] are consistent.
pub fn describes_itself_consistently(target: &Target) {
    let info = target.disk.info();
    let block = info.logical_block_bytes;
    assert!(block.is_power_of_two() && block >= 512, "{info:?}");
    assert!(
        info.physical_block_bytes.is_multiple_of(block) && info.physical_block_bytes > 0,
        "{info:?}"
    );
    assert!(info.memory_align_bytes.is_power_of_two(), "{info:?}");
    assert!((info.capacity_sectors * 512).is_multiple_of(u64::from(block)), "{info:?}");
    assert!(!info.description.is_empty() && !info.description.contains('\n'), "{info:?}");
    for limits in [info.discard, info.write_zeroes, info.secure_erase].into_iter().flatten() {
        assert!(limits.sectors_max > 0 && limits.align_sectors > 0, "{info:?}");
        assert!(limits.align_sectors.is_multiple_of(block / 512), "{info:?}");
    }
    assert!(info.write_zeroes.is_some() || !info.write_zeroes_unmaps, "{info:?}");
    assert_eq!(info, target.disk.info(), "the description does not change");
}

/// An empty transfer succeeds, even at the end of the disk.
pub fn a_zero_length_io_succeeds(target: &Target) {
    let mut rig = Rig::new(target);
    let end = capacity(&rig);
    for offset in [0, end] {
        assert_eq!(rig.run(&mut Request::read(offset, &[], 0)), Ok(()));
        assert_eq!(rig.run(&mut Request::write(offset, &[], &[], 0)), Ok(()));
    }
}

/// The disk refuses a range beyond its end, and neither its content nor its size changes.
pub fn nothing_lies_behind_the_end(target: &Target) {
    let mut rig = Rig::new(target);
    let (block, end) = (block(&rig), capacity(&rig));
    let last = end - block as u64;
    let before = rig.read(last, block);
    let beyond = [last + 1, end, end + (1 << 40), u64::MAX - 511, !(block as u64 - 1)];
    for offset in beyond {
        let data = pattern(2 * block, offset);
        let write = rig.run(&mut Request::write(offset, &data, &[data.len()], 0));
        assert!(write.is_err(), "write at {offset} of {end}: {write:?}");
        let read = rig.run(&mut Request::read(offset, &[2 * block], 0));
        assert!(read.is_err(), "read at {offset} of {end}: {read:?}");
        for kind in [IoKind::WriteZeroes { unmap: false }, IoKind::Discard] {
            let ranged = rig.run(&mut Request::command(kind, offset, 2 * block as u64));
            assert!(ranged.is_err(), "{kind:?} at {offset} of {end}: {ranged:?}");
        }
    }
    let crossing = rig.run(&mut Request::write(last, &pattern(2 * block, 1), &[2 * block], 0));
    assert!(crossing.is_err(), "write across the end: {crossing:?}");
    if keeps_data(&mut rig) {
        assert_eq!(rig.read(last, block), before, "the last block was touched");
    }
    assert_eq!(target.disk.info().capacity_sectors * 512, end);
}

/// Returns whether a read changes the buffers: a disk that stores nothing leaves them unchanged.
fn keeps_data(rig: &mut Rig) -> bool {
    let mut request = Request::read(0, &[block(rig)], 0);
    let untouched = request.memory.as_ref().expect("a read has memory").content();
    assert_eq!(rig.run(&mut request), Ok(()));
    request.memory.expect("a read has memory").content() != untouched
}

/// An I/O that violates the contract ends with an outcome, and the disk stays usable.
pub fn odd_values_do_no_harm(target: &Target) {
    let mut rig = Rig::new(target);
    let kinds = [
        IoKind::Read,
        IoKind::Write,
        IoKind::Flush,
        IoKind::Discard,
        IoKind::WriteZeroes { unmap: true },
        IoKind::WriteZeroes { unmap: false },
        IoKind::SecureErase,
    ];
    for kind in kinds {
        for (offset, len) in
            [(1, 511), (513, 1), (0, 1), (u64::MAX, u64::MAX), (0, u64::MAX), (512, 0), (0, 4096)]
        {
            // The I/O has a length and no memory.
            let _outcome = rig.run(&mut Request::command(kind, offset, len));
        }
    }
    let block = block(&rig);
    let _still_reads = rig.read(0, block);
}

/// Two FLUSHes on an idle disk succeed.
pub fn flush_succeeds(target: &Target) {
    let mut rig = Rig::new(target);
    for _ in 0..2 {
        assert_eq!(rig.run(&mut Request::command(IoKind::Flush, 0, 0)), Ok(()));
    }
}

/// The disk answers `Unsupported` to each command that [`crate::Info`] does not offer.
pub fn unsupported_commands_say_so(target: &Target) {
    let mut rig = Rig::new(target);
    let len = block(&rig) as u64;
    let offered = [
        (IoKind::Discard, rig.info.discard),
        (IoKind::SecureErase, rig.info.secure_erase),
        (IoKind::WriteZeroes { unmap: false }, rig.info.write_zeroes),
    ];
    for (kind, limits) in offered {
        let wanted = if limits.is_some() { Ok(()) } else { Err(IoError::Unsupported) };
        assert_eq!(rig.run(&mut Request::command(kind, 0, len)), wanted, "{kind:?}");
    }
}

/// A read returns the written data.
pub fn reads_back_what_was_written(target: &Target) {
    let mut rig = Rig::new(target);
    let block = block(&rig);
    for (offset, len) in [(0, block), (3 * block, 5 * block), (1 << 20, 1 << 20)] {
        let data = pattern(len, len as u64);
        rig.write(offset as u64, &data);
        assert!(rig.read(offset as u64, len) == data, "{len} bytes at {offset}");
    }
}

/// Segments may start at any address.
pub fn takes_memory_of_any_alignment(target: &Target) {
    let mut rig = Rig::new(target);
    let len = 4 * block(&rig);
    for misalign in [1, 2, 3, 4, 8, 16, 511, 512, 513, 2048, 4095] {
        let data = pattern(len, misalign as u64);
        assert_eq!(rig.run(&mut Request::write(0, &data, &[len], misalign)), Ok(()), "{misalign}");
        assert!(rig.read(0, len) == data, "write from memory at {misalign}");
        let mut read = Request::read(0, &[len], misalign);
        assert_eq!(rig.run(&mut read), Ok(()), "{misalign}");
        assert!(read.memory.expect("set above").content() == data, "read to memory at {misalign}");
    }
}

/// Segments may have odd and zero lengths.
pub fn takes_segments_of_any_split(target: &Target) {
    let mut rig = Rig::new(target);
    let block = block(&rig);
    let total = 4096.max(block);
    let splits: [&[usize]; 6] = [
        &[1, 511, total - 512],
        &[total - 1, 1],
        &[0, total, 0],
        &[7, 0, 505, 512, total - 1024],
        &[512, total - 512],
        &vec![1; total],
    ];
    for (n, split) in splits.into_iter().enumerate() {
        let data = pattern(total, n as u64);
        assert_eq!(rig.run(&mut Request::write(0, &data, split, 0)), Ok(()), "split {n}");
        assert!(rig.read(0, total) == data, "write from split {n}");
        let mut read = Request::read(0, split, 0);
        assert_eq!(rig.run(&mut read), Ok(()), "split {n}");
        assert!(read.memory.expect("set above").content() == data, "read to split {n}");
    }
}

/// A transfer may have more than `IOV_MAX` (1024) aligned segments.
pub fn takes_more_segments_than_one_system_call(target: &Target) {
    let mut rig = Rig::new(target);
    let block = block(&rig);
    let lens = vec![block; 1500];
    let data = pattern(1500 * block, 1);
    assert_eq!(rig.run(&mut Request::write(0, &data, &lens, 0)), Ok(()));
    let mut read = Request::read(0, &lens, 0);
    assert_eq!(rig.run(&mut read), Ok(()));
    assert!(read.memory.expect("set above").content() == data);
}

/// A transfer may be larger than a bounce buffer.
pub fn splits_large_unaligned_transfers(target: &Target) {
    let mut rig = Rig::new(target);
    let len = (1 << 20) + block(&rig);
    let data = pattern(len, 2);
    assert_eq!(rig.run(&mut Request::write(4096, &data, &[len], 1)), Ok(()));
    let mut read = Request::read(4096, &[len - 1, 1], 3);
    assert_eq!(rig.run(&mut read), Ok(()));
    assert!(read.memory.expect("set above").content() == data);
}

/// Each kind of I/O that writes supports write-through, direct and bounced.
pub fn durable_writes_are_read_back(target: &Target) {
    let mut rig = Rig::new(target);
    let len = 2 * block(&rig);
    for misalign in [0, 1] {
        let data = pattern(len, misalign as u64);
        let mut write = Request::write(0, &data, &[len], misalign).durable();
        assert_eq!(rig.run(&mut write), Ok(()));
        assert!(rig.read(0, len) == data);
    }
    let whole = len as u64;
    let mut zero = Request::command(IoKind::WriteZeroes { unmap: true }, 0, whole).durable();
    assert_eq!(rig.run(&mut zero), Ok(()));
    assert!(rig.read(0, len) == vec![0; len]);
}

/// Runs a range command on the middle of written data; returns the content of the range.
fn run_in_the_middle(rig: &mut Rig, kind: IoKind, limits: RangeLimits) -> Vec<u8> {
    let unit = (limits.align_sectors as usize * 512).next_multiple_of(block(rig));
    // The range is not a multiple of the chunks of any fallback method.
    let middle = unit * (200 * 1024 / unit + 3).min(limits.sectors_max as usize * 512 / unit);
    let data = pattern(unit + middle + unit, 3);
    rig.write(0, &data);
    let mut request = Request::command(kind, unit as u64, middle as u64);
    assert_eq!(rig.run(&mut request), Ok(()), "{kind:?}");
    let after = rig.read(0, data.len());
    assert!(after[..unit] == data[..unit], "{kind:?} changed what lies before its range");
    let end = unit + middle;
    assert!(after[end..] == data[end..], "{kind:?} changed what lies behind its range");
    after[unit..end].to_vec()
}

fn all_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Checks that the disk refuses a command that it does not offer; the case counts as skipped.
fn not_applicable(rig: &mut Rig, kind: IoKind) {
    let refused = rig.run(&mut Request::command(kind, 0, block(rig) as u64));
    assert_eq!(refused, Err(IoError::Unsupported), "{kind:?} is not offered");
    println!("SKIP: not applicable, the disk does not offer {kind:?}");
}

/// WRITE_ZEROES zeroes its range, with and without unmap.
pub fn write_zeroes_zeroes_its_range_only(target: &Target) {
    let mut rig = Rig::new(target);
    let Some(limits) = rig.info.write_zeroes else {
        return not_applicable(&mut rig, IoKind::WriteZeroes { unmap: false });
    };
    for unmap in [false, true] {
        let kind = IoKind::WriteZeroes { unmap };
        assert!(all_zero(&run_in_the_middle(&mut rig, kind, limits)), "unmap {unmap}");
    }
    // A range of one block, which may be smaller than the preferred alignment.
    let (block, data) = (block(&rig), pattern(3 * block(&rig), 4));
    rig.write(0, &data);
    let kind = IoKind::WriteZeroes { unmap: true };
    assert_eq!(rig.run(&mut Request::command(kind, block as u64, block as u64)), Ok(()));
    let after = rig.read(0, 3 * block);
    assert!(after[..block] == data[..block] && after[2 * block..] == data[2 * block..]);
    assert!(all_zero(&after[block..2 * block]));
}

/// DISCARD keeps the size and the adjacent data, and the range can be written again.
pub fn discard_touches_its_range_only(target: &Target) {
    let mut rig = Rig::new(target);
    let Some(limits) = rig.info.discard else {
        return not_applicable(&mut rig, IoKind::Discard);
    };
    let end = capacity(&rig);
    let _any_content = run_in_the_middle(&mut rig, IoKind::Discard, limits);
    let len = (end - (1 << 20)).min(u64::from(limits.sectors_max) * 512);
    assert_eq!(rig.run(&mut Request::command(IoKind::Discard, 1 << 20, len)), Ok(()));
    assert_eq!(target.disk.info().capacity_sectors * 512, end);
    let last = end - block(&rig) as u64;
    let data = pattern(block(&rig), 5);
    rig.write(last, &data);
    assert!(rig.read(last, data.len()) == data);
}

/// SECURE_ERASE erases its range, if the disk offers it.
pub fn secure_erase_zeroes_its_range_only(target: &Target) {
    let mut rig = Rig::new(target);
    let Some(limits) = rig.info.secure_erase else {
        return not_applicable(&mut rig, IoKind::SecureErase);
    };
    let content = run_in_the_middle(&mut rig, IoKind::SecureErase, limits);
    assert!(all_zero(&content), "erased data can be read");
}

/// The first and the last block can be written and read.
pub fn serves_its_first_and_last_block(target: &Target) {
    let mut rig = Rig::new(target);
    let len = block(&rig);
    let last = capacity(&rig) - len as u64;
    for (offset, misalign) in [(0, 0), (last, 0), (0, 1), (last, 1)] {
        let data = pattern(len, offset + misalign as u64);
        assert_eq!(rig.run(&mut Request::write(offset, &data, &[len], misalign)), Ok(()));
        assert!(rig.read(offset, len) == data, "block at {offset}");
    }
}

/// More I/Os than bounce buffers may be in flight, aligned and unaligned.
pub fn many_ios_in_flight_end_once_each(target: &Target) {
    let mut rig = Rig::new(target);
    let len = block(&rig) * 2;
    let count = 100;
    let data = |n: usize| pattern(len, n as u64 + 7);
    let mut writes: Vec<Request> = (0..count)
        .map(|n| Request::write((n * len) as u64, &data(n), &[len], [0, 1, 0, 511][n % 4]))
        .collect();
    let outcomes = rig.run_all(&mut writes);
    assert!(outcomes.iter().all(|outcome| *outcome == Ok(())), "{outcomes:?}");
    assert_eq!(rig.run(&mut Request::command(IoKind::Flush, 0, 0)), Ok(()));
    let mut reads: Vec<Request> = (0..count)
        .map(|n| Request::read((n * len) as u64, &[len - 1, 1], [0, 1, 3, 0][n % 4]))
        .collect();
    let outcomes = rig.run_all(&mut reads);
    assert!(outcomes.iter().all(|outcome| *outcome == Ok(())), "{outcomes:?}");
    for (n, read) in reads.iter().enumerate() {
        assert!(read.memory.as_ref().expect("set above").content() == data(n), "io {n}");
    }
}

/// The lanes of two threads access the same disk.
pub fn lanes_see_each_others_writes(target: &Target) {
    let (mut one, mut other) = (Rig::new(target), Rig::new(target));
    let len = block(&one);
    for n in 0..3 {
        let data = pattern(len, n);
        one.write(0, &data);
        assert!(other.read(0, len) == data);
        let data = pattern(len, n + 100);
        other.write(len as u64, &data);
        assert!(one.read(len as u64, len) == data);
    }
}

/// Concurrent writes of adjacent blocks by several lanes are not lost, for any block size of the
/// storage.
pub fn writers_of_neighbouring_blocks_lose_nothing(target: &Target) {
    const WRITERS: usize = 4;
    const ROUNDS: u64 = 40;
    let block = target.disk.info().logical_block_bytes as usize;
    let data = |writer: usize, round: u64| pattern(block, round * WRITERS as u64 + writer as u64);
    let (disk, engine) = (&target.disk, &target.engine);
    let write = |writer: usize| {
        let mut rig = Rig::of(&**disk, engine);
        for round in 0..ROUNDS {
            rig.write((writer * block) as u64, &data(writer, round));
            let mine = rig.read((writer * block) as u64, block);
            assert!(mine == data(writer, round), "writer {writer} lost its round {round}");
        }
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS).map(|n| scope.spawn(move || write(n))).collect();
        writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
    });
    let after = Rig::new(target).read(0, WRITERS * block);
    for (writer, found) in after.chunks(block).enumerate() {
        assert!(found == data(writer, ROUNDS - 1), "writer {writer} lost its last write");
    }
}
