// SPDX-License-Identifier: Apache-2.0
//! Random requests in random layouts against a model of the disk.

use super::Subject;
use anyhow::{Context, Result};
use driver::{Cuts, Layout, Request};
use kit::rng::Rng;
use virtio_spec::blk::{S_IOERR, S_OK, WRITE_ZEROES_F_UNMAP};

/// Bytes of the disk that the case uses.
const MODEL_BYTES: usize = 4 << 20;
/// Bytes of the largest request.
const REQUEST_MAX: u64 = 128 << 10;

/// Expected content of the disk; `None` for unknown content.
struct Model {
    bytes: Vec<u8>,
    known: Vec<bool>,
}

/// Executes random requests, one at a time.
pub(super) fn random_requests(subject: &mut Subject<'_>, count: u64) -> Result<()> {
    let seed = subject.env.seed();
    let mut rng = Rng::new(seed);
    let mut model = Model { bytes: vec![0; MODEL_BYTES], known: vec![false; MODEL_BYTES] };
    for n in 0..count {
        one(subject, &mut rng, &mut model)
            .with_context(|| format!("random request {n} of seed {seed}"))?;
    }
    Ok(())
}

fn one(subject: &mut Subject<'_>, rng: &mut Rng, model: &mut Model) -> Result<()> {
    let block = subject.disk.block_bytes;
    let blocks = MODEL_BYTES as u64 / block;
    let count = 1 + rng.below(REQUEST_MAX / block);
    let first = rng.below(blocks - count);
    let (start, len) = ((first * block) as usize, (count * block) as usize);
    let layout = random_layout(rng);
    let sector = subject.at(first);
    match rng.below(10) {
        0..4 => {
            let data = rng.bytes(len);
            subject.ends_in(&Request::write(sector, &data), &layout, S_OK, 1)?;
            model.bytes[start..start + len].copy_from_slice(&data);
            model.known[start..start + len].fill(true);
        }
        4..7 => {
            let request = Request::read(sector, len);
            let read = subject.ends_in(&request, &layout, S_OK, len as u32 + 1)?.data;
            compare(model, start, &read)?;
        }
        7 => {
            let status = subject.write_zeroes_status();
            let flags = if rng.one_in(2) { WRITE_ZEROES_F_UNMAP } else { 0 };
            let ranges = [subject.range(first, count, flags)];
            subject.ends_in(&Request::write_zeroes(&ranges), &layout, status, 1)?;
            if status == S_OK {
                model.bytes[start..start + len].fill(0);
                model.known[start..start + len].fill(true);
            }
        }
        8 => {
            let status = subject.discard_status();
            let ranges = [subject.range(first, count, 0)];
            subject.ends_in(&Request::discard(&ranges), &layout, status, 1)?;
            if status == S_OK {
                model.known[start..start + len].fill(false);
            }
        }
        _ => {
            let end = subject.disk.sectors();
            subject.ends_in(&Request::write(end, &rng.bytes(len)), &layout, S_IOERR, 1)?;
            subject.ends_in(&Request::flush(), &layout, S_OK, 1)?;
        }
    }
    Ok(())
}

fn compare(model: &Model, start: usize, read: &[u8]) -> Result<()> {
    let expected: Vec<u8> = (0..read.len())
        .map(|n| if model.known[start + n] { model.bytes[start + n] } else { read[n] })
        .collect();
    super::same(read, &expected).with_context(|| format!("read at byte {start} of the disk"))
}

fn random_cuts(rng: &mut Rng) -> Cuts {
    match rng.below(4) {
        0 => Cuts::Usual,
        1 => Cuts::Joined,
        2 => Cuts::Every(200 + rng.below(9000) as usize),
        _ => Cuts::Lengths((0..1 + rng.below(20)).map(|_| rng.below(6000) as usize).collect()),
    }
}

fn random_layout(rng: &mut Rng) -> Layout {
    Layout {
        readable: random_cuts(rng),
        writable: random_cuts(rng),
        indirect: rng.one_in(2),
        align: *rng.pick(&[1, 4, 512, 4096]),
        misalign: if rng.one_in(3) { rng.below(4096) as usize } else { 0 },
    }
}
