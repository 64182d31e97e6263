// SPDX-License-Identifier: Apache-2.0
//! The configuration space and the feature bits that a disk offers (sections 5.2.3 and 5.2.4).

use backend::{Info, RangeLimits};
use virtio_spec::blk::{self, Config};
use virtio_spec::features::{self, bit};
use zerocopy::IntoBytes;

/// Maximum ranges of one DISCARD, WRITE_ZEROES or SECURE_ERASE. The configuration space announces
/// them for DISCARD only: the ranges of the others together are bounded like a single range.
pub const MAX_RANGES: u32 = 32;
/// Maximum length of a data segment that the configuration space announces, in bytes. With a
/// `seg_max` of 126 a request stays below 32 MiB, the maximum of the kernel data plane.
pub const SEGMENT_BYTES_MAX: u32 = 256 << 10;
/// Maximum sectors of a WRITE_ZEROES or SECURE_ERASE range that the configuration space announces
/// (4 MiB): a full queue of 128 stays within the data plane's bound on bytes in flight, so that reads
/// behind it do not wait. Advice, like SIZE_MAX: a guest that was started by a daemon with larger
/// limits may use those of [`Info`].
pub const ZEROED_SECTORS_MAX: u32 = 8 << 10;
/// The same for a DISCARD range (64 MiB), of which 16 bytes count as one byte in flight.
pub const DISCARDED_SECTORS_MAX: u32 = 128 << 10;

/// The properties of the device that drivers see.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Properties of the storage.
    pub info: Info,
    /// Number of request queues.
    pub num_queues: u16,
    /// Maximum data segments of a request.
    pub seg_max: u32,
    /// Offer the packed layout.
    pub packed: bool,
}

impl DeviceConfig {
    /// The offered feature bits (sections 5.2.3 and 6).
    pub fn features(&self) -> u64 {
        let info = &self.info;
        let mut offered = bit(features::F_VERSION_1)
            | bit(features::F_INDIRECT_DESC)
            | bit(features::F_EVENT_IDX)
            | bit(blk::F_SIZE_MAX)
            | bit(blk::F_SEG_MAX)
            | bit(blk::F_BLK_SIZE)
            | bit(blk::F_TOPOLOGY)
            | bit(blk::F_FLUSH)
            | bit(blk::F_CONFIG_WCE);
        let mut offer = |number: u32, wanted: bool| offered |= u64::from(wanted) << number;
        offer(features::F_RING_PACKED, self.packed);
        offer(blk::F_MQ, self.num_queues > 1);
        offer(blk::F_RO, info.read_only);
        offer(blk::F_DISCARD, info.discard.is_some() && !info.read_only);
        offer(blk::F_WRITE_ZEROES, info.write_zeroes.is_some() && !info.read_only);
        offer(blk::F_SECURE_ERASE, info.secure_erase.is_some() && !info.read_only);
        offered
    }

    /// The configuration space (section 5.2.4). `writeback` is the current cache mode.
    pub fn space(&self, writeback: bool) -> Vec<u8> {
        let info = &self.info;
        let blocks = |bytes: u32| bytes / info.logical_block_bytes;
        let mut config = Config {
            capacity: info.capacity_sectors.to_le(),
            size_max: SEGMENT_BYTES_MAX.to_le(),
            seg_max: self.seg_max.to_le(),
            blk_size: info.logical_block_bytes.to_le(),
            physical_block_exp: blocks(info.physical_block_bytes).max(1).ilog2() as u8,
            min_io_size: u16::try_from(blocks(info.io_min_bytes)).unwrap_or(0).to_le(),
            opt_io_size: blocks(info.io_opt_bytes).to_le(),
            writeback: u8::from(writeback),
            num_queues: self.num_queues.to_le(),
            ..Config::default()
        };
        if let Some(limits) = info.discard {
            config.max_discard_sectors = announced(limits, DISCARDED_SECTORS_MAX).to_le();
            config.max_discard_seg = MAX_RANGES.to_le();
            config.discard_sector_alignment = limits.align_sectors.to_le();
        }
        if let Some(limits) = info.write_zeroes {
            config.max_write_zeroes_sectors = announced(limits, ZEROED_SECTORS_MAX).to_le();
            config.max_write_zeroes_seg = 1u32.to_le();
            config.write_zeroes_may_unmap = u8::from(info.write_zeroes_unmaps);
        }
        if let Some(limits) = info.secure_erase {
            config.max_secure_erase_sectors = announced(limits, ZEROED_SECTORS_MAX).to_le();
            config.max_secure_erase_seg = 1u32.to_le();
            config.secure_erase_sector_alignment = limits.align_sectors.to_le();
        }
        config.as_bytes().to_vec()
    }
}

/// The announced length of a range in sectors. Storage with a larger alignment does nothing for
/// shorter ranges.
fn announced(limits: RangeLimits, sectors_max: u32) -> u32 {
    limits.sectors_max.min(sectors_max.max(limits.align_sectors))
}
