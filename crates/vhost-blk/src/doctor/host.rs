// SPDX-License-Identifier: Apache-2.0
//! The kernel, its limits and the CPUs.

use super::{Finding, Outcome};
use crate::options;
use crate::values::NUM_QUEUES_MAX;

/// Oldest kernel with all the io_uring operations that the data plane uses.
const KERNEL_MIN: (u32, u32) = (5, 19);

pub(super) fn kernel() -> Finding {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let (major, minor) = KERNEL_MIN;
    match version(release) {
        Some(found) if found >= KERNEL_MIN => {
            Finding::new("kernel", Outcome::Ok, format!("Linux {release}"))
        }
        Some(_) => Finding::new("kernel", Outcome::Fail, format!("Linux {release} is too old"))
            .remedy(format!("use {major}.{minor} or newer")),
        None => Finding::new("kernel", Outcome::Warn, format!("unknown version `{release}`"))
            .remedy(format!("see that it is {major}.{minor} or newer")),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(super) fn memlock() -> Finding {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let soft = line.and_then(|line| line.split_whitespace().next()).unwrap_or("unknown");
    let message = match soft.parse::<u64>() {
        Ok(bytes) => format!("locked memory is limited to {} KiB", bytes >> 10),
        Err(_) => format!("locked memory: {soft}"),
    };
    let finding = Finding::new("memlock", Outcome::Info, message);
    match soft {
        "unlimited" => finding,
        _ => finding.remedy(
            "this matters only with --pin-memory on: then raise LimitMEMLOCK= (ulimit -l) above \
             the guest's memory",
        ),
    }
}

pub(super) fn hugepages() -> Finding {
    let text = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    let count = text.trim().parse::<u64>().unwrap_or(0);
    let message = format!("{count} huge pages reserved; they are not needed");
    let remedy = "the guest's memory must be shared: -object memory-backend-memfd,share=on";
    Finding::new("hugepages", Outcome::Info, message).remedy(remedy)
}

pub(super) fn cpus(queues: Option<u16>) -> Finding {
    let cpus = options::host_cpus();
    let default = u16::try_from(cpus).unwrap_or(NUM_QUEUES_MAX).min(NUM_QUEUES_MAX);
    let queues = queues.unwrap_or(default);
    let message = format!("{cpus} CPUs, {queues} virtqueues");
    match usize::from(queues) > cpus {
        true => Finding::new("cpus", Outcome::Warn, message)
            .remedy("more queues than CPUs cost memory and gain nothing: lower --num-queues"),
        false => Finding::new("cpus", Outcome::Ok, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_compare_by_number() {
        assert_eq!(version("6.18.0-cloud"), Some((6, 18)));
        assert_eq!(version("5.9-rc1"), Some((5, 9)));
        assert!(version("5.9") < version("5.10"));
        assert_eq!(version("unknown"), None);
    }
}
