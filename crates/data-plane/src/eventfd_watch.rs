// SPDX-License-Identifier: Apache-2.0
//! Writes to eventfds that a VMM also holds.
//!
//! The VMM can make such an eventfd blocking at any time, and fill it up. A write to it then does not return, and its
//! thread serves no queue. So a thread of the process, the watch, looks at the writes of all others about every
//! [`LOOK_EVERY`], and sends a signal to each thread that it finds in one. A write that waits ends with EINTR then; any
//! other one goes on. The caller makes no further write for a front-end that has blocked one.
//!
//! `Writes::number` is odd during a write. The watch parks after a time without writes, so that an idle process takes
//! no processor time:
//!
//! | Watch | Next | A thread that begins a write |
//! |---|---|---|
//! | sleeps | looks after [`LOOK_EVERY`] | goes on |
//! | looks | sleeps; parks if no write has begun since the last look, and none begins meanwhile | goes on |
//! | parks ([`PARKED`]) | sleeps | wakes the watch, and goes on |
// UNSAFETY: a handler of SIGURG, which a process ignores otherwise; that signal to a thread of the process; and the
// signal mask of the present thread.
#![expect(unsafe_code)]

use rustix::thread::{Pid, gettid};
use std::cell::OnceCell;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Duration;

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The watch parks.
static PARKED: AtomicBool = AtomicBool::new(false);
/// The watch, since it runs.
static WATCH: OnceLock<Thread> = OnceLock::new();
/// The writes of all threads.
static ALL: Mutex<Vec<Arc<Writes>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: OnceCell<Own> = const { OnceCell::new() };
}

/// A write to an eventfd did not return: the front-end has blocked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked;

/// The writes of a thread.
struct Writes {
    number: AtomicU64,
    /// The number at the last look. For the watch only.
    seen: AtomicU64,
    thread: Pid,
}

/// The writes of the present thread, until its end.
struct Own(Arc<Writes>);

impl Drop for Own {
    fn drop(&mut self) {
        // The watch looks under this lock, so that it sends no signal to a later thread of this number.
        all().retain(|writes| !Arc::ptr_eq(writes, &self.0));
    }
}

/// Signals an eventfd, or the end of a socket pair in its place. A full one has a pending signal.
///
/// # Errors
/// [`Blocked`].
#[inline]
pub fn signal(eventfd: &mut File) -> Result<(), Blocked> {
    OWN.with(|own| own.get_or_init(register).0.write(eventfd))
}

/// Starts the watch of the process, if there is none.
///
/// # Errors
/// The thread cannot start, or the signal cannot be handled.
pub(crate) fn start() -> io::Result<()> {
    static START: Mutex<()> = Mutex::new(());
    let _start = START.lock().unwrap_or_else(PoisonError::into_inner);
    if WATCH.get().is_none() {
        handle_signal()?;
        let thread = std::thread::Builder::new().name("signal-watch".into()).spawn(watch)?;
        let _ = WATCH.set(thread.thread().clone());
    }
    Ok(())
}

fn all() -> MutexGuard<'static, Vec<Arc<Writes>>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the writes of the present thread known to the watch.
#[cold]
fn register() -> Own {
    if let Err(error) = start() {
        tracing::warn!(%error, "writes to eventfds are not watched: a front-end can stop a thread");
    }
    if let Err(error) = admit_signal() {
        tracing::warn!(%error, "a thread cannot be interrupted: a front-end can stop it");
    }
    let (number, seen) = Default::default();
    let writes = Arc::new(Writes { number, seen, thread: gettid() });
    all().push(Arc::clone(&writes));
    Own(writes)
}

impl Writes {
    #[inline]
    fn write(&self, eventfd: &mut File) -> Result<(), Blocked> {
        let number = self.number.load(Relaxed);
        // The partner is the second look of `park_if_idle`: one of both sees the other.
        self.number.store(number + 1, SeqCst);
        if PARKED.load(SeqCst) {
            WATCH.get().map(Thread::unpark);
        }
        let written = eventfd.write(&1u64.to_ne_bytes());
        // The partner is the load in `look`.
        self.number.store(number + 2, Release);
        match written {
            Err(error) if error.kind() == ErrorKind::Interrupted => Err(Blocked),
            _ => Ok(()),
        }
    }
}

/// Looks at the writes as long as the process runs.
fn watch() {
    loop {
        std::thread::sleep(LOOK_EVERY);
        if look() {
            park_if_idle();
        }
    }
}

/// Interrupts the threads that are in a write. Returns whether no thread has begun one since the last look.
fn look() -> bool {
    let mut idle = true;
    for writes in all().iter() {
        let now = writes.number.load(Acquire);
        if now % 2 == 1 {
            interrupt(writes.thread);
        }
        idle &= now % 2 == 0 && now == writes.seen.swap(now, Relaxed);
    }
    idle
}

/// Parks until a thread begins a write, if none has begun one since the last look.
fn park_if_idle() {
    PARKED.store(true, SeqCst);
    // The partner is the store at the begin of `Writes::write`.
    let is_idle = |writes: &Arc<Writes>| writes.number.load(SeqCst) == writes.seen.load(Relaxed);
    // The lock ends here: a new thread must not wait for the watch.
    let parks = all().iter().all(is_idle);
    if parks {
        std::thread::park();
    }
    PARKED.store(false, Relaxed);
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

/// Unblocks SIGURG in the present thread.
fn admit_signal() -> io::Result<()> {
    // SAFETY: an all-zero set is valid, and the calls get it and no place for the old one.
    let error = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGURG);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut())
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Interrupts the system call of a thread of this process.
fn interrupt(thread: Pid) {
    let (process, thread) = (std::process::id(), thread.as_raw_nonzero().get());
    // SAFETY: the call takes numbers only. The caller holds the lock of `ALL`, so that the thread has not ended.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGURG) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::time::Instant;

    /// Far more than the time between two looks.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn wait_until(what: &str, is_so: impl Fn() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < PATIENCE, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// An eventfd whose writes wait.
    fn full() -> File {
        let mut full = File::from(eventfd(0, EventfdFlags::empty()).unwrap());
        full.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        full
    }

    #[test]
    fn a_write_that_waits_is_interrupted_also_after_a_time_without_writes() {
        let mut free = File::from(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        for _ in 0..2 {
            assert_eq!(signal(&mut free), Ok(()));
            assert_eq!(signal(&mut full()), Err(Blocked));
            wait_until("the watch does not park", || PARKED.load(SeqCst));
        }
        // A thread that has ended is not looked at.
        let thread = std::thread::spawn(|| (signal(&mut full()), gettid()));
        let (ended, thread) = thread.join().unwrap();
        assert_eq!(ended, Err(Blocked));
        wait_until("the writes stay", || all().iter().all(|writes| writes.thread != thread));
    }

    /// A front-end that lets each write wait for a time shorter than that between two looks is found, too.
    #[test]
    fn writes_that_wait_again_and_again_are_interrupted() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(LOOK_EVERY / 5);
                // Room for some writes; the next one waits again.
                let _ = reader.read(&mut [0; 4096]);
            }
        });
        let (mut writer, begin) = (File::from(OwnedFd::from(writer)), Instant::now());
        while signal(&mut writer).is_ok() {
            assert!(begin.elapsed() < PATIENCE, "each write waits");
        }
    }
}
