// SPDX-License-Identifier: Apache-2.0
//! Queues: sizes, addresses, eventfds.

use crate::common::LIMIT;
use crate::mischief::*;
use rustix::event::epoll;
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
use std::fs::File;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use vmm_sys_util::eventfd::EventFd;

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

/// A descriptor of a signal that the process never gets, and one of an `io_uring`.
#[expect(unsafe_code, reason = "UNSAFETY: rustix has no signalfd, and its io_uring is not built")]
fn signalfd_and_io_uring() -> [OwnedFd; 2] {
    // SAFETY: `sigset_t` is valid as zeroes, which `signalfd` reads as no signal.
    let signals = unsafe { libc::signalfd(-1, &std::mem::zeroed(), libc::SFD_CLOEXEC) };
    let mut params = [0_u32; 30]; // `struct io_uring_params` has 120 bytes
    // SAFETY: the kernel writes the parameters, which have this size.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) } as i32;
    [signals, ring].map(|fd| {
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new, and nothing else has it.
        unsafe { OwnedFd::from_raw_fd(fd) }
    })
}

/// The kernel waits for another file when it polls an epoll descriptor.
#[test]
fn anonymous_descriptors_that_are_no_eventfds_are_refused() {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
    let [signals, ring] = signalfd_and_io_uring();
    for fd in [epoll, timer, signals, ring] {
        each(Mischief::running, &[SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR], |m, &code| {
            m.refuses(code, &longs(&[0]), &[fd.as_fd()]);
        });
    }
}

#[test]
fn a_call_eventfd_that_is_full_is_accepted_and_called_at_a_restart() {
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
