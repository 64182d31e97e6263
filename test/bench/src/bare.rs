// SPDX-License-Identifier: Apache-2.0
//! Bare fio on the same file or device: the rate of the storage without any virtqueue.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use kit::fio::{Job, Outcome};
use kit::metric::{CPU, Figures, IOPS, P50, P99};

use crate::load::Load;

/// Seconds by which fio may exceed its run time.
const GRACE_S: f64 = 60.0;

/// Measures once, with the operation, the blocks and the depth of a load; fio runs on these CPUs.
pub fn measure(file: &Path, load: &Load, cpus: &[usize], seconds: f64) -> Result<Outcome> {
    let Load { op, block_bytes, depth, .. } = load;
    let mut job = Job::new("bare", &file.display().to_string()).timed(seconds, 200).with(&format!(
        "--rw={op} --bs={block_bytes} --iodepth={depth} --ioengine=io_uring --fixedbufs \
         --registerfiles --direct=1"
    ));
    if !cpus.is_empty() {
        let list: Vec<_> = cpus.iter().map(usize::to_string).collect();
        job = job.with(&format!("--cpus_allowed={}", list.join(",")));
    }
    job.measure(Duration::from_secs_f64(seconds + GRACE_S))
}

/// Rate, latencies and CPU time.
pub fn figures(outcome: &Outcome) -> Figures {
    vec![
        (IOPS, outcome.iops),
        (P50, outcome.p50_us),
        (P99, outcome.p99_us),
        (CPU, outcome.cpu_us()),
    ]
}
