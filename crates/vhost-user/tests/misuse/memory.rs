// SPDX-License-Identifier: Apache-2.0
//! Memory tables.

use crate::common::{Daemon, Setup, mem};
use crate::mischief::*;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

#[test]
fn memory_regions_that_make_no_sense_are_refused() {
    let cases = [
        ("no bytes", [0, 0, USER, 0]),
        ("wraps", [u64::MAX - 4095, 8192, USER, 0]),
        ("ends at the very end", [u64::MAX - 4095, 4096, USER, 0]),
        ("wraps in the front-end", [0, 8192, u64::MAX - 4095, 0]),
        ("offset wraps", [0, 4096, USER, u64::MAX - 4095]),
        ("longer than its file", [0, MEMORY_BYTES + 1, USER, 0]),
        ("starts behind its file", [0, 4096, USER, MEMORY_BYTES]),
        ("far too large", [0, 1 << 62, USER, 0]),
        ("far too large an offset", [0, 4096, USER, 1 << 62]),
    ];
    for code in [SET_MEM_TABLE, ADD_MEM_REG] {
        each(Mischief::negotiated, &cases, |m, (what, region)| {
            let head = if code == SET_MEM_TABLE { words(&[1, 0]) } else { longs(&[0]) };
            let payload = [head, longs(region)].concat();
            let answer = m.says(code, &payload, &[m.memory_fd()]);
            assert_ne!(answer, Answer::Accepted, "{what}");
        });
    }
}

#[test]
fn memory_regions_that_overlap_are_refused() {
    let overlapping = [
        [0, 8192, USER, 0, 4096, 8192, USER + (1 << 30), 0],
        [4096, 4096, USER, 0, 0, 1 << 20, USER + (1 << 30), 0],
        [0, 4096, USER, 0, 0, 4096, USER, 0],
    ];
    each(Mischief::negotiated, &overlapping, |m, regions| {
        let table = [words(&[2, 0]), longs(regions)].concat();
        m.refuses(SET_MEM_TABLE, &table, &[m.memory_fd(), m.memory_fd()]);
    });
    each(Mischief::with_memory, &[0, 4096, MEMORY_BYTES - 4096], |m, &at| {
        let region = longs(&[0, at, 8192, USER + (1 << 30), 0]);
        m.refuses(ADD_MEM_REG, &region, &[m.memory_fd()]);
    });
}

#[test]
fn memory_without_or_with_the_wrong_descriptors_is_refused() {
    let table = [words(&[1, 0]), longs(&[0, MEMORY_BYTES, USER, 0])].concat();
    for count in [0, 2, 8, 33] {
        once(Mischief::negotiated, |m| {
            m.refuses(SET_MEM_TABLE, &table, &vec![m.memory_fd(); count]);
        });
        let region = longs(&[0, 0, MEMORY_BYTES, USER, 0]);
        once(Mischief::negotiated, |m| {
            m.refuses(ADD_MEM_REG, &region, &vec![m.memory_fd(); count]);
        });
    }
    // An eventfd, a directory and a socket are no memory.
    once(Mischief::negotiated, |m| {
        m.refuses(SET_MEM_TABLE, &table, &[m.eventfd.as_fd_()]);
    });
    once(Mischief::negotiated, |m| {
        let directory = File::open("/").unwrap();
        m.refuses(SET_MEM_TABLE, &table, &[directory.as_fd()]);
    });
    once(Mischief::negotiated, |m| {
        m.refuses(SET_MEM_TABLE, &table, &[m.channel.stream().as_fd()]);
    });
}

/// A file of procfs stands for one of FUSE, whose server may be the front-end.
#[test]
fn a_file_of_a_server_is_refused_as_memory_as_log_and_as_in_flight_region() {
    let region = [0, 4096, USER, 0];
    let inflight = [longs(&[8192, 0]), [1u16, 128].map(u16::to_le_bytes).concat(), vec![0; 4]];
    let messages = [
        (SET_MEM_TABLE, [words(&[1, 0]), longs(&region)].concat()),
        (ADD_MEM_REG, [longs(&[0]), longs(&region)].concat()),
        (SET_LOG_BASE, longs(&[4096, 0])),
        (SET_INFLIGHT_FD, inflight.concat()),
    ];
    let file = File::open("/proc/self/status").unwrap();
    for (code, payload) in messages {
        let daemon = Daemon::start(Arc::new(mem()), &Setup::default());
        Mischief::negotiated(&daemon).refuses(code, &payload, &[file.as_fd()]);
        let why = daemon.next_outcome().unwrap_err();
        assert!(why.contains("may wait for a server"), "{code}: {why}");
    }
}

#[test]
fn an_in_flight_region_for_more_queues_than_a_device_can_have_is_refused() {
    let message = |queues: u16| {
        let sizes = [queues, 1].map(u16::to_le_bytes).concat();
        [longs(&[MEMORY_BYTES, 0]), sizes, vec![0; 4]].concat()
    };
    once(Mischief::negotiated, |m| {
        assert_eq!(m.says(SET_INFLIGHT_FD, &message(64), &[m.memory_fd()]), Answer::Accepted);
    });
    each(Mischief::negotiated, &[65, u16::MAX], |m, &queues| {
        m.refuses(SET_INFLIGHT_FD, &message(queues), &[m.memory_fd()]);
    });
}

#[test]
fn tables_whose_number_of_regions_is_wrong_are_refused() {
    let region = longs(&[0, MEMORY_BYTES, USER, 0]);
    each(Mischief::negotiated, &[0, 2, 9, 33, 1000, u32::MAX], |m, &count| {
        let table = [words(&[count, 0]), region.clone()].concat();
        m.refuses(SET_MEM_TABLE, &table, &[m.memory_fd()]);
    });
}

/// User Mode Linux sends room for two regions and uses one.
#[test]
fn a_table_may_have_room_for_more_regions_than_it_uses() {
    let region = longs(&[0, MEMORY_BYTES, USER, 0]);
    let table = |room: usize| [words(&[1, 0]), region.clone(), vec![0xff; room]].concat();
    each(Mischief::negotiated, &[32, 31 * 32], |m, &room| {
        m.accepts(SET_MEM_TABLE, &table(room), &[m.memory_fd()]);
    });
    each(Mischief::negotiated, &[1, 31, 33, 32 * 32, 0x1000], |m, &room| {
        m.refuses(SET_MEM_TABLE, &table(room), &[m.memory_fd()]);
    });
    each(Mischief::negotiated, &[0, 2], |m, &count| {
        m.refuses(SET_MEM_TABLE, &table(32), &vec![m.memory_fd(); count]);
    });
}

#[test]
fn a_region_that_is_not_there_cannot_be_removed() {
    let cases = [[0, 4096, USER, 0], [0, MEMORY_BYTES, USER + 1, 0], [1, MEMORY_BYTES, USER, 0]];
    each(Mischief::with_memory, &cases, |m, region| {
        m.refuses(REM_MEM_REG, &[longs(&[0]), longs(region)].concat(), &[]);
    });
}

#[test]
fn a_queue_whose_memory_goes_is_given_up_with_the_connection() {
    once(Mischief::running, |m| {
        m.refuses(REM_MEM_REG, &longs(&[0, 0, MEMORY_BYTES, USER, 0]), &[]);
    });
    once(Mischief::running, |m| {
        let table = [words(&[1, 0]), longs(&[0, 4096, USER + (1 << 30), 0])].concat();
        m.refuses(SET_MEM_TABLE, &table, &[m.memory_fd()]);
    });
}

#[test]
fn more_regions_than_slots_are_refused() {
    once(Mischief::negotiated, |m| {
        let slots = m.ask(36);
        let mut answer = Answer::Accepted;
        for n in 0..=slots {
            assert_eq!(answer, Answer::Accepted, "slot {n} of {slots}");
            let region = longs(&[0, n << 12, 4096, USER + (n << 12), 0]);
            answer = m.says(ADD_MEM_REG, &region, &[m.memory_fd()]);
        }
        assert_ne!(answer, Answer::Accepted);
    });
}
