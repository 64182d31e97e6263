// SPDX-License-Identifier: Apache-2.0
//! Parts whose front-end writes meanwhile.

use super::part::Part;
use super::{InflightRegion, packed, queue_region_bytes, split};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use virtio_spec::split::QUEUE_SIZE_MAX;
use virtqueue::Layout;

const SIZE: u16 = QUEUE_SIZE_MAX;
const ROUNDS: usize = 50;

fn region(layout: Layout) -> Arc<InflightRegion> {
    let bytes = queue_region_bytes(layout, SIZE) as u64;
    let file = File::from(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    InflightRegion::map(file, 0, bytes, 1, SIZE).unwrap()
}

/// Calls `read` with the part of a queue `ROUNDS` times, while another thread writes random values to
/// the eight bytes at each offset of `counters`.
fn while_counters_change(layout: Layout, counters: &[usize], read: impl Fn(Part)) {
    let region = region(layout);
    let part = || Part::new(&region, 0, queue_region_bytes(layout, SIZE)).unwrap();
    let (written, done) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let (part, mut value) = (part(), 1_u64);
            while !done.load(Ordering::Relaxed) {
                for at in counters {
                    // Xorshift.
                    value ^= value << 13;
                    value ^= value >> 7;
                    value ^= value << 17;
                    part.store_u64(*at, value);
                }
                written.store(true, Ordering::Relaxed);
            }
        });
        while !written.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..ROUNDS).for_each(|_| read(part()));
        }));
        done.store(true, Ordering::Relaxed);
        result.unwrap();
    });
}

#[test]
fn a_split_part_whose_counters_change_meanwhile_is_opened() {
    const ENTRY: usize = 16;
    let counters: Vec<_> = (1..=usize::from(SIZE)).map(|entry| entry * ENTRY + 8).collect();
    while_counters_change(Layout::Split, &counters, |part| {
        // The version, the size, and all marks.
        part.store_u16(8, 1);
        part.store_u16(10, SIZE);
        counters.iter().for_each(|counter| part.store_u8(counter - 8, 1));
        let (_, left) = split::SplitPart::open(part, SIZE, 0);
        let mut heads = left.unwrap();
        heads.sort_unstable();
        assert!(heads.into_iter().eq(0..SIZE));
    });
}

#[test]
fn a_packed_part_whose_counters_change_meanwhile_is_read() {
    const ENTRY: usize = 32;
    let counters: Vec<_> = (1..=usize::from(SIZE)).map(|entry| entry * ENTRY + 8).collect();
    while_counters_change(Layout::Packed, &counters, |part| {
        // The version, the size, an empty list of free entries, and all marks; each chain has one entry.
        part.store_u16(8, 1);
        part.store_u16(10, SIZE);
        part.store_u16(12, SIZE);
        part.store_u16(14, SIZE);
        for counter in &counters {
            part.store_u8(counter - 8, 1);
            part.store_u16(counter - 2, 1);
        }
        let left = packed::left(&part, SIZE, |_| false).unwrap();
        assert!(left.chains.iter().map(|chain| chain.counter).is_sorted());
        assert_eq!(left.chains.len(), usize::from(SIZE));
    });
}
