// SPDX-License-Identifier: Apache-2.0
//! Configuration space, logs, in-flight regions, status.

use crate::common::LIMIT;
use crate::mischief::*;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;

#[test]
fn the_configuration_space_has_bounds() {
    // (offset, size, bytes of payload)
    let cases = [(0, 0, 0), (4096, 1, 1), (4095, 2, 2), (u32::MAX, 1, 1)];
    let more = [(1, u32::MAX, 8), (0, 8, 0), (0, 8, 7), (0, 8, 9)];
    for code in [GET_CONFIG, SET_CONFIG] {
        each(Mischief::negotiated, &[cases.to_vec(), more.to_vec()].concat(), |m, case| {
            let &(offset, size, len) = case;
            let payload = [words(&[offset, size, 0]), vec![0; len]].concat();
            m.refuses(code, &payload, &[]);
        });
    }
    // Beyond the fields there are zeroes.
    once(Mischief::negotiated, |m| {
        let payload = [words(&[200, 56, 0]), vec![0xff; 56]].concat();
        m.channel.message(GET_CONFIG, &payload, &[]).unwrap();
        let reply = m.channel.reply(LIMIT).unwrap();
        assert_eq!(reply.payload, [words(&[200, 56, 0]), vec![0; 56]].concat());
    });
}

#[test]
fn only_the_cache_mode_can_be_written() {
    each(Mischief::negotiated, &[(0, 8), (32, 2), (31, 1), (33, 1), (32, 4)], |m, case| {
        let (offset, len) = *case;
        let payload = [words(&[offset, len, 0]), vec![1; len as usize]].concat();
        m.refuses(SET_CONFIG, &payload, &[]);
    });
}

#[test]
fn logs_that_make_no_sense_are_refused() {
    let cases = [[0, 0], [MEMORY_BYTES + 1, 0], [4096, MEMORY_BYTES], [1 << 62, 0], [8, u64::MAX]];
    each(Mischief::running, &cases, |m, log| {
        m.refuses(SET_LOG_BASE, &longs(log), &[m.memory_fd()]);
    });
    // Longer than a log of any guest, in a file that has the bytes.
    once(Mischief::running, |m| {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(1 << 40).unwrap();
        m.refuses(SET_LOG_BASE, &longs(&[(1 << 37) + 1, 0]), &[file.as_fd()]);
    });
    once(Mischief::running, |m| m.refuses(SET_LOG_BASE, &longs(&[4096, 0]), &[]));
    once(Mischief::running, |m| {
        m.refuses(SET_LOG_BASE, &longs(&[4096, 0]), &[m.memory_fd(); 2]);
    });
}

#[test]
fn in_flight_regions_that_make_no_sense_are_refused() {
    let region = |size: u64, offset: u64, queues: u16, queue_size: u16| {
        let numbers = [queues, queue_size].map(u16::to_le_bytes).concat();
        // The structure is padded to 24 bytes.
        [longs(&[size, offset]), numbers, vec![0; 4]].concat()
    };
    let wanted = [(0, 128), (1, 0), (3, 128), (2, 2048), (u16::MAX, u16::MAX)];
    each(Mischief::negotiated, &wanted, |m, &(queues, queue_size)| {
        m.refuses(GET_INFLIGHT_FD, &region(0, 0, queues, queue_size), &[]);
    });
    let given = [
        region(0, 0, 1, 128),
        region(64, 0, 1, 128),
        region(MEMORY_BYTES + 4096, 0, 1, 128),
        region(MEMORY_BYTES, 4096, 1, 128),
        region(8192, 3, 1, 128),
        region(8192, u64::MAX - 7, 1, 128),
        region(u64::MAX, 0, 1, 128),
        region(8192, 0, 0, 128),
        region(8192, 0, 1, 0),
        region(8192, 0, u16::MAX, u16::MAX),
    ];
    each(Mischief::running, &given, |m, region| {
        m.refuses(SET_INFLIGHT_FD, region, &[m.memory_fd()]);
    });
    // A queue of 32768 descriptors needs 1 MiB and a header.
    once(Mischief::running, |m| {
        let file = File::from(memfd_create("inflight", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(1 << 40).unwrap();
        m.accepts(SET_INFLIGHT_FD, &region((1 << 20) + 64, 0, 1, 128), &[file.as_fd()]);
        m.refuses(SET_INFLIGHT_FD, &region((1 << 20) + 128, 0, 1, 128), &[file.as_fd()]);
    });
    once(Mischief::running, |m| m.refuses(SET_INFLIGHT_FD, &region(8192, 0, 1, 128), &[]));
}

#[test]
fn status_zero_resets_and_the_connection_goes_on() {
    once(Mischief::running, |m| {
        m.accepts(SET_STATUS, &longs(&[15]), &[]);
        assert_eq!(m.ask(GET_STATUS), 15);
        m.accepts(SET_STATUS, &longs(&[0]), &[]);
        assert_eq!(m.ask(GET_STATUS), 0);
        m.channel.message(GET_VRING_BASE, &words(&[0, 0]), &[]).unwrap();
        assert_eq!(m.channel.reply(LIMIT).unwrap().payload, words(&[0, 0]));
    });
}

#[test]
fn a_front_end_that_says_nothing_and_leaves_is_no_error() {
    let daemon = daemon();
    drop(daemon.raw());
    assert_eq!(daemon.next_outcome(), Ok(()));
}

#[test]
fn many_messages_at_once_are_served_one_after_the_other() {
    once(Mischief::negotiated, |m| {
        let one = words(&[GET_FEATURES, FLAG_VERSION, 0]);
        m.channel.send_bytes(&one.repeat(100), &[]).unwrap();
        let first = m.channel.reply(LIMIT).unwrap().value().unwrap();
        for _ in 1..100 {
            assert_eq!(m.channel.reply(LIMIT).unwrap().value(), Some(first));
        }
    });
}
