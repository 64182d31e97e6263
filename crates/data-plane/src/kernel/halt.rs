// SPDX-License-Identifier: Apache-2.0
//! The errors that halt a disk, as options of the kernel module.

use super::abi;
use crate::error::KernelError;
use crate::error_rules::{ErrorPolicies, ErrorPolicy};
use crate::health::Health;

/// Checks that the module can halt the disk by these policies.
pub(super) fn check(kernel: &abi::Info, policies: ErrorPolicies) -> Result<(), KernelError> {
    let lacks = |flags: u32| kernel.option_flags & flags != flags;
    let unsuited = |why: &str| Err(KernelError::Unsuited(why.into()));
    if policies.can_halt() && lacks(abi::OPT_KEEP_FAILED) {
        return unsuited(
            "the kernel module is too old to halt a disk; load the one that belongs to this \
             program, use --data-plane uring, or --on-error report",
        );
    }
    if lacks(of_policies(policies)) {
        return unsuited(
            "the kernel module is too old to part the errors of reads from others; load the one \
             that belongs to this program, use --data-plane uring, or the same --on-read-error and \
             --on-error",
        );
    }
    Ok(())
}

/// The option flags for the errors that halt the disk.
pub(super) fn flags(health: &Health) -> u32 {
    let at_flush = if health.can_flush_halt() { abi::OPT_HALT_AT_FLUSH } else { 0 };
    of_policies(health.policies()) | at_flush
}

fn of_policies(policies: ErrorPolicies) -> u32 {
    let others = match policies.others {
        ErrorPolicy::Report => 0,
        ErrorPolicy::Stop => abi::OPT_KEEP_FAILED,
        ErrorPolicy::Enospc => abi::OPT_KEEP_NO_SPACE,
    };
    if !policies.are_apart() {
        return others; // A module that does not know the flags of reads halts by these, too.
    }
    let reads = match policies.reads {
        ErrorPolicy::Report => 0,
        ErrorPolicy::Stop => abi::OPT_READS_KEEP_FAILED,
        ErrorPolicy::Enospc => abi::OPT_READS_KEEP_NO_SPACE,
    };
    others | abi::OPT_READS_APART | reads
}

#[cfg(test)]
mod tests {
    use super::*;
    use ErrorPolicy::{Enospc, Report, Stop};

    fn module(option_flags: u32) -> abi::Info {
        abi::Info { option_flags, ..abi::Info::default() }
    }

    #[test]
    fn a_disk_that_errors_halt_does_not_suit_a_module_that_keeps_no_request() {
        check(&module(0), Report.into()).unwrap();
        for policies in [Stop.into(), ErrorPolicies { reads: Stop, others: Report }] {
            let why = check(&module(0), policies).unwrap_err().to_string();
            assert!(why.contains("to halt a disk") && why.contains("--on-error report"), "{why}");
        }
    }

    #[test]
    fn reads_apart_do_not_suit_a_module_that_has_one_policy() {
        let old = module(abi::OPT_KEEP_FAILED | abi::OPT_KEEP_NO_SPACE);
        for policy in [Report, Stop, Enospc] {
            check(&old, policy.into()).unwrap();
        }
        let reads = abi::OPT_READS_KEEP_FAILED | abi::OPT_READS_KEEP_NO_SPACE;
        let new = module(old.option_flags | abi::OPT_READS_APART | reads);
        for (reads, others) in [(Report, Stop), (Report, Enospc), (Stop, Report), (Stop, Enospc)] {
            let apart = ErrorPolicies { reads, others };
            let why = check(&old, apart).unwrap_err().to_string();
            assert!(why.contains("too old") && why.contains("--on-read-error"), "{why}");
            check(&new, apart).unwrap();
        }
    }

    #[test]
    fn the_flags_are_those_of_both_policies() {
        let apart = abi::OPT_READS_APART;
        for (reads, others, expected) in [
            (Report, Report, 0),
            (Stop, Stop, abi::OPT_KEEP_FAILED),
            (Enospc, Enospc, abi::OPT_KEEP_NO_SPACE),
            (Report, Stop, apart | abi::OPT_KEEP_FAILED),
            (Stop, Report, apart | abi::OPT_READS_KEEP_FAILED),
            (Stop, Enospc, apart | abi::OPT_READS_KEEP_FAILED | abi::OPT_KEEP_NO_SPACE),
            (Enospc, Report, apart | abi::OPT_READS_KEEP_NO_SPACE),
        ] {
            let health = Health::new(ErrorPolicies { reads, others }, None);
            let at_flush = if others == Report { 0 } else { abi::OPT_HALT_AT_FLUSH };
            assert_eq!(flags(&health), expected | at_flush, "{reads:?}, {others:?}");
        }
    }
}
