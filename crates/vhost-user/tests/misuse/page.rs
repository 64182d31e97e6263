// SPDX-License-Identifier: Apache-2.0
//! The tables of `docs/protocol.md` against the answers of the daemon: every message that is not in
//! its table is refused.

use crate::common::LIMIT;
use crate::mischief::*;
use docs::Document;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

/// The page, which a virtual machine does not have as a file.
const PAGE: &str = include_str!("../../../../docs/protocol.md");
/// Codes to try: more than the specification has.
const CODES: std::ops::Range<u32> = 0..64;
/// Sizes of the messages that exist, for codes without an example.
const SIZES: [usize; 8] = [0, 4, 8, 12, 16, 20, 32, 40];

fn page() -> Document {
    Document::parse("docs/protocol.md", PAGE)
}

/// A payload that the daemon accepts from a front-end that shares memory, and the number of its
/// descriptors.
fn example(code: FrontendReq, protocol: u64) -> Option<(Vec<u8>, usize)> {
    use FrontendReq as Req;
    let payload = match code {
        Req::SET_PROTOCOL_FEATURES => longs(&[protocol]),
        Req::SET_MEM_TABLE => [words(&[1, 0]), longs(&[0, MEMORY_BYTES, USER, 0])].concat(),
        Req::ADD_MEM_REG => {
            let apart = 1 << 40;
            longs(&[0, apart, MEMORY_BYTES, USER + apart, 0])
        }
        Req::REM_MEM_REG => longs(&[0, 0, MEMORY_BYTES, USER, 0]),
        Req::SET_VRING_NUM => words(&[0, 128]),
        Req::SET_VRING_ADDR => addresses(USER, USER + 0x2000, USER + 0x1000),
        Req::GET_CONFIG => [words(&[0, 8, 0]), vec![0; 8]].concat(),
        Req::SET_CONFIG => [words(&[32, 1, 0]), vec![1]].concat(),
        // One queue of 128 descriptors; the structure is padded to 24 bytes.
        Req::GET_INFLIGHT_FD => [longs(&[0, 0]), vec![1, 0, 128, 0, 0, 0, 0, 0]].concat(),
        Req::SET_INFLIGHT_FD => {
            [longs(&[MEMORY_BYTES, 0]), vec![1, 0, 128, 0, 0, 0, 0, 0]].concat()
        }
        Req::SET_LOG_BASE => longs(&[0x1000, 0]),
        Req::SET_BACKEND_REQ_FD => Vec::new(),
        Req::SET_VRING_KICK | Req::SET_VRING_CALL | Req::SET_VRING_ERR => longs(&[0]),
        _ => return None,
    };
    let descriptors = match code {
        Req::SET_MEM_TABLE | Req::ADD_MEM_REG | Req::SET_LOG_BASE | Req::SET_INFLIGHT_FD => 1,
        Req::SET_BACKEND_REQ_FD | Req::SET_VRING_KICK => 1,
        Req::SET_VRING_CALL | Req::SET_VRING_ERR => 1,
        _ => 0,
    };
    Some((payload, descriptors))
}

/// True if the daemon carries the message out. The answer to a message with a failure is a number
/// other than 0, or the end of the connection.
fn is_accepted(
    m: &Mischief,
    code: u32,
    name: &str,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> bool {
    let flags = FLAG_VERSION | FLAG_NEED_REPLY;
    m.channel.send(code, flags, payload.len() as u32, payload, fds).unwrap();
    match m.channel.reply(LIMIT) {
        Ok(reply) => name.starts_with("GET_") || reply.value().is_none_or(|value| value == 0),
        Err(why) => {
            assert_ne!(why.kind(), std::io::ErrorKind::WouldBlock, "{name}: no answer in time");
            false
        }
    }
}

/// The codes of messages with the payloads to try.
fn attempts(protocol: u64) -> Vec<(u32, String, Vec<u8>, usize)> {
    let mut attempts = Vec::new();
    for code in CODES {
        let known = FrontendReq::try_from(code);
        let name = known.map_or_else(|()| format!("message {code}"), |known| format!("{known:?}"));
        match known.ok().and_then(|known| example(known, protocol)) {
            Some((payload, descriptors)) => attempts.push((code, name, payload, descriptors)),
            None => attempts.extend(SIZES.iter().flat_map(|&size| {
                [0, 1].map(|descriptors| (code, name.clone(), vec![0; size], descriptors))
            })),
        }
    }
    attempts
}

#[test]
fn the_page_lists_every_message_that_is_accepted_and_no_other() {
    let daemon = daemon();
    let protocol = Mischief::negotiated(&daemon).ask(GET_PROTOCOL_FEATURES);
    daemon.next_outcome().expect("a good front-end leaves well");
    let (socket, _other) = UnixStream::pair().unwrap();
    let mut accepted: Vec<String> = Vec::new();
    for (code, name, payload, descriptors) in attempts(protocol) {
        let m = Mischief::with_memory(&daemon);
        let fd = match FrontendReq::try_from(code) {
            Ok(FrontendReq::SET_BACKEND_REQ_FD) => socket.as_fd(),
            Ok(
                FrontendReq::SET_VRING_KICK
                | FrontendReq::SET_VRING_CALL
                | FrontendReq::SET_VRING_ERR,
            ) => m.eventfd.as_fd_(),
            _ => m.memory_fd(),
        };
        if is_accepted(&m, code, &name, &payload, &vec![fd; descriptors]) {
            accepted.push(name);
        }
        drop(m);
        let _how_it_ended = daemon.next_outcome();
    }
    accepted.sort();
    accepted.dedup();
    assert_eq!(page().first_column("Messages"), accepted);
}

#[test]
fn the_page_lists_every_protocol_feature_that_is_offered_and_no_other() {
    let offered = Mischief::negotiated(&daemon()).ask(GET_PROTOCOL_FEATURES);
    let offered = VhostUserProtocolFeatures::from_bits(offered).expect("bits with names");
    let mut names: Vec<_> = offered.iter_names().map(|(name, _)| name).collect();
    names.sort_unstable();
    assert_eq!(page().first_column("Protocol features"), names);
}
