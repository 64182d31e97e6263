// SPDX-License-Identifier: Apache-2.0
//! Disks by their special property, as the tables of cases name them.

use crate::host::fixture::{Disk, Dm, DmKind, FileSystem, NullBlkOptions, image_on, null_blk};
use anyhow::Result;

/// null_blk as most cases use it.
pub(crate) const USUAL: NullBlkOptions = NullBlkOptions::USUAL;
/// With blocks of 4096 bytes.
pub(crate) const BLOCKS_4096: NullBlkOptions = NullBlkOptions { block_bytes: 4096, ..USUAL };
/// With polled queues.
pub(crate) const POLLED: NullBlkOptions = NullBlkOptions { poll_queues: 2, ..USUAL };
/// With polled queues, four tags for all queues, and a volatile cache.
pub(crate) const FEW_TAGS: NullBlkOptions =
    NullBlkOptions { shared_tags: 4, cache_mib: 16, ..POLLED };
/// With polled queues, and requests of at most 32 KiB.
pub(crate) const SPLIT: NullBlkOptions = NullBlkOptions { max_sectors: 64, ..POLLED };
/// Completes after one millisecond.
pub(crate) const SLOW: NullBlkOptions =
    NullBlkOptions { irqmode: 2, completion_ns: 1_000_000, ..USUAL };

/// A null_blk with these options.
pub(crate) fn disk_like(options: NullBlkOptions) -> Result<Disk> {
    null_blk(options).map(|(disk, _)| disk)
}

/// The disk of most cases.
pub(crate) fn usual() -> Result<Disk> {
    disk_like(USUAL)
}

/// A device-mapper device over the usual disk.
pub(crate) fn mapped() -> Result<Disk> {
    mapped_on(usual())
}

/// A device-mapper device over another disk.
pub(crate) fn mapped_on(below: Result<Disk>) -> Result<Disk> {
    Dm::over(below?, "mapped", DmKind::Linear).map(|(disk, _)| disk)
}

/// A disk that can hold all requests: the usual one, or an image in the page cache over it.
pub(crate) fn holding(is_cached: bool) -> Result<(Disk, Dm)> {
    let below = disk_like(NullBlkOptions { mib: 512, ..USUAL })?;
    let (below, dm) = Dm::over(below, "holding", DmKind::Linear)?;
    let disk = if is_cached { image_on(FileSystem::Ext4, below, false)? } else { below };
    Ok((disk, dm))
}

/// An image whose writes wait in the page cache for a disk that takes one millisecond.
pub(crate) fn slow_and_cached() -> Result<Disk> {
    let below = disk_like(NullBlkOptions { mib: 512, ..SLOW })?;
    image_on(FileSystem::Ext4, below, false)
}
