// SPDX-License-Identifier: Apache-2.0
//! io_uring: sets up rings.

use super::{Finding, Outcome};
use io_uring::{IoUring, cqueue, opcode, squeue};
use std::io;

const ENTRIES: u32 = 8;

pub(super) fn io_uring() -> Finding {
    let ring = match IoUring::new(ENTRIES) {
        Ok(ring) => ring,
        Err(error) => return unusable(&error),
    };
    let missing = missing_operations(&ring);
    if !missing.is_empty() {
        let message = format!("this kernel's io_uring lacks {}", missing.join(", "));
        return Finding::new("io_uring", Outcome::Fail, message).remedy("use a newer kernel");
    }
    let builder = IoUring::<squeue::Entry, cqueue::Entry>::builder;
    let single = builder().setup_single_issuer().build(ENTRIES).is_ok();
    let deferred = builder().setup_single_issuer().setup_defer_taskrun().build(ENTRIES).is_ok();
    let message = match (single, deferred) {
        (_, true) => "usable, with SINGLE_ISSUER and DEFER_TASKRUN",
        (true, false) => "usable, with SINGLE_ISSUER; DEFER_TASKRUN (Linux 6.1) is missing",
        (false, false) => "usable; SINGLE_ISSUER (6.0) and DEFER_TASKRUN (6.1) are missing",
    };
    Finding::new("io_uring", Outcome::Ok, message)
}

fn unusable(error: &io::Error) -> Finding {
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let remedy = match disabled.as_deref().map(str::trim) {
        Ok("1") => {
            "it is reserved (kernel.io_uring_disabled=1): run as root or with the group \
                    kernel.io_uring_group, or set the sysctl to 0"
        }
        Ok("2") => "it is switched off: set the sysctl kernel.io_uring_disabled to 0",
        _ if error.kind() == io::ErrorKind::OutOfMemory => "raise LimitMEMLOCK= (ulimit -l)",
        _ if error.raw_os_error() == Some(libc::ENOSYS) => "use a kernel that has it built in",
        _ => {
            "a seccomp filter (container?) may forbid it: allow io_uring_setup, io_uring_enter \
              and io_uring_register"
        }
    };
    Finding::new("io_uring", Outcome::Fail, format!("cannot be set up: {error}")).remedy(remedy)
}

/// Operations of the data plane that the kernel lacks.
fn missing_operations(ring: &IoUring) -> Vec<&'static str> {
    let mut probe = io_uring::register::Probe::new();
    if ring.submitter().register_probe(&mut probe).is_err() {
        return vec!["the probe of its operations"];
    }
    let needed = [
        ("READ", opcode::Read::CODE),
        ("WRITE", opcode::Write::CODE),
        ("READV", opcode::Readv::CODE),
        ("WRITEV", opcode::Writev::CODE),
        ("FSYNC", opcode::Fsync::CODE),
        ("FALLOCATE", opcode::Fallocate::CODE),
        ("POLL_ADD", opcode::PollAdd::CODE),
        ("TIMEOUT", opcode::Timeout::CODE),
        ("ASYNC_CANCEL", opcode::AsyncCancel2::CODE),
    ];
    let lacks = |(_, code): &(&str, u8)| !probe.is_supported(*code);
    needed.into_iter().filter(lacks).map(|(name, _)| name).collect()
}
