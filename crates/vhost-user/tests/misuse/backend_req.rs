// SPDX-License-Identifier: Apache-2.0
//! The channel for the daemon's own requests (SET_BACKEND_REQ_FD).

use crate::common::LIMIT;
use crate::mischief::*;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};

const SET_BACKEND_REQ_FD: u32 = 21;

fn gives(m: &Mischief, fds: &[BorrowedFd<'_>]) {
    m.accepts(SET_BACKEND_REQ_FD, &[], fds);
}

/// True if the daemon has closed its end.
fn ends(channel: &mut (impl Read + AsFd)) -> bool {
    channel.read(&mut [0]).expect("an end, and no error") == 0
}

#[test]
fn a_channel_is_closed_when_another_one_comes_and_at_the_end_of_the_connection() {
    let daemon = daemon();
    let m = Mischief::running(&daemon);
    let (mut first, given) = UnixStream::pair().unwrap();
    first.set_read_timeout(Some(LIMIT)).unwrap();
    gives(&m, &[given.as_fd()]);
    drop(given);
    let (mut second, given) = UnixStream::pair().unwrap();
    second.set_read_timeout(Some(LIMIT)).unwrap();
    gives(&m, &[given.as_fd()]);
    drop(given);
    assert!(ends(&mut first));
    drop(m);
    assert!(ends(&mut second));
    serves_the_next(&daemon, &driver::Options::default());
}

#[test]
fn a_channel_that_is_closed_or_full_disturbs_nothing() {
    let (closed, given) = UnixStream::pair().unwrap();
    drop(closed);
    once(Mischief::running, |m| gives(m, &[given.as_fd()]));
    let (unread, given) = UnixStream::pair().unwrap();
    given.set_nonblocking(true).unwrap();
    while rustix::io::write(&given, &[0; 4096]).is_ok() {}
    once(Mischief::running, |m| {
        gives(m, &[given.as_fd()]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 0]), &[]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        gives(m, &[given.as_fd()]);
    });
    drop(unread);
}

#[test]
fn what_is_no_channel_is_refused() {
    let (stream, _peer) = UnixStream::pair().unwrap();
    let datagrams = UnixDatagram::unbound().unwrap();
    let (_reader, writer) = std::io::pipe().unwrap();
    let refuses = |m: &Mischief, fds: &[BorrowedFd<'_>]| m.refuses(SET_BACKEND_REQ_FD, &[], fds);
    let stream = stream.as_fd();
    for fds in [vec![], vec![stream; 2], vec![stream; 33], vec![datagrams.as_fd()]] {
        once(Mischief::negotiated, |m| refuses(m, &fds));
    }
    once(Mischief::negotiated, |m| refuses(m, &[writer.as_fd()]));
    // If the daemon held the descriptor, the connection would never end.
    once(Mischief::negotiated, |m| refuses(m, &[m.channel.stream().as_fd()]));
    once(Mischief::negotiated, |m| refuses(m, &[m.memory_fd()]));
    once(Mischief::negotiated, |m| refuses(m, &[m.eventfd.as_fd_()]));
    once(Mischief::negotiated, |m| m.refuses(SET_BACKEND_REQ_FD, &[0; 8], &[stream]));
}
