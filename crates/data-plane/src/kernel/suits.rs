// SPDX-License-Identifier: Apache-2.0
//! Whether the kernel can stand in for the daemon's own data plane without the guest noticing:
//! what the device promised in its configuration space and features must hold on either plane.

use super::abi;
use super::error::KernelError;
use backend::Info;
use virtio_spec::blk;
use virtio_spec::features::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1, VHOST_F_LOG_ALL, bit,
};

fn unsuited<T>(why: String) -> Result<T, KernelError> {
    Err(KernelError::Unsuited(why))
}

/// Feature bits with a meaning for whoever runs the queues.
const OF_QUEUES: u64 = bit(F_VERSION_1)
    | bit(F_INDIRECT_DESC)
    | bit(F_EVENT_IDX)
    | bit(F_RING_PACKED)
    | bit(VHOST_F_LOG_ALL)
    | bit(blk::F_FLUSH)
    | bit(blk::F_DISCARD)
    | bit(blk::F_WRITE_ZEROES)
    | bit(blk::F_SECURE_ERASE);

/// The features to set in the kernel, which knows `known`, for a driver that took `acked`.
///
/// LOG_ALL only with a log: without one the kernel takes the log to be at address 0, and a
/// front-end, which chooses the guest's addresses, could have it set bits anywhere in this process.
pub(super) fn features(acked: u64, known: u64, has_log: bool) -> Result<u64, KernelError> {
    let acked = if has_log { acked } else { acked & !bit(VHOST_F_LOG_ALL) };
    if acked & bit(F_RING_PACKED) != 0 {
        return unsuited(
            "the guest uses packed virtqueues, and the kernel knows only split ones; \
                         set --packed off and restart the guest's device"
                .into(),
        );
    }
    match acked & OF_QUEUES & !known {
        0 => Ok(acked & known),
        missing => unsuited(format!(
            "the guest uses the features {missing:#x}, which the kernel module does not know; load \
             the module that belongs to this program"
        )),
    }
}

/// Compares the attached file as the kernel sees it with the disk as the guest sees it.
pub(super) fn disk(kernel: &abi::Info, disk: &Info, seg_max: u32) -> Result<(), KernelError> {
    let has = |flag: u32| kernel.flags & flag != 0;
    if !has(abi::INFO_ATTACHED) {
        return unsuited("the kernel module attached nothing; see the kernel log (dmesg)".into());
    }
    // More is no harm: it was grown, and the guest knows of what there was at the start.
    if kernel.capacity_sectors < disk.capacity_sectors {
        return unsuited(format!(
            "the kernel would serve {} sectors and the disk has {}: it has shrunk since the start; \
             give it its size back, or start anew",
            kernel.capacity_sectors, disk.capacity_sectors
        ));
    }
    if kernel.logical_block_bytes > disk.logical_block_bytes {
        return unsuited(format!(
            "the kernel wants blocks of {} bytes and the disk has {}; set --logical-block-size {0}",
            kernel.logical_block_bytes, disk.logical_block_bytes
        ));
    }
    if kernel.seg_max < seg_max {
        let (most, wanted) = (kernel.seg_max, seg_max);
        return unsuited(format!(
            "the kernel takes {most} segments of a request, not {wanted}; load the module that \
             belongs to this program"
        ));
    }
    if has(abi::INFO_READ_ONLY) && !disk.read_only {
        return unsuited("the kernel may only read the disk; check that it is writable".into());
    }
    let commands = [
        ("DISCARD", disk.discard.is_some(), abi::INFO_DISCARD),
        ("WRITE_ZEROES", disk.write_zeroes.is_some(), abi::INFO_WRITE_ZEROES),
        ("SECURE_ERASE", disk.secure_erase.is_some(), abi::INFO_SECURE_ERASE),
    ];
    match commands.iter().find(|(_, offered, flag)| *offered && !has(*flag)) {
        None => Ok(()),
        Some((name, ..)) => {
            unsuited(format!("the kernel has no {name} for this storage; use --data-plane uring"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::{Disk, Null};
    use virtio_spec::features::VHOST_USER_F_PROTOCOL_FEATURES;

    fn seen() -> (abi::Info, Info) {
        let disk = Null::new(1 << 20).info();
        let flags = abi::INFO_ATTACHED
            | abi::INFO_DISCARD
            | abi::INFO_WRITE_ZEROES
            | abi::INFO_SECURE_ERASE;
        let kernel = abi::Info {
            flags,
            seg_max: 256,
            capacity_sectors: disk.capacity_sectors,
            logical_block_bytes: 512,
            ..abi::Info::default()
        };
        (kernel, disk)
    }

    #[test]
    fn an_equal_disk_suits() {
        let (kernel, info) = seen();
        disk(&kernel, &info, 126).unwrap();
    }

    #[test]
    fn whatever_the_guest_could_notice_does_not_suit() {
        let (kernel, info) = seen();
        let without = |flag: u32| abi::Info { flags: kernel.flags & !flag, ..kernel };
        let unsuited = [
            (without(abi::INFO_ATTACHED), "attached nothing"),
            (abi::Info { capacity_sectors: 2047, ..kernel }, "2047 sectors"),
            (abi::Info { logical_block_bytes: 4096, ..kernel }, "--logical-block-size 4096"),
            (abi::Info { seg_max: 125, ..kernel }, "125 segments"),
            (abi::Info { flags: kernel.flags | abi::INFO_READ_ONLY, ..kernel }, "only read"),
            (without(abi::INFO_DISCARD), "no DISCARD"),
            (without(abi::INFO_WRITE_ZEROES), "no WRITE_ZEROES"),
            (without(abi::INFO_SECURE_ERASE), "no SECURE_ERASE"),
        ];
        for (kernel, words) in unsuited {
            let why = disk(&kernel, &info, 126).unwrap_err().to_string();
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn features_that_mean_nothing_to_queues_are_left_out() {
        let ring = bit(F_VERSION_1) | bit(F_EVENT_IDX);
        let acked = ring | bit(blk::F_CONFIG_WCE) | bit(VHOST_USER_F_PROTOCOL_FEATURES);
        assert_eq!(features(acked, ring | bit(F_INDIRECT_DESC), false).unwrap(), ring);
    }

    #[test]
    fn the_kernel_logs_only_where_there_is_a_log() {
        let acked = bit(F_VERSION_1) | bit(VHOST_F_LOG_ALL);
        assert_eq!(features(acked, u64::MAX, false).unwrap(), bit(F_VERSION_1));
        assert_eq!(features(acked, u64::MAX, true).unwrap(), acked);
    }

    #[test]
    fn a_disk_that_has_grown_since_the_start_suits() {
        let (kernel, info) = seen();
        let grown = abi::Info { capacity_sectors: kernel.capacity_sectors + 8, ..kernel };
        disk(&grown, &info, 126).unwrap();
    }

    #[test]
    fn a_feature_that_the_kernel_lacks_and_packed_rings_are_refused() {
        let why = features(bit(F_EVENT_IDX), 0, false).unwrap_err().to_string();
        assert!(why.contains("0x20000000"), "{why}");
        let why = features(bit(F_RING_PACKED), u64::MAX, false).unwrap_err().to_string();
        assert!(why.contains("--packed off"), "{why}");
    }
}
