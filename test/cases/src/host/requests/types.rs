// SPDX-License-Identifier: Apache-2.0
//! One request of each type, and its effect on the disk.

use super::{Subject, pattern};
use crate::host::env::Env;
use crate::host::fixture::Disk;
use crate::host::target::{SERIAL, options};
use anyhow::{Context, Result, ensure};
use driver::kernel::abi;
use driver::{Completion, Request};
use virtio_spec::blk::{S_OK, S_UNSUPP, T_GET_ID, T_GET_LIFETIME, WRITE_ZEROES_F_UNMAP};

/// Checks every type.
pub(super) fn all(subject: &mut Subject<'_>) -> Result<()> {
    read_write_flush(subject).context("read, write, flush")?;
    zeroes(subject).context("write zeroes")?;
    discards(subject).context("discard")?;
    secure_erases(subject).context("secure erase")?;
    ids(subject).context("get id")?;
    unknown(subject).context("unknown types")?;
    empty(subject).context("empty requests")
}

fn read_write_flush(subject: &mut Subject<'_>) -> Result<()> {
    let data = pattern(subject.len(16), 1);
    let sector = subject.at(8);
    subject.writes(sector, &data)?;
    subject.reads_as(sector, &data)?;
    subject.ends(&Request::flush(), S_OK, 1)?;
    // A flush ignores its sector.
    let far = Request::new(virtio_spec::blk::T_FLUSH, u64::MAX, &[], 0);
    subject.ends(&far, S_OK, 1)?;
    subject.reads_as(sector, &data)
}

fn zeroes(subject: &mut Subject<'_>) -> Result<()> {
    let status = subject.write_zeroes_status();
    let data = pattern(subject.len(8), 2);
    for flags in [0, WRITE_ZEROES_F_UNMAP] {
        let sector = subject.at(40);
        subject.writes(sector, &data)?;
        let ranges = [subject.range(42, 2, flags), subject.range(46, 1, flags)];
        subject.ends(&Request::write_zeroes(&ranges), status, 1)?;
        let mut expected = data.clone();
        if status == S_OK {
            expected[subject.len(2)..subject.len(4)].fill(0);
            expected[subject.len(6)..subject.len(7)].fill(0);
        }
        subject.reads_as(sector, &expected)?;
    }
    Ok(())
}

fn discards(subject: &mut Subject<'_>) -> Result<()> {
    let status = subject.discard_status();
    let data = pattern(subject.len(24), 3);
    let sector = subject.at(64);
    subject.writes(sector, &data)?;
    let ranges = [subject.range(72, 4, 0), subject.range(80, 4, 0)];
    subject.ends(&Request::discard(&ranges), status, 1)?;
    // Discarded blocks can have any content; the blocks next to them must not change.
    for (block, count) in [(64, 8), (76, 4), (84, 4)] {
        let first = subject.len(block - 64);
        let expected = &data[first..first + subject.len(count)];
        subject.reads_as(subject.at(block), expected)?;
    }
    Ok(())
}

fn secure_erases(subject: &mut Subject<'_>) -> Result<()> {
    let data = pattern(subject.len(3), 4);
    let sector = subject.at(100);
    subject.writes(sector, &data)?;
    let request = Request::secure_erase(&[subject.range(101, 1, 0)]);
    if !subject.can_secure_erase()? {
        subject.ends(&request, S_UNSUPP, 1)?;
        return subject.reads_as(sector, &data);
    }
    subject.ends(&request, S_OK, 1)?;
    subject.reads_as(sector, &data[..subject.len(1)])?;
    subject.reads_as(subject.at(102), &data[subject.len(2)..])
}

fn id_of(subject: &mut Subject<'_>, room: usize, written: u32) -> Result<Completion> {
    subject.ends(&Request::new(T_GET_ID, 0, &[], room), S_OK, written)
}

fn ids(subject: &mut Subject<'_>) -> Result<()> {
    let mut id = SERIAL.as_bytes().to_vec();
    id.resize(20, 0);
    ensure!(id_of(subject, 20, 21)?.data == id, "another id");
    ensure!(id_of(subject, 8, 9)?.data == id[..8], "a short buffer got another id");
    let long = id_of(subject, 30, 21)?.data;
    ensure!(long[..20] == id && long[20..] == [0xee; 10], "a long buffer got {long:02x?}");
    Ok(())
}

fn unknown(subject: &mut Subject<'_>) -> Result<()> {
    for kind in [2, 3, 5, 9, T_GET_LIFETIME, 12, 15, 0x7777, 0x8000_0000, u32::MAX] {
        let refused = subject.ends(&Request::new(kind, 0, &[], 512), S_UNSUPP, 1)?;
        ensure!(refused.data == [0xee; 512], "type {kind} wrote data");
    }
    Ok(())
}

fn empty(subject: &mut Subject<'_>) -> Result<()> {
    subject.ends(&Request::write(0, &[]), S_OK, 1)?;
    subject.ends(&Request::read(0, 0), S_OK, 1)?;
    let end = subject.disk.sectors();
    subject.ends(&Request::read(end, 0), S_OK, 1).map(drop)
}

/// All of these checks hold in write-through mode too.
pub(super) fn write_through(env: &Env, disk: &Disk) -> Result<()> {
    let mut subject = Subject::new(env, disk, &options(), abi::OPT_WRITE_THROUGH)?;
    all(&mut subject).context("write-through")
}
