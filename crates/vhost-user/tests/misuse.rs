// SPDX-License-Identifier: Apache-2.0
//! Messages that no front-end should send. In every case the daemon refuses or hangs up, and the
//! next front-end is served with its data intact.

mod common;

use common::plane::skip_on_kernel;
use common::{Daemon, LIMIT, Setup, mem, pattern};
use driver::{GuestMemory, Options, RawChannel};
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const GET_CONFIG: u32 = 24;
const SET_CONFIG: u32 = 25;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;
const SET_STATUS: u32 = 39;
const GET_STATUS: u32 = 40;

const FLAG_VERSION: u32 = 1;
const FLAG_REPLY: u32 = 4;
const FLAG_NEED_REPLY: u32 = 8;
const NO_FD: u64 = 1 << 8;
/// The user address of the guest's memory, as the messages here claim it.
const USER: u64 = 0x5_0000_0000;
const MEMORY_BYTES: u64 = 1 << 20;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

/// What the daemon made of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Accepted,
    Refused,
    HungUp,
}

/// A front-end that has come as far as the test wants.
struct Mischief {
    channel: RawChannel,
    memory: Arc<GuestMemory>,
    eventfd: EventFd,
}

impl Mischief {
    /// Everything offered is negotiated.
    fn negotiated(daemon: &Daemon) -> Self {
        let channel = daemon.raw();
        let memory = GuestMemory::new(&[(0, MEMORY_BYTES)]).unwrap();
        let this = Mischief { channel, memory, eventfd: EventFd::new(0).unwrap() };
        let features = this.ask(GET_FEATURES);
        let protocol = this.ask(GET_PROTOCOL_FEATURES);
        let plain = |code, value| this.channel.message(code, &longs(&[value]), &[]).unwrap();
        plain(SET_PROTOCOL_FEATURES, protocol);
        // Without RING_PACKED and LOG_ALL.
        plain(SET_FEATURES, features & !(1 << 34 | 1 << 26));
        this.accepts(SET_OWNER, &[], &[]);
        this
    }

    /// ... and its memory is known.
    fn with_memory(daemon: &Daemon) -> Self {
        let this = Self::negotiated(daemon);
        let table = [words(&[1, 0]), longs(&[0, MEMORY_BYTES, USER, 0])].concat();
        this.accepts(SET_MEM_TABLE, &table, &[this.memory_fd()]);
        this
    }

    /// ... and queue 0 runs.
    fn running(daemon: &Daemon) -> Self {
        let this = Self::with_memory(daemon);
        this.accepts(SET_VRING_NUM, &words(&[0, 128]), &[]);
        this.accepts(SET_VRING_ADDR, &addresses(USER, USER + 0x2000, USER + 0x1000), &[]);
        this.accepts(SET_VRING_BASE, &words(&[0, 0]), &[]);
        this.accepts(SET_VRING_KICK, &longs(&[0]), &[this.eventfd.as_fd_()]);
        this.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        this
    }

    fn memory_fd(&self) -> BorrowedFd<'_> {
        self.memory.regions()[0].fd()
    }

    fn ask(&self, code: u32) -> u64 {
        self.channel.message(code, &[], &[]).unwrap();
        self.channel.reply(LIMIT).unwrap().value().unwrap()
    }

    fn says(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Answer {
        self.sends(code, FLAG_VERSION | FLAG_NEED_REPLY, payload.len() as u32, payload, fds)
    }

    fn sends(
        &self,
        code: u32,
        flags: u32,
        size: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Answer {
        let sent = self.channel.send(code, flags, size, payload, fds);
        if sent.is_err() {
            return Answer::HungUp;
        }
        match self.channel.reply(LIMIT) {
            Ok(reply) if reply.value() == Some(0) => Answer::Accepted,
            Ok(_) => Answer::Refused,
            Err(why) => {
                let hang_up = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset];
                assert!(hang_up.contains(&why.kind()), "no answer in time: {why}");
                Answer::HungUp
            }
        }
    }

    fn accepts(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.says(code, payload, fds), Answer::Accepted, "message {code}");
    }

    fn refuses(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        if [GET_VRING_BASE, GET_CONFIG, GET_INFLIGHT_FD, SET_LOG_BASE].contains(&code) {
            return self.gives_nothing(code, payload, fds);
        }
        assert_ne!(self.says(code, payload, fds), Answer::Accepted, "message {code}: {payload:?}");
    }

    /// A message that is answered by more than a number: it must not be. An answer to GET_CONFIG
    /// without any of the space is a refusal.
    fn gives_nothing(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.channel.message(code, payload, fds).unwrap();
        let reply = self.channel.reply(LIMIT);
        match reply {
            Ok(reply) => assert!(code == GET_CONFIG && reply.payload.len() == 12, "{reply:?}"),
            Err(why) => assert_ne!(why.kind(), ErrorKind::WouldBlock, "no answer in time"),
        }
    }
}

/// `EventFd` has no `AsFd`.
trait AsFdOf {
    fn as_fd_(&self) -> BorrowedFd<'_>;
}

impl AsFdOf for EventFd {
    #[expect(unsafe_code, reason = "UNSAFETY: vmm-sys-util's EventFd has no AsFd")]
    fn as_fd_(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open as long as the eventfd is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.as_raw_fd()) }
    }
}

/// SET_VRING_ADDR of queue 0.
fn addresses(desc: u64, used: u64, avail: u64) -> Vec<u8> {
    [words(&[0, 0]), longs(&[desc, used, avail, 0])].concat()
}

fn daemon() -> Daemon {
    let daemon = Daemon::start(Arc::new(mem()), &Setup { queues: 2, ..Setup::default() });
    let mut device = daemon.connect(&Options::default());
    device.write(0, &pattern(4096, 42)).unwrap();
    drop(device);
    daemon.next_outcome().unwrap();
    daemon
}

/// The daemon ends the connection before, and serves the next one with the data intact.
fn serves_the_next(daemon: &Daemon, options: &Options) {
    let _how_it_ended = daemon.next_outcome();
    let mut device = daemon.connect(options);
    let mut data = vec![0; 4096];
    device.read(0, &mut data).unwrap();
    assert!(data == pattern(4096, 42), "the data is not intact");
    device.write(0, &data).unwrap();
    drop(device);
    daemon.next_outcome().expect("a good front-end leaves well");
}

/// Runs each act on a connection of its own.
fn each<T>(bring_up: fn(&Daemon) -> Mischief, cases: &[T], act: impl Fn(&Mischief, &T)) {
    let daemon = daemon();
    for case in cases {
        let mischief = bring_up(&daemon);
        act(&mischief, case);
        drop(mischief);
        serves_the_next(&daemon, &Options::default());
    }
}

fn once(bring_up: fn(&Daemon) -> Mischief, act: impl Fn(&Mischief)) {
    each(bring_up, &[()], |mischief, ()| act(mischief));
}

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
    });
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
    // An eventfd, a folder and a socket are no memory.
    once(Mischief::negotiated, |m| {
        m.refuses(SET_MEM_TABLE, &table, &[m.eventfd.as_fd_()]);
    });
    once(Mischief::negotiated, |m| {
        let folder = File::open("/").unwrap();
        m.refuses(SET_MEM_TABLE, &table, &[folder.as_fd()]);
    });
    once(Mischief::negotiated, |m| {
        m.refuses(SET_MEM_TABLE, &table, &[m.channel.stream().as_fd()]);
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

#[test]
fn queue_sizes_that_cannot_be_are_refused() {
    each(Mischief::negotiated, &[0, 1025, 2048, 65535, 65536, u32::MAX], |m, &size| {
        m.refuses(SET_VRING_NUM, &words(&[0, size]), &[]);
    });
    // A split ring's size is a power of two; it is known to be split when the queue starts.
    each(Mischief::with_memory, &[3, 100, 1023], |m, &size| {
        m.accepts(SET_VRING_NUM, &words(&[0, size]), &[]);
        m.accepts(SET_VRING_ADDR, &addresses(USER, USER + 0x8000, USER + 0x4000), &[]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        m.refuses(SET_VRING_KICK, &longs(&[0]), &[m.eventfd.as_fd_()]);
    });
}

#[test]
fn queues_that_do_not_exist_are_refused() {
    for index in [2, 64, 255, 256, u32::MAX] {
        let of_state = [SET_VRING_NUM, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_ENABLE];
        each(Mischief::with_memory, &of_state, |m, &code| {
            m.refuses(code, &words(&[index, 1]), &[]);
        });
        once(Mischief::with_memory, |m| {
            let payload = [words(&[index, 0]), longs(&[USER, USER, USER, 0])].concat();
            m.refuses(SET_VRING_ADDR, &payload, &[]);
        });
    }
    each(Mischief::with_memory, &[SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR], |m, &code| {
        m.refuses(code, &longs(&[2]), &[m.eventfd.as_fd_()]);
    });
}

#[test]
fn rings_outside_memory_or_not_aligned_are_refused() {
    let end = USER + MEMORY_BYTES;
    let cases = [
        ("outside", addresses(end, USER + 0x2000, USER + 0x1000)),
        ("table crosses the end", addresses(end - 2032, USER + 0x2000, USER + 0x1000)),
        ("used crosses the end", addresses(USER, end - 1028, USER + 0x1000)),
        ("avail crosses the end", addresses(USER, USER + 0x2000, end - 258)),
        ("before", addresses(USER - 16, USER + 0x2000, USER + 0x1000)),
        ("null", addresses(0, 0, 0)),
        ("at the very end", addresses(u64::MAX - 15, u64::MAX - 3, u64::MAX - 1)),
        ("table not aligned", addresses(USER + 8, USER + 0x2000, USER + 0x1000)),
        ("used not aligned", addresses(USER, USER + 0x2002, USER + 0x1000)),
        ("avail not aligned", addresses(USER, USER + 0x2000, USER + 0x1001)),
    ];
    each(Mischief::with_memory, &cases, |m, (what, addresses)| {
        m.accepts(SET_VRING_NUM, &words(&[0, 128]), &[]);
        m.accepts(SET_VRING_KICK, &longs(&[0]), &[m.eventfd.as_fd_()]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        assert_ne!(m.says(SET_VRING_ADDR, addresses, &[]), Answer::Accepted, "{what}");
    });
    // The same while the queue runs.
    each(Mischief::running, &cases, |m, (what, addresses)| {
        assert_ne!(m.says(SET_VRING_ADDR, addresses, &[]), Answer::Accepted, "{what}");
    });
}

#[test]
fn rings_that_are_aligned_for_the_front_end_only_are_refused() {
    // The file's offset takes the alignment away.
    once(Mischief::negotiated, |m| {
        let table = [words(&[1, 0]), longs(&[0, 0x10000, USER, 3])].concat();
        m.accepts(SET_MEM_TABLE, &table, &[m.memory_fd()]);
        m.accepts(SET_VRING_NUM, &words(&[0, 128]), &[]);
        m.accepts(SET_VRING_KICK, &longs(&[0]), &[m.eventfd.as_fd_()]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        m.refuses(SET_VRING_ADDR, &addresses(USER, USER + 0x2000, USER + 0x1000), &[]);
    });
}

#[test]
fn a_base_beyond_sixteen_bits_is_refused_on_a_split_ring() {
    once(Mischief::running, |m| m.refuses(SET_VRING_BASE, &words(&[0, 0x1_0000]), &[]));
}

#[test]
fn an_incomplete_queue_does_not_start_and_can_be_asked_for_its_base() {
    once(Mischief::negotiated, |m| {
        // Kick and enable before everything else.
        m.accepts(SET_VRING_KICK, &longs(&[0]), &[m.eventfd.as_fd_()]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        m.eventfd.write(1).unwrap();
        m.accepts(SET_VRING_NUM, &words(&[0, 128]), &[]);
        m.accepts(SET_VRING_BASE, &words(&[0, 7]), &[]);
        m.channel.message(GET_VRING_BASE, &words(&[0, 0]), &[]).unwrap();
        assert_eq!(m.channel.reply(LIMIT).unwrap().payload, words(&[0, 7]));
    });
    // Addresses before there is any memory.
    once(Mischief::negotiated, |m| {
        m.accepts(SET_VRING_ADDR, &addresses(USER, USER + 0x2000, USER + 0x1000), &[]);
        m.accepts(SET_VRING_NUM, &words(&[0, 128]), &[]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        m.refuses(SET_VRING_KICK, &longs(&[0]), &[m.eventfd.as_fd_()]);
    });
}

#[test]
fn queues_are_set_up_in_any_order_and_everything_may_be_said_twice() {
    once(Mischief::with_memory, |m| {
        for _ in 0..2 {
            m.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
            m.accepts(SET_VRING_KICK, &longs(&[0]), &[m.eventfd.as_fd_()]);
            m.accepts(SET_VRING_ERR, &longs(&[0]), &[m.eventfd.as_fd_()]);
            m.accepts(SET_VRING_CALL, &longs(&[0]), &[m.eventfd.as_fd_()]);
            m.accepts(SET_VRING_BASE, &words(&[0, 0]), &[]);
            m.accepts(SET_VRING_ADDR, &addresses(USER, USER + 0x2000, USER + 0x1000), &[]);
            m.accepts(SET_VRING_NUM, &words(&[0, 128]), &[]);
        }
        for _ in 0..2 {
            m.channel.message(GET_VRING_BASE, &words(&[0, 0]), &[]).unwrap();
            assert_eq!(m.channel.reply(LIMIT).unwrap().payload, words(&[0, 0]));
            m.accepts(SET_VRING_ENABLE, &words(&[0, 0]), &[]);
        }
    });
}

#[test]
fn vring_messages_with_missing_or_surplus_descriptors_are_refused() {
    for code in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
        once(Mischief::running, |m| m.refuses(code, &longs(&[0]), &[]));
        once(Mischief::running, |m| m.refuses(code, &longs(&[0]), &[m.eventfd.as_fd_(); 2]));
        once(Mischief::running, |m| m.refuses(code, &longs(&[NO_FD]), &[m.eventfd.as_fd_()]));
        once(Mischief::running, |m| m.accepts(code, &longs(&[NO_FD]), &[]));
    }
    once(Mischief::running, |m| m.refuses(SET_OWNER, &[], &[m.eventfd.as_fd_()]));
    once(Mischief::running, |m| m.refuses(GET_FEATURES, &[], &[m.eventfd.as_fd_(); 32]));
    once(Mischief::running, |m| {
        let _ignored = m.says(SET_STATUS, &longs(&[0]), &[m.eventfd.as_fd_()]);
    });
}

#[test]
fn eventfds_that_are_none_are_refused() {
    for code in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
        once(Mischief::running, |m| {
            let file = tempfile::tempfile().unwrap();
            m.refuses(code, &longs(&[0]), &[file.as_fd()]);
        });
        // The front-end's own end of the connection, which would keep it open for ever.
        once(Mischief::running, |m| {
            m.refuses(code, &longs(&[0]), &[m.channel.stream().as_fd()]);
        });
        once(Mischief::running, |m| {
            m.refuses(code, &longs(&[0]), &[File::open("/").unwrap().as_fd()]);
        });
    }
}

#[test]
fn a_call_eventfd_that_is_full_does_not_stop_the_queue() {
    once(Mischief::running, |m| {
        let full = EventFd::new(0).unwrap();
        full.write(u64::MAX - 1).unwrap();
        m.accepts(SET_VRING_CALL, &longs(&[0]), &[full.as_fd_()]);
        m.accepts(SET_VRING_ERR, &longs(&[0]), &[full.as_fd_()]);
        // Starting a queue again calls the driver.
        m.accepts(SET_VRING_ENABLE, &words(&[0, 0]), &[]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        m.accepts(SET_VRING_ENABLE, &words(&[0, 0]), &[]);
    });
}

#[test]
fn enabling_by_another_number_than_one_is_refused() {
    each(Mischief::with_memory, &[2, u32::MAX], |m, &value| {
        m.refuses(SET_VRING_ENABLE, &words(&[0, value]), &[]);
    });
}

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
