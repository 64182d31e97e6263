// SPDX-License-Identifier: Apache-2.0
//! Random ioctls in random order on a few devices, from two threads; afterwards a new device must
//! work, and nothing may leak.

mod material;
mod ops;

use crate::case::cases;
use crate::host::env::Env;
use crate::host::fixture::{NullBlkOptions, null_blk};
use crate::host::module;
use crate::host::target::{self, need_module};
use anyhow::{Context, Result, anyhow, ensure};
use driver::kernel::KernelDevice;
use kit::rng::Rng;
use kit::set::Set::{Full, Gating};
use material::Material;
use std::sync::{Arc, Mutex};

cases! { Host;
    "ioctl-fuzz", Gating,
        "random ioctls with random arguments from two threads; a new device serves after",
        |env| run(env, 4_000);
    "ioctl-fuzz-long", Full,
        "the same for much longer",
        |env| run(env, 400_000);
}

/// Number of devices, shared by the threads.
const DEVICES: usize = 3;
/// Number of threads.
const THREADS: u64 = 2;

/// The shared devices. A thread works on a clone, so another thread can close the original
/// meanwhile.
pub(super) type Devices = Arc<Mutex<Vec<Arc<KernelDevice>>>>;

/// Opens a device with at most eight queues: the core locks all of them at once for an IOTLB
/// message, and lockdep supports no more locks of one class at once.
pub(super) fn open(num_queues: u32) -> std::io::Result<KernelDevice> {
    let device = KernelDevice::open()?;
    device.set_num_queues(num_queues)?;
    Ok(device)
}

/// Runs `count` random steps.
pub(crate) fn run(env: &Env, count: u64) -> Result<()> {
    need_module()?;
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    let count = env.rounds(count) / THREADS;
    let refs = module::references()?;
    let devices = (0..DEVICES).map(|n| open(1 + n as u32).map(Arc::new));
    let devices: Devices = Arc::new(Mutex::new(devices.collect::<std::io::Result<_>>()?));
    let material = Arc::new(Material::new(&disk)?);
    let threads: Vec<_> = (0..THREADS)
        .map(|n| {
            let (devices, material, mut rng) =
                (devices.clone(), material.clone(), Rng::new(env.seed() + n));
            std::thread::spawn(move || -> Result<(u64, u64)> {
                let mut told = (0, 0);
                for step in 0..count {
                    let done = ops::step(&devices, &material, &mut rng)
                        .with_context(|| format!("thread {n}, step {step}"))?;
                    *(if done { &mut told.0 } else { &mut told.1 }) += 1;
                }
                Ok(told)
            })
        })
        .collect();
    for (n, thread) in threads.into_iter().enumerate() {
        let (done, refused) = thread.join().map_err(|_| anyhow!("thread {n} panicked"))??;
        println!("thread {n}: {done} succeeded, {refused} were refused");
        ensure!(done > count / 20, "hardly anything succeeded: the fuzzer reaches nothing");
    }
    drop(devices);
    drop(material);
    module::wait_for_references(refs).context("after all devices were closed")?;
    target::check_serves(env, &disk).context("a new device")
}
