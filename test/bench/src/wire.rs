// SPDX-License-Identifier: Apache-2.0
//! Layout of a request in guest memory, as virtio-blk or as virtio-scsi.

use std::sync::atomic::Ordering;

use anyhow::{Result, bail};
use driver::{Area, Segment};
use virtio_spec::blk::{S_OK, T_FLUSH, T_IN, T_OUT};

use crate::load::Load;

/// virtio-blk: header of 16 bytes, status byte behind it; a cache line for each request.
const BLK_STATUS_OFFSET: usize = 16;
const BLK_SLOT_BYTES: usize = 64;

/// `struct virtio_scsi_cmd_req`: `lun[8]`, tag (8), attribute, priority, crn, `cdb[32]`.
const SCSI_REQUEST_BYTES: usize = 51;
const SCSI_CDB_OFFSET: usize = 19;
/// `struct virtio_scsi_cmd_resp`: sense length (4), residual (4), qualifier (2), status, response,
/// `sense[96]`.
const SCSI_RESPONSE_BYTES: usize = 108;
const SCSI_RESPONSE_OFFSET: usize = 64;
const SCSI_STATUS_OFFSET: usize = SCSI_RESPONSE_OFFSET + 10;
const SCSI_SLOT_BYTES: usize = 192;

const READ_10: u8 = 0x28;
const WRITE_10: u8 = 0x2a;
const SYNCHRONIZE_CACHE_10: u8 = 0x35;
/// Initial value of the status byte, until the device writes it.
const UNTOUCHED: u8 = 0xff;

/// The kind of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
}

/// The protocol of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// virtio-blk.
    Blk,
    /// virtio-scsi: READ(10), WRITE(10) and SYNCHRONIZE CACHE(10), as Linux sends them to disks
    /// below 2 TiB.
    Scsi,
}

impl Wire {
    /// Bytes of header and answer, on cache lines of their own.
    pub fn slot_bytes(self) -> usize {
        match self {
            Self::Blk => BLK_SLOT_BYTES,
            Self::Scsi => SCSI_SLOT_BYTES,
        }
    }

    /// Writes the parts that stay the same for all requests of a kind.
    pub(crate) fn lay_out(self, slots: &Area, at: usize, kind: Kind, block_bytes: u32) {
        match self {
            Self::Blk => {
                let word = match kind {
                    Kind::Read => T_IN,
                    Kind::Write => T_OUT,
                    Kind::Flush => T_FLUSH,
                };
                slots.store_u64(at, word.into(), Ordering::Relaxed);
            }
            Self::Scsi => {
                let mut request = [0; SCSI_REQUEST_BYTES];
                // Target 1 (its portal group), LUN 0, single level addressing.
                request[..4].copy_from_slice(&[1, 1, 0x40, 0]);
                let cdb = &mut request[SCSI_CDB_OFFSET..];
                cdb[0] = match kind {
                    Kind::Read => READ_10,
                    Kind::Write => WRITE_10,
                    Kind::Flush => SYNCHRONIZE_CACHE_10,
                };
                // A FLUSH of no blocks is one of all blocks.
                let blocks = if kind == Kind::Flush { 0 } else { (block_bytes / 512) as u16 };
                cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
                slots.write(at, &request);
            }
        }
    }

    /// Sets the sector of the request.
    #[inline]
    pub(crate) fn aim(self, slots: &Area, at: usize, sector: u64) {
        match self {
            Self::Blk => {
                slots.store_u64(at + 8, sector, Ordering::Relaxed);
                slots.store_u8(at + BLK_STATUS_OFFSET, UNTOUCHED, Ordering::Relaxed);
            }
            Self::Scsi => {
                let lba = (sector as u32).to_be_bytes();
                slots.write(at + SCSI_CDB_OFFSET + 2, &lba);
                slots.store_u8(at + SCSI_STATUS_OFFSET, UNTOUCHED, Ordering::Relaxed);
            }
        }
    }

    /// The chain: device-readable parts, then device-writable ones. A FLUSH has the first and the
    /// last one only.
    #[inline]
    pub(crate) fn segments(self, header: u64, data: u64, kind: Kind, len: u32) -> [Segment; 3] {
        let data = Segment { gpa: data, len, writable: kind == Kind::Read };
        match self {
            Self::Blk => {
                let status = Segment::writable(header + BLK_STATUS_OFFSET as u64, 1);
                [Segment::readable(header, 16), data, status]
            }
            Self::Scsi => {
                let request = Segment::readable(header, SCSI_REQUEST_BYTES as u32);
                let at = header + SCSI_RESPONSE_OFFSET as u64;
                let response = Segment::writable(at, SCSI_RESPONSE_BYTES as u32);
                // Data to the device comes after the request, data from it after the response.
                if data.writable { [request, response, data] } else { [request, data, response] }
            }
        }
    }

    /// Checks that the request succeeded.
    #[inline]
    pub(crate) fn check(self, slots: &Area, at: usize) -> Result<()> {
        match self {
            Self::Blk => {
                let status = slots.load_u8(at + BLK_STATUS_OFFSET, Ordering::Acquire);
                if status != S_OK {
                    bail!("a request ended with status {status}");
                }
            }
            Self::Scsi => {
                // Status GOOD and response OK are both 0.
                let answer = slots.load_u16(at + SCSI_STATUS_OFFSET, Ordering::Acquire);
                if answer != 0 {
                    let sense = slots.to_vec(at + SCSI_RESPONSE_OFFSET + 12, 18);
                    let [status, response] = answer.to_le_bytes();
                    bail!("a command ended with status {status}, response {response}: {sense:x?}");
                }
            }
        }
        Ok(())
    }
}

/// Guest memory for so many queues: requests, then ring and indirect tables (64 bytes a descriptor
/// each, amply).
pub(crate) fn memory_bytes(load: &Load, queues: u16, wire: Wire) -> u64 {
    let slot_bytes = wire.slot_bytes() + load.block_bytes.next_multiple_of(4096) as usize;
    let queue_bytes =
        usize::from(load.depth) * slot_bytes + usize::from(load.queue_size) * 128 + (64 << 10);
    (usize::from(queues) * queue_bytes).next_multiple_of(2 << 20) as u64
}
