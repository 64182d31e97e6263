// SPDX-License-Identifier: Apache-2.0
//! Bare fio on the same file or device: the rate of the storage without any virtqueue.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use kit::fio::{Job, Outcome};
use kit::metric::{CPU, Figures, IOPS, P50, P99};

use crate::load::{Load, MIXED_ALIGN, MIXED_SIZES, Op, READS_PERCENT};

/// Seconds by which fio may exceed its run time.
const GRACE_S: f64 = 60.0;

const FIXED: &str = "--ioengine=io_uring --fixedbufs --registerfiles";

/// fio's engine with its best options. The limit of the storage is the best of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// One request at a time by a thread; a log has as many threads as writers.
    Psync,
    /// Without options.
    Uring,
    /// Registered files and buffers.
    UringFixed,
    /// The same, submitted and taken back in batches.
    UringBatch,
    /// Registered files and buffers; a thread of the kernel submits, and fio looks for completions
    /// without sleeping. It needs a second CPU.
    UringSpin,
    /// Registered files and buffers; completions are polled for at the device, which must have poll
    /// queues.
    UringPolled,
}

impl Engine {
    /// The engines that sleep until a completion.
    pub const SLEEPING: [Self; 4] = [Self::Psync, Self::Uring, Self::UringFixed, Self::UringBatch];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Psync => "bare fio psync",
            Self::Uring => "bare fio io_uring",
            Self::UringFixed => "bare fio io_uring fixed",
            Self::UringBatch => "bare fio io_uring fixed, batches",
            Self::UringSpin => "bare fio io_uring fixed, spinning",
            Self::UringPolled => "bare fio io_uring fixed, polled",
        }
    }

    fn options(self, load: &Load) -> String {
        let depth = load.depth;
        let engine = match self {
            Self::Psync => "--ioengine=psync".to_owned(),
            Self::Uring => "--ioengine=io_uring".to_owned(),
            Self::UringFixed => FIXED.to_owned(),
            // fio sleeps for completions in the system call that submits, which it then has not.
            Self::UringSpin => format!("{FIXED} --sqthread_poll"),
            Self::UringPolled => format!("{FIXED} --hipri"),
            Self::UringBatch => {
                let batch = (depth / 2).clamp(1, 16);
                format!(
                    "{FIXED} --iodepth_batch_submit={batch} --iodepth_batch_complete_min=1 \
                     --iodepth_batch_complete_max={batch}"
                )
            }
        };
        let flight = match (load.op, self) {
            // A writer waits for its own FLUSH: many writers are many jobs, each in a part of its own.
            (Op::Writeflush, _) => {
                let part = 100 / depth.max(1);
                format!("--numjobs={depth} --offset_increment={part}% --group_reporting --thread")
            }
            (_, Self::Psync) => String::new(),
            _ => format!("--iodepth={depth}"),
        };
        format!("{engine} {flight}")
    }
}

fn operation(load: &Load) -> String {
    if load.op == Op::Mixed {
        let split = MIXED_SIZES.map(|(bytes, percent)| format!("{bytes}/{percent}")).join(":");
        return format!(
            "--rw=randrw --rwmixread={READS_PERCENT} --bssplit={split} --blockalign={MIXED_ALIGN}"
        );
    }
    let operation = match load.op {
        Op::Randrw => format!("--rw=randrw --rwmixread={READS_PERCENT}"),
        Op::Writeflush => "--rw=write --fdatasync=1".to_owned(),
        op => format!("--rw={op}"),
    };
    format!("{operation} --bs={}", load.block_bytes)
}

/// The job of a load on a file; fio runs on these CPUs.
fn job(file: &Path, load: &Load, engine: Engine, cpus: &[usize], seconds: f64) -> Job {
    let ramp_ms = (seconds * 200.0) as u32;
    let job = Job::new("bare", &file.display().to_string()).timed(seconds, ramp_ms).with(&format!(
        "{} {} --direct=1",
        operation(load),
        engine.options(load)
    ));
    // Two threads that never sleep would take turns of milliseconds on one CPU.
    if cpus.is_empty() || engine == Engine::UringSpin && cpus.len() < 2 {
        return job;
    }
    let list: Vec<_> = cpus.iter().map(usize::to_string).collect();
    job.with(&format!("--cpus_allowed={}", list.join(",")))
}

/// Runs so many requests of a load.
///
/// # Errors
/// fio cannot run it.
pub(crate) fn count(file: &Path, load: &Load, engine: Engine, ios: u64) -> Result<()> {
    let words = format!("{} {} --direct=1", operation(load), engine.options(load));
    let job = Job::new("bare", &file.display().to_string()).with(&words);
    let job = job.with(&format!("--norandommap --number_ios={ios}"));
    job.measure(Duration::from_secs_f64(GRACE_S)).map(drop)
}

/// Measures once, with the operation, the blocks and the depth of a load; fio runs on these CPUs.
pub fn measure(
    file: &Path,
    load: &Load,
    engine: Engine,
    cpus: &[usize],
    seconds: f64,
) -> Result<Outcome> {
    job(file, load, engine, cpus, seconds).measure(Duration::from_secs_f64(seconds + GRACE_S))
}

/// Rate, latencies and CPU time. For writes with a FLUSH only the rate: fio measures the latency of
/// the write without the FLUSH, and reports the CPU time of one job of several.
pub fn figures(outcome: &Outcome, load: &Load) -> Figures {
    let mut figures = vec![(IOPS, outcome.iops)];
    if load.op != Op::Writeflush {
        let latencies = [(P50, outcome.p50_us), (P99, outcome.p99_us)];
        figures.extend(latencies.into_iter().chain([(CPU, outcome.cpu_us())]));
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Chains, Mode};

    fn line(op: Op, depth: u16, engine: Engine) -> String {
        let load = Load {
            op,
            block_bytes: 4096,
            depth,
            mode: Mode::Event,
            queues: 1,
            queue_size: 128,
            packed: false,
            chains: Chains::Auto,
            cpus: Vec::new(),
        };
        job(Path::new("disk"), &load, engine, &[1], 1.0).command_line()
    }

    #[test]
    fn each_engine_has_its_best_options() {
        assert!(!line(Op::Randread, 32, Engine::Psync).contains("iodepth"));
        let batch = line(Op::Randrw, 32, Engine::UringBatch);
        for part in ["--rw=randrw --rwmixread=70", "--iodepth=32", "--iodepth_batch_submit=16"] {
            assert!(batch.contains(part), "{batch}");
        }
        let spinning = line(Op::Randread, 1, Engine::UringSpin);
        assert!(spinning.contains("--registerfiles --sqthread_poll"), "{spinning}");
        assert!(
            !spinning.contains("cpus_allowed"),
            "it would spin beside its own thread: {spinning}"
        );
    }

    #[test]
    fn mixed_sizes_are_those_of_the_client() {
        let mixed = line(Op::Mixed, 32, Engine::UringFixed);
        let split = "--rw=randrw --rwmixread=70 --bssplit=512/10:4096/50:16384/25:65536/15";
        assert!(mixed.contains(&format!("{split} --blockalign=4096")), "{mixed}");
        assert!(!mixed.contains("--bs="), "{mixed}");
    }

    #[test]
    fn each_writer_of_a_log_is_a_job() {
        let log = line(Op::Writeflush, 8, Engine::UringFixed);
        for part in ["--fdatasync=1", "--numjobs=8", "--offset_increment=12%"] {
            assert!(log.contains(part), "{log}");
        }
        assert!(!log.contains("iodepth"), "{log}");
    }
}
