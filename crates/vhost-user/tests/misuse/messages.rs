// SPDX-License-Identifier: Apache-2.0
//! Messages as such: framing, sizes, features.

use crate::common::plane::skip_on_kernel;
use crate::common::{Daemon, LIMIT, pattern};
use crate::mischief::*;
use driver::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

#[test]
fn unknown_messages_are_refused() {
    each(Mischief::negotiated, &[0, 7, 19, 22, 26, 41, 42, 99, 1000, u32::MAX], |m, &code| {
        m.refuses(code, &[], &[]);
    });
}

#[test]
fn messages_of_features_that_were_not_negotiated_are_refused() {
    // Nothing but features was asked for.
    let bring_up = |daemon: &Daemon| {
        let (channel, eventfd) = (daemon.raw(), EventFd::new(0).unwrap());
        Mischief { channel, memory: GuestMemory::new(&[(0, 4096)]).unwrap(), eventfd }
    };
    let config = [words(&[0, 8, 0]), vec![0; 8]].concat();
    let cases = [
        (17, vec![]),
        (21, vec![]),
        (34, vec![]),
        (36, vec![]),
        (GET_STATUS, vec![]),
        (GET_CONFIG, config),
        (GET_INFLIGHT_FD, [longs(&[0, 0]), vec![1, 0, 128, 0]].concat()),
    ];
    each(bring_up, &cases, |m, (code, payload)| m.refuses(*code, payload, &[]));
}

#[test]
fn garbage_is_hung_up_on() {
    each(Mischief::negotiated, &[1, 2, 3, 4], |m, &seed| {
        let sent = m.channel.send_bytes(&pattern(4096, seed), &[]);
        assert!(sent.is_err() || m.channel.hangs_up_within(LIMIT).unwrap());
    });
}

#[test]
fn half_a_message_and_a_hang_up_end_the_connection() {
    let whole = [words(&[SET_FEATURES, FLAG_VERSION, 8]), vec![0; 8]].concat();
    each(Mischief::negotiated, &[1, 4, 8, 11, 12, 13, 19], |m, &len| {
        m.channel.send_bytes(&whole[..len], &[]).unwrap();
        m.channel.stream().shutdown(std::net::Shutdown::Write).unwrap();
        assert!(m.channel.hangs_up_within(LIMIT).unwrap());
    });
}

#[test]
fn half_a_message_with_descriptors_and_a_hang_up_end_the_connection() {
    let whole = [words(&[SET_MEM_TABLE, FLAG_VERSION, 40]), vec![0; 40]].concat();
    each(Mischief::negotiated, &[1, 11, 12, 13, 51], |m, &len| {
        m.channel.send_bytes(&whole[..len], &[m.memory_fd(); 8]).unwrap();
        m.channel.stream().shutdown(std::net::Shutdown::Write).unwrap();
        assert!(m.channel.hangs_up_within(LIMIT).unwrap());
    });
}

#[test]
fn a_message_in_single_bytes_is_understood() {
    once(Mischief::negotiated, |m| {
        for byte in words(&[GET_FEATURES, FLAG_VERSION, 0]) {
            m.channel.send_bytes(&[byte], &[]).unwrap();
        }
        assert!(m.channel.reply(LIMIT).unwrap().value().unwrap() != 0);
        let status = [words(&[SET_STATUS, FLAG_VERSION, 8]), longs(&[3])].concat();
        for byte in [status, words(&[GET_STATUS, FLAG_VERSION, 0])].concat() {
            m.channel.send_bytes(&[byte], &[]).unwrap();
        }
        assert_eq!(m.channel.reply(LIMIT).unwrap().value(), Some(3));
        let number = words(&[SET_VRING_NUM, FLAG_VERSION | FLAG_NEED_REPLY, 8, 0, 128]);
        for byte in number {
            m.channel.send_bytes(&[byte], &[]).unwrap();
        }
        assert_eq!(m.channel.reply(LIMIT).unwrap().value(), Some(0));
    });
}

#[test]
fn a_payload_behind_a_header_with_descriptors_is_understood() {
    let table = [words(&[1, 0]), longs(&[0, MEMORY_BYTES, USER, 0])].concat();
    once(Mischief::negotiated, |m| {
        let messages = [
            (SET_MEM_TABLE, table.clone(), m.memory_fd()),
            (SET_VRING_CALL, longs(&[0]), m.eventfd.as_fd_()),
        ];
        for (code, payload, fd) in messages {
            let flags = FLAG_VERSION | FLAG_NEED_REPLY;
            m.channel.send_bytes(&words(&[code, flags, payload.len() as u32]), &[fd]).unwrap();
            let (part, rest) = payload.split_at(4);
            m.channel.send_bytes(part, &[]).unwrap();
            m.channel.send_bytes(rest, &[]).unwrap();
            assert_eq!(m.channel.reply(LIMIT).unwrap().value(), Some(0));
        }
    });
}

#[test]
fn out_of_band_bytes_are_refused_at_once() {
    let whole = [words(&[SET_STATUS, FLAG_VERSION, 8]), longs(&[3])].concat();
    let config = words(&[GET_CONFIG, FLAG_VERSION, 1]);
    let daemon = daemon();
    // Before and between messages, in a header and in a payload.
    for before in [&[], &whole[..], &whole[..11], &whole[..19], &config[..]] {
        let m = Mischief::negotiated(&daemon);
        m.channel.send_bytes(before, &[]).unwrap();
        let sent = rustix::net::send(m.channel.stream(), &[0], rustix::net::SendFlags::OOB);
        if sent == Err(rustix::io::Errno::OPNOTSUPP) {
            println!("PARTLY SKIPPED: this kernel has no out-of-band bytes of UNIX sockets");
            return;
        }
        let why = daemon.next_outcome().unwrap_err();
        assert!(why.contains("a message with out-of-band bytes"), "{why}");
    }
}

#[test]
fn headers_with_a_wrong_version_reply_flag_or_reserved_flags_are_refused() {
    let flags = [0, 2, 3, FLAG_VERSION | FLAG_REPLY, FLAG_VERSION | 16, !2];
    each(Mischief::negotiated, &flags, |m, &flags| {
        let answer = m.sends(SET_OWNER, flags | FLAG_NEED_REPLY, 0, &[], &[]);
        assert_ne!(answer, Answer::Accepted);
    });
    each(Mischief::negotiated, &flags, |m, &flags| {
        let flags = flags | FLAG_NEED_REPLY;
        assert_ne!(m.sends(SET_STATUS, flags, 8, &[0; 8], &[]), Answer::Accepted);
    });
}

#[test]
fn payloads_of_a_wrong_size_are_refused() {
    let right: [(u32, usize); 12] = [
        (SET_FEATURES, 8),
        (SET_OWNER, 0),
        (SET_VRING_NUM, 8),
        (SET_VRING_ADDR, 40),
        (SET_VRING_BASE, 8),
        (GET_VRING_BASE, 8),
        (SET_VRING_KICK, 8),
        (SET_VRING_CALL, 8),
        (SET_VRING_ENABLE, 8),
        (SET_PROTOCOL_FEATURES, 8),
        (SET_STATUS, 8),
        (GET_FEATURES, 0),
    ];
    let sizes = [0, 1, 4, 7, 9, 16, 39, 41, 4096];
    let cases: Vec<_> = right
        .iter()
        .flat_map(|&(code, right)| sizes.map(|size| (code, right, size)))
        .filter(|&(_, right, size)| size != right)
        .collect();
    each(Mischief::negotiated, &cases, |m, &(code, _, size)| {
        m.refuses(code, &vec![0; size], &[]);
    });
}

#[test]
fn a_size_beyond_the_largest_message_is_refused_at_once() {
    each(Mischief::negotiated, &[4097, 1 << 20, u32::MAX], |m, &size| {
        let answer = m.sends(SET_FEATURES, FLAG_VERSION | FLAG_NEED_REPLY, size, &[], &[]);
        assert_ne!(answer, Answer::Accepted);
    });
}

#[test]
fn features_that_were_not_offered_are_refused() {
    each(Mischief::negotiated, &[1 << 40, 1 << 5, u64::MAX, 1 << 17], |m, &features| {
        m.refuses(SET_FEATURES, &longs(&[features]), &[]);
    });
    each(Mischief::negotiated, &[1 << 8, 1 << 63, u64::MAX], |m, &features| {
        m.refuses(SET_PROTOCOL_FEATURES, &longs(&[features]), &[]);
    });
}

#[test]
fn the_ring_layout_of_a_running_queue_cannot_change() {
    if skip_on_kernel("there is only one layout") {
        return;
    }
    once(Mischief::running, |m| {
        let features = m.ask(GET_FEATURES);
        m.refuses(SET_FEATURES, &longs(&[features & !(1 << 26)]), &[]);
    });
}

#[test]
fn a_second_owner_and_a_second_negotiation_do_no_harm() {
    once(Mischief::running, |m| {
        m.accepts(SET_OWNER, &[], &[]);
        let features = m.ask(GET_FEATURES);
        m.accepts(SET_FEATURES, &longs(&[features & !(1 << 34 | 1 << 26)]), &[]);
        assert_ne!(m.ask(GET_PROTOCOL_FEATURES), 0);
    });
}

#[test]
fn a_refusal_names_the_message_the_field_and_the_reason() {
    let reasons = [
        (SET_VRING_NUM, FLAG_VERSION, vec![0; 4], "SET_VRING_NUM: size: 4 bytes of payload"),
        (SET_MEM_TABLE, FLAG_VERSION, vec![0; 8], "SET_MEM_TABLE: size: 8 bytes of payload"),
        (SET_OWNER, 2, vec![], "SET_OWNER: flags: version 2"),
        (SET_OWNER, FLAG_VERSION | FLAG_REPLY, vec![], "SET_OWNER: flags: 0x4"),
        (99, FLAG_VERSION, vec![], "message 99: code"),
        (SET_VRING_NUM, FLAG_VERSION, words(&[9, 128]), "SET_VRING_NUM: queue 9 of 2"),
        (SET_VRING_KICK, FLAG_VERSION, longs(&[0]), "SET_VRING_KICK: payload or descriptors: "),
        (SET_MEM_TABLE, FLAG_VERSION, [words(&[1, 0]), vec![0; 32]].concat(), "descriptors for 1"),
    ];
    let daemon = daemon();
    for (code, flags, payload, reason) in reasons {
        let m = Mischief::negotiated(&daemon);
        m.channel.send(code, flags, payload.len() as u32, &payload, &[]).unwrap();
        let why = daemon.next_outcome().unwrap_err();
        assert!(why.contains(reason), "{why}");
    }
}
