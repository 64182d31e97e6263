// SPDX-License-Identifier: Apache-2.0
//! Rings of random content: each is read as the reference implementation reads it, or is a ring
//! fault, never a panic.

mod common;

use common::reference::{Found, Ring};
use common::{Arena, DATA_END, HIGH, LOW, RINGS, TABLES, TABLES_BORDER};
use proptest::collection::vec;
use proptest::prelude::*;
use virtqueue::{Chain, Layout, RingSetup, VirtQueue};

const AVAIL: u16 = 1 << 7;
const SIZE: u16 = 8;

/// Descriptors that are wrong in likely ways: nearly legal ones, edges of memory, and noise.
fn garbage() -> impl Strategy<Value = [u8; 16]> {
    let edges = vec![LOW - 1, LOW, HIGH - 3, DATA_END - 1, DATA_END, TABLES, TABLES + 8];
    let addr = prop_oneof![
        4 => LOW..DATA_END,
        3 => prop::sample::select(edges),
        2 => TABLES..TABLES_BORDER + 0x3000,
        1 => RINGS..RINGS + common::RINGS_LEN,
        1 => any::<u64>(),
        1 => u64::MAX - 64..=u64::MAX,
    ];
    let len = prop_oneof![
        3 => prop::sample::select(vec![0u32, 1, 16, 32, 48, 512, 4096]),
        2 => (1u32..12).prop_map(|entries| 16 * entries),
        1 => 0u32..0x10_0000,
        1 => any::<u32>(),
    ];
    let flags = prop_oneof![
        4 => 0u16..8,
        3 => (0u16..8).prop_map(|flags| flags | AVAIL),
        1 => any::<u16>(),
    ];
    let last = prop_oneof![6 => 0u16..10, 1 => any::<u16>()];
    (addr, len, flags, last, any::<bool>()).prop_map(|(addr, len, flags, last, packed)| {
        let (third, fourth) = if packed { (last, flags) } else { (flags, last) };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&third.to_le_bytes());
        bytes[14..].copy_from_slice(&fourth.to_le_bytes());
        bytes
    })
}

/// Takes chains until none is left or the ring breaks, each as the reference reads it.
fn take_all(
    arena: &Arena,
    queue: &mut VirtQueue,
    mut expect: impl FnMut(&VirtQueue) -> Result<Option<Found>, common::reference::Broken>,
) {
    let mut chain = Chain::default();
    for _ in 0..3 * SIZE {
        let expected = expect(queue);
        let (base, used) = (queue.base(), queue.used_index());
        match queue.take(&mut chain) {
            Ok(Some(head)) => {
                let (readable, writable) = arena.chain_ranges(&mut chain);
                let bytes = (chain.readable_bytes(), chain.writable_bytes());
                assert_eq!(bytes, (common::sum(&readable), common::sum(&writable)));
                let (id, descriptors) = (head.id(), head.descriptor_count());
                let found = Found { id, descriptors, readable, writable };
                assert_eq!(expected, Ok(Some(found)));
                queue.push_used(head, 1);
                queue.publish();
                let _ = queue.needs_call();
            }
            Ok(None) => return assert_eq!(expected, Ok(None)),
            Err(fault) => {
                assert!(expected.is_err(), "{fault:?} where the reference has {expected:?}");
                assert_eq!((queue.base(), queue.used_index()), (base, used));
                return;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn garbage_in_a_split_ring_is_a_fault_or_a_legal_chain(
        descs in vec(garbage(), SIZE as usize),
        table in vec(garbage(), 24),
        heads in vec(prop_oneof![20 => 0..SIZE, 1 => any::<u16>()], SIZE as usize),
        base: u16,
        ahead in prop_oneof![6 => 0..=SIZE, 1 => any::<u16>()],
        indirect: bool,
        event_idx: bool,
    ) {
        let arena = Arena::new();
        let areas = common::split_areas(SIZE);
        arena.write(areas[0], &descs.concat());
        arena.write(TABLES, &table.concat());
        arena.write(TABLES_BORDER - 24, &table.concat());
        for (i, head) in (0..).zip(&heads) {
            arena.write_u16(areas[1] + 4 + 2 * i, *head);
        }
        arena.write_u16(areas[1] + 2, base.wrapping_add(ahead));
        let setup = arena.setup(Layout::Split, SIZE, areas);
        let setup = RingSetup { base: base.into(), indirect, event_idx, ..setup };
        let mut queue = VirtQueue::start(&setup).unwrap();
        // The used ring may be a buffer of the driver's too: let the device's writes count.
        let ring = Ring { arena: &arena, size: SIZE, areas, indirect };
        take_all(&arena, &mut queue, |queue| ring.split(queue.base() as u16));
    }

    #[test]
    fn garbage_in_a_packed_ring_is_a_fault_or_a_legal_chain(
        descs in vec(garbage(), 11),
        table in vec(garbage(), 24),
        offset in 0u16..11,
        wrap: bool,
        indirect: bool,
        event_idx: bool,
        driver_event: [u8; 4],
    ) {
        let arena = Arena::new();
        let areas = [RINGS, RINGS + 0x1000, RINGS + 0x2000];
        arena.write(areas[0], &descs.concat());
        arena.write(areas[1], &driver_event);
        arena.write(TABLES, &table.concat());
        let half = u32::from(offset) | u32::from(wrap) << 15;
        let setup = arena.setup(Layout::Packed, 11, areas);
        let setup = RingSetup { base: half * 0x1_0001, indirect, event_idx, ..setup };
        let mut queue = VirtQueue::start(&setup).unwrap();
        let ring = Ring { arena: &arena, size: 11, areas, indirect };
        take_all(&arena, &mut queue, |queue| {
            let base = queue.base() as u16;
            ring.packed(base & 0x7fff, base & 0x8000 != 0)
        });
    }

    #[test]
    fn noise_everywhere_never_panics(
        noise in vec(any::<u8>(), 0x300),
        packed: bool,
        base: u32,
        size in 1u16..64,
    ) {
        let arena = Arena::new();
        let (layout, size) = match packed {
            true => (Layout::Packed, size),
            false => (Layout::Split, size.next_power_of_two()),
        };
        arena.write(RINGS, &noise);
        let areas = [RINGS, RINGS + 0x100, RINGS + 0x200];
        let base = if packed { base & 0x8000_8000 } else { base & 0xffff };
        let setup = RingSetup { base, event_idx: true, ..arena.setup(layout, size, areas) };
        let mut queue = VirtQueue::start(&setup).unwrap();
        let mut chain = Chain::default();
        for _ in 0..100 {
            match queue.take(&mut chain) {
                Ok(Some(head)) => {
                    arena.chain_ranges(&mut chain);
                    let _ = chain.take_status();
                    let _ = chain.take_front::<16>();
                    arena.chain_ranges(&mut chain);
                    queue.push_used(head, u32::MAX);
                    queue.publish();
                    let _ = queue.needs_call();
                    queue.arm();
                    queue.suppress();
                }
                Ok(None) | Err(_) => break,
            }
        }
    }
}
