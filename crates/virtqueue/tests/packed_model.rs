// SPDX-License-Identifier: Apache-2.0
//! The packed ring against a driver and a plain reading of section 2.8 that live in this file and
//! in `common/reference.rs`. Positions here are never wrapped: a place in the ring is its number
//! of descriptors since the start, and lap and wrap counter follow from it by division.

mod common;

use common::reference::{Found, Ring};
use common::{Arena, DATA_END, HIGH, LOW, RINGS, TABLES, USER_BASE};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use virtqueue::{Chain, ChainHead, Layout, QueueError, RingSetup, VirtQueue};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;
const TABLE_STRIDE: u64 = 256;

#[derive(Clone, Debug)]
struct ChainSpec {
    readable: Vec<(u64, u32)>,
    writable: Vec<(u64, u32)>,
    indirect: bool,
    table_skew: u64,
    /// Flags of table entries that the device must ignore.
    stray_flags: u16,
}

#[derive(Clone, Debug)]
enum Op {
    Add(ChainSpec),
    Take(usize),
    Complete { picks: Vec<(Index, u32)>, event_ahead: i32, flags: u16 },
    Arm,
    Suppress,
}

fn buffer() -> impl Strategy<Value = (u64, u32)> {
    prop_oneof![
        2 => (1u64..0x3000, 0u32..0x6000).prop_map(|(before, len)| (HIGH - before, len)),
        6 => (LOW..DATA_END - 0x2000, 0u32..0x2000),
        1 => (any::<u64>(), Just(0u32)),
    ]
}

fn chain_spec() -> impl Strategy<Value = ChainSpec> {
    let half = || vec(buffer(), 0..=5);
    let stray = prop_oneof![Just(0), Just(NEXT), Just(INDIRECT | NEXT | AVAIL)];
    (half(), half(), any::<bool>(), 0u64..16, stray).prop_filter_map(
        "no buffer",
        |(readable, writable, indirect, table_skew, stray_flags)| {
            let some = !(readable.is_empty() && writable.is_empty());
            some.then_some(ChainSpec { readable, writable, indirect, table_skew, stray_flags })
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let flags = prop_oneof![
        1 => Just(EVENT_ENABLE),
        1 => Just(EVENT_DISABLE),
        4 => Just(EVENT_DESC),
        1 => Just(0xfffc | EVENT_DISABLE), // the device ignores reserved bits
    ];
    let complete = (vec((any::<Index>(), any::<u32>()), 0..8), -70i32..70, flags)
        .prop_map(|(picks, event_ahead, flags)| Op::Complete { picks, event_ahead, flags });
    prop_oneof![
        6 => chain_spec().prop_map(Op::Add),
        3 => (0usize..10).prop_map(Op::Take),
        4 => complete,
        1 => Just(Op::Arm),
        1 => Just(Op::Suppress),
    ]
}

/// The driver's record of one chain.
#[derive(Clone, Debug)]
struct Open {
    found: Found,
    written: Option<u32>,
}

struct World {
    arena: Arena,
    size: u16,
    event_idx: bool,
    areas: [u64; 3],
    device: VirtQueue,
    chain: Chain,
    taken: Vec<ChainHead>,
    /// Chains by id.
    open: Vec<Option<Open>>,
    free_ids: Vec<u16>,
    /// Unwrapped positions: filled by the driver, taken and used by the device, collected.
    added: u64,
    taken_at: u64,
    used_at: u64,
    collected: u64,
}

impl World {
    fn new(size: u16, start: u64, event_idx: bool) -> Self {
        let arena = Arena::new();
        let areas = [RINGS, RINGS + 0x8000, RINGS + 0x9000];
        // The state after the previous laps: used by the device, nothing available.
        for back in 1..=u64::from(size).min(start) {
            let flags = if lap_wrap(start - back, size) { AVAIL | USED } else { 0 };
            arena.write_u16(areas[0] + 16 * ((start - back) % u64::from(size)) + 14, flags);
        }
        let world = World {
            device: VirtQueue::start(&RingSetup {
                base: base_at(start, size),
                event_idx,
                ..arena.setup(Layout::Packed, size, areas)
            })
            .unwrap(),
            arena,
            size,
            event_idx,
            areas,
            chain: Chain::default(),
            taken: Vec::new(),
            open: vec![None; size.into()],
            free_ids: (0..size).collect(),
            added: start,
            taken_at: start,
            used_at: start,
            collected: start,
        };
        world.compare();
        world
    }

    fn wrap(&self, position: u64) -> bool {
        lap_wrap(position, self.size)
    }

    fn desc(&self, position: u64) -> u64 {
        self.areas[0] + 16 * (position % u64::from(self.size))
    }

    fn write_desc(&self, at: u64, (addr, len): (u64, u32), id: u16, flags: u16) {
        self.arena.write(at, &addr.to_le_bytes());
        self.arena.write(at + 8, &len.to_le_bytes());
        self.arena.write_u16(at + 12, id);
        self.arena.write_u16(at + 14, flags);
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Add(spec) => self.add(spec),
            Op::Take(count) => (0..*count).for_each(|_| self.take()),
            Op::Complete { picks, event_ahead, flags } => {
                self.complete(picks, *event_ahead, *flags);
                self.collect();
            }
            Op::Arm => self.arm(),
            Op::Suppress => {
                self.device.suppress();
                assert_eq!(self.arena.read_u16(self.areas[2] + 2), EVENT_DISABLE);
            }
        }
        self.compare();
    }

    fn add(&mut self, spec: &ChainSpec) {
        let readable = spec.readable.iter().map(|&buffer| (buffer, 0));
        let buffers: Vec<_> =
            readable.chain(spec.writable.iter().map(|&buffer| (buffer, WRITE))).collect();
        let wanted = if spec.indirect { 1 } else { buffers.len() as u64 };
        if self.added + wanted > self.collected + u64::from(self.size) {
            return;
        }
        let Some(id) = self.free_ids.pop() else { return };
        let ring: Vec<_> = if spec.indirect {
            let table = TABLES + TABLE_STRIDE * u64::from(id % 64) + spec.table_skew;
            for (i, &(buffer, flags)) in (0..).zip(&buffers) {
                self.write_desc(table + 16 * i, buffer, 0xdead, flags | spec.stray_flags);
            }
            vec![((table, 16 * buffers.len() as u32), INDIRECT)]
        } else {
            buffers
        };
        // In reverse order, so that the head's flags are written last, as a driver must do.
        for (i, &(buffer, flags)) in ring.iter().enumerate().rev() {
            let i = i as u64;
            let position = self.added + i;
            let more = if i + 1 < wanted { NEXT } else { 0 };
            let lap = if self.wrap(position) { AVAIL } else { USED };
            let id = if more == 0 { id } else { 0xdead };
            self.write_desc(self.desc(position), buffer, id, flags | more | lap);
        }
        self.open[usize::from(id)] = Some(Open {
            found: Found {
                id,
                descriptors: wanted as u16,
                readable: common::joined(spec.readable.iter().map(|&(a, l)| (a, l.into()))),
                writable: common::joined(spec.writable.iter().map(|&(a, l)| (a, l.into()))),
            },
            written: None,
        });
        self.added += wanted;
    }

    fn take(&mut self) {
        let ring = Ring { arena: &self.arena, size: self.size, areas: self.areas, indirect: true };
        let offset = (self.taken_at % u64::from(self.size)) as u16;
        let expected = ring.packed(offset, self.wrap(self.taken_at)).unwrap();
        assert_eq!(expected.is_some(), self.taken_at < self.added);
        assert_eq!(self.device.has_avail(), Ok(expected.is_some()));
        let head = self.device.take(&mut self.chain).expect("the chains are legal");
        assert_eq!(head.is_some(), expected.is_some());
        let Some(head) = head else { return };
        let (readable, writable) = self.arena.chain_ranges(&mut self.chain);
        let (id, descriptors) = (head.id(), head.descriptor_count());
        let found = Found { id, descriptors, readable, writable };
        assert_eq!(Some(&found), expected.as_ref());
        assert_eq!(found, self.open[usize::from(id)].as_ref().unwrap().found);
        self.taken_at += u64::from(descriptors);
        self.taken.push(head);
    }

    fn complete(&mut self, picks: &[(Index, u32)], event_ahead: i32, flags: u16) {
        let old = self.used_at;
        let event = old.saturating_add_signed(i64::from(event_ahead));
        self.arena.write_u16(self.areas[1], off_wrap(event, self.size));
        self.arena.write_u16(self.areas[1] + 2, flags);
        for (pick, written) in picks {
            if self.taken.is_empty() {
                break;
            }
            let head = self.taken.swap_remove(pick.index(self.taken.len()));
            self.used_at += u64::from(head.descriptor_count());
            self.open[usize::from(head.id())].as_mut().unwrap().written = Some(*written);
            self.device.push_used(head, *written);
            assert!(!self.shows_used(), "a used entry is seen before publish");
        }
        self.device.publish();
        let used = self.used_at - old;
        let by_event = event_passed(event, old, self.used_at, self.size);
        let expected = used > 0
            && match flags & 3 {
                EVENT_DISABLE => false,
                EVENT_DESC if self.event_idx => by_event || used >= u64::from(self.size),
                _ => true,
            };
        assert_eq!(self.device.needs_call(), expected);
        assert!(!self.device.needs_call(), "asked again without a new used entry");
    }

    fn shows_used(&self) -> bool {
        let flags = self.arena.read_u16(self.desc(self.collected) + 14);
        let wrap = self.wrap(self.collected);
        self.collected < self.added && (flags & AVAIL != 0) == wrap && (flags & USED != 0) == wrap
    }

    /// The driver's side: collects used chains in any order.
    fn collect(&mut self) {
        while self.shows_used() {
            let at = self.desc(self.collected);
            let len = u32::from_le_bytes(self.arena.read(at + 8, 4).try_into().unwrap());
            let id = self.arena.read_u16(at + 12);
            let open = self.open[usize::from(id)].take().expect("the chain is in flight");
            let writes = self.arena.read_u16(at + 14) & WRITE != 0;
            assert_eq!(Some(len), open.written);
            assert_eq!(writes, len > 0, "section 2.8.4: WRITE says that `len` is valid");
            self.free_ids.insert(0, id);
            self.collected += u64::from(open.found.descriptors);
        }
        assert_eq!(self.collected, self.used_at, "a published entry is not seen");
    }

    fn arm(&mut self) {
        self.device.arm();
        let [low, high] = [0, 2].map(|at| self.arena.read_u16(self.areas[2] + at));
        assert_eq!(high, if self.event_idx { EVENT_DESC } else { EVENT_ENABLE });
        assert_eq!(low, off_wrap(self.taken_at, self.size));
    }

    fn compare(&self) {
        let used = base_at(self.used_at, self.size) & 0xffff_0000;
        assert_eq!(self.device.base(), base_at(self.taken_at, self.size) & 0xffff | used);
    }
}

/// The wrap counter at a position.
fn lap_wrap(position: u64, size: u16) -> bool {
    (position / u64::from(size)).is_multiple_of(2)
}

fn off_wrap(position: u64, size: u16) -> u16 {
    (position % u64::from(size)) as u16 | if lap_wrap(position, size) { 0x8000 } else { 0 }
}

/// Both halves of a vring base, with nothing in flight.
fn base_at(position: u64, size: u16) -> u32 {
    u32::from(off_wrap(position, size)) * 0x1_0001
}

/// True if a place with the event's offset and wrap counter was used in `[old, new)`.
fn event_passed(event: u64, old: u64, new: u64, size: u16) -> bool {
    (old..new).any(|position| off_wrap(position, size) == off_wrap(event, size))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn packed_ring_does_what_the_model_says(
        size in prop_oneof![Just(1u16), Just(7), Just(16), 1u16..=64],
        start in 0u64..300,
        event_idx: bool,
        ops in vec(op(), 1..120),
    ) {
        let mut world = World::new(size, start, event_idx);
        for op in &ops {
            world.run(op);
        }
    }
}

#[test]
fn kept_descriptors_are_those_of_the_ring() {
    let arena = Arena::new();
    let areas = [RINGS, RINGS + 0x8000, RINGS + 0x9000];
    let setup = arena.setup(Layout::Packed, 4, areas);
    let setup = RingSetup { keep_descriptors: true, base: 0x8000_8000, ..setup };
    let mut device = VirtQueue::start(&setup).unwrap();
    // `addr, len, id, flags`: written by hand.
    let words = [(LOW, 16u32, 9u16, AVAIL | NEXT), (LOW + 64, 32, 5, AVAIL | WRITE)];
    for (i, (addr, len, id, flags)) in (0..).zip(words) {
        arena.write(RINGS + 16 * i, &addr.to_le_bytes());
        arena.write(RINGS + 16 * i + 8, &len.to_le_bytes());
        arena.write_u16(RINGS + 16 * i + 12, id);
        arena.write_u16(RINGS + 16 * i + 14, flags);
    }
    let mut chain = Chain::default();
    let head = device.take(&mut chain).unwrap().unwrap();
    assert_eq!((head.id(), head.descriptor_count()), (5, 2));
    let kept: Vec<_> =
        chain.ring_descriptors().iter().map(|d| (d.addr, d.len, d.id, d.flags)).collect();
    assert_eq!(kept, words);
    head.abandon();
}

#[test]
fn base_outside_the_ring_is_refused() {
    let arena = Arena::new();
    let areas = [RINGS, RINGS + 0x8000, RINGS + 0x9000];
    let setup = arena.setup(Layout::Packed, 8, areas);
    for base in [0x8000_8008, 0x8008_8000, 0x7fff_ffff] {
        let setup = RingSetup { base, ..setup.clone() };
        assert_eq!(VirtQueue::start(&setup).unwrap_err(), QueueError::Base(base));
    }
}

#[test]
fn packed_sizes_need_not_be_powers_of_two_but_have_bounds() {
    let arena = Arena::new();
    let areas = [RINGS, RINGS + 0x8000, RINGS + 0x9000];
    for (size, fine) in [(1, true), (5, true), (0, false), (32769, false)] {
        let setup = arena.setup(Layout::Packed, size, areas);
        let started = VirtQueue::start(&RingSetup { base: 0x8000_8000, ..setup });
        assert_eq!(started.err(), (!fine).then_some(QueueError::Size(size)));
    }
}

#[test]
fn misaligned_or_foreign_areas_are_refused_by_name() {
    let arena = Arena::new();
    let areas = [RINGS, RINGS + 0x8000, RINGS + 0x9000];
    let cases = [
        ([RINGS + 8, areas[1], areas[2]], "descriptor ring"),
        ([areas[0], areas[1] + 2, areas[2]], "driver area"),
        ([areas[0], areas[1], areas[2] + 2], "device area"),
        ([areas[0], areas[1], 0x5000_0000], "device area"),
        ([areas[0], common::RINGS + common::RINGS_LEN, areas[2]], "driver area"),
    ];
    for (areas, name) in cases {
        let setup = arena.setup(Layout::Packed, 8, areas);
        let error = VirtQueue::start(&RingSetup { base: 0x8000_8000, ..setup }).unwrap_err();
        let QueueError::Area { area, addr } = error else { panic!("{error}") };
        assert_eq!(area, name);
        assert!(areas.contains(&(addr - USER_BASE)));
    }
}
