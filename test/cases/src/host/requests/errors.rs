// SPDX-License-Identifier: Apache-2.0
//! Requests that must be refused: with the right status, and without changing any other byte.

use super::{Subject, pattern};
use crate::host::env::Env;
use crate::host::fixture::Disk;
use crate::host::target::options;
use anyhow::{Context, Result, ensure};
use driver::kernel::abi;
use driver::{Layout, Options, Placed, Request, Segment};
use kit::system::run;
use std::os::unix::fs::FileTypeExt;
use virtio_spec::blk::{
    F_DISCARD, F_FLUSH, F_SECURE_ERASE, F_WRITE_ZEROES, RangeSegment, S_IOERR, S_OK, S_UNSUPP,
    T_DISCARD, WRITE_ZEROES_F_UNMAP,
};
use virtio_spec::features::bit;

/// Checks every error that all disks have.
pub(super) fn all(subject: &mut Subject<'_>) -> Result<()> {
    outside(subject).context("outside of the disk")?;
    misaligned(subject).context("misaligned")?;
    missing_parts(subject).context("missing parts")?;
    empty_descriptors(subject).context("empty descriptors")?;
    bad_ranges(subject).context("bad ranges")?;
    too_many_ranges(subject).context("too many ranges")
}

fn outside(subject: &mut Subject<'_>) -> Result<()> {
    let blocks = subject.disk.bytes / subject.disk.block_bytes;
    let (last, two) = (subject.at(blocks - 2), subject.len(2));
    let data = pattern(two, 7);
    subject.writes(last, &data)?;
    let far = [u64::MAX, u64::MAX / 512, 1 << 55, (1 << 55) - subject.at(1)];
    let near = [subject.at(blocks - 1), subject.at(blocks)];
    for sector in near.into_iter().chain(far) {
        subject.ends(&Request::write(sector, &vec![0; two]), S_IOERR, 1)?;
        let read = subject.ends(&Request::read(sector, two), S_IOERR, 1)?;
        ensure!(read.data.iter().all(|&byte| byte == 0xee), "a refused read wrote data");
    }
    subject.reads_as(last, &data)
}

fn misaligned(subject: &mut Subject<'_>) -> Result<()> {
    let data = pattern(subject.len(4), 8);
    subject.writes(0, &data)?;
    for len in [1, 511, 513] {
        subject.ends(&Request::write(0, &vec![0; len]), S_IOERR, 1)?;
        subject.ends(&Request::read(0, len), S_IOERR, 1)?;
    }
    if subject.disk.unit() > 1 {
        for (sector, len) in [(1, subject.len(1)), (0, 512), (0, subject.len(1) + 512), (7, 512)] {
            subject.ends(&Request::write(sector, &vec![0; len]), S_IOERR, 1)?;
            subject.ends(&Request::read(sector, len), S_IOERR, 1)?;
        }
        let range = RangeSegment { sector: 1, num_sectors: 8, flags: 0 };
        let status = refusal(subject.write_zeroes_status());
        subject.ends(&Request::write_zeroes(&[range]), status, 1)?;
    }
    subject.reads_as(0, &data)
}

/// Status of a command with an invalid range.
fn refusal(well_formed: u8) -> u8 {
    if well_formed == S_OK { S_IOERR } else { well_formed }
}

fn missing_parts(subject: &mut Subject<'_>) -> Result<()> {
    let negotiated = subject.device.layout().indirect;
    for indirect in [false, negotiated] {
        let layout = Layout { indirect, ..Layout::default() };
        let half = Request { readable: vec![0; 8], writable_len: 513 };
        subject.ends_in(&half, &layout, S_IOERR, 1)?;
        let nothing = Request { readable: vec![], writable_len: 1 };
        subject.ends_in(&nothing, &layout, S_IOERR, 1)?;
        let deaf = Request { readable: vec![0; 16], writable_len: 0 };
        let completion = subject.device.queue(0).execute(&deaf, &layout)?;
        ensure!((completion.status, completion.written) == (None, 0), "{completion:?}");
        if subject.discard_status() == S_OK {
            for len in [0, 8, 24] {
                let request = Request::new(T_DISCARD, 0, &vec![0; len], 0);
                subject.ends_in(&request, &layout, S_IOERR, 1)?;
            }
        }
    }
    subject.ends(&Request::flush(), S_OK, 1).map(drop)
}

fn empty_descriptors(subject: &mut Subject<'_>) -> Result<()> {
    let empty = vec![Segment::readable(0x1000, 0), Segment::writable(0x1000, 0)];
    let queue = subject.device.queue(0);
    queue.add_placed(Placed { segments: empty }, false)?;
    queue.queue().publish();
    queue.queue().kick_if_asked();
    let written = queue.collect()?.1.written;
    ensure!(written == 0, "a chain of empty descriptors: {written} bytes written");
    subject.ends(&Request::flush(), S_OK, 1).map(drop)
}

fn bad_ranges(subject: &mut Subject<'_>) -> Result<()> {
    let data = pattern(subject.len(8), 9);
    subject.writes(0, &data)?;
    let blocks = subject.disk.bytes / subject.disk.block_bytes;
    let (zeroes, discard) = (subject.write_zeroes_status(), subject.discard_status());
    let good = subject.range(0, 8, 0);
    let far = RangeSegment { sector: u64::MAX, num_sectors: 2, flags: 0 };
    let bad = [subject.range(blocks, 1, 0), subject.range(blocks - 1, 2, 0), far];
    for bad in bad {
        for ranges in [[good, bad], [bad, good]] {
            subject.ends(&Request::write_zeroes(&ranges), refusal(zeroes), 1)?;
            subject.ends(&Request::discard(&ranges), refusal(discard), 1)?;
        }
    }
    for flags in [2, 4, u32::MAX] {
        let ranges = [good, subject.range(0, 8, flags)];
        subject.ends(&Request::write_zeroes(&ranges), S_UNSUPP, 1)?;
        subject.ends(&Request::discard(&ranges), S_UNSUPP, 1)?;
    }
    let unmap = Request::discard(&[subject.range(0, 8, WRITE_ZEROES_F_UNMAP)]);
    subject.ends(&unmap, S_UNSUPP, 1)?;
    subject.reads_as(0, &data)
}

fn too_many_ranges(subject: &mut Subject<'_>) -> Result<()> {
    if subject.write_zeroes_status() != S_OK {
        return Ok(());
    }
    let most = subject.ranges_max();
    let data = pattern(subject.len(2 * most + 2), 10);
    subject.writes(0, &data)?;
    let ranges: Vec<_> = (0..=most).map(|n| subject.range(2 * n, 1, 0)).collect();
    subject.ends(&Request::write_zeroes(&ranges), S_IOERR, 1)?;
    subject.reads_as(0, &data)?;
    subject.ends(&Request::write_zeroes(&ranges[..most as usize]), S_OK, 1)?;
    let mut expected = data;
    let block = subject.len(1);
    expected.chunks_mut(2 * block).take(most as usize).for_each(|pair| pair[..block].fill(0));
    subject.reads_as(0, &expected)
}

/// A read-only disk refuses all writing requests, and serves the others.
pub(super) fn read_only(env: &Env, disk: &Disk) -> Result<()> {
    let data = pattern(disk.block_bytes as usize, 11);
    let mut writer = Subject::new(env, disk, &options(), 0)?;
    writer.writes(0, &data)?;
    drop(writer);
    let mut subject = Subject::new(env, disk, &options(), abi::OPT_READ_ONLY)?;
    refuses_writes(&mut subject, &vec![1; data.len()])?;
    subject.reads_as(0, &data)
}

/// A block device becomes read-only while it is served, and then writable again. (An image has no
/// such switch: a process that has it open for writing can continue to write.)
pub(super) fn becomes_read_only(subject: &mut Subject<'_>) -> Result<()> {
    if !subject.disk.path.metadata()?.file_type().is_block_device() {
        return Ok(());
    }
    let path = subject.disk.path.to_string_lossy().into_owned();
    let (old, new) = (pattern(subject.len(1), 12), pattern(subject.len(1), 13));
    subject.writes(0, &old)?;
    run("blockdev", &["--setro", &path])?;
    let refused = refuses_writes(subject, &new);
    run("blockdev", &["--setrw", &path])?;
    refused?;
    subject.reads_as(0, &old).context("what a refused write left")?;
    subject.writes(0, &new).context("writable again")?;
    subject.reads_as(0, &new)
}

/// Checks that writing requests end with an error, and that the others are served.
fn refuses_writes(subject: &mut Subject<'_>, data: &[u8]) -> Result<()> {
    subject.ends(&Request::write(0, data), S_IOERR, 1).context("a write to a read-only disk")?;
    let ranges = [subject.range(0, 1, 0)];
    let status = |negotiated: bool| if negotiated { S_IOERR } else { S_UNSUPP };
    let (discard, zeroes) = (subject.has(F_DISCARD), subject.has(F_WRITE_ZEROES));
    subject.ends(&Request::discard(&ranges), status(discard), 1)?;
    subject.ends(&Request::write_zeroes(&ranges), status(zeroes), 1)?;
    subject.ends(&Request::flush(), S_OK, 1).map(drop)
}

/// Commands that were not negotiated are unsupported, even if the disk supports them.
pub(super) fn not_negotiated(env: &Env, disk: &Disk) -> Result<()> {
    let ranged = bit(F_DISCARD) | bit(F_WRITE_ZEROES) | bit(F_SECURE_ERASE) | bit(F_FLUSH);
    let features = options().features & !ranged;
    let mut subject = Subject::new(env, disk, &Options { features, ..options() }, 0)?;
    let data = pattern(subject.len(8), 12);
    subject.writes(0, &data)?;
    let ranges = [subject.range(0, 8, 0)];
    subject.ends(&Request::discard(&ranges), S_UNSUPP, 1)?;
    subject.ends(&Request::write_zeroes(&ranges), S_UNSUPP, 1)?;
    subject.ends(&Request::secure_erase(&ranges), S_UNSUPP, 1)?;
    subject.ends(&Request::flush(), S_UNSUPP, 1)?;
    subject.ends(&Request::get_id(), S_OK, 21)?;
    subject.reads_as(0, &data)
}
