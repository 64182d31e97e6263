// SPDX-License-Identifier: Apache-2.0
//! The guest memory of one request, and the segments of the request.

use super::periods::Moment;
use super::stamp::SECTOR;
use anyhow::Result;
use driver::{Area, GuestMemory, Queue, Segment};
use kit::rng::Rng;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use virtio_spec::blk::{RangeSegment, ReqHeader};
use zerocopy::IntoBytes;

/// Bytes before a slot's data: header, ranges, status byte.
const HEAD_BYTES: usize = 256;
const STATUS_AT: usize = 192;
/// Most ranges of a WRITE_ZEROES.
const RANGES_MAX: u64 = 8;
/// Content of the status byte before the device writes it.
const NO_STATUS: u8 = 0xee;
/// Most data segments of a request: the indirect tables in guest memory have room for them.
const SEGMENTS_MAX: u64 = 100;

/// Type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Zeroes,
    Flush,
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) kind: Kind,
    pub(super) sector: u64,
    pub(super) count: u64,
    pub(super) generation: u32,
    pub(super) submitted: Moment,
}

impl Op {
    pub(super) fn overlaps(&self, sector: u64, count: u64) -> bool {
        sector < self.sector + self.count && self.sector < sector + count
    }
}

/// Memory for one request.
pub(super) struct Slot {
    /// Sectors per logical block.
    unit: u64,
    /// Data is at the start of a page.
    aligned: bool,
    head: Area,
    data: Area,
    /// Offset of the data of the request in flight.
    offset: usize,
    pub(super) op: Option<Op>,
}

impl Slot {
    /// Bytes of guest memory for a slot.
    pub(super) fn bytes(room: usize) -> usize {
        HEAD_BYTES + room + 3 * 4096
    }

    pub(super) fn new(memory: &Arc<GuestMemory>, room: usize, unit: u64, aligned: bool) -> Self {
        let head = memory.alloc_area(HEAD_BYTES, 64);
        Self {
            unit,
            aligned,
            head,
            data: memory.alloc_area(room + 4096, 4096),
            offset: 0,
            op: None,
        }
    }

    /// Room for data, in bytes.
    pub(super) fn room(&self) -> usize {
        self.data.len() - 4096
    }

    /// Places a request in memory and adds it to the queue.
    pub(super) fn start(
        &mut self,
        queue: &mut Queue,
        rng: &mut Rng,
        op: Op,
        data: &[u8],
        indirect: bool,
    ) -> Result<u16> {
        // Usually aligned as drivers do it, sometimes so that the device must use a bounce buffer.
        self.offset = if self.aligned { 0 } else { *rng.pick(&[0, 0, 0, 512, 64, 1]) };
        let kind = match op.kind {
            Kind::Read => virtio_spec::blk::T_IN,
            Kind::Write => virtio_spec::blk::T_OUT,
            Kind::Zeroes => virtio_spec::blk::T_WRITE_ZEROES,
            Kind::Flush => virtio_spec::blk::T_FLUSH,
        };
        let sector = if op.kind == Kind::Flush { 0 } else { op.sector };
        self.head.write(0, ReqHeader { kind, reserved: 0, sector }.as_bytes());
        let ranges = if op.kind == Kind::Zeroes { self.ranges(rng, op) } else { Vec::new() };
        self.head.write(16, ranges.as_bytes());
        self.head.store_u8(STATUS_AT, NO_STATUS, Relaxed);
        self.data.write(self.offset, data);
        let segments = self.segments(rng, op, ranges.len(), indirect);
        let id = if indirect { queue.add_indirect(&segments) } else { queue.add(&segments) }?;
        self.op = Some(op);
        Ok(id)
    }

    /// The sectors of a WRITE_ZEROES as one range or, half of the time, as several.
    fn ranges(&self, rng: &mut Rng, op: Op) -> Vec<RangeSegment> {
        let blocks = op.count / self.unit;
        let count = if rng.one_in(2) { 1 } else { (2 + rng.below(RANGES_MAX - 1)).min(blocks) };
        let edge = |n| op.sector + blocks * n / count * self.unit;
        (0..count)
            .map(|n| {
                let num_sectors = (edge(n + 1) - edge(n)) as u32;
                RangeSegment { sector: edge(n), num_sectors, flags: 0 }
            })
            .collect()
    }

    fn segments(&self, rng: &mut Rng, op: Op, ranges: usize, indirect: bool) -> Vec<Segment> {
        let head = self.head.gpa();
        let header = (16 + ranges * size_of::<RangeSegment>()) as u32;
        let mut segments = vec![Segment::readable(head, header)];
        let mut left = match op.kind {
            Kind::Read | Kind::Write => op.count as usize * SECTOR,
            Kind::Zeroes | Kind::Flush => 0,
        };
        let pieces = if indirect { 1 + rng.below(SEGMENTS_MAX) } else { 1 + rng.below(6) };
        let unit = if !self.aligned && rng.one_in(4) { 1 } else { 512 };
        let piece = left.div_ceil(pieces as usize).next_multiple_of(unit);
        let mut gpa = self.data.gpa() + self.offset as u64;
        while left > 0 {
            let len = piece.min(left);
            let writable = op.kind == Kind::Read;
            segments.push(Segment { gpa, len: len as u32, writable });
            gpa += len as u64;
            left -= len;
        }
        segments.push(Segment::writable(head + STATUS_AT as u64, 1));
        segments
    }

    pub(super) fn status(&self) -> u8 {
        self.head.load_u8(STATUS_AT, Relaxed)
    }

    pub(super) fn data(&self, len: usize) -> Vec<u8> {
        self.data.to_vec(self.offset, len)
    }
}
