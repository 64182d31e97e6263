// SPDX-License-Identifier: Apache-2.0
//! A front-end that sends arbitrary messages.

use crate::common::{Daemon, LIMIT, Setup, mem, pattern};
use driver::{GuestMemory, Options, RawChannel};
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

pub(crate) const GET_FEATURES: u32 = 1;
pub(crate) const SET_FEATURES: u32 = 2;
pub(crate) const SET_OWNER: u32 = 3;
pub(crate) const SET_MEM_TABLE: u32 = 5;
pub(crate) const SET_LOG_BASE: u32 = 6;
pub(crate) const SET_VRING_NUM: u32 = 8;
pub(crate) const SET_VRING_ADDR: u32 = 9;
pub(crate) const SET_VRING_BASE: u32 = 10;
pub(crate) const GET_VRING_BASE: u32 = 11;
pub(crate) const SET_VRING_KICK: u32 = 12;
pub(crate) const SET_VRING_CALL: u32 = 13;
pub(crate) const SET_VRING_ERR: u32 = 14;
pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
pub(crate) const SET_VRING_ENABLE: u32 = 18;
pub(crate) const GET_CONFIG: u32 = 24;
pub(crate) const SET_CONFIG: u32 = 25;
pub(crate) const GET_INFLIGHT_FD: u32 = 31;
pub(crate) const SET_INFLIGHT_FD: u32 = 32;
pub(crate) const ADD_MEM_REG: u32 = 37;
pub(crate) const REM_MEM_REG: u32 = 38;
pub(crate) const SET_STATUS: u32 = 39;
pub(crate) const GET_STATUS: u32 = 40;

pub(crate) const FLAG_VERSION: u32 = 1;
pub(crate) const FLAG_REPLY: u32 = 4;
pub(crate) const FLAG_NEED_REPLY: u32 = 8;
pub(crate) const NO_FD: u64 = 1 << 8;
/// The user address of the guest's memory that these messages claim.
pub(crate) const USER: u64 = 0x5_0000_0000;
pub(crate) const MEMORY_BYTES: u64 = 1 << 20;

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

/// The daemon's reaction to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Accepted,
    Refused,
    HungUp,
}

/// A front-end, set up as far as the test needs.
pub(crate) struct Mischief {
    pub(crate) channel: RawChannel,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) eventfd: EventFd,
}

impl Mischief {
    /// Negotiates every offered feature.
    pub(crate) fn negotiated(daemon: &Daemon) -> Self {
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

    /// As [`Self::negotiated`], and shares memory.
    pub(crate) fn with_memory(daemon: &Daemon) -> Self {
        let this = Self::negotiated(daemon);
        let table = [words(&[1, 0]), longs(&[0, MEMORY_BYTES, USER, 0])].concat();
        this.accepts(SET_MEM_TABLE, &table, &[this.memory_fd()]);
        this
    }

    /// As [`Self::with_memory`], and starts queue 0.
    pub(crate) fn running(daemon: &Daemon) -> Self {
        let this = Self::with_memory(daemon);
        this.accepts(SET_VRING_NUM, &words(&[0, 128]), &[]);
        this.accepts(SET_VRING_ADDR, &addresses(USER, USER + 0x2000, USER + 0x1000), &[]);
        this.accepts(SET_VRING_BASE, &words(&[0, 0]), &[]);
        this.accepts(SET_VRING_KICK, &longs(&[0]), &[this.eventfd.as_fd_()]);
        this.accepts(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        this
    }

    pub(crate) fn memory_fd(&self) -> BorrowedFd<'_> {
        self.memory.regions()[0].fd()
    }

    pub(crate) fn ask(&self, code: u32) -> u64 {
        self.channel.message(code, &[], &[]).unwrap();
        self.channel.reply(LIMIT).unwrap().value().unwrap()
    }

    pub(crate) fn says(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Answer {
        self.sends(code, FLAG_VERSION | FLAG_NEED_REPLY, payload.len() as u32, payload, fds)
    }

    pub(crate) fn sends(
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

    pub(crate) fn accepts(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.says(code, payload, fds), Answer::Accepted, "message {code}");
    }

    pub(crate) fn refuses(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        if [GET_VRING_BASE, GET_CONFIG, GET_INFLIGHT_FD, SET_LOG_BASE].contains(&code) {
            return self.gives_nothing(code, payload, fds);
        }
        assert_ne!(self.says(code, payload, fds), Answer::Accepted, "message {code}: {payload:?}");
    }

    /// Checks that the message gets no answer beyond a number. An answer to GET_CONFIG without any
    /// of the space is a refusal.
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
pub(crate) trait AsFdOf {
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
pub(crate) fn addresses(desc: u64, used: u64, avail: u64) -> Vec<u8> {
    [words(&[0, 0]), longs(&[desc, used, avail, 0])].concat()
}

pub(crate) fn daemon() -> Daemon {
    let daemon = Daemon::start(Arc::new(mem()), &Setup { queues: 2, ..Setup::default() });
    let mut device = daemon.connect(&Options::default());
    device.write(0, &pattern(4096, 42)).unwrap();
    drop(device);
    daemon.next_outcome().unwrap();
    daemon
}

/// Checks that the daemon ends the previous connection and serves the next one with the data
/// intact.
pub(crate) fn serves_the_next(daemon: &Daemon, options: &Options) {
    let _how_it_ended = daemon.next_outcome();
    let mut device = daemon.connect(options);
    let mut data = vec![0; 4096];
    device.read(0, &mut data).unwrap();
    assert!(data == pattern(4096, 42), "the data is not intact");
    device.write(0, &data).unwrap();
    drop(device);
    daemon.next_outcome().expect("a good front-end leaves well");
}

/// Runs each act on its own connection.
pub(crate) fn each<T>(bring_up: fn(&Daemon) -> Mischief, cases: &[T], act: impl Fn(&Mischief, &T)) {
    let daemon = daemon();
    for case in cases {
        let mischief = bring_up(&daemon);
        act(&mischief, case);
        drop(mischief);
        serves_the_next(&daemon, &Options::default());
    }
}

pub(crate) fn once(bring_up: fn(&Daemon) -> Mischief, act: impl Fn(&Mischief)) {
    each(bring_up, &[()], |mischief, ()| act(mischief));
}
