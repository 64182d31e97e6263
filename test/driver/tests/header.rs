// SPDX-License-Identifier: Apache-2.0
//! The driver's own definitions of the kernel interface against the C headers themselves.

use driver::kernel::abi;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

/// The header that the module and its users share.
const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernel/include/uapi/vhost_blk.h");

macro_rules! values {
    ($($name:literal: $value:expr,)*) => { vec![$(($name, u64::from($value)),)*] };
}

/// C expressions of the project's header and what this crate has for them.
fn own_values() -> Vec<(&'static str, u64)> {
    values! {
        "VHOST_BLK_SET_BACKEND": abi::BLK_SET_BACKEND,
        "VHOST_BLK_SET_SERIAL": abi::BLK_SET_SERIAL,
        "VHOST_BLK_GET_INFO": abi::BLK_GET_INFO,
        "VHOST_BLK_SET_QUEUE": abi::BLK_SET_QUEUE,
        "VHOST_BLK_SET_OPTIONS": abi::BLK_SET_OPTIONS,
        "VHOST_BLK_SET_INFLIGHT": abi::BLK_SET_INFLIGHT,
        "VHOST_BLK_SET_NUM_QUEUES": abi::BLK_SET_NUM_QUEUES,
        "VHOST_BLK_SET_FAILURE_EVENT": abi::BLK_SET_FAILURE_EVENT,
        "VHOST_BLK_GET_FAILURE": abi::BLK_GET_FAILURE,
        "VHOST_BLK_SET_TRACE": abi::BLK_SET_TRACE,
        "VHOST_BLK_GET_TRACED": abi::BLK_GET_TRACED,
        "VHOST_BLK_GET_OLDEST": abi::BLK_GET_OLDEST,
        "VHOST_BLK_GET_KEPT": abi::BLK_GET_KEPT,
        "VHOST_BLK_FAILURE_HALTED": abi::FAILURE_HALTED,
        "VHOST_BLK_OPT_KEEP_FAILED": abi::OPT_KEEP_FAILED,
        "VHOST_BLK_OPT_KEEP_NO_SPACE": abi::OPT_KEEP_NO_SPACE,
        "VHOST_BLK_OPT_HALT_AT_FLUSH": abi::OPT_HALT_AT_FLUSH,
        "VHOST_BLK_OPT_HALT": abi::OPT_HALT,
        "VHOST_BLK_OPT_BATCH": abi::OPT_BATCH,
        "VHOST_BLK_OPT_READS_APART": abi::OPT_READS_APART,
        "VHOST_BLK_OPT_READS_KEEP_FAILED": abi::OPT_READS_KEEP_FAILED,
        "VHOST_BLK_OPT_READS_KEEP_NO_SPACE": abi::OPT_READS_KEEP_NO_SPACE,
        "VHOST_BLK_BATCH_SIZE_MAX": abi::BATCH_SIZE_MAX,
        "VHOST_BLK_SHARE_LIMITS": abi::BLK_SHARE_LIMITS,
        "VHOST_BLK_TRACED_VALID": abi::TRACED_VALID,
        "VHOST_BLK_TRACED_FAILED": abi::TRACED_FAILED,
        "VHOST_BLK_TRACED_MAX": abi::BLK_TRACED_MAX,
        "VHOST_BLK_BUSYLOOP_US_MAX": abi::BLK_BUSYLOOP_US_MAX,
        "VHOST_BLK_FAILURE_IO": abi::FAILURE_IO,
        "VHOST_BLK_FAILURE_REMOVED": abi::FAILURE_REMOVED,
        "VHOST_BLK_FAILURE_NO_SPACE": abi::FAILURE_NO_SPACE,
        "VHOST_BLK_FAILURE_TIMEOUT": abi::FAILURE_TIMEOUT,
        "VHOST_BLK_FAILURE_READ_ONLY": abi::FAILURE_READ_ONLY,
        "VHOST_BLK_FAILURE_SYNC": abi::FAILURE_SYNC,
        "VHOST_BLK_QUEUES_MAX": abi::BLK_QUEUES_MAX,
        "VHOST_BLK_QUEUE_SIZE_MAX": abi::BLK_QUEUE_SIZE_MAX,
        "VHOST_BLK_RANGES_MAX": abi::BLK_RANGES_MAX,
        "VHOST_BLK_SERIAL_BYTES": 20_u32,
        "VHOST_BLK_INFO_ATTACHED": abi::INFO_ATTACHED,
        "VHOST_BLK_INFO_BLOCK_DEVICE": abi::INFO_BLOCK_DEVICE,
        "VHOST_BLK_INFO_READ_ONLY": abi::INFO_READ_ONLY,
        "VHOST_BLK_INFO_WRITE_CACHE": abi::INFO_WRITE_CACHE,
        "VHOST_BLK_INFO_DISCARD": abi::INFO_DISCARD,
        "VHOST_BLK_INFO_WRITE_ZEROES": abi::INFO_WRITE_ZEROES,
        "VHOST_BLK_INFO_SECURE_ERASE": abi::INFO_SECURE_ERASE,
        "VHOST_BLK_INFO_POLL_QUEUES": abi::INFO_POLL_QUEUES,
        "VHOST_BLK_INFO_DEAD": abi::INFO_DEAD,
        "VHOST_BLK_OPT_WRITE_THROUGH": abi::OPT_WRITE_THROUGH,
        "VHOST_BLK_OPT_READ_ONLY": abi::OPT_READ_ONLY,
        "VHOST_BLK_OPT_IOPOLL": abi::OPT_IOPOLL,
        "VHOST_BLK_OPT_PIN_MEMORY": abi::OPT_PIN_MEMORY,
        "VHOST_BLK_OPT_NO_UNMAP": abi::OPT_NO_UNMAP,
    }
}

/// The same for the vhost core's header.
fn core_values() -> Vec<(&'static str, u64)> {
    values! {
        "VHOST_GET_FEATURES": abi::GET_FEATURES,
        "VHOST_SET_FEATURES": abi::SET_FEATURES,
        "VHOST_SET_OWNER": abi::SET_OWNER,
        "VHOST_RESET_OWNER": abi::RESET_OWNER,
        "VHOST_SET_MEM_TABLE": abi::SET_MEM_TABLE,
        "VHOST_SET_LOG_BASE": abi::SET_LOG_BASE,
        "VHOST_SET_LOG_FD": abi::SET_LOG_FD,
        "VHOST_SET_VRING_NUM": abi::SET_VRING_NUM,
        "VHOST_SET_VRING_ADDR": abi::SET_VRING_ADDR,
        "VHOST_SET_VRING_BASE": abi::SET_VRING_BASE,
        "VHOST_GET_VRING_BASE": abi::GET_VRING_BASE,
        "VHOST_SET_VRING_KICK": abi::SET_VRING_KICK,
        "VHOST_SET_VRING_CALL": abi::SET_VRING_CALL,
        "VHOST_SET_VRING_ERR": abi::SET_VRING_ERR,
        "VHOST_SET_VRING_BUSYLOOP_TIMEOUT": abi::SET_VRING_BUSYLOOP_TIMEOUT,
        "VHOST_GET_VRING_BUSYLOOP_TIMEOUT": abi::GET_VRING_BUSYLOOP_TIMEOUT,
        "VHOST_SET_BACKEND_FEATURES": abi::SET_BACKEND_FEATURES,
        "VHOST_GET_BACKEND_FEATURES": abi::GET_BACKEND_FEATURES,
        "VHOST_ACCESS_RW": abi::ACCESS_RW,
        "VHOST_IOTLB_MISS": abi::IOTLB_MISS,
        "VHOST_IOTLB_UPDATE": abi::IOTLB_UPDATE,
        "VHOST_IOTLB_INVALIDATE": abi::IOTLB_INVALIDATE,
        "VHOST_IOTLB_MSG": abi::IOTLB_MSG,
    }
}

/// In headers older than Linux 6.5 these do not exist.
fn worker_values() -> Vec<(&'static str, u64)> {
    values! {
        "VHOST_NEW_WORKER": abi::NEW_WORKER,
        "VHOST_FREE_WORKER": abi::FREE_WORKER,
        "VHOST_ATTACH_VRING_WORKER": abi::ATTACH_VRING_WORKER,
        "VHOST_GET_VRING_WORKER": abi::GET_VRING_WORKER,
    }
}

macro_rules! layouts {
    ($($c:literal $rust:ident { $($field:literal $own:ident,)* })*) => {{
        let mut all: Vec<(&'static str, u64)> = Vec::new();
        $(
            all.push((concat!("sizeof(struct ", $c, ")"), size_of::<abi::$rust>() as u64));
            $(all.push((
                concat!("offsetof(struct ", $c, ", ", $field, ")"),
                offset_of!(abi::$rust, $own) as u64,
            ));)*
        )*
        all
    }};
}

fn layouts() -> Vec<(&'static str, u64)> {
    layouts! {
        "vhost_vring_state" VringState { "num" num, }
        "vhost_vring_file" VringFile { "fd" fd, }
        "vhost_vring_addr" VringAddr {
            "desc_user_addr" desc, "used_user_addr" used, "avail_user_addr" avail,
            "log_guest_addr" log,
        }
        "vhost_memory" MemoryHead { "nregions" nregions, }
        "vhost_memory_region" MemoryRegion {
            "guest_phys_addr" gpa, "memory_size" size, "userspace_addr" user,
        }
        "vhost_msg" IotlbMsg {
            "iotlb.iova" iova, "iotlb.size" size, "iotlb.uaddr" uaddr, "iotlb.perm" perm,
            "iotlb.type" what,
        }
        "vhost_msg_v2" IotlbMsg { "asid" asid, "iotlb.iova" iova, }
        "vhost_blk_info" BlkInfo {
            "flags" flags, "option_flags" option_flags, "queues_max" queues_max,
            "queue_size_max" queue_size_max, "seg_max" seg_max,
            "request_bytes_max" request_bytes_max, "inflight_bytes_max" inflight_bytes_max,
            "capacity_sectors" capacity_sectors, "logical_block_bytes" logical_block_bytes,
            "physical_block_bytes" physical_block_bytes, "io_min_bytes" io_min_bytes,
            "io_opt_bytes" io_opt_bytes, "memory_align_bytes" memory_align_bytes,
            "discard_align_sectors" discard_align_sectors,
            "max_discard_sectors" max_discard_sectors,
            "max_write_zeroes_sectors" max_write_zeroes_sectors,
            "max_secure_erase_sectors" max_secure_erase_sectors, "num_queues" num_queues,
        }
        "vhost_blk_failure" BlkFailure {
            "kinds" kinds, "count" count, "sector" sector, "error" error, "reserved" reserved,
        }
        "vhost_blk_options" BlkOptions {
            "flags" flags, "max_discard_sectors" max_discard_sectors,
            "max_write_zeroes_sectors" max_write_zeroes_sectors,
            "max_secure_erase_sectors" max_secure_erase_sectors, "batch" batch,
        }
        "vhost_blk_trace" BlkTrace { "fd" fd, "slower_than_ns" slower_than_ns, }
        "vhost_blk_traced" BlkTraced {
            "flags" flags, "lost" lost, "queue" queue, "type" kind, "sector" sector, "bytes" bytes,
            "limit_ns" limit_ns, "submit_ns" submit_ns, "storage_ns" storage_ns, "used_ns" used_ns,
        }
        "vhost_blk_failure" BlkFailure {
            "kinds" kinds, "count" count, "sector" sector, "error" error, "halt_type" halt_type,
            "halt_error" halt_error, "halt_sector" halt_sector, "halt_bytes" halt_bytes,
        }
        "vhost_blk_kept" BlkKept { "index" index, "count" count, "heads" heads, }
        "vhost_blk_oldest" BlkOldest { "index" index, "age_ns" age_ns, }
        "vhost_blk_limits" SharedLimits {
            "version" version, "burst_ns" burst_ns, "iops" iops, "iops_clock" iops_clock,
            "bytes" bytes, "bytes_clock" bytes_clock, "top" top, "behind" behind,
            "behind_ns" behind_ns, "behind_by" behind_by,
        }
        "vhost_blk_debt" SharedDebt { "iops_ns" iops_ns, "bytes_ns" bytes_ns, }
        "vhost_blk_share" BlkShare { "limits_addr" limits_addr, "debt_addr" debt_addr, }
        "vhost_blk_inflight" BlkInflight { "desc_num" desc_num, "user_addr" user_addr, }
    }
}

/// Prints the value of each expression, one a line.
fn program(always: &[(&str, u64)], where_defined: &[(&str, u64)]) -> String {
    let mut source = format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include \"{HEADER}\"\nint main(void)\n{{\n"
    );
    for (name, _) in always {
        writeln!(source, "printf(\"%llu\\n\", (unsigned long long)({name}));").unwrap();
    }
    for (name, _) in where_defined {
        let print = format!("printf(\"%llu\\n\", (unsigned long long)({name}));");
        writeln!(source, "#ifdef {name}\n{print}\n#else\nprintf(\"absent\\n\");\n#endif").unwrap();
    }
    source + "return 0;\n}\n"
}

fn answers_of(source: &str) -> Vec<String> {
    let directory = tempfile::tempdir().expect("a directory for the C program");
    let (file, binary) = (directory.path().join("values.c"), directory.path().join("values"));
    std::fs::write(&file, source).expect("the C program is written");
    let built = Command::new("cc").arg(&file).arg("-o").arg(&binary).status();
    assert!(built.expect("cc is installed").success(), "the C program does not compile");
    let output = Command::new(&binary).output().expect("the C program runs");
    String::from_utf8(output.stdout).expect("numbers").lines().map(String::from).collect()
}

#[test]
fn codes_sizes_and_offsets_are_those_of_the_headers() {
    assert!(Path::new(HEADER).exists(), "no header at {HEADER}");
    let always = [own_values(), core_values(), layouts()].concat();
    let workers = worker_values();
    let answers = answers_of(&program(&always, &workers));
    assert_eq!(answers.len(), always.len() + workers.len());
    let mut absent = Vec::new();
    for ((name, ours), theirs) in always.iter().chain(&workers).zip(&answers) {
        if theirs == "absent" {
            absent.push(*name);
            continue;
        }
        assert_eq!(&ours.to_string(), theirs, "{name}");
    }
    if !absent.is_empty() {
        println!("PARTLY SKIPPED: this system's linux/vhost.h has no {}", absent.join(", "));
    }
}
