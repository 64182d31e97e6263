// SPDX-License-Identifier: Apache-2.0
//! All cases.

use crate::case::Case;
use crate::case::Tier::{Full, Gating};
use crate::fixture::{self, FileSystem, NullBlkOptions};
use crate::fuzz;
use crate::hostile;
use crate::integrity::{self, Setup};
use crate::requests;

macro_rules! cases {
    ($($name:literal $tier:ident $about:literal $run:expr;)*) => {
        &[$(Case { name: $name, tier: $tier, about: $about, run: $run },)*]
    };
}

/// Cases in the order in which they are listed.
pub(crate) const CASES: &[Case] = cases! {
    "requests-null-blk" Gating
        "every request type, layout and error on null_blk"
        |env| requests::all(env, null_blk(NullBlkOptions::default()));
    "requests-null-blk-4096" Full
        "every request type, layout and error on null_blk with blocks of 4096 bytes"
        |env| requests::all(env, null_blk(NullBlkOptions { block_bytes: 4096, ..NullBlkOptions::default() }));
    "integrity-null-blk" Gating
        "two queues and workers, mixed sizes to 4 MiB, every sector verified, on null_blk"
        |env| integrity::run(env, null_blk(NullBlkOptions::default()), Setup::usual(300));
    "hostile-rings" Gating
        "malformed chains on one queue while another one is served; the queue serves again after"
        |env| hostile::run(env, null_blk(NullBlkOptions::default()), 20_000, false);
    "hostile-rings-raced" Gating
        "malformed chains that a second thread changes while the device reads them"
        |env| hostile::run(env, null_blk(NullBlkOptions::default()), 20_000, true);
    "hostile-rings-million" Full
        "a million malformed chains, raced"
        |env| hostile::run(env, null_blk(NullBlkOptions::default()), 1_000_000, true);
    "ioctl-fuzz" Gating
        "random ioctls with random arguments from two threads; a new device serves after"
        |env| fuzz::run(env, 8_000);
    "ioctl-fuzz-long" Full
        "the same for much longer"
        |env| fuzz::run(env, 400_000);
};

fn null_blk(options: NullBlkOptions) -> anyhow::Result<fixture::Disk> {
    fixture::null_blk(options).map(|(disk, _)| disk)
}
