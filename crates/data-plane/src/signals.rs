// SPDX-License-Identifier: Apache-2.0
//! Writes of data-plane threads to the call and err eventfds of their queues.
//!
//! The VMM holds these eventfds, too. If it makes one blocking and fills it up, a write to it does not return, and its
//! thread serves no disk. So one thread of the pool, the watch, looks at the writes of all others, and interrupts one
//! that lasts. The disk then gets no such write any more on the thread: its queues fault.
//!
//! `Writes::number` is odd during a write. The watch sleeps for [`LOOK_EVERY`] between two looks. It parks while no
//! thread writes, so that an idle pool takes no processor time:
//!
//! | Watch | A thread that begins a write |
//! |---|---|
//! | looks | goes on |
//! | `parked` | wakes the watch |
// UNSAFETY: a handler of SIGURG, which the process ignores otherwise, and that signal to a thread of the process.
#![expect(unsafe_code)]

use rustix::thread::{Pid, gettid};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

/// Time between two looks. A write that both see is interrupted.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A write to an eventfd of the disk did not return.
pub(crate) const BLOCKED: &str =
    "its front-end has blocked a call or err eventfd; remove the disk and add it again";

/// The writes of a data-plane thread.
pub(crate) struct Writes {
    number: AtomicU64,
    thread: Pid,
    watch: Arc<Watched>,
}

/// The part of the watch that the threads see.
#[derive(Default)]
pub(crate) struct Watched {
    parked: AtomicBool,
    ends: AtomicBool,
    watch: OnceLock<Thread>,
}

impl Watched {
    fn wake(&self) {
        self.watch.get().map(Thread::unpark);
    }
}

/// The eventfds of a disk on a thread.
pub(crate) struct Signals {
    writes: Arc<Writes>,
    is_blocked: AtomicBool,
}

impl Signals {
    pub(crate) fn new(writes: Arc<Writes>) -> Arc<Self> {
        Arc::new(Signals { writes, is_blocked: AtomicBool::new(false) })
    }

    /// Signals an eventfd. A full counter (EAGAIN) means that a signal is pending.
    ///
    /// # Errors
    /// A write to an eventfd of the disk did not return, this one or an earlier one.
    pub(crate) fn signal(&self, eventfd: &mut File) -> Result<(), &'static str> {
        if self.is_blocked.load(Relaxed) {
            return Err(BLOCKED);
        }
        self.writes.write(eventfd).inspect_err(|_| self.is_blocked.store(true, Relaxed))
    }
}

impl Writes {
    /// Those of the present thread.
    pub(crate) fn new(watch: Arc<Watched>) -> Arc<Self> {
        Arc::new(Writes { number: AtomicU64::new(0), thread: gettid(), watch })
    }

    #[inline]
    fn write(&self, eventfd: &mut File) -> Result<(), &'static str> {
        let number = self.number.load(Relaxed);
        // The partner is the look of `Watch::park` after `parked` is set: one of both sees the other.
        self.number.store(number + 1, SeqCst);
        if self.watch.parked.load(SeqCst) {
            self.watch.wake();
        }
        let written = eventfd.write(&1u64.to_ne_bytes());
        // The partner is the load of `Watch::look`.
        self.number.store(number + 2, Release);
        match written {
            Err(error) if error.kind() == ErrorKind::Interrupted => Err(BLOCKED),
            _ => Ok(()),
        }
    }
}

/// The thread that looks at the writes. It has to end before the watched threads.
pub(crate) struct Watch {
    pub(crate) shared: Arc<Watched>,
    handle: Option<JoinHandle<()>>,
}

impl Watch {
    /// A watch without a thread so far.
    ///
    /// # Errors
    /// The signal cannot be handled.
    pub(crate) fn new() -> io::Result<Self> {
        handle_signal()?;
        Ok(Watch { shared: Arc::default(), handle: None })
    }

    /// Starts to look.
    ///
    /// # Errors
    /// The thread cannot start.
    pub(crate) fn start(&mut self, all: Vec<Arc<Writes>>) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let body = move || look(&shared, &all);
        let handle = std::thread::Builder::new().name("signal-watch".into()).spawn(body)?;
        let _ = self.shared.watch.set(handle.thread().clone());
        self.handle = Some(handle);
        Ok(())
    }

    /// Ends the thread.
    pub(crate) fn end(&mut self) {
        self.shared.ends.store(true, Release);
        self.shared.wake();
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

/// Looks at all writes until the watch ends.
fn look(shared: &Watched, all: &[Arc<Writes>]) {
    let numbers = || all.iter().map(|writes| writes.number.load(Acquire)).collect::<Vec<_>>();
    let mut before = numbers();
    while !shared.ends.load(Acquire) {
        if !park_if_idle(shared, all, &before) {
            std::thread::park_timeout(LOOK_EVERY);
        }
        let now = numbers();
        for (writes, (now, before)) in all.iter().zip(now.iter().zip(&before)) {
            if now == before && now % 2 == 1 {
                interrupt(writes.thread);
            }
        }
        before = now;
    }
}

/// Parks until a thread writes, if none has done so since the last look. Returns whether it parked.
fn park_if_idle(shared: &Watched, all: &[Arc<Writes>], before: &[u64]) -> bool {
    shared.parked.store(true, SeqCst);
    // The partner is the store of `Writes::write` at the begin of a write.
    let is_idle = |(writes, before): (&Arc<Writes>, &u64)| {
        before % 2 == 0 && writes.number.load(SeqCst) == *before
    };
    let parks = all.iter().zip(before).all(is_idle);
    if parks {
        std::thread::park();
    }
    shared.parked.store(false, Relaxed);
    parks
}

/// Lets SIGURG end a system call that waits.
fn handle_signal() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: an all-zero `sigaction` is valid: no signal is blocked, and no flag restarts the call.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // SAFETY: the handler does nothing.
    match unsafe { libc::sigaction(libc::SIGURG, &action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Interrupts the system call of a thread of this process.
fn interrupt(thread: Pid) {
    let (process, thread) = (std::process::id(), thread.as_raw_nonzero().get());
    // SAFETY: the call takes numbers only. The thread ends after the watch, so that the number is its own.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGURG) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    /// Far more than two looks.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A blocking eventfd.
    fn eventfd() -> File {
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        File::from(eventfd)
    }

    /// One for which a write waits.
    fn full() -> File {
        let mut full = eventfd();
        full.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        full
    }

    #[test]
    fn a_write_that_does_not_return_is_interrupted_and_ends_all_signals_of_its_disk() {
        let mut watch = Watch::new().unwrap();
        let watched = Arc::clone(&watch.shared);
        let (give, take) = channel();
        let (go, wait) = channel();
        let thread = std::thread::spawn(move || {
            let writes = Writes::new(watched);
            give.send(Arc::clone(&writes)).unwrap();
            wait.recv().unwrap();
            let [bad, good] = [(); 2].map(|()| Signals::new(Arc::clone(&writes)));
            let (mut full, mut free) = (full(), eventfd());
            let ends = [bad.signal(&mut full), bad.signal(&mut free), good.signal(&mut free)];
            (ends, Instant::now())
        });
        watch.start(vec![take.recv().unwrap()]).unwrap();
        // The watch parks without a write.
        let begin = Instant::now();
        while !watch.shared.parked.load(SeqCst) {
            assert!(begin.elapsed() < PATIENCE, "the watch never parks");
            std::thread::sleep(Duration::from_millis(1));
        }
        go.send(()).unwrap();
        let (ends, at) = thread.join().unwrap();
        assert_eq!(ends, [Err(BLOCKED), Err(BLOCKED), Ok(())]);
        assert!(at - begin < PATIENCE);
        watch.end();
    }
}
