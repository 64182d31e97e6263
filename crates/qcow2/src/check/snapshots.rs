// SPDX-License-Identifier: Apache-2.0
//! The table of internal snapshots, and their L1 tables.

use super::tables::Counter;
use crate::fields::{read_padded, u32_at, u64_at};
use crate::header::L1_ENTRIES_MAX;
use std::io;

/// Limits of QEMU.
const SNAPSHOTS_MAX: u32 = 65536;
const TABLE_MAX: u64 = 64 << 20;
/// Bytes of an entry before its extra data.
const HEAD: u64 = 40;
/// Bytes of extra data: size of the state and size of the disk.
const EXTRA_MIN: u64 = 16;
const EXTRA_MAX: u64 = 1024;

/// Counts the references of the snapshots.
pub(super) fn count(counter: &mut Counter<'_>) -> io::Result<()> {
    let (number, start) = (counter.fields.snapshots, counter.fields.snapshots_at);
    let is_apart = |at: u64| at.is_multiple_of(counter.fields.cluster_bytes()) && at < 1 << 62;
    if number > SNAPSHOTS_MAX || !is_apart(start) {
        return Err(io::Error::other("the table of snapshots has an impossible place or length"));
    }
    let mut at = start;
    for index in 0..number {
        let head = read_padded(counter.file, HEAD as usize, at)?;
        let (l1_at, l1_entries) = (u64_at(&head, 0), u32_at(&head, 8));
        let names = u32_at(&head, 12);
        let extra = u64::from(u32_at(&head, 36));
        let bytes = HEAD + extra + u64::from(names >> 16) + u64::from(names & 0xffff);
        at += bytes.next_multiple_of(8);
        if at - start > TABLE_MAX {
            return Err(io::Error::other("the table of snapshots is too long"));
        }
        if counter.fields.version == 3 && extra < EXTRA_MIN || extra > EXTRA_MAX {
            counter.report.error(format!("snapshot {index} has {extra} bytes of extra data"));
        }
        let is_aligned = l1_at.is_multiple_of(counter.fields.cluster_bytes());
        if !is_aligned || l1_at >= 1 << 56 || l1_entries > L1_ENTRIES_MAX {
            counter.report.error(format!("snapshot {index} has an impossible L1 table"));
            continue;
        }
        counter.l1_table(l1_at, l1_entries, false)?;
    }
    counter.count(start, at - start, 1, "the table of snapshots");
    Ok(())
}
