// SPDX-License-Identifier: Apache-2.0
//! Stage *request*: header copied once, checked against the disk, turned into a type.

use crate::config::MAX_RANGES;
use backend::{Info, RangeLimits};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_spec::blk::{self, ReqHeader, SECTOR_BYTES};
use virtio_spec::features::bit;
use virtqueue::Chain;
use virtqueue::chain::StatusByte;
use zerocopy::FromBytes;

/// What a queue knows of its disk; made at start from the *negotiated* features.
#[derive(Clone, Debug)]
pub struct DiskView {
    capacity_sectors: u64,
    read_only: bool,
    flush: bool,
    discard: Option<RangeLimits>,
    write_zeroes: Option<RangeLimits>,
    secure_erase: Option<RangeLimits>,
    writeback: Arc<AtomicBool>,
    id: [u8; blk::ID_BYTES],
}

impl DiskView {
    /// The view of a disk by a driver that negotiated `features`. `writeback` is the cache mode,
    /// which the driver may change at any time where it negotiated CONFIG_WCE.
    pub fn new(info: &Info, features: u64, writeback: Arc<AtomicBool>, serial: &str) -> Self {
        let acked = |number: u32| features & bit(number) != 0;
        DiskView {
            capacity_sectors: info.capacity_sectors,
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

    /// Section 5.2.6.2: without FLUSH, or with the cache in write-through mode, a write completes
    /// only when it is durable.
    #[inline]
    pub fn write_through(&self) -> bool {
        !self.flush || !self.writeback.load(Ordering::Relaxed)
    }

    /// Whether `[sector, sector + sectors)` lies on the disk.
    #[inline]
    fn holds(&self, sector: u64, sectors: u64) -> bool {
        sector.checked_add(sectors).is_some_and(|end| end <= self.capacity_sectors)
    }
}

/// `serial` as the 20 bytes of GET_ID: cut or padded with zeroes (section 5.2.6).
pub fn id_bytes(serial: &str) -> [u8; blk::ID_BYTES] {
    let mut id = [0; blk::ID_BYTES];
    for (to, from) in id.iter_mut().zip(serial.bytes()) {
        *to = from;
    }
    id
}

/// A range on the disk, inside its capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u32,
    /// WRITE_ZEROES: the space may be freed.
    pub unmap: bool,
}

/// The checked ranges of one request; reused, so that it allocates at most once.
#[derive(Debug, Default)]
pub struct RangeList {
    ranges: Vec<Range>,
    next: usize,
}

impl RangeList {
    /// The next range to work on.
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

/// What a request asks for. In range and allowed, by construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Fill the chain's writable segments.
    Read {
        /// First sector.
        sector: u64,
        /// Bytes; a multiple of 512.
        bytes: u64,
    },
    /// Store the chain's readable segments.
    Write {
        /// First sector.
        sector: u64,
        /// Bytes; a multiple of 512.
        bytes: u64,
        /// Durable before completion.
        durable: bool,
    },
    /// Make completed writes durable.
    Flush,
    /// The ranges are in the [`RangeList`].
    Discard {
        /// Durable before completion.
        durable: bool,
    },
    /// The ranges are in the [`RangeList`].
    WriteZeroes {
        /// Durable before completion.
        durable: bool,
    },
    /// The ranges are in the [`RangeList`].
    SecureErase,
    /// Copy the id into the chain's writable segments.
    GetId,
}

/// A request that may be carried out.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub kind: Kind,
    /// Where the outcome goes.
    pub status: StatusByte,
}

/// A request that is answered without being carried out.
#[derive(Debug)]
pub struct Refused {
    /// `S_IOERR` or `S_UNSUPP`.
    pub code: u8,
    /// Where the code goes; `None` when the chain has no writable byte.
    pub status: Option<StatusByte>,
}

impl Request {
    /// Reads the request in `chain`, cutting header and status byte off it, so that the data
    /// segments are left. Nothing but the header (and the ranges) is read, nothing is written.
    ///
    /// # Errors
    /// [`Refused`], with the status that the driver is to see.
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
            .ok_or(blk::S_IOERR)
            .and_then(|bytes| parse_kind(header(bytes), chain, disk, ranges));
        match kind {
            Ok(kind) => Ok(Request { kind, status }),
            Err(code) => Err(Refused { code, status: Some(status) }),
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
) -> Result<Kind, u8> {
    let sector = header.sector;
    match header.kind {
        blk::T_IN => {
            let bytes = checked_bytes(chain.writable_bytes(), sector, disk)?;
            Ok(Kind::Read { sector, bytes })
        }
        blk::T_OUT => {
            refuse_if(disk.read_only, blk::S_IOERR)?;
            let bytes = checked_bytes(chain.readable_bytes(), sector, disk)?;
            Ok(Kind::Write { sector, bytes, durable: disk.write_through() })
        }
        blk::T_FLUSH if disk.flush => Ok(Kind::Flush),
        blk::T_GET_ID => Ok(Kind::GetId),
        blk::T_DISCARD => {
            parse_ranges(chain, disk, disk.discard, false, ranges)?;
            Ok(Kind::Discard { durable: disk.write_through() })
        }
        blk::T_WRITE_ZEROES => {
            parse_ranges(chain, disk, disk.write_zeroes, true, ranges)?;
            Ok(Kind::WriteZeroes { durable: disk.write_through() })
        }
        blk::T_SECURE_ERASE => {
            parse_ranges(chain, disk, disk.secure_erase, false, ranges)?;
            Ok(Kind::SecureErase)
        }
        _ => Err(blk::S_UNSUPP),
    }
}

#[inline]
fn refuse_if(condition: bool, code: u8) -> Result<(), u8> {
    if condition { Err(code) } else { Ok(()) }
}

/// Section 5.2.6.1: data is a multiple of 512 bytes and lies on the disk.
#[inline]
fn checked_bytes(bytes: u64, sector: u64, disk: &DiskView) -> Result<u64, u8> {
    let whole = bytes.is_multiple_of(SECTOR_BYTES);
    let fits = disk.holds(sector, bytes / SECTOR_BYTES);
    if whole && fits { Ok(bytes) } else { Err(blk::S_IOERR) }
}

/// Section 5.2.6.2: all ranges are checked before any is worked on.
fn parse_ranges(
    chain: &mut Chain,
    disk: &DiskView,
    limits: Option<RangeLimits>,
    unmap_allowed: bool,
    ranges: &mut RangeList,
) -> Result<(), u8> {
    let limits = limits.ok_or(blk::S_UNSUPP)?;
    refuse_if(disk.read_only, blk::S_IOERR)?;
    let bytes = chain.readable_bytes();
    let size = blk::RANGE_SEGMENT_BYTES as u64;
    refuse_if(bytes == 0 || !bytes.is_multiple_of(size), blk::S_IOERR)?;
    refuse_if(bytes / size > u64::from(MAX_RANGES), blk::S_IOERR)?;
    ranges.clear();
    while let Some(bytes) = chain.take_front::<{ blk::RANGE_SEGMENT_BYTES }>() {
        let wire = blk::RangeSegment::read_from_bytes(&bytes).expect("the array has its size");
        let (sector, sectors) = (u64::from_le(wire.sector), u32::from_le(wire.num_sectors));
        let flags = u32::from_le(wire.flags);
        let allowed = if unmap_allowed { blk::WRITE_ZEROES_F_UNMAP } else { 0 };
        refuse_if(flags & !allowed != 0, blk::S_UNSUPP)?;
        refuse_if(sectors > limits.sectors_max, blk::S_IOERR)?;
        refuse_if(!disk.holds(sector, u64::from(sectors)), blk::S_IOERR)?;
        ranges.push(Range { sector, sectors, unmap: flags != 0 });
    }
    Ok(())
}
