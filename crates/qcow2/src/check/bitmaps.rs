// SPDX-License-Identifier: Apache-2.0
//! Persistent dirty bitmaps: their directory, tables and data.

use super::read_table;
use super::tables::Counter;
use crate::fields::{Extension, read_padded, u32_at, u64_at};
use std::collections::HashSet;
use std::io;

/// Bit of the autoclear features: the bitmaps are valid.
const VALID: u64 = 1;
/// Limits of QEMU.
const BITMAPS_MAX: u32 = 65535;
const DIRECTORY_MAX: u64 = 64 << 20;
const TABLE_ENTRIES_MAX: u32 = 0x800_0000;
/// Bytes of an entry of the directory before its extra data.
const HEAD: u64 = 24;
const POSITION: u64 = 0x00ff_ffff_ffff_fe00;
const RESERVED: u64 = 0xff00_0000_0000_01fe;

/// Counts the references of the bitmaps. If a program without bitmaps has changed the image, they
/// are void.
pub(super) fn count(counter: &mut Counter<'_>, extension: Extension) -> io::Result<()> {
    if counter.fields.autoclear & VALID == 0 {
        return Ok(());
    }
    let head = read_padded(counter.file, 24, extension.at)?;
    let (number, bytes, start) = (u32_at(&head, 0), u64_at(&head, 8), u64_at(&head, 16));
    if number > BITMAPS_MAX || bytes > DIRECTORY_MAX || start >= 1 << 56 {
        return Err(io::Error::other("the directory of bitmaps has an impossible place or length"));
    }
    counter.count(start, bytes, 1, "the directory of bitmaps");
    let directory = read_padded(counter.file, bytes as usize, start)?;
    let mut at = 0;
    let mut seen = HashSet::new();
    for index in 0..number {
        let entry = directory.get(at as usize..).filter(|rest| rest.len() >= HEAD as usize);
        let Some(entry) = entry else {
            counter.report.error(format!("bitmap {index} lies behind the end of its directory"));
            break;
        };
        let (table_at, entries) = (u64_at(entry, 0), u32_at(entry, 8));
        let name_bytes = u64::from(u32_at(entry, 16) & 0xffff);
        at += (HEAD + u64::from(u32_at(entry, 20)) + name_bytes).next_multiple_of(8);
        let is_apart = table_at.is_multiple_of(counter.fields.cluster_bytes());
        if !is_apart || table_at >= 1 << 56 || entries > TABLE_ENTRIES_MAX {
            counter.report.error(format!("bitmap {index} has an impossible table"));
            continue;
        }
        if entries > 0 && !seen.insert(table_at) {
            counter.report.error(format!("bitmap {index} has the table of another one"));
            continue;
        }
        table(counter, table_at, entries)?;
    }
    Ok(())
}

fn table(counter: &mut Counter<'_>, at: u64, entries: u32) -> io::Result<()> {
    /// Entries that are read at once.
    const PART: u64 = 1 << 16;
    let entries = u64::from(entries);
    counter.count(at, entries * 8, 1, "the table of a bitmap");
    // Entries behind the end of the file are zero.
    let readable = counter.file_clusters() << counter.fields.cluster_bits;
    let entries = entries.min(readable.saturating_sub(at) / 8);
    for first in (0..entries).step_by(PART as usize) {
        for entry in read_table(counter.file, at + first * 8, PART.min(entries - first))? {
            let place = entry & POSITION;
            if entry & RESERVED != 0 || !place.is_multiple_of(counter.fields.cluster_bytes()) {
                let text = format!("entry {entry:#x} of a bitmap's table is damaged");
                counter.report.error(text);
            } else if place != 0 {
                counter.count(place, counter.fields.cluster_bytes(), 1, "data of a bitmap");
            }
        }
    }
    Ok(())
}
