// SPDX-License-Identifier: Apache-2.0
//! Stage *request*: copies the header once, checks it against the disk, and returns a type.

use crate::config::MAX_RANGES;
use backend::{Info, RangeLimits};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_spec::blk::{self, ReqHeader, SECTOR_BYTES};
use virtio_spec::features::bit;
use virtqueue::Chain;
use virtqueue::chain::StatusByte;
use zerocopy::FromBytes;

/// Maximum data bytes of one IN or OUT. Drivers that negotiate SIZE_MAX stay below 32 MiB. UEFI
/// firmware (OVMF) negotiates neither SIZE_MAX nor SEG_MAX, and reads up to 1 GiB of a file at
/// once.
pub const REQUEST_BYTES_MAX: u64 = 1 << 30;

/// Bytes of a DISCARD that count as one byte in flight.
pub const DISCARDED_PER_WRITTEN: u64 = 16;

/// The properties of the disk for one queue; derived from the *negotiated* features at its start.
#[derive(Clone, Debug)]
pub struct DiskView {
    capacity_sectors: u64,
    /// Sectors of a logical block: a power of two.
    block_sectors: u64,
    read_only: bool,
    flush: bool,
    discard: Option<RangeLimits>,
    write_zeroes: Option<RangeLimits>,
    secure_erase: Option<RangeLimits>,
    writeback: Arc<AtomicBool>,
    id: [u8; blk::ID_BYTES],
}

impl DiskView {
    /// The view of a driver that negotiated `features`. `writeback` is the cache mode; the driver
    /// may change it at any time if it negotiated CONFIG_WCE.
    pub fn new(info: &Info, features: u64, writeback: Arc<AtomicBool>, serial: &str) -> Self {
        let acked = |number: u32| features & bit(number) != 0;
        DiskView {
            capacity_sectors: info.capacity_sectors,
            block_sectors: u64::from(info.logical_block_bytes) / SECTOR_BYTES,
            read_only: info.read_only,
            flush: acked(blk::F_FLUSH),
            discard: info.discard.filter(|_| acked(blk::F_DISCARD)),
            write_zeroes: info.write_zeroes.filter(|_| acked(blk::F_WRITE_ZEROES)),
            secure_erase: info.secure_erase.filter(|_| acked(blk::F_SECURE_ERASE)),
            writeback,
            id: id_bytes(serial),
        }
    }

    /// The GET_ID answer.
    pub fn id(&self) -> &[u8; blk::ID_BYTES] {
        &self.id
    }

    /// Returns whether a write must be durable before it completes: the driver did not negotiate
    /// FLUSH, or the cache is in write-through mode (section 5.2.6.2).
    #[inline]
    pub fn write_through(&self) -> bool {
        !self.flush || !self.writeback.load(Ordering::Relaxed)
    }

    /// Returns whether `[sector, sector + sectors)` lies on the disk and consists of whole logical
    /// blocks.
    #[inline]
    fn holds(&self, sector: u64, sectors: u64) -> bool {
        let whole = (sector | sectors) & (self.block_sectors - 1) == 0;
        whole && sector.checked_add(sectors).is_some_and(|end| end <= self.capacity_sectors)
    }
}

/// The 20 bytes of GET_ID for `serial`, truncated or padded with zeroes (section 5.2.6).
pub fn id_bytes(serial: &str) -> [u8; blk::ID_BYTES] {
    let mut id = [0; blk::ID_BYTES];
    for (to, from) in id.iter_mut().zip(serial.bytes()) {
        *to = from;
    }
    id
}

/// A range inside the capacity of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u32,
    /// WRITE_ZEROES: the storage may free the space.
    pub unmap: bool,
}

/// The checked ranges of one request. Later requests reuse it: it allocates at most once.
#[derive(Debug, Default)]
pub struct RangeList {
    ranges: Vec<Range>,
    next: usize,
}

impl RangeList {
    /// The next range to carry out; `None` after the last one.
    pub fn next_range(&mut self) -> Option<Range> {
        let range = self.ranges.get(self.next).copied();
        self.next += 1;
        range
    }

    fn clear(&mut self) {
        self.ranges.clear();
        self.ranges.reserve_exact(MAX_RANGES as usize);
        self.next = 0;
    }

    fn push(&mut self, range: Range) {
        self.ranges.push(range);
    }
}

/// The kind and the arguments of a request (section 5.2.6). They are in range and allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads the disk into the chain's writable segments.
    Read {
        /// First sector.
        sector: u64,
        /// Length in bytes; a multiple of 512.
        bytes: u64,
    },
    /// Writes the chain's readable segments to the disk.
    Write {
        /// First sector.
        sector: u64,
        /// Length in bytes; a multiple of 512.
        bytes: u64,
        /// The data is durable before the completion.
        durable: bool,
    },
    /// Makes completed writes durable.
    Flush,
    /// Discards the ranges of the [`RangeList`].
    Discard {
        /// Length of all ranges in bytes.
        bytes: u64,
        /// Length of the longest range in bytes.
        longest_bytes: u64,
        /// The effect is durable before the completion.
        durable: bool,
    },
    /// Zeroes the ranges of the [`RangeList`].
    WriteZeroes {
        /// Length of all ranges in bytes.
        bytes: u64,
        /// The effect is durable before the completion.
        durable: bool,
    },
    /// Erases the ranges of the [`RangeList`].
    SecureErase {
        /// Length of all ranges in bytes.
        bytes: u64,
    },
    /// Copies the device id into the chain's writable segments.
    GetId,
}

impl Kind {
    /// Bytes of data that the request transfers.
    #[inline]
    pub fn data_bytes(self) -> u64 {
        match self {
            Kind::Read { bytes, .. } | Kind::Write { bytes, .. } => bytes,
            _ => 0,
        }
    }

    /// Bytes of the chain's buffers that the device may write, without the status byte.
    #[inline]
    pub fn written_bytes(self) -> u64 {
        match self {
            Kind::Read { bytes, .. } => bytes,
            Kind::GetId => blk::ID_BYTES as u64,
            _ => 0,
        }
    }

    /// Bytes of the disk that the request reads, writes, discards or clears.
    #[inline]
    pub fn disk_bytes(self) -> u64 {
        match self {
            Kind::Discard { bytes, .. }
            | Kind::WriteZeroes { bytes, .. }
            | Kind::SecureErase { bytes } => bytes,
            transfer => transfer.data_bytes(),
        }
    }

    /// Bytes that the request adds to the queue's bound on I/O in flight, for which a stop waits. A
    /// stop waits for one range of a DISCARD only, and storage discards faster than it writes.
    #[inline]
    pub fn inflight_bytes(self) -> u64 {
        match self {
            Kind::Discard { longest_bytes, .. } => longest_bytes / DISCARDED_PER_WRITTEN,
            other => other.disk_bytes(),
        }
    }

    /// Bytes that a limit on the bandwidth counts: those of all ranges, because storage works on each.
    #[inline]
    pub fn limit_bytes(self) -> u64 {
        match self {
            Kind::Discard { bytes, .. } => bytes / DISCARDED_PER_WRITTEN,
            other => other.disk_bytes(),
        }
    }
}

/// Reasons to refuse a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    /// Section 5.2.6: the chain is shorter than the header.
    #[error("the request has no complete header")]
    NoHeader,
    /// The type, a flag or the command is unknown or was not negotiated.
    #[error("the request is not supported")]
    Unsupported,
    /// Section 5.2.6.2: a write to a read-only disk.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The data or a range is outside the disk, or not whole logical blocks.
    #[error("the range is outside the disk or not whole logical blocks")]
    Range,
    /// The list of ranges is empty, incomplete or too long.
    #[error("the list of ranges is malformed")]
    RangeList,
    /// The data, a range or all ranges together exceed a limit.
    #[error("the request is too large")]
    TooLarge,
}

impl RequestError {
    /// The status byte of the refused request.
    #[inline]
    fn code(self) -> u8 {
        match self {
            RequestError::Unsupported => blk::S_UNSUPP,
            _ => blk::S_IOERR,
        }
    }
}

/// A valid request.
#[derive(Debug)]
pub struct Request {
    /// Kind and arguments.
    pub kind: Kind,
    /// Place of the status byte.
    pub status: StatusByte,
}

/// A request that is answered without being carried out.
#[derive(Debug)]
pub struct Refused {
    /// `S_IOERR` or `S_UNSUPP`.
    pub code: u8,
    /// Place of the status byte; `None` if the chain has no writable byte.
    pub status: Option<StatusByte>,
}

impl Request {
    /// Parses the request in `chain` and removes header, ranges and status byte: the data segments
    /// are left. Reads only the header and the ranges, and writes nothing.
    ///
    /// # Errors
    /// [`Refused`], with the status for the driver.
    #[inline]
    pub fn parse(
        chain: &mut Chain,
        disk: &DiskView,
        ranges: &mut RangeList,
    ) -> Result<Request, Refused> {
        let Some(status) = chain.take_status() else {
            return Err(Refused { code: blk::S_IOERR, status: None });
        };
        let kind = chain
            .take_front::<{ blk::REQ_HEADER_BYTES }>()
            .ok_or(RequestError::NoHeader)
            .and_then(|bytes| parse_kind(header(bytes), chain, disk, ranges));
        match kind {
            Ok(kind) => Ok(Request { kind, status }),
            Err(error) => Err(Refused { code: error.code(), status: Some(status) }),
        }
    }
}

#[inline]
fn header(bytes: [u8; blk::REQ_HEADER_BYTES]) -> ReqHeader {
    let wire = ReqHeader::read_from_bytes(&bytes).expect("the array has the header's size");
    ReqHeader { kind: u32::from_le(wire.kind), reserved: 0, sector: u64::from_le(wire.sector) }
}

#[inline]
fn parse_kind(
    header: ReqHeader,
    chain: &mut Chain,
    disk: &DiskView,
    ranges: &mut RangeList,
) -> Result<Kind, RequestError> {
    let sector = header.sector;
    match header.kind {
        blk::T_IN => {
            let bytes = checked_bytes(chain.writable_bytes(), sector, disk)?;
            Ok(Kind::Read { sector, bytes })
        }
        blk::T_OUT => {
            refuse_if(disk.read_only, RequestError::ReadOnly)?;
            let bytes = checked_bytes(chain.readable_bytes(), sector, disk)?;
            Ok(Kind::Write { sector, bytes, durable: disk.write_through() })
        }
        blk::T_FLUSH if disk.flush => Ok(Kind::Flush),
        blk::T_GET_ID => Ok(Kind::GetId),
        blk::T_DISCARD => {
            let sizes = parse_ranges(chain, disk, disk.discard, header.kind, ranges)?;
            Ok(Kind::Discard {
                bytes: sizes.sum * SECTOR_BYTES,
                longest_bytes: sizes.longest * SECTOR_BYTES,
                durable: disk.write_through(),
            })
        }
        blk::T_WRITE_ZEROES => {
            let sizes = parse_ranges(chain, disk, disk.write_zeroes, header.kind, ranges)?;
            let bytes = sizes.sum * SECTOR_BYTES;
            Ok(Kind::WriteZeroes { bytes, durable: disk.write_through() })
        }
        blk::T_SECURE_ERASE => {
            let sizes = parse_ranges(chain, disk, disk.secure_erase, header.kind, ranges)?;
            Ok(Kind::SecureErase { bytes: sizes.sum * SECTOR_BYTES })
        }
        _ => Err(RequestError::Unsupported),
    }
}

#[inline]
fn refuse_if(condition: bool, error: RequestError) -> Result<(), RequestError> {
    if condition { Err(error) } else { Ok(()) }
}

/// Checks the data of an IN or OUT: whole logical blocks inside the disk (section 5.2.6.1), and at
/// most [`REQUEST_BYTES_MAX`] bytes.
#[inline]
fn checked_bytes(bytes: u64, sector: u64, disk: &DiskView) -> Result<u64, RequestError> {
    let whole = bytes.is_multiple_of(SECTOR_BYTES);
    let fits = disk.holds(sector, bytes / SECTOR_BYTES);
    refuse_if(!whole || !fits, RequestError::Range)?;
    refuse_if(bytes > REQUEST_BYTES_MAX, RequestError::TooLarge)?;
    Ok(bytes)
}

/// Lengths of a list of ranges in sectors.
struct RangeSizes {
    sum: u64,
    longest: u64,
}

/// Checks all ranges before any of them is carried out (section 5.2.6.2). The total length of the
/// ranges is bounded, too, except of a DISCARD.
fn parse_ranges(
    chain: &mut Chain,
    disk: &DiskView,
    limits: Option<RangeLimits>,
    kind: u32,
    ranges: &mut RangeList,
) -> Result<RangeSizes, RequestError> {
    let limits = limits.ok_or(RequestError::Unsupported)?;
    let allowed = if kind == blk::T_WRITE_ZEROES { blk::WRITE_ZEROES_F_UNMAP } else { 0 };
    refuse_if(disk.read_only, RequestError::ReadOnly)?;
    let bytes = chain.readable_bytes();
    let size = blk::RANGE_SEGMENT_BYTES as u64;
    refuse_if(bytes == 0 || !bytes.is_multiple_of(size), RequestError::RangeList)?;
    refuse_if(bytes / size > u64::from(MAX_RANGES), RequestError::RangeList)?;
    ranges.clear();
    let mut sizes = RangeSizes { sum: 0, longest: 0 };
    while let Some(bytes) = chain.take_front::<{ blk::RANGE_SEGMENT_BYTES }>() {
        let wire = blk::RangeSegment::read_from_bytes(&bytes).expect("the array has its size");
        let (sector, sectors) = (u64::from_le(wire.sector), u32::from_le(wire.num_sectors));
        let flags = u32::from_le(wire.flags);
        refuse_if(flags & !allowed != 0, RequestError::Unsupported)?;
        refuse_if(sectors > limits.sectors_max, RequestError::TooLarge)?;
        sizes.sum += u64::from(sectors);
        sizes.longest = sizes.longest.max(u64::from(sectors));
        refuse_if(!disk.holds(sector, u64::from(sectors)), RequestError::Range)?;
        ranges.push(Range { sector, sectors, unmap: flags != 0 });
    }
    // A stop of the queue skips the rest of a DISCARD, but waits for the other commands.
    let is_too_large = kind != blk::T_DISCARD && sizes.sum > u64::from(limits.sectors_max);
    refuse_if(is_too_large, RequestError::TooLarge)?;
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::{Disk, Null};

    #[test]
    fn a_request_of_more_than_1_gib_is_refused() {
        let info = Null::new(1 << 40).info();
        let disk = DiskView::new(&info, 0, Arc::default(), "");
        assert_eq!(checked_bytes(1 << 30, 8, &disk), Ok(1 << 30));
        let refused = checked_bytes((1 << 30) + 512, 8, &disk);
        assert_eq!(refused.map_err(RequestError::code), Err(blk::S_IOERR));
    }
}
