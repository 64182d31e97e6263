// SPDX-License-Identifier: Apache-2.0
//! The backend of a loaded device is replaced by another path to the same content.

use super::{kernel, specs_for};
use crate::host::env::Env;
use crate::host::fixture::{Disk, FileSystem, NullBlkOptions, dm_linear_pair, image, null_blk};
use crate::host::integrity::{Setup, tell};
use crate::host::load::under_load;
use crate::host::target::{self, Target};
use anyhow::{Context, Result};
use std::fs::File;

/// Swaps two device-mapper names of one disk.
pub(crate) fn swap_mapped(env: &Env, setup: Setup) -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions::default())?;
    let disks = dm_linear_pair(below)?;
    swap(env, &disks[0], setup, |n| disks[n % 2].open())
}

/// Swaps an image with and without the page cache.
pub(crate) fn swap_files(env: &Env, setup: Setup) -> Result<()> {
    let disk = image(FileSystem::Ext4, true)?;
    swap(env, &disk, setup, |n| disk.open_as(n % 2 == 0, false))
}

fn swap(
    env: &Env,
    disk: &Disk,
    setup: Setup,
    mut open: impl FnMut(usize) -> Result<File>,
) -> Result<()> {
    println!("on {disk}, {setup:?}");
    let (specs, options) = specs_for(env, disk, setup);
    let Target { device, .. } = target::serve_with(env, disk, &options, &setup.kernel())?;
    let count = env.rounds(setup.requests) as usize;
    let done = under_load(device, specs, |handles| {
        for n in 1..=count {
            handles.wait_for_progress(super::STEP).with_context(|| format!("before swap {n}"))?;
            let backend = open(n)?;
            kernel(handles)?.swap_backend(backend).with_context(|| format!("swap {n}"))?;
        }
        handles.wait_for_progress(super::STEP).context("after the last swap")
    })?;
    tell(&done);
    Ok(())
}
