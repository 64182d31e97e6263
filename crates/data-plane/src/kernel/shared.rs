// SPDX-License-Identifier: Apache-2.0
//! Limits that disks of the kernel plane share, also with disks of the io_uring plane: the module uses
//! the clocks of the limiter and the debt of the disk in the memory of this process.

use super::device::VhostBlk;
use crate::error::KernelError;
use crate::limits::{KernelUser, Share};
use std::sync::Arc;

/// The offsets of the clocks of this process; the file is missing in a kernel without time namespaces.
const CLOCK_OFFSETS: &str = "/proc/self/timens_offsets";

/// Makes `device` use the limits of a group; `None`: its own ones. The device must be closed, or use
/// others, before the result is dropped.
pub(super) fn share(
    device: &VhostBlk,
    share: Option<&Arc<Share>>,
) -> Result<Option<KernelUser>, KernelError> {
    let user = share.map(Share::add_kernel_user);
    device.share_limits(user.as_ref()).map_err(with_remedy)?;
    Ok(user)
}

/// Checks that the module can share limits.
pub(super) fn check(device: &VhostBlk, own: &Arc<Share>) -> Result<(), KernelError> {
    let offsets = std::fs::read_to_string(CLOCK_OFFSETS).unwrap_or_default();
    if has_other_clock(&offsets) {
        return Err(KernelError::Unsuited(
            "this process has a time namespace with another clock than the kernel, so the planes \
             cannot share limits; start it outside, take the disk out of its limit group, or use the \
             data plane uring"
                .into(),
        ));
    }
    let user = share(device, Some(own))?;
    device.share_limits(None)?;
    drop(user); // the module used its memory until now
    Ok(())
}

/// Returns whether the monotonic clock differs from the kernel's: the lines have the name of a clock,
/// seconds and nanoseconds.
fn has_other_clock(offsets: &str) -> bool {
    let mut lines = offsets.lines().map(|line| line.split_whitespace());
    lines.any(|mut words| words.next() == Some("monotonic") && words.any(|word| word != "0"))
}

/// Names the cause if a module does not know shared limits, or may not lock their memory.
fn with_remedy(error: KernelError) -> KernelError {
    match error.errno() {
        Some(libc::ENOTTY | libc::E2BIG) => KernelError::Unsuited(
            "the kernel module is too old to share limits between disks; load the one that belongs \
             to this program, take the disk out of its limit group, or use the data plane uring"
                .into(),
        ),
        Some(libc::ENOMEM) => KernelError::Unsuited(
            "the memory of shared limits cannot be locked: raise RLIMIT_MEMLOCK (LimitMEMLOCK=) by 8 \
             KiB for each disk of a limit group, take the disk out of its group, or use the data \
             plane uring"
                .into(),
        ),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_offset_of_the_monotonic_clock_separates_the_planes() {
        let text = |seconds: &str| {
            format!("monotonic  {seconds:>10}         0\nboottime           7         0\n")
        };
        assert!(!has_other_clock(""));
        assert!(!has_other_clock(&text("0")));
        assert!(has_other_clock(&text("-7")));
    }

    #[test]
    fn a_refusal_names_an_old_module_or_the_limit_of_locked_memory() {
        let failed = |errno| {
            KernelError::call("VHOST_BLK_SHARE_LIMITS", std::io::Error::from_raw_os_error(errno))
        };
        for errno in [libc::ENOTTY, libc::E2BIG] {
            let text = with_remedy(failed(errno)).to_string();
            assert!(text.contains("too old to share limits between disks; load the one"), "{text}");
        }
        let text = with_remedy(failed(libc::ENOMEM)).to_string();
        assert!(text.contains("raise RLIMIT_MEMLOCK"), "{text}");
        let text = with_remedy(failed(libc::EPERM)).to_string();
        assert!(text.starts_with("VHOST_BLK_SHARE_LIMITS: "), "{text}");
    }
}
