// SPDX-License-Identifier: Apache-2.0
//! The configuration space of a device that lies.

use kit::rng::Rng;
use virtio_spec::blk::Config;
use zerocopy::IntoBytes;

use kit::disks::Lie;

/// Sectors of a disk without a lie.
const SECTORS: u64 = 64 << 11;

/// The bytes that a read of the configuration space returns.
pub(super) fn random_config(lie: Lie, rng: &mut Rng) -> Vec<u8> {
    let mut config = honest();
    match lie {
        Lie::ConfigZero => zero(&mut config),
        Lie::ConfigHuge => huge(&mut config),
        Lie::ConfigRandom => {
            rng.fill(config.as_mut_bytes());
        }
        Lie::CapacityJumps => {
            config.capacity = match rng.below(4) {
                0 => 0,
                1 => rng.below(SECTORS),
                2 => rng.number(),
                _ => SECTORS,
            };
        }
        Lie::OneSegment => (config.seg_max, config.blk_size) = (1, 4096),
        _ => {}
    }
    config.as_bytes().to_vec()
}

fn honest() -> Config {
    Config {
        capacity: SECTORS,
        size_max: 1 << 20,
        seg_max: 64,
        blk_size: 512,
        writeback: 1,
        num_queues: 8,
        max_discard_sectors: 1 << 16,
        max_discard_seg: 16,
        discard_sector_alignment: 8,
        max_write_zeroes_sectors: 1 << 16,
        max_write_zeroes_seg: 1,
        write_zeroes_may_unmap: 1,
        max_secure_erase_sectors: 1 << 16,
        max_secure_erase_seg: 1,
        secure_erase_sector_alignment: 8,
        ..Config::default()
    }
}

/// A disk with a capacity, but with zero in all other fields: no driver can use it.
fn zero(config: &mut Config) {
    *config = Config { capacity: SECTORS, ..Config::default() };
}

fn huge(config: &mut Config) {
    config.as_mut_bytes().fill(0xff);
    config.blk_size = 512;
}
