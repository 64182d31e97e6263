// SPDX-License-Identifier: Apache-2.0
//! The moment of a copy of the disk: backups and snapshots have the content of one, of which the file
//! of the writer tells the number.
//!
//! The writer has one request at a time. So a copy has all of its writes up to a number, and none
//! after that. A block of another number is a write that the copy has missed, or has too early.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::images::text;
use super::writer::{BLOCK_BYTES, BLOCKS, slot_of};
use crate::process::run_to_end;

const DIGITS: usize = 16;

/// Checks a raw copy of the disk: replays the journal of its file system, which is sound then, and
/// compares the writer's file. Removes the copy.
pub(super) fn check(copy: &Path, moments: &RangeInclusive<u64>) -> Result<()> {
    let (path, dumped) = (text(copy), copy.with_extension("stamped"));
    // 1: it has changed something.
    let replay = format!("e2fsck -E journal_only -p '{path}' || [ $? -eq 1 ]");
    run_to_end(&["sh", "-c", &replay])?;
    run_to_end(&["e2fsck", "-f", "-n", &path])?;
    let dump = format!("dump /stamped {}", dumped.display());
    let said = run_to_end(&["debugfs", "-R", &dump, &path])?;
    let content = fs::read(&dumped).with_context(|| format!("debugfs: {said}"))?;
    let moment = moment_of(&content)?;
    ensure!(
        moments.contains(&moment),
        "the copy has the moment of write {moment}, not one of {moments:?}"
    );
    fs::remove_file(&dumped)?;
    fs::remove_file(copy)?;
    Ok(())
}

/// The number of the last write in the writer's file, which has all writes before it.
fn moment_of(content: &[u8]) -> Result<u64> {
    let bytes = BLOCK_BYTES * BLOCKS as usize;
    ensure!(content.len() == bytes, "{} bytes instead of {bytes}", content.len());
    let blocks = content.chunks(BLOCK_BYTES).zip(0..);
    let numbers: Vec<u64> =
        blocks.map(|(block, slot)| number_of(block, slot)).collect::<Result<_>>()?;
    let moment = numbers.iter().copied().max().unwrap_or_default();
    let mut expected = vec![0; BLOCKS as usize];
    // A later write of a block replaces the earlier ones.
    for number in moment.saturating_sub(BLOCKS - 1)..=moment {
        expected[slot_of(number) as usize] = number;
    }
    let wrong: Vec<String> = (0..)
        .zip(numbers.iter().zip(&expected))
        .filter(|(_, (number, expected))| number != expected)
        .map(|(slot, (number, expected))| format!("block {slot}: {number} instead of {expected}"))
        .collect();
    ensure!(wrong.is_empty(), "not the content after write {moment}: {}", wrong.join(", "));
    Ok(moment)
}

/// The number of the write that a block has.
fn number_of(block: &[u8], slot: u64) -> Result<u64> {
    let stamp = &block[..2 * DIGITS];
    let parse = |digits: &[u8]| std::str::from_utf8(digits).ok()?.parse::<u64>().ok();
    match (parse(&stamp[..DIGITS]), parse(&stamp[DIGITS..])) {
        (Some(number), Some(its))
            if its == slot && block.chunks(2 * DIGITS).all(|it| it == stamp) =>
        {
            Ok(number)
        }
        _ => bail!("wrong bytes in block {slot}: {}", String::from_utf8_lossy(stamp)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file after some writes, as the program makes it.
    fn after(writes: u64) -> Vec<u8> {
        let mut content = vec![0; BLOCK_BYTES * BLOCKS as usize];
        let mut write = |number: u64, slot: u64| {
            let stamp = format!("{number:016}{slot:016}").repeat(BLOCK_BYTES / 32);
            content[slot as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(stamp.as_bytes());
        };
        (0..BLOCKS).for_each(|slot| write(0, slot));
        (1..=writes).for_each(|number| write(number, slot_of(number)));
        content
    }

    #[test]
    fn the_moment_is_the_number_of_the_last_write() {
        for writes in [0, 1, 511, 512, 513, 5000] {
            assert_eq!(moment_of(&after(writes)).unwrap(), writes);
        }
    }

    #[test]
    fn a_missing_early_or_broken_write_is_found() {
        let block = |content: &[u8], slot: u64| {
            content[slot as usize * BLOCK_BYTES..][..BLOCK_BYTES].to_vec()
        };
        let put = |content: &mut [u8], slot: u64, block: &[u8]| {
            content[slot as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(block);
        };
        let mut missing = after(700);
        put(&mut missing, slot_of(690), &block(&after(600), slot_of(690)));
        let error = moment_of(&missing).unwrap_err().to_string();
        assert!(error.contains("178 instead of 690"), "{error}");
        let mut early = after(700);
        put(&mut early, slot_of(705), &block(&after(705), slot_of(705)));
        assert!(moment_of(&early).is_err());
        let mut moved = after(700);
        put(&mut moved, 3, &block(&after(700), 4));
        assert!(moment_of(&moved).unwrap_err().to_string().contains("block 3"));
        let mut torn = after(700);
        torn[10 * BLOCK_BYTES + 4000] = b'x';
        assert!(moment_of(&torn).unwrap_err().to_string().contains("block 10"));
        assert!(moment_of(&torn[1..]).is_err());
    }
}
