// SPDX-License-Identifier: Apache-2.0
//! Block requests in any layout that the specification allows, and in some that it does not.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use virtio_spec::blk::{
    ID_BYTES, REQ_HEADER_BYTES, RangeSegment, ReqHeader, T_DISCARD, T_FLUSH, T_GET_ID, T_IN, T_OUT,
    T_SECURE_ERASE, T_WRITE_ZEROES,
};
use zerocopy::IntoBytes;

use crate::device::Error;
use crate::queue::{Queue, Segment};

/// Initial content of writable buffers, the status byte included.
const UNTOUCHED: u8 = 0xee;

/// The readable bytes of a request and the number of writable ones; [`Layout`] places them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Device-readable bytes: the header, then data.
    pub readable: Vec<u8>,
    /// Device-writable bytes: data, then one status byte.
    pub writable_len: usize,
}

impl Request {
    /// A request of any kind: header, further readable bytes, writable bytes before the status.
    pub fn new(kind: u32, sector: u64, readable: &[u8], writable_len: usize) -> Self {
        let header = ReqHeader { kind, reserved: 0, sector };
        let readable = [header.as_bytes(), readable].concat();
        Self { readable, writable_len: writable_len + 1 }
    }

    /// Reads `len` bytes.
    pub fn read(sector: u64, len: usize) -> Self {
        Self::new(T_IN, sector, &[], len)
    }

    /// Writes.
    pub fn write(sector: u64, data: &[u8]) -> Self {
        Self::new(T_OUT, sector, data, 0)
    }

    /// Makes completed writes durable.
    pub fn flush() -> Self {
        Self::new(T_FLUSH, 0, &[], 0)
    }

    /// Discards ranges.
    pub fn discard(ranges: &[RangeSegment]) -> Self {
        Self::new(T_DISCARD, 0, ranges.as_bytes(), 0)
    }

    /// Writes zeroes to ranges.
    pub fn write_zeroes(ranges: &[RangeSegment]) -> Self {
        Self::new(T_WRITE_ZEROES, 0, ranges.as_bytes(), 0)
    }

    /// Erases ranges securely.
    pub fn secure_erase(ranges: &[RangeSegment]) -> Self {
        Self::new(T_SECURE_ERASE, 0, ranges.as_bytes(), 0)
    }

    /// Reads the id string.
    pub fn get_id() -> Self {
        Self::new(T_GET_ID, 0, &[], ID_BYTES)
    }

    /// Writable bytes before the status byte.
    fn data_len(&self) -> usize {
        self.writable_len.saturating_sub(1)
    }
}

/// The points at which the bytes of one direction are cut into descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cuts {
    /// As drivers cut them: the header and the status byte have descriptors of their own.
    #[default]
    Usual,
    /// Everything in one descriptor.
    Joined,
    /// Descriptors of these lengths (0 is possible), then one more for the remainder, if any.
    Lengths(Vec<usize>),
    /// Descriptors of this many bytes, the last one shorter.
    Every(usize),
}

impl Cuts {
    fn lengths(&self, total: usize, usual: usize) -> Vec<usize> {
        let wanted = match self {
            Self::Usual => vec![usual.min(total)],
            Self::Joined => vec![],
            Self::Lengths(lengths) => lengths.clone(),
            Self::Every(len) => vec![*len; total / len],
        };
        let mut left = total;
        let mut lengths: Vec<_> = wanted
            .into_iter()
            .map(|len| {
                let len = len.min(left);
                left -= len;
                len
            })
            .collect();
        if left > 0 {
            lengths.push(left);
        }
        if *self == Self::Usual {
            lengths.retain(|&len| len > 0);
        }
        lengths
    }
}

/// The placement of a request in guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Cuts of the device-readable bytes.
    pub readable: Cuts,
    /// Cuts of the device-writable bytes.
    pub writable: Cuts,
    /// Through an indirect table (one descriptor of the ring).
    pub indirect: bool,
    /// Alignment of each buffer; a power of two.
    pub align: usize,
    /// Bytes by which each buffer is off that alignment.
    pub misalign: usize,
}

impl Default for Layout {
    fn default() -> Self {
        let cuts = Cuts::Usual;
        Self { readable: cuts.clone(), writable: cuts, indirect: false, align: 512, misalign: 0 }
    }
}

impl Layout {
    /// The usual layout through an indirect table.
    pub fn indirect() -> Self {
        Self { indirect: true, ..Self::default() }
    }

    /// Bytes of scratch memory that suffice for `request` in this layout.
    pub fn scratch_bytes(&self, request: &Request) -> usize {
        let readable = self.readable.lengths(request.readable.len(), REQ_HEADER_BYTES);
        let writable = self.writable.lengths(request.writable_len, request.data_len());
        let gap = self.align - 1 + self.misalign;
        readable.iter().chain(&writable).map(|len| len + gap).sum()
    }
}

/// A request that has been placed in guest memory.
#[derive(Clone, Debug)]
pub struct Placed {
    /// The chain, readable buffers first.
    pub segments: Vec<Segment>,
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The last writable byte; `None` if the request had no writable byte.
    pub status: Option<u8>,
    /// Written length as the device reported it.
    pub written: u32,
    /// The writable bytes before the status byte.
    pub data: Vec<u8>,
}

/// Scratch memory for requests; starts anew when nothing is in flight.
#[derive(Debug)]
struct Scratch {
    start: u64,
    end: u64,
    next: u64,
}

impl Scratch {
    fn take(&mut self, len: usize, align: usize, misalign: usize) -> Result<u64, Error> {
        let gpa = self.next.next_multiple_of(align as u64) + misalign as u64;
        if gpa + len as u64 > self.end {
            return Err(Error::NoScratch(len));
        }
        self.next = gpa + len as u64;
        Ok(gpa)
    }
}

/// A queue with memory for its requests.
#[derive(Debug)]
pub struct RequestQueue {
    queue: Queue,
    scratch: Scratch,
    in_flight: HashMap<u16, Placed>,
    limit: Duration,
}

impl RequestQueue {
    /// Adds scratch memory to a queue. `limit` bounds every wait.
    pub fn new(queue: Queue, scratch_bytes: usize, limit: Duration) -> Self {
        let start = queue.memory().alloc(scratch_bytes, 4096);
        let scratch = Scratch { start, end: start + scratch_bytes as u64, next: start };
        Self { queue, scratch, in_flight: HashMap::new(), limit }
    }

    /// The queue underneath, for its ring and its eventfds.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// Returns the queue alone; its guest memory stays taken.
    pub fn into_queue(self) -> Queue {
        self.queue
    }

    /// Places a request in guest memory.
    pub fn place(&mut self, request: &Request, layout: &Layout) -> Result<Placed, Error> {
        if self.in_flight.is_empty() {
            self.scratch.next = self.scratch.start;
        }
        let memory = self.queue.memory().clone();
        let mut segments = Vec::new();
        let mut from = 0;
        for len in layout.readable.lengths(request.readable.len(), REQ_HEADER_BYTES) {
            let gpa = self.scratch.take(len, layout.align, layout.misalign)?;
            memory.write(gpa, &request.readable[from..from + len]);
            segments.push(Segment::readable(gpa, len as u32));
            from += len;
        }
        for len in layout.writable.lengths(request.writable_len, request.data_len()) {
            let gpa = self.scratch.take(len, layout.align, layout.misalign)?;
            memory.write(gpa, &vec![UNTOUCHED; len]);
            segments.push(Segment::writable(gpa, len as u32));
        }
        Ok(Placed { segments })
    }

    /// Adds a request without showing it to the device.
    pub fn add(&mut self, request: &Request, layout: &Layout) -> Result<u16, Error> {
        let placed = self.place(request, layout)?;
        self.add_placed(placed, layout.indirect)
    }

    /// Adds a chain whose layout the caller has made or changed.
    pub fn add_placed(&mut self, placed: Placed, indirect: bool) -> Result<u16, Error> {
        let id = if indirect {
            self.queue.add_indirect(&placed.segments)?
        } else {
            self.queue.add(&placed.segments)?
        };
        self.in_flight.insert(id, placed);
        Ok(id)
    }

    /// Adds a request, publishes it and kicks if asked.
    pub fn submit(&mut self, request: &Request, layout: &Layout) -> Result<u16, Error> {
        let id = self.add(request, layout)?;
        self.queue.publish();
        self.queue.kick_if_asked();
        Ok(id)
    }

    /// Waits for the next used chain, asleep on the call eventfd.
    pub fn collect(&mut self) -> Result<(u16, Completion), Error> {
        let end = Instant::now() + self.limit;
        loop {
            if let Some(completion) = self.try_collect()? {
                return Ok(completion);
            }
            if self.queue.arm_calls() {
                let left = end.saturating_duration_since(Instant::now());
                if !self.queue.wait_call_for(left)? {
                    return Err(Error::Silent(self.limit));
                }
            }
        }
    }

    /// Takes the next used chain, if there is one.
    pub fn try_collect(&mut self) -> Result<Option<(u16, Completion)>, Error> {
        let Some(used) = self.queue.take_used()? else { return Ok(None) };
        let placed = self.in_flight.remove(&used.id).ok_or(Error::NotARequest(used.id))?;
        Ok(Some((used.id, self.completion(&placed, used.len))))
    }

    fn completion(&self, placed: &Placed, written: u32) -> Completion {
        let mut data = Vec::new();
        for segment in placed.segments.iter().filter(|s| s.writable) {
            let area = self.queue.memory().area(segment.gpa, segment.len as usize);
            data.extend(area.to_vec(0, area.len()));
        }
        Completion { status: data.pop(), written, data }
    }

    /// One request from start to end; nothing else may be in flight.
    pub fn execute(&mut self, request: &Request, layout: &Layout) -> Result<Completion, Error> {
        self.submit(request, layout)?;
        Ok(self.collect()?.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_cuts_put_header_and_status_apart() {
        assert_eq!(Cuts::Usual.lengths(16 + 512, 16), [16, 512]);
        assert_eq!(Cuts::Usual.lengths(513, 512), [512, 1]);
        assert_eq!(Cuts::Usual.lengths(1, 0), [1]);
    }

    #[test]
    fn the_scratch_bytes_of_a_layout_hold_a_request_and_are_all_needed_for_the_worst() {
        let request = Request::read(0, 128 << 10);
        let layout =
            Layout { writable: Cuts::Every(300), align: 4096, misalign: 4095, ..Layout::default() };
        let bytes = layout.scratch_bytes(&request) as u64;
        let lengths = layout.writable.lengths(request.writable_len, request.data_len());
        let fits = |end| {
            let mut scratch = Scratch { start: 1, end, next: 1 };
            let all = [REQ_HEADER_BYTES].into_iter().chain(lengths.clone());
            all.map(|len| scratch.take(len, layout.align, layout.misalign))
                .all(|taken| taken.is_ok())
        };
        assert!(fits(1 + bytes));
        assert!(!fits(bytes * 9 / 10), "far more than needed");
    }

    #[test]
    fn chosen_cuts_keep_every_byte_and_empty_descriptors() {
        assert_eq!(Cuts::Lengths(vec![3, 0, 5]).lengths(10, 16), [3, 0, 5, 2]);
        assert_eq!(Cuts::Every(4).lengths(10, 16), [4, 4, 2]);
        assert_eq!(Cuts::Joined.lengths(10, 16), [10]);
    }
}
