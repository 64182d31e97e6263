// SPDX-License-Identifier: Apache-2.0
//! Front-ends that share huge sparse files do not use up the address space of the process. The test
//! is alone in its program, because it takes all that the process may map.

mod common;
#[expect(dead_code, reason = "the tests of `misuse` use the rest")]
#[path = "misuse/mischief.rs"]
mod mischief;

use common::{Daemon, Setup, mem};
use driver::Options;
use mischief::{ADD_MEM_REG, Mischief, SET_MEM_TABLE, USER, longs, words};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Most memory of one guest.
const TABLE_BYTES_MAX: u64 = 16 << 40;

/// A SET_MEM_TABLE with one region.
fn table(len: u64, offset: u64) -> Vec<u8> {
    [words(&[1, 0]), longs(&[0, len, USER, offset])].concat()
}

fn refusal(daemon: &Daemon) -> String {
    daemon.next_outcome().expect_err("the front-end's message is refused")
}

#[test]
fn guest_memory_has_a_bound_for_a_disk_and_one_for_all_disks() {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(1 << 60).unwrap();
    let daemons: Vec<_> =
        (0..5).map(|_| Daemon::start(Arc::new(mem()), &Setup::default())).collect();
    // The bytes before the offset are not mapped.
    let fill = |daemon| {
        let front_end = Mischief::negotiated(daemon);
        front_end.accepts(SET_MEM_TABLE, &table(TABLE_BYTES_MAX, 1 << 50), &[file.as_fd()]);
        front_end
    };

    let more = longs(&[0, TABLE_BYTES_MAX, 4096, USER + TABLE_BYTES_MAX, 0]);
    fill(&daemons[0]).refuses(ADD_MEM_REG, &more, &[file.as_fd()]);
    let why = refusal(&daemons[0]);
    assert!(why.contains("more than 16384 GiB of guest memory"), "{why}");
    let over = table(TABLE_BYTES_MAX + 4096, 0);
    Mischief::negotiated(&daemons[0]).refuses(SET_MEM_TABLE, &over, &[file.as_fd()]);
    let why = refusal(&daemons[0]);
    assert!(why.contains("more than 16384 GiB of guest memory"), "{why}");

    // Four such guests take all. The process goes on, and the memory of one that ends is free.
    let mut all: Vec<_> = daemons[..4].iter().map(fill).collect();
    let late = Mischief::negotiated(&daemons[4]);
    late.refuses(SET_MEM_TABLE, &table(4096, 0), &[file.as_fd()]);
    let why = refusal(&daemons[4]);
    assert!(why.contains("65536 of at most 65536 GiB"), "{why}");
    std::thread::spawn(|| vec![1u8; 64 << 20]).join().expect("there is room for a thread");
    drop(all.pop());
    daemons[3].next_outcome().expect("the front-end left");
    daemons[4].connect(&Options::default()).write(1, &[1; 512]).unwrap();
}
