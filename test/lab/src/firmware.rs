// SPDX-License-Identifier: Apache-2.0
//! Firmware for guests that boot from the served disk, from Debian's packages.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::debian::download_and_unpack;

/// UEFI with its shell; unpacked into the cache and not installed.
///
/// # Errors
/// When the package cannot be fetched, or holds no firmware.
pub fn ovmf(cache: &Cache) -> Result<PathBuf> {
    let entry = cache.entry("ovmf", |staging| download_and_unpack("ovmf", staging))?;
    let directory = entry.join("usr/share");
    // Debian's names since 2.70 and since 2022.11; the one with its variables in it works alone.
    ["ovmf/OVMF.fd", "qemu/OVMF.fd", "OVMF/OVMF_CODE_4M.fd"]
        .into_iter()
        .map(|name| directory.join(name))
        .find(|path| path.exists())
        .context("the package ovmf holds no OVMF.fd")
}
