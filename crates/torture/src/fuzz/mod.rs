// SPDX-License-Identifier: Apache-2.0
//! Random ioctls in random order on some devices, from two threads; then a new device must serve,
//! and nothing may be left behind.

mod material;
mod ops;

use crate::case::expect_lockdep_limit;
use crate::env::Env;
use crate::fixture::{NullBlkOptions, null_blk};
use crate::module;
use crate::target::{self, need_module};
use anyhow::{Context, Result, anyhow, ensure};
use driver::kernel::KernelDevice;
use lab_case::rng::Rng;
use material::Material;
use std::sync::{Arc, Mutex};

/// Devices that the threads share.
const DEVICES: usize = 3;
/// Threads.
const THREADS: u64 = 2;

/// The shared devices. A thread works on a clone, so that another one can close it meanwhile.
pub(super) type Devices = Arc<Mutex<Vec<Arc<KernelDevice>>>>;

/// `count` steps.
pub(crate) fn run(env: &Env, count: u64) -> Result<()> {
    need_module()?;
    expect_lockdep_limit();
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    let count = env.rounds(count) / THREADS;
    let refs = module::references()?;
    let devices = (0..DEVICES).map(|_| KernelDevice::open().map(Arc::new));
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
