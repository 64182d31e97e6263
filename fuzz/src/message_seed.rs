// SPDX-License-Identifier: Apache-2.0
//! Valid scripts for the `message` target: a front-end that behaves like QEMU, with requests in
//! guest memory.

use crate::Rng;
use crate::message::{EVENT, MEMORY, MEMORY_BYTES, SHORT_FILE};

/// Offset of the front-end's addresses from guest-physical ones.
const USER_BASE: u64 = 0x7000_0000_0000;
const SIZE: u16 = 16;
const DESC: u64 = 0;
const AVAIL: u64 = 0x100;
const USED: u64 = 0x200;
/// Requests: header at `HEADERS + 16 * n`, data and status at `DATA + 0x400 * n`.
const HEADERS: u64 = 0x300;
const DATA: u64 = 0x1000;
const REQUESTS: u16 = 5;

/// VERSION_1, INDIRECT, EVENT_IDX, vhost-user's protocol features, FLUSH, CONFIG_WCE, MQ, DISCARD.
const FEATURES: u64 = 1 << 32 | 1 << 28 | 1 << 29 | 1 << 30 | 0x3a00;
const PACKED: u64 = 1 << 34;
/// MQ, LOG_SHMFD, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS, STATUS.
const PROTOCOL: u64 = 0x1_b20b;
const LOG_ALL: u64 = 1 << 26;

/// Writes a script.
struct Script(Vec<u8>);

impl Script {
    fn send(&mut self, code: u8, fds: &[u8], payload: &[u8]) {
        self.with_flags(code, 1, fds, payload);
    }

    fn with_flags(&mut self, code: u8, flags: u8, fds: &[u8], payload: &[u8]) {
        self.0.extend([code, flags, fds.len() as u8, 0, payload.len() as u8]);
        self.0.extend(fds);
        self.0.extend(payload);
    }

    fn number(&mut self, code: u8, fds: &[u8], value: u64) {
        self.send(code, fds, &value.to_le_bytes());
    }

    fn vring(&mut self, code: u8, index: u32, value: u32) {
        self.send(code, &[], &[index.to_le_bytes(), value.to_le_bytes()].concat());
    }
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A complete connection, from the set-up to the stop.
pub(crate) fn seed(rng: &mut Rng) -> Vec<u8> {
    let packed = rng.one_in(2);
    let memory = guest_memory(rng, packed);
    let mut data = (memory.len() as u16).to_le_bytes().to_vec();
    data.extend(memory);
    let mut script = Script(Vec::new());
    let logged = rng.one_in(4);
    negotiate(&mut script, rng, packed, logged);
    memory_table(&mut script, rng);
    if logged {
        script.send(6, &[MEMORY], &words(&[MEMORY_BYTES / 4096 / 8, 0x8000]));
    }
    if rng.one_in(4) {
        let mut payload = words(&[0x2000, 0x9000]);
        payload.extend([2, 0, 16, 0, 0, 0, 0, 0]); // 2 queues of 16, padding
        let file = rng.pick(&[MEMORY, MEMORY, MEMORY, SHORT_FILE]);
        match rng.below(3) {
            0 => script.send(31, &[], &payload), // GET_INFLIGHT_FD
            _ => script.send(32, &[file], &payload),
        }
    }
    queue(&mut script, rng, packed);
    for _ in 0..rng.below(5) {
        anything_else(&mut script, rng);
    }
    script.vring(11, 0, 0); // GET_VRING_BASE
    data.extend(script.0);
    data
}

fn negotiate(script: &mut Script, rng: &mut Rng, packed: bool, logged: bool) {
    let bit = |wanted: bool, bit: u64| if wanted { bit } else { 0 };
    let features = FEATURES | bit(packed, PACKED) | bit(logged, LOG_ALL);
    script.send(1, &[], &[]); // GET_FEATURES
    script.send(15, &[], &[]); // GET_PROTOCOL_FEATURES
    script.number(16, &[], PROTOCOL & if rng.one_in(8) { rng.next() } else { u64::MAX });
    script.send(17, &[], &[]); // GET_QUEUE_NUM
    script.send(3, &[], &[]); // SET_OWNER
    script.number(2, &[], features & if rng.one_in(8) { rng.next() | 1 << 30 } else { u64::MAX });
}

fn memory_table(script: &mut Script, rng: &mut Rng) {
    if rng.one_in(3) {
        for (at, len) in [(0, 0x8000), (0x8000, 0x8000)] {
            script.send(37, &[MEMORY], &words(&[0, at, len, USER_BASE + at, at])); // ADD_MEM_REG
        }
        return;
    }
    let regions = words(&[1, 0, MEMORY_BYTES, USER_BASE, 0]);
    script.send(5, &[MEMORY], &regions); // SET_MEM_TABLE
}

fn queue(script: &mut Script, rng: &mut Rng, packed: bool) {
    script.vring(8, 0, SIZE.into()); // SET_VRING_NUM
    script.vring(10, 0, if packed { 0x8000_8000 } else { 0 }); // SET_VRING_BASE
    let mut addresses = words(&[0]);
    addresses.extend(words(&[USER_BASE + DESC, USER_BASE + USED, USER_BASE + AVAIL, USED]));
    script.send(9, &[], &addresses); // SET_VRING_ADDR
    script.number(13, &[EVENT], 0); // SET_VRING_CALL
    if rng.one_in(2) {
        script.number(14, &[EVENT], 0); // SET_VRING_ERR
    }
    script.number(12, &[EVENT], 0); // SET_VRING_KICK
    script.vring(18, 0, 1); // SET_VRING_ENABLE
}

fn anything_else(script: &mut Script, rng: &mut Rng) {
    let config = |offset: u32, size: u32| {
        let mut payload = [offset.to_le_bytes(), size.to_le_bytes(), [0; 4]].concat();
        payload.resize(12 + size as usize, 1);
        payload
    };
    match rng.below(12) {
        0 => script.send(24, &[], &config(0, 60)),  // GET_CONFIG
        1 => script.send(25, &[], &config(32, 1)),  // SET_CONFIG: writeback
        2 => script.send(34, &[], &[]),             // RESET_DEVICE
        3 => script.number(39, &[], rng.below(16)), // SET_STATUS
        4 => script.send(40, &[], &[]),             // GET_STATUS
        5 => script.send(36, &[], &[]),             // GET_MAX_MEM_SLOTS
        6 => script.vring(18, 0, rng.below(2) as u32),
        7 => script.number(13, &[EVENT], 0),
        8 => script.send(5, &[MEMORY], &words(&[1, 0, MEMORY_BYTES, USER_BASE, 0])),
        9 => memory_table(script, rng),
        10 => script.vring(11, 0, 0),
        _ => script.with_flags(rng.below(46) as u8, 9, &[], &words(&[rng.below(3)])),
    }
}

/// A ring with available requests: read, write, flush, id, discard.
fn guest_memory(rng: &mut Rng, packed: bool) -> Vec<u8> {
    let mut memory = vec![0; HEADERS as usize + 0x100];
    let mut put = |at: u64, bytes: &[u8]| {
        memory[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    };
    for number in 0..REQUESTS {
        let kind = rng.pick(&[0u32, 0, 1, 1, 4, 8, 11]);
        let header = HEADERS + 16 * u64::from(number);
        put(header, &kind.to_le_bytes());
        put(header + 8, &rng.below(16).to_le_bytes());
        let data = DATA + 0x400 * u64::from(number);
        let status = data + 0x200;
        let chain = [(header, 16, 1), (data, 512, if kind == 1 { 1 } else { 3 }), (status, 1, 2)];
        for (i, (addr, len, flags)) in (0..).zip(chain) {
            let index = 3 * number + i;
            let at = DESC + 16 * u64::from(index);
            let lap = if packed { flags | 0x80 } else { flags };
            let (third, fourth) = if packed { (number, lap) } else { (lap, index + 1) };
            put(at, &words(&[addr]));
            put(at + 8, &u32::to_le_bytes(len));
            put(at + 12, &third.to_le_bytes());
            put(at + 14, &fourth.to_le_bytes());
        }
        if !packed {
            put(AVAIL + 4 + 2 * u64::from(number), &(3 * number).to_le_bytes());
        }
    }
    if !packed {
        put(AVAIL + 2, &REQUESTS.to_le_bytes());
    }
    memory
}
