// SPDX-License-Identifier: Apache-2.0
//! Checks that the kernel data plane is compatible with the device: the properties in the
//! configuration space and the features must hold on both data planes.

use super::abi;
use crate::error::KernelError;
use backend::Info;
use virtio_spec::blk;
use virtio_spec::features::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1, VHOST_F_LOG_ALL, bit,
};

fn unsuited<T>(why: String) -> Result<T, KernelError> {
    Err(KernelError::Unsuited(why))
}

/// Feature bits that affect the queues.
const OF_QUEUES: u64 = bit(F_VERSION_1)
    | bit(F_INDIRECT_DESC)
    | bit(F_EVENT_IDX)
    | bit(F_RING_PACKED)
    | bit(VHOST_F_LOG_ALL)
    | bit(blk::F_FLUSH)
    | bit(blk::F_DISCARD)
    | bit(blk::F_WRITE_ZEROES)
    | bit(blk::F_SECURE_ERASE);

/// The features to set in a kernel that supports `known`, for a driver that negotiated `acked`.
///
/// LOG_ALL needs a log: without one the kernel would use a log at address 0. A front-end chooses
/// the guest's addresses and could then set bits anywhere in this process.
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

/// True if the disk tells the guest that no command frees space.
pub(super) fn keeps_space(disk: &Info) -> bool {
    disk.write_zeroes.is_some() && !disk.write_zeroes_unmaps && disk.discard.is_none()
}

/// Compares the properties of the attached file with the disk that the guest sees.
pub(super) fn disk(kernel: &abi::Info, disk: &Info, seg_max: u32) -> Result<(), KernelError> {
    let has = |flag: u32| kernel.flags & flag != 0;
    if !has(abi::INFO_ATTACHED) {
        return unsuited("the kernel module attached nothing; see the kernel log (dmesg)".into());
    }
    // A larger file is compatible: it has grown, and the guest uses the capacity at the start.
    if kernel.capacity_sectors < disk.capacity_sectors {
        return unsuited(format!(
            "the kernel would serve {} sectors and the disk has {}: it has shrunk since the start; \
             give it its size back, or start anew",
            kernel.capacity_sectors, disk.capacity_sectors
        ));
    }
    if kernel.logical_block_bytes > disk.logical_block_bytes {
        return unsuited(format!(
            "the kernel wants blocks of {} bytes and the guest has {}; use --data-plane uring, or \
             for a new disk --logical-block-size {0}",
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
    let can_keep_space = kernel.option_flags & abi::OPT_NO_UNMAP != 0;
    if keeps_space(disk) && has(abi::INFO_DISCARD) && !can_keep_space {
        return unsuited(
            "the guest was told that WRITE_ZEROES keeps its space, and the kernel module is too \
             old for that; load the one that belongs to this program, use --data-plane uring, or \
             --discard on"
                .into(),
        );
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
    fn a_disk_that_must_stay_thick_suits_a_module_that_keeps_space() {
        let (kernel, info) = seen();
        let thick = Info { discard: None, write_zeroes_unmaps: false, ..info };
        let why = disk(&kernel, &thick, 126).unwrap_err().to_string();
        assert!(why.contains("--discard on"), "{why}");
        let keeps = abi::Info { option_flags: abi::OPT_NO_UNMAP, ..kernel };
        disk(&keeps, &thick, 126).unwrap();
        let cannot = abi::Info { flags: kernel.flags & !abi::INFO_DISCARD, ..kernel };
        disk(&cannot, &thick, 126).unwrap();
        disk(&cannot, &Info { write_zeroes: None, ..thick }, 126).unwrap();
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
