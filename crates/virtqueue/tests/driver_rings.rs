// SPDX-License-Identifier: Apache-2.0
//! Both rings against the project's user-space driver, which shares no ring code with the device:
//! chains come back as given, and neither side sleeps through a notification it asked for.

use driver::{GuestMemory, PackedRing, RingError, Segment, SplitRing, Used};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;
use virtqueue::{Chain, ChainHead, Layout, Region, RingSetup, VirtQueue};

/// The driver's ring; the two types have the same methods and no trait.
enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

macro_rules! on {
    ($self:expr, $ring:ident => $call:expr) => {
        match $self {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

struct World {
    ring: Ring,
    device: VirtQueue,
    chain: Chain,
    taken: Vec<(ChainHead, u32)>,
    /// Written lengths that the driver shall see, by id.
    expected: HashMap<u16, u32>,
    in_flight: usize,
    /// The device asked for a kick and took everything; so did the driver with calls.
    device_sleeps: bool,
    /// The device has asked for no kicks since it slept.
    device_polls: bool,
    driver_sleeps: bool,
}

#[derive(Clone, Debug)]
enum Op {
    Add(u8, u8),
    Take,
    Complete(Index),
    DriverTakes,
    DeviceSleeps,
    DeviceWakes,
    DriverSleeps,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1u8..4, 0u8..3).prop_map(|(readable, writable)| Op::Add(readable, writable)),
        3 => Just(Op::Take),
        3 => any::<Index>().prop_map(Op::Complete),
        2 => Just(Op::DriverTakes),
        1 => Just(Op::DeviceSleeps),
        1 => Just(Op::DeviceWakes),
        1 => Just(Op::DriverSleeps),
    ]
}

impl World {
    fn new(size: u16, packed: bool, event_idx: bool) -> Self {
        let memory = GuestMemory::new(&[(0, 1 << 20)]).unwrap();
        let ring = match packed {
            false => Ring::Split(SplitRing::new(&memory, size, event_idx)),
            true => Ring::Packed(PackedRing::new(&memory, size, event_idx)),
        };
        let regions = memory.regions().iter().map(|region| {
            let file = File::from(region.fd().try_clone_to_owned().unwrap());
            Region::map(region.gpa(), region.user_address(), region.size(), file, 0).unwrap()
        });
        let table = virtqueue::GuestMemory::new(regions.collect()).unwrap();
        let addresses = on!(&ring, ring => ring.addresses());
        let [desc_addr, avail_addr, used_addr] = addresses.map(|gpa| memory.user_address(gpa));
        let setup = RingSetup {
            memory: Arc::new(table),
            layout: if packed { Layout::Packed } else { Layout::Split },
            size,
            desc_addr,
            avail_addr,
            used_addr,
            base: match &ring {
                Ring::Split(ring) => u32::from(ring.base()),
                Ring::Packed(ring) => ring.base(),
            },
            indirect: false,
            event_idx,
            keep_descriptors: false,
            log: None,
            used_log_addr: None,
        };
        World {
            device: VirtQueue::start(&setup).unwrap(),
            ring,
            chain: Chain::default(),
            taken: Vec::new(),
            expected: HashMap::new(),
            in_flight: 0,
            device_sleeps: false,
            device_polls: false,
            driver_sleeps: false,
        }
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Add(readable, writable) => self.add(*readable, *writable),
            Op::Take => drop(self.take()),
            Op::Complete(pick) => self.complete(pick),
            Op::DriverTakes => self.driver_takes(),
            Op::DeviceSleeps => {
                while self.take() {}
                self.device.arm();
                assert_eq!(self.device.has_avail(), Ok(false));
                (self.device_sleeps, self.device_polls) = (true, false);
            }
            Op::DeviceWakes => self.suppress(),
            Op::DriverSleeps => {
                self.driver_takes();
                assert!(on!(&mut self.ring, ring => ring.arm_calls()), "nothing was left unseen");
                self.driver_sleeps = true;
            }
        }
    }

    fn add(&mut self, readable: u8, writable: u8) {
        let at = |i: u8| 0x8_0000 + 0x1000 * u64::from(i);
        let mut segments: Vec<_> =
            (0..readable).map(|i| Segment::readable(at(i), 16 + u32::from(i))).collect();
        segments.extend((0..writable).map(|i| Segment::writable(at(8 + i), 1 + u32::from(i))));
        match on!(&mut self.ring, ring => ring.add(&segments)) {
            Err(RingError::Full) => return,
            result => drop(result.unwrap()),
        }
        self.in_flight += 1;
        on!(&mut self.ring, ring => ring.publish());
        let kick = on!(&mut self.ring, ring => ring.kick_is_asked());
        assert!(kick || !self.device_sleeps, "the device sleeps on");
        assert!(!kick || !self.device_polls, "a kick that no one asked for");
        self.device_sleeps = false;
    }

    fn suppress(&mut self) {
        self.device.suppress();
        (self.device_sleeps, self.device_polls) = (false, true);
    }

    fn take(&mut self) -> bool {
        let Some(head) = self.device.take(&mut self.chain).unwrap() else { return false };
        self.suppress();
        let bytes = (self.chain.readable_bytes() + self.chain.writable_bytes()) as u32;
        self.taken.push((head, bytes));
        true
    }

    fn complete(&mut self, pick: &Index) {
        if !self.taken.is_empty() {
            self.complete_one(pick.index(self.taken.len()));
        }
    }

    fn complete_one(&mut self, at: usize) {
        let (head, written) = self.taken.swap_remove(at);
        self.expected.insert(head.id(), written);
        self.device.push_used(head, written);
        self.device.publish();
        let call = self.device.needs_call();
        assert!(call || !self.driver_sleeps, "the driver sleeps on");
        self.driver_sleeps = false;
    }

    fn driver_takes(&mut self) {
        while let Some(Used { id, len }) =
            on!(&mut self.ring, ring => ring.take_used()).expect("what came back was in flight")
        {
            assert_eq!(self.expected.remove(&id), Some(len));
            self.in_flight -= 1;
        }
        assert!(self.expected.is_empty(), "a used chain was not seen");
        self.driver_sleeps = false;
    }

    fn finish(&mut self) {
        while self.take() {}
        while !self.taken.is_empty() {
            self.complete_one(0);
        }
        self.driver_takes();
        assert_eq!(self.in_flight, 0, "a chain was lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_between_the_projects_driver_and_device(
        size_exp in 2u32..6,
        packed: bool,
        event_idx: bool,
        ops in vec(op(), 1..400),
    ) {
        let mut world = World::new(1 << size_exp, packed, event_idx);
        for op in &ops {
            world.run(op);
        }
        world.finish();
    }
}
