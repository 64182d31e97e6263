// SPDX-License-Identifier: Apache-2.0
//! The guest memory of one request, and the segments of the request.

use super::stamp::SECTOR;
use anyhow::Result;
use driver::{Area, GuestMemory, Queue, Segment};
use kit::rng::Rng;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use virtio_spec::blk::{RangeSegment, ReqHeader};
use zerocopy::IntoBytes;

/// Bytes before a slot's data: header, one range, status byte.
const HEAD_BYTES: usize = 64;
const STATUS_AT: usize = 48;
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
}

impl Op {
    pub(super) fn overlaps(&self, sector: u64, count: u64) -> bool {
        sector < self.sector + self.count && self.sector < sector + count
    }
}

/// Memory for one request.
pub(super) struct Slot {
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

    pub(super) fn new(memory: &Arc<GuestMemory>, room: usize) -> Self {
        let head = memory.alloc_area(HEAD_BYTES, 64);
        Self { head, data: memory.alloc_area(room + 4096, 4096), offset: 0, op: None }
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
        self.offset = *rng.pick(&[0, 0, 0, 512, 64, 1]);
        let kind = match op.kind {
            Kind::Read => virtio_spec::blk::T_IN,
            Kind::Write => virtio_spec::blk::T_OUT,
            Kind::Zeroes => virtio_spec::blk::T_WRITE_ZEROES,
            Kind::Flush => virtio_spec::blk::T_FLUSH,
        };
        let sector = if op.kind == Kind::Flush { 0 } else { op.sector };
        self.head.write(0, ReqHeader { kind, reserved: 0, sector }.as_bytes());
        let range = RangeSegment { sector: op.sector, num_sectors: op.count as u32, flags: 0 };
        self.head.write(16, range.as_bytes());
        self.head.store_u8(STATUS_AT, NO_STATUS, Relaxed);
        self.data.write(self.offset, data);
        let segments = self.segments(rng, op, indirect);
        let id = if indirect { queue.add_indirect(&segments) } else { queue.add(&segments) }?;
        self.op = Some(op);
        Ok(id)
    }

    fn segments(&self, rng: &mut Rng, op: Op, indirect: bool) -> Vec<Segment> {
        let head = self.head.gpa();
        let header = if op.kind == Kind::Zeroes { 32 } else { 16 };
        let mut segments = vec![Segment::readable(head, header)];
        let mut left = match op.kind {
            Kind::Read | Kind::Write => op.count as usize * SECTOR,
            Kind::Zeroes | Kind::Flush => 0,
        };
        let pieces = if indirect { 1 + rng.below(SEGMENTS_MAX) } else { 1 + rng.below(6) };
        let piece =
            left.div_ceil(pieces as usize).next_multiple_of(if rng.one_in(4) { 1 } else { 512 });
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
