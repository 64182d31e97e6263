// SPDX-License-Identifier: Apache-2.0
//! All cases.

use crate::case::Case;
use crate::case::Tier::{Full, Gating};
use crate::control;
use crate::fixture::{self, FileSystem, NullBlkOptions};
use crate::fuzz;
use crate::hostile;
use crate::integrity::{self, Setup};
use crate::requests;
use driver::kernel::abi;

macro_rules! cases {
    ($($name:literal $tier:ident $about:literal $run:expr;)*) => {
        &[$(Case { name: $name, tier: $tier, about: $about, run: $run },)*]
    };
}

/// Cases in the order in which they are listed.
pub(crate) const CASES: &[Case] = cases! {
    "requests-null-blk" Gating
        "every request type, layout and error on null_blk"
        |env| requests::all(env, usual());
    "requests-null-blk-4096" Full
        "every request type, layout and error on null_blk with blocks of 4096 bytes"
        |env| requests::all(env, null_blk(NullBlkOptions { block_bytes: 4096, ..NullBlkOptions::default() }));
    "integrity-null-blk" Gating
        "two queues and workers, mixed sizes to 4 MiB, every sector verified, on null_blk"
        |env| integrity::run(env, usual(), Setup::usual(300));
    "hostile-rings" Gating
        "malformed chains on one queue while another one is served; the queue serves again after"
        |env| hostile::run(env, usual(), 20_000, false);
    "hostile-rings-raced" Gating
        "malformed chains that a second thread changes while the device reads them"
        |env| hostile::run(env, usual(), 20_000, true);
    "hostile-rings-million" Full
        "a million malformed chains, raced"
        |env| hostile::run(env, usual(), 1_000_000, true);
    "ioctl-fuzz" Gating
        "random ioctls with random arguments from two threads; a new device serves after"
        |env| fuzz::run(env, 8_000);
    "ioctl-fuzz-long" Full
        "the same for much longer"
        |env| fuzz::run(env, 400_000);
    "control-stop-start" Gating
        "queues stop with their exact index and start again under load"
        |env| control::stop_and_start(env, usual(), Setup::usual(60));
    "control-memory-table" Gating
        "the memory table is exchanged under load"
        |env| control::memory_table(env, usual(), Setup::usual(40));
    "control-reset-owner" Gating
        "RESET_OWNER and everything anew under load"
        |env| control::reset_owner(env, usual(), Setup::usual(20));
    "control-features" Gating
        "LOG_ALL on and off under load"
        |env| control::features(env, usual(), Setup::usual(40));
    "control-calls" Gating
        "call eventfds are exchanged under load"
        |env| control::replace_calls(env, usual(), Setup::usual(60));
    "control-tune" Gating
        "options, workers, busy-loop time and serial change under load"
        |env| control::tune(env, usual(), Setup { workers: 0, ..Setup::usual(60) });
    "control-swap-mapped" Gating
        "the backend is exchanged for another name of the same disk under load"
        |env| control::swap_mapped(env, Setup::usual(30));
    "control-swap-files" Gating
        "an image is swapped between O_DIRECT and the page cache under load"
        |env| control::swap_files(env, Setup::usual(30));
    "control-iotlb" Gating
        "addresses go through the IOTLB, which misses and loses entries under load"
        |env| control::iotlb_with_misses(env, usual(), Setup::usual(100));
    "dirty-log" Gating
        "every page that the device wrote is in the dirty log"
        |env| control::dirty_log_is_complete(env, usual(), 0);
    "dirty-log-pinned" Gating
        "every page that the device wrote is in the dirty log, with pinned memory"
        |env| control::dirty_log_is_complete(env, usual(), abi::OPT_PIN_MEMORY);
};

fn usual() -> anyhow::Result<fixture::Disk> {
    null_blk(NullBlkOptions::default())
}

fn null_blk(options: NullBlkOptions) -> anyhow::Result<fixture::Disk> {
    fixture::null_blk(options).map(|(disk, _)| disk)
}
