// SPDX-License-Identifier: Apache-2.0
//! Constants and structures of `kernel/include/uapi/vhost_blk.h` in the header's order, and those
//! of the vhost core that the `vhost` crate lacks. A test compiles the header and compares.

use vhost::vhost_kern::vhost_binding::{VHOST, vhost_vring_file, vhost_vring_state};
use virtio_spec::blk::ID_BYTES;
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr, ioctl_iowr_nr};

/// Maximum descriptors of a running virtqueue.
pub(crate) const QUEUE_SIZE_MAX: u32 = 1024;

pub(crate) const INFO_ATTACHED: u32 = 1 << 0;
pub(crate) const INFO_READ_ONLY: u32 = 1 << 2;
pub(crate) const INFO_DISCARD: u32 = 1 << 4;
pub(crate) const INFO_WRITE_ZEROES: u32 = 1 << 5;
pub(crate) const INFO_SECURE_ERASE: u32 = 1 << 6;
pub(crate) const INFO_POLL_QUEUES: u32 = 1 << 7;

pub(crate) const OPT_WRITE_THROUGH: u32 = 1 << 0;
pub(crate) const OPT_READ_ONLY: u32 = 1 << 1;
pub(crate) const OPT_IOPOLL: u32 = 1 << 2;
pub(crate) const OPT_PIN_MEMORY: u32 = 1 << 3;
pub(crate) const OPT_NO_UNMAP: u32 = 1 << 4;
pub(crate) const OPT_COALESCE: u32 = 1 << 5;
pub(crate) const OPT_COALESCE_AUTO: u32 = 1 << 6;
pub(crate) const OPT_KEEP_FAILED: u32 = 1 << 7;
pub(crate) const OPT_KEEP_NO_SPACE: u32 = 1 << 8;
pub(crate) const OPT_HALT_AT_FLUSH: u32 = 1 << 9;
pub(crate) const OPT_HALT: u32 = 1 << 10;
pub(crate) const OPT_BATCH: u32 = 1 << 11;
pub(crate) const OPT_READS_APART: u32 = 1 << 12;
pub(crate) const OPT_READS_KEEP_FAILED: u32 = 1 << 13;
pub(crate) const OPT_READS_KEEP_NO_SPACE: u32 = 1 << 14;

pub(crate) const FAILURE_IO: u32 = 1 << 0;
pub(crate) const FAILURE_REMOVED: u32 = 1 << 1;
pub(crate) const FAILURE_NO_SPACE: u32 = 1 << 2;
pub(crate) const FAILURE_TIMEOUT: u32 = 1 << 3;
pub(crate) const FAILURE_READ_ONLY: u32 = 1 << 4;
pub(crate) const FAILURE_SYNC: u32 = 1 << 5;
pub(crate) const FAILURE_HALTED: u32 = 1 << 6;

pub(crate) const TRACED_VALID: u32 = 1 << 0;
pub(crate) const TRACED_FAILED: u32 = 1 << 1;

/// `struct vhost_blk_info`: limits and features of the module and the attached file.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Info {
    pub(crate) size: u32,
    pub(crate) flags: u32,
    pub(crate) option_flags: u32,
    pub(crate) queues_max: u32,
    pub(crate) queue_size_max: u32,
    pub(crate) seg_max: u32,
    pub(crate) request_bytes_max: u64,
    pub(crate) inflight_bytes_max: u64,
    pub(crate) capacity_sectors: u64,
    pub(crate) logical_block_bytes: u32,
    pub(crate) physical_block_bytes: u32,
    pub(crate) io_min_bytes: u32,
    pub(crate) io_opt_bytes: u32,
    pub(crate) memory_align_bytes: u32,
    pub(crate) discard_align_sectors: u32,
    pub(crate) max_discard_sectors: u32,
    pub(crate) max_write_zeroes_sectors: u32,
    pub(crate) max_secure_erase_sectors: u32,
    pub(crate) num_queues: u32,
}

/// `struct vhost_blk_options`: behaviour of the disk.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) size: u32,
    pub(crate) flags: u32,
    pub(crate) max_discard_sectors: u32,
    pub(crate) max_write_zeroes_sectors: u32,
    pub(crate) max_secure_erase_sectors: u32,
    pub(crate) batch: u32,
    pub(crate) limit_iops: u64,
    pub(crate) limit_bytes: u64,
    pub(crate) limit_burst_ms: u32,
    pub(crate) limit_debt_ms: u32,
}

/// `struct vhost_blk_failure`: failures of the backend since the previous query.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) size: u32,
    pub(crate) kinds: u32,
    pub(crate) count: u64,
    pub(crate) sector: u64,
    pub(crate) error: u32,
    pub(crate) reserved: u32,
    pub(crate) halt_type: u32,
    pub(crate) halt_error: u32,
    pub(crate) halt_sector: u64,
    pub(crate) halt_bytes: u64,
}

/// `struct vhost_blk_inflight`: the in-flight region of one queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inflight {
    pub(crate) index: u32,
    pub(crate) desc_num: u32,
    pub(crate) user_addr: u64,
}

/// `struct vhost_blk_trace`: which requests are recorded.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trace {
    pub(crate) size: u32,
    pub(crate) fd: i32,
    pub(crate) slower_than_ns: u64,
}

/// `struct vhost_blk_traced`: a slow request; `kind` is its `type`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traced {
    pub(crate) size: u32,
    pub(crate) flags: u32,
    pub(crate) lost: u64,
    pub(crate) queue: u32,
    pub(crate) kind: u32,
    pub(crate) sector: u64,
    pub(crate) bytes: u64,
    pub(crate) limit_ns: u64,
    pub(crate) submit_ns: u64,
    pub(crate) storage_ns: u64,
    pub(crate) used_ns: u64,
    pub(crate) ring_ns: u64,
}

/// `struct vhost_blk_oldest`: the age of the oldest request in flight.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Oldest {
    pub(crate) size: u32,
    pub(crate) index: u32,
    pub(crate) age_ns: u64,
}

/// `struct vhost_blk_kept`: the chains that a queue keeps.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) size: u32,
    pub(crate) index: u32,
    pub(crate) count: u32,
    pub(crate) reserved: u32,
    pub(crate) heads: [u16; QUEUE_SIZE_MAX as usize],
}

/// `struct vhost_blk_share`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) limits_addr: u64,
    pub(crate) debt_addr: u64,
}

/// `struct vhost_worker_state` of linux/vhost.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkerState {
    pub(crate) worker_id: u32,
}

/// `struct vhost_vring_worker` of linux/vhost.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VringWorker {
    pub(crate) index: u32,
    pub(crate) worker_id: u32,
}

ioctl_iow_nr!(SET_BACKEND, VHOST, 0xff, vhost_vring_file);
ioctl_iow_nr!(SET_SERIAL, VHOST, 0xfe, [u8; ID_BYTES]);
ioctl_iowr_nr!(GET_INFO, VHOST, 0xfd, Info);
ioctl_iow_nr!(SET_QUEUE, VHOST, 0xfc, vhost_vring_state);
ioctl_iow_nr!(SET_OPTIONS, VHOST, 0xfb, Options);
ioctl_iow_nr!(SET_INFLIGHT, VHOST, 0xfa, Inflight);
ioctl_iow_nr!(SET_NUM_QUEUES, VHOST, 0xf9, u32);
ioctl_iow_nr!(SET_FAILURE_EVENT, VHOST, 0xf8, i32);
ioctl_iowr_nr!(GET_FAILURE, VHOST, 0xf7, Failure);
ioctl_iow_nr!(SET_TRACE, VHOST, 0xf6, Trace);
ioctl_iowr_nr!(GET_TRACED, VHOST, 0xf5, Traced);
ioctl_iowr_nr!(GET_OLDEST, VHOST, 0xf4, Oldest);
ioctl_iowr_nr!(GET_KEPT, VHOST, 0xf3, Kept);
ioctl_iow_nr!(SHARE_LIMITS, VHOST, 0xf2, Share);
ioctl_ior_nr!(NEW_WORKER, VHOST, 0x08, WorkerState);
ioctl_iow_nr!(ATTACH_VRING_WORKER, VHOST, 0x15, VringWorker);
ioctl_iow_nr!(SET_VRING_BUSYLOOP_TIMEOUT, VHOST, 0x23, vhost_vring_state);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{BEHIND_AGE, Bucket, Clocks, Debt, GIVE_WAY_MAX, LEAD_MAX, TAG_LEAD_MAX};
    use std::collections::BTreeMap;
    use std::fmt::Write as _;
    use std::mem::offset_of;
    use std::path::Path;
    use std::process::Command;

    /// Every number of this module with its C expression.
    #[expect(clippy::too_many_lines, reason = "a table")]
    fn mirrored() -> Vec<(&'static str, u64)> {
        macro_rules! structure {
            ($name:literal, $type:ty: $($field:ident),*) => {
                vec![
                    (concat!("sizeof(struct ", $name, ")"), size_of::<$type>() as u64),
                    $((concat!("offsetof(struct ", $name, ", ", stringify!($field), ")"),
                       offset_of!($type, $field) as u64),)*
                ]
            };
        }
        let mut all = vec![
            ("VHOST_BLK_QUEUE_SIZE_MAX", QUEUE_SIZE_MAX.into()),
            ("VHOST_BLK_SERIAL_BYTES", ID_BYTES as u64),
            ("VHOST_BLK_INFO_ATTACHED", INFO_ATTACHED.into()),
            ("VHOST_BLK_INFO_READ_ONLY", INFO_READ_ONLY.into()),
            ("VHOST_BLK_INFO_DISCARD", INFO_DISCARD.into()),
            ("VHOST_BLK_INFO_WRITE_ZEROES", INFO_WRITE_ZEROES.into()),
            ("VHOST_BLK_INFO_SECURE_ERASE", INFO_SECURE_ERASE.into()),
            ("VHOST_BLK_INFO_POLL_QUEUES", INFO_POLL_QUEUES.into()),
            ("VHOST_BLK_OPT_WRITE_THROUGH", OPT_WRITE_THROUGH.into()),
            ("VHOST_BLK_OPT_READ_ONLY", OPT_READ_ONLY.into()),
            ("VHOST_BLK_OPT_IOPOLL", OPT_IOPOLL.into()),
            ("VHOST_BLK_OPT_PIN_MEMORY", OPT_PIN_MEMORY.into()),
            ("VHOST_BLK_OPT_NO_UNMAP", OPT_NO_UNMAP.into()),
            ("VHOST_BLK_OPT_COALESCE", OPT_COALESCE.into()),
            ("VHOST_BLK_OPT_COALESCE_AUTO", OPT_COALESCE_AUTO.into()),
            ("VHOST_BLK_OPT_KEEP_FAILED", OPT_KEEP_FAILED.into()),
            ("VHOST_BLK_OPT_KEEP_NO_SPACE", OPT_KEEP_NO_SPACE.into()),
            ("VHOST_BLK_OPT_HALT_AT_FLUSH", OPT_HALT_AT_FLUSH.into()),
            ("VHOST_BLK_OPT_HALT", OPT_HALT.into()),
            ("VHOST_BLK_OPT_BATCH", OPT_BATCH.into()),
            ("VHOST_BLK_OPT_READS_APART", OPT_READS_APART.into()),
            ("VHOST_BLK_OPT_READS_KEEP_FAILED", OPT_READS_KEEP_FAILED.into()),
            ("VHOST_BLK_OPT_READS_KEEP_NO_SPACE", OPT_READS_KEEP_NO_SPACE.into()),
            ("VHOST_BLK_SET_BACKEND", SET_BACKEND()),
            ("VHOST_BLK_SET_SERIAL", SET_SERIAL()),
            ("VHOST_BLK_GET_INFO", GET_INFO()),
            ("VHOST_BLK_SET_QUEUE", SET_QUEUE()),
            ("VHOST_BLK_SET_OPTIONS", SET_OPTIONS()),
            ("VHOST_BLK_SET_INFLIGHT", SET_INFLIGHT()),
            ("VHOST_BLK_SET_NUM_QUEUES", SET_NUM_QUEUES()),
            ("VHOST_BLK_SET_FAILURE_EVENT", SET_FAILURE_EVENT()),
            ("VHOST_BLK_GET_FAILURE", GET_FAILURE()),
            ("VHOST_BLK_SET_TRACE", SET_TRACE()),
            ("VHOST_BLK_GET_TRACED", GET_TRACED()),
            ("VHOST_BLK_GET_OLDEST", GET_OLDEST()),
            ("VHOST_BLK_GET_KEPT", GET_KEPT()),
            ("VHOST_BLK_SHARE_LIMITS", SHARE_LIMITS()),
            ("VHOST_BLK_LIMITS_LEAD_NS", LEAD_MAX),
            ("VHOST_BLK_LIMITS_GIVE_WAY_NS", GIVE_WAY_MAX),
            ("VHOST_BLK_LIMITS_BEHIND_AGE_NS", BEHIND_AGE),
            ("VHOST_BLK_LIMITS_TAG_LEAD_NS", TAG_LEAD_MAX),
            ("VHOST_BLK_TRACED_VALID", TRACED_VALID.into()),
            ("VHOST_BLK_TRACED_FAILED", TRACED_FAILED.into()),
            ("VHOST_BLK_FAILURE_IO", FAILURE_IO.into()),
            ("VHOST_BLK_FAILURE_REMOVED", FAILURE_REMOVED.into()),
            ("VHOST_BLK_FAILURE_NO_SPACE", FAILURE_NO_SPACE.into()),
            ("VHOST_BLK_FAILURE_TIMEOUT", FAILURE_TIMEOUT.into()),
            ("VHOST_BLK_FAILURE_READ_ONLY", FAILURE_READ_ONLY.into()),
            ("VHOST_BLK_FAILURE_SYNC", FAILURE_SYNC.into()),
            ("VHOST_BLK_FAILURE_HALTED", FAILURE_HALTED.into()),
            ("VHOST_SET_VRING_BUSYLOOP_TIMEOUT", SET_VRING_BUSYLOOP_TIMEOUT()),
        ];
        all.extend(structure!("vhost_blk_info", Info: size, flags, option_flags, queues_max,
            queue_size_max, seg_max, request_bytes_max, inflight_bytes_max, capacity_sectors,
            logical_block_bytes, physical_block_bytes, io_min_bytes, io_opt_bytes,
            memory_align_bytes, discard_align_sectors, max_discard_sectors,
            max_write_zeroes_sectors, max_secure_erase_sectors, num_queues));
        all.extend(structure!("vhost_blk_failure", Failure: size, kinds, count, sector, error,
            reserved, halt_type, halt_error, halt_sector, halt_bytes));
        all.extend(structure!("vhost_blk_kept", Kept: size, index, count, reserved, heads));
        all.extend(structure!("vhost_blk_options", Options: size, flags, max_discard_sectors,
            max_write_zeroes_sectors, max_secure_erase_sectors, batch, limit_iops,
            limit_bytes, limit_burst_ms, limit_debt_ms));
        all.extend(structure!("vhost_blk_inflight", Inflight: index, desc_num, user_addr));
        all.extend(structure!("vhost_blk_trace", Trace: size, fd, slower_than_ns));
        all.extend(structure!("vhost_blk_traced", Traced: size, flags, lost, queue, sector, bytes,
            limit_ns, submit_ns, storage_ns, used_ns, ring_ns));
        all.extend(structure!("vhost_blk_oldest", Oldest: size, index, age_ns));
        all.extend(
            structure!("vhost_blk_limits", Clocks: version, burst_ns, iops, bytes, top, behind,
            behind_ns, behind_by),
        );
        all.extend(structure!("vhost_blk_share", Share: limits_addr, debt_addr));
        for (expression, value) in [
            ("sizeof(struct vhost_blk_debt)", size_of::<Debt>()),
            ("offsetof(struct vhost_blk_debt, iops_ns)", offset_of!(Debt, iops)),
            ("offsetof(struct vhost_blk_debt, bytes_ns)", offset_of!(Debt, bytes)),
        ] {
            all.push((expression, value as u64));
        }
        let clock = offset_of!(Clocks, bytes) + offset_of!(Bucket, clock);
        all.push(("offsetof(struct vhost_blk_limits, bytes_clock)", clock as u64));
        all
    }

    /// The values of the C expressions, compiled with the project's header.
    fn compiled(expressions: &[&str]) -> BTreeMap<String, u64> {
        let directory = tempfile::tempdir().unwrap();
        let (source, program) = (directory.path().join("abi.c"), directory.path().join("abi"));
        let mut text = String::from(
            "#include <stddef.h>\n#include <stdio.h>\n#include <vhost_blk.h>\nint main(void) {\n",
        );
        for expression in expressions {
            writeln!(
                text,
                "printf(\"%s=%llu\\n\", \"{expression}\", (unsigned long long)({expression}));"
            )
            .unwrap();
        }
        std::fs::write(&source, text + "return 0;\n}\n").unwrap();
        let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel/include/uapi");
        let mut compiler = Command::new("cc");
        compiler.arg("-I").arg(headers).arg("-o").arg(&program).arg(&source);
        let built = compiler.output().expect("a C compiler, as linking Rust needs one too");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let output = Command::new(&program).output().unwrap();
        let lines = String::from_utf8(output.stdout).unwrap();
        let pair = |line: &str| {
            let (name, value) = line.split_once('=').unwrap();
            (name.to_owned(), value.parse().unwrap())
        };
        lines.lines().map(pair).collect()
    }

    #[test]
    fn the_mirror_agrees_with_the_header() {
        let mirrored = mirrored();
        let names: Vec<&str> = mirrored.iter().map(|(name, _)| *name).collect();
        let compiled = compiled(&names);
        assert_eq!(compiled.len(), mirrored.len());
        for (name, value) in mirrored {
            assert_eq!(compiled[name], value, "{name}");
        }
    }

    /// The numbers of Linux 6.5 and later; the linux/vhost.h of older C libraries lacks them.
    #[test]
    fn the_worker_ioctls_have_the_cores_codes() {
        assert_eq!(NEW_WORKER(), 0x8004_af08);
        assert_eq!(ATTACH_VRING_WORKER(), 0x4008_af15);
    }
}
