// SPDX-License-Identifier: Apache-2.0
//! Target `chain`: any bytes as guest memory with a virtqueue in it.

use crate::Rng;
use crate::guest::{Guest, USER_BASE};
use virtqueue::{Chain, Layout, RingSetup, VirtQueue};

/// Options in front of the memory's content.
const OPTIONS: usize = 8;
/// The ring areas, inside the first region; a queue of 64 fits.
const AREAS: [u64; 3] = [0, 0x400, 0x500];
const SIZES: [u16; 8] = [1, 2, 4, 7, 16, 33, 64, 16];
/// Bound on the chains of one input; larger than any ring, so that a repetition is reached.
const TAKES_MAX: usize = 200;

/// Builds the queue from the bytes and walks its chains.
pub fn chain(data: &[u8]) {
    let Some((options, contents)) = data.split_at_checked(OPTIONS) else { return };
    let guest = Guest::new(contents);
    let mut setup = setup_of(&guest, options);
    let Ok(mut queue) = VirtQueue::start(&setup) else {
        // A base outside the ring, or a size that a split queue cannot have.
        setup.base = 0x8000_8000 & if setup.layout == Layout::Packed { u32::MAX } else { 0xffff };
        setup.size = 16;
        VirtQueue::start(&setup).expect("a queue of 16");
        return;
    };
    let mut chain = Chain::default();
    let mut held = Vec::new();
    for turn in 0..TAKES_MAX {
        let before = (guest.contents(), queue.base(), queue.used_index());
        match queue.take(&mut chain) {
            Ok(Some(head)) => {
                guest.check(&mut chain);
                edges(&guest, &mut chain);
                held.push(head);
            }
            Ok(None) => break,
            Err(fault) => {
                assert_eq!(queue.take(&mut chain), Err(fault), "a fault must stay");
                assert!(before == (guest.contents(), queue.base(), queue.used_index()));
                break;
            }
        }
        if turn % 3 == 2 || held.len() > 20 {
            give_back(&mut queue, &mut held);
        }
    }
    give_back(&mut queue, &mut held);
    queue.arm();
    let _ = queue.has_avail();
    queue.suppress();
}

fn setup_of(guest: &Guest, options: &[u8]) -> RingSetup {
    let flag = |bit: u8| options[0] & (1 << bit) != 0;
    let [desc_addr, avail_addr, used_addr] = AREAS.map(|gpa| gpa + USER_BASE);
    let base = u32::from_le_bytes([options[2], options[3], options[4], options[5]]);
    let layout = if flag(0) { Layout::Packed } else { Layout::Split };
    RingSetup {
        memory: guest.memory.clone(),
        layout,
        size: SIZES[usize::from(options[1] % 8)],
        desc_addr,
        avail_addr,
        used_addr,
        base: if layout == Layout::Split { base & 0xffff } else { base },
        indirect: flag(1),
        event_idx: flag(2),
        keep_descriptors: flag(3),
        log: flag(4).then(|| guest.log.clone()),
        used_log_addr: flag(5).then_some(u64::from_be_bytes([
            options[6], 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, options[7],
        ])),
    }
}

/// Parses a chain as the request stage does.
fn edges(guest: &Guest, chain: &mut Chain) {
    let status = chain.take_status();
    guest.check(chain);
    while chain.take_front::<16>().is_some() {
        guest.check(chain);
    }
    if let Some(status) = status {
        status.write(0);
    }
}

fn give_back(queue: &mut VirtQueue, held: &mut Vec<virtqueue::ChainHead>) {
    for head in held.drain(..).rev() {
        queue.push_used(head, 0x1234);
    }
    queue.publish();
    let _ = queue.needs_call();
    assert!(!queue.needs_call());
}

/// A ring with legal chains.
pub(crate) fn seed(rng: &mut Rng) -> Vec<u8> {
    let packed = rng.one_in(2);
    let size_index = if packed { rng.below(8) } else { rng.pick(&[0, 1, 2, 4, 6, 7]) };
    let size = SIZES[size_index as usize];
    let mut memory = vec![0; 0x2000];
    let base = if packed { 0x8000_8000 } else { rng.pick(&[0u32, 0xfffe, 0x1234]) };
    let mut table = 0x1000;
    for index in 0..size {
        let indirect = rng.one_in(4);
        let more = !indirect && index + 1 < size && rng.one_in(2);
        let (at, len) = match indirect {
            true => indirect_table(rng, &mut memory, &mut table, packed),
            false => (0x2000 + rng.below(0x5000), rng.below(0x900) as u32),
        };
        let flags = match (more, indirect) {
            (true, _) => 1,
            (false, true) => 4,
            (false, false) => 2,
        };
        let flags = if packed { flags | 0x80 } else { flags };
        put_desc(&mut memory, 16 * usize::from(index), at, len, flags, index + 1, packed);
        put(&mut memory, 0x404 + 2 * usize::from(index), &(index % size).to_le_bytes());
    }
    if !packed {
        let idx = (base as u16).wrapping_add(rng.below(u64::from(size) + 1) as u16);
        put(&mut memory, 0x402, &idx.to_le_bytes());
    }
    let options = u8::from(packed) | (rng.next() as u8 & 0x3c) | 2;
    let mut data = vec![options, size_index as u8];
    data.extend(base.to_le_bytes());
    data.extend([rng.next() as u8, rng.next() as u8]);
    data.append(&mut memory);
    data
}

fn indirect_table(rng: &mut Rng, memory: &mut [u8], table: &mut usize, packed: bool) -> (u64, u32) {
    let at = *table;
    let count = 1 + rng.below(4) as u16;
    if at + 64 > memory.len() {
        return (0x1000, 16);
    }
    for index in 0..count {
        let last = index + 1 == count;
        let flags = if last { 2 } else { 1 };
        let (addr, len) = (0x2000 + rng.below(0x5000), rng.below(0x900) as u32);
        put_desc(memory, at + 16 * usize::from(index), addr, len, flags, index + 1, packed);
    }
    *table += 64;
    (at as u64, 16 * u32::from(count))
}

fn put_desc(
    memory: &mut [u8],
    at: usize,
    addr: u64,
    len: u32,
    flags: u16,
    other: u16,
    packed: bool,
) {
    let (third, fourth) = if packed { (other, flags) } else { (flags, other) };
    put(memory, at, &addr.to_le_bytes());
    put(memory, at + 8, &len.to_le_bytes());
    put(memory, at + 12, &third.to_le_bytes());
    put(memory, at + 14, &fourth.to_le_bytes());
}

fn put(memory: &mut [u8], at: usize, bytes: &[u8]) {
    memory[at..at + bytes.len()].copy_from_slice(bytes);
}
