// SPDX-License-Identifier: Apache-2.0
//! The amount of memory that this process may still lock (getrlimit(2), RLIMIT_MEMLOCK).

use rustix::process::{Resource, getrlimit};

/// CAP_IPC_LOCK (capabilities(7)).
const CAP_IPC_LOCK: u32 = 14;

/// Bytes that this process may still lock; `None`: no limit.
pub(super) fn room() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    room_of(&status, getrlimit(Resource::Memlock).current)
}

fn room_of(status: &str, limit: Option<u64>) -> Option<u64> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()
    };
    let effective = field("CapEff:").and_then(|text| u64::from_str_radix(text, 16).ok());
    if effective.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 != 0) {
        return None;
    }
    let locked = field("VmLck:").and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    limit.map(|limit| limit.saturating_sub(locked << 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_locked_counts_and_a_capability_lifts_the_limit() {
        let status = "Name:\tx\nVmLck:\t    1024 kB\nCapEff:\t0000000000000000\n";
        assert_eq!(room_of(status, Some(4 << 20)), Some(3 << 20));
        assert_eq!(room_of(status, Some(1 << 10)), Some(0));
        assert_eq!(room_of(status, None), None);
        assert_eq!(room_of("CapEff:\t0000000000004000\n", Some(1 << 10)), None);
    }
}
