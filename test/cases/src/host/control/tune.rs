// SPDX-License-Identifier: Apache-2.0
//! All settings that can change while queues run: options, workers, busy-loop time.

use super::{kernel, rounds};
use crate::host::env::Env;
use crate::host::fixture::Disk;
use crate::host::integrity::Setup;
use anyhow::Result;
use driver::kernel::abi::{self, BlkOptions};
use kit::rng::Rng;

/// Makes random changes that are allowed at any time.
pub(crate) fn tune(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    let mut rng = Rng::new(env.seed() ^ 0x7e5e);
    let mut extra: Vec<u32> = Vec::new();
    rounds(env, disk, setup, |handles, round| {
        let queue = rng.below(setup.queues.into()) as u32;
        let kernel = kernel(handles)?;
        match round % 4 {
            0 => {
                let all = [
                    abi::OPT_WRITE_THROUGH,
                    abi::OPT_IOPOLL,
                    abi::OPT_PIN_MEMORY,
                    abi::OPT_COALESCE,
                    abi::OPT_COALESCE_AUTO,
                ];
                let flags =
                    all.iter().filter(|_| rng.one_in(2)).fold(0, |flags, flag| flags | flag);
                kernel.set_options(BlkOptions::with_flags(flags))?;
            }
            1 => {
                let worker = kernel.device().new_worker()?;
                extra.push(worker);
                kernel.device().attach_worker(queue, worker)?;
                // Workers without a queue can be freed; the others are in use.
                extra.retain(|&worker| kernel.device().free_worker(worker).is_err());
            }
            2 => {
                let us = *rng.pick(&[0, 1, 50, 1000, 100_000]);
                kernel.device().set_busyloop(queue, us)?;
                anyhow::ensure!(kernel.device().busyloop(queue)? == us, "another busy-loop time");
            }
            _ => kernel.device().set_serial(rng.bytes(20).try_into().expect("20 bytes"))?,
        }
        Ok(())
    })
}
