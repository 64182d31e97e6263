// SPDX-License-Identifier: Apache-2.0
//! The split ring against rust-vmm's `virtio-queue`: the same guest memory, the same chains, the
//! same used ring, the same decisions.

mod common;

use common::{Arena, DATA_END, HIGH, LOW, TABLES, joined};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use virtio_queue::{Queue, QueueT};
use virtqueue::{Chain, ChainHead, Layout, RingSetup, VirtQueue};
use vm_memory::{Address, GuestAddress};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const NO_INTERRUPT: u16 = 1;
/// Bytes between the indirect tables of two heads.
const TABLE_STRIDE: u64 = 256;
const BUFFERS_MAX: usize = 12;

/// A buffer; `glued` ones begin where the one before ended.
#[derive(Clone, Debug)]
struct Buffer {
    addr: u64,
    len: u32,
    glued: bool,
}

#[derive(Clone, Debug)]
struct ChainSpec {
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
    /// Buffers before the indirect table; all of them: no table.
    direct: usize,
    table_skew: u64,
    /// The table's entries are linked backwards.
    reversed: bool,
}

#[derive(Clone, Debug)]
enum Op {
    Add(ChainSpec),
    Take(usize),
    Complete { picks: Vec<(Index, u32)>, event_ahead: i16, no_interrupt: bool },
    Arm,
    Suppress,
}

fn buffer() -> impl Strategy<Value = Buffer> {
    let across = (1u64..0x3000, 0u32..0x6000).prop_map(|(before, len)| (HIGH - before, len));
    let anywhere = (LOW..DATA_END - 0x2000, 0u32..0x2000);
    let empty = (any::<u64>(), Just(0u32));
    let place = prop_oneof![2 => across, 6 => anywhere, 1 => empty];
    (place, any::<bool>()).prop_map(|((addr, len), glued)| Buffer { addr, len, glued })
}

fn chain_spec() -> impl Strategy<Value = ChainSpec> {
    let half = || vec(buffer(), 0..=BUFFERS_MAX / 2);
    let parts = (half(), half(), 0..=BUFFERS_MAX, 0u64..16, any::<bool>());
    parts.prop_filter_map("no buffer", |(readable, writable, direct, table_skew, reversed)| {
        let some = !(readable.is_empty() && writable.is_empty());
        some.then_some(ChainSpec { readable, writable, direct, table_skew, reversed })
    })
}

fn op() -> impl Strategy<Value = Op> {
    let complete = (vec((any::<Index>(), any::<u32>()), 0..12), -3i16..14, any::<bool>()).prop_map(
        |(picks, event_ahead, no_interrupt)| Op::Complete { picks, event_ahead, no_interrupt },
    );
    prop_oneof![
        6 => chain_spec().prop_map(Op::Add),
        3 => (0usize..10).prop_map(Op::Take),
        4 => complete,
        1 => Just(Op::Arm),
        1 => Just(Op::Suppress),
    ]
}

/// A driver, the device under test, and rust-vmm's device with a used ring of its own.
struct World {
    arena: Arena,
    size: u16,
    event_idx: bool,
    areas: [u64; 3],
    oracle_used: u64,
    free: Vec<u16>,
    chains: Vec<Vec<u16>>,
    avail_idx: u16,
    device: VirtQueue,
    oracle: Queue,
    taken: Vec<ChainHead>,
    chain: Chain,
}

impl World {
    fn new(size: u16, base: u16, event_idx: bool, order: &[Index]) -> Self {
        let arena = Arena::new();
        let areas = common::split_areas(size);
        let oracle_used = areas[2] + 0x4000;
        for at in [areas[1], areas[2], oracle_used] {
            arena.write_u16(at + 2, base);
        }
        let setup = arena.setup(Layout::Split, size, areas);
        let setup = RingSetup { base: u32::from(base), event_idx, ..setup };
        let mut oracle = Queue::new(size).unwrap();
        oracle.try_set_desc_table_address(GuestAddress(areas[0])).unwrap();
        oracle.try_set_avail_ring_address(GuestAddress(areas[1])).unwrap();
        oracle.try_set_used_ring_address(GuestAddress(oracle_used)).unwrap();
        oracle.set_size(size);
        oracle.set_event_idx(event_idx);
        oracle.set_next_avail(base);
        oracle.set_next_used(base);
        oracle.set_ready(true);
        assert!(oracle.is_valid(&arena.driver));
        let mut free: Vec<u16> = (0..size).collect();
        for (i, other) in (0..free.len()).zip(order.iter().cycle()) {
            free.swap(i, other.index(usize::from(size)));
        }
        World {
            device: VirtQueue::start(&setup).unwrap(),
            arena,
            size,
            event_idx,
            areas,
            oracle_used,
            free,
            chains: vec![Vec::new(); size.into()],
            avail_idx: base,
            oracle,
            taken: Vec::new(),
            chain: Chain::default(),
        }
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Add(spec) => self.add(spec),
            Op::Take(count) => (0..*count).for_each(|_| self.take()),
            Op::Complete { picks, event_ahead, no_interrupt } => {
                self.complete(picks, *event_ahead, *no_interrupt);
            }
            Op::Arm => {
                self.device.arm();
                let more = self.oracle.enable_notification(&self.arena.driver).unwrap();
                assert_eq!(self.device.has_avail(), Ok(more));
            }
            Op::Suppress => {
                self.device.suppress();
                self.oracle.disable_notification(&self.arena.driver).unwrap();
                if self.event_idx {
                    // rust-vmm leaves what it asked for last, so the driver may answer it yet.
                    let avail_event = self.oracle_used + 4 + 8 * u64::from(self.size);
                    let passed = self.oracle.next_avail().wrapping_sub(1);
                    self.arena.write_u16(avail_event, passed);
                }
            }
        }
        self.compare();
    }

    /// The driver's part: lays a chain out, where it has descriptors left.
    fn add(&mut self, spec: &ChainSpec) {
        let buffers = placed(spec);
        let direct = spec.direct.min(buffers.len());
        let tabled = direct < buffers.len();
        let wanted = direct + usize::from(tabled);
        if wanted > self.free.len() {
            return;
        }
        let ring: Vec<u16> = self.free.drain(..wanted).collect();
        let more = |last: bool| if last { 0 } else { NEXT };
        for (i, &(addr, len, flags)) in buffers[..direct].iter().enumerate() {
            let last = i + 1 == wanted;
            let next = if last { 0xbeef } else { ring[i + 1] };
            self.arena.write_desc(self.areas[0], ring[i], (addr, len), flags | more(last), next);
        }
        if tabled {
            let table = TABLES + TABLE_STRIDE * u64::from(ring[0]) + spec.table_skew;
            let bytes = self.add_table(table, &buffers[direct..], spec.reversed);
            let entry = ring[direct];
            self.arena.write_desc(self.areas[0], entry, (table, bytes), INDIRECT, 0xbeef);
        }
        let slot = self.areas[1] + 4 + 2 * u64::from(self.avail_idx % self.size);
        self.arena.write_u16(slot, ring[0]);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.arena.write_u16(self.areas[1] + 2, self.avail_idx);
        let head = usize::from(ring[0]);
        self.chains[head] = ring;
    }

    fn add_table(&self, table: u64, buffers: &[(u64, u32, u16)], reversed: bool) -> u32 {
        let count = buffers.len() as u16;
        let place = |i: u16| if reversed && i > 0 { count - i } else { i };
        for (i, &(addr, len, flags)) in (0..count).zip(buffers) {
            let more = if i + 1 < count { NEXT } else { 0 };
            let next = if i + 1 < count { place(i + 1) } else { 0xbeef };
            self.arena.write_desc(table, place(i), (addr, len), flags | more, next);
        }
        u32::from(count) * 16
    }

    fn take(&mut self) {
        let head = self.device.take(&mut self.chain).expect("the chains are legal");
        let expected = self.oracle.pop_descriptor_chain(&self.arena.driver);
        assert_eq!(head.is_some(), expected.is_some());
        let (Some(head), Some(expected)) = (head, expected) else { return };
        assert_eq!(head.id(), expected.head_index());
        assert_eq!(head.descriptor_count(), 1);
        let part = |writable: bool| {
            let descs = expected.clone().filter(move |desc| desc.is_write_only() == writable);
            joined(descs.map(|desc| (desc.addr().raw_value(), u64::from(desc.len()))))
        };
        let (readable, writable) = self.arena.chain_ranges(&mut self.chain);
        assert_eq!((&readable, &writable), (&part(false), &part(true)));
        assert_eq!(self.chain.readable_bytes(), common::sum(&readable));
        assert_eq!(self.chain.writable_bytes(), common::sum(&writable));
        self.taken.push(head);
    }

    fn complete(&mut self, picks: &[(Index, u32)], event_ahead: i16, no_interrupt: bool) {
        let before = self.oracle.next_used();
        let used_event = before.wrapping_add_signed(event_ahead);
        let event_at = self.areas[1] + 4 + 2 * u64::from(self.size);
        self.arena.write_u16(event_at, used_event);
        self.arena.write_u16(self.areas[1], if no_interrupt { NO_INTERRUPT } else { 0 });
        for (pick, written) in picks {
            if self.taken.is_empty() {
                break;
            }
            let head = self.taken.swap_remove(pick.index(self.taken.len()));
            let id = head.id();
            self.free.append(&mut self.chains[usize::from(id)]);
            self.oracle.add_used(&self.arena.driver, id, *written).unwrap();
            self.device.push_used(head, *written);
        }
        let hidden = self.arena.read_u16(self.areas[2] + 2);
        assert_eq!(hidden, before, "the used index moves at publish only");
        self.device.publish();
        let oracle = self.oracle.needs_notification(&self.arena.driver).unwrap();
        // rust-vmm knows no AVAIL_F_NO_INTERRUPT and notifies without a used entry.
        let expected = match self.event_idx {
            true => oracle,
            false => oracle && self.oracle.next_used() != before && !no_interrupt,
        };
        assert_eq!(self.device.needs_call(), expected);
        assert!(!self.device.needs_call(), "asked again without a new used entry");
    }

    fn compare(&self) {
        let bytes = 6 + 8 * usize::from(self.size);
        let ours = self.arena.read(self.areas[2], bytes);
        assert_eq!(ours, self.arena.read(self.oracle_used, bytes), "the used rings differ");
        assert_eq!(self.device.base(), u32::from(self.oracle.next_avail()));
        assert_eq!(self.device.used_index(), self.oracle.next_used());
    }
}

/// Address, length and flags of each buffer, readable ones first.
fn placed(spec: &ChainSpec) -> Vec<(u64, u32, u16)> {
    let readable = spec.readable.iter().map(|buffer| (buffer, 0));
    let all = readable.chain(spec.writable.iter().map(|buffer| (buffer, WRITE)));
    let mut out: Vec<(u64, u32, u16)> = Vec::new();
    for (buffer, flags) in all {
        let after = out.last().map_or(0, |&(addr, len, _)| addr.wrapping_add(u64::from(len)));
        let room = (LOW..=DATA_END - u64::from(buffer.len)).contains(&after);
        let addr = if buffer.glued && room { after } else { buffer.addr };
        out.push((addr, buffer.len, flags));
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn split_ring_does_what_rust_vmms_queue_does(
        size_exp in 0u32..7,
        base in prop_oneof![65500u16..=65535, any::<u16>()],
        event_idx: bool,
        order in vec(any::<Index>(), 1..8),
        ops in vec(op(), 1..120),
    ) {
        let mut world = World::new(1 << size_exp, base, event_idx, &order);
        for op in &ops {
            world.run(op);
        }
    }
}

#[test]
fn index_wraps_over_65535_without_a_lost_or_repeated_chain() {
    let mut world = World::new(4, 65530, true, &[]);
    let buffer = Buffer { addr: LOW, len: 512, glued: false };
    let spec = ChainSpec {
        readable: vec![buffer],
        writable: Vec::new(),
        direct: 1,
        table_skew: 0,
        reversed: false,
    };
    for _ in 0..20 {
        world.add(&spec);
        world.take();
        assert_eq!(world.taken.len(), 1);
        let head = world.taken.pop().unwrap();
        world.free.append(&mut world.chains[usize::from(head.id())]);
        world.oracle.add_used(&world.arena.driver, head.id(), 7).unwrap();
        world.device.push_used(head, 7);
        world.device.publish();
        world.compare();
    }
    assert_eq!(world.device.base(), 14);
}
