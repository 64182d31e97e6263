// SPDX-License-Identifier: Apache-2.0
//! Signals as a descriptor. All threads block them, so that one that no thread has read yet
//! stays pending, also for another program that this process executes.
// UNSAFETY: signal masks and `signalfd` have no safe form.
#![expect(unsafe_code)]

use crate::os;
use std::fs::File;
use std::io::{self, Read};
use std::mem;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

/// Size of the kernel's record of a signal; its first word is the number.
const RECORD_BYTES: usize = size_of::<libc::signalfd_siginfo>();
/// Place of the sender's process id in the record.
const SENDER_AT: usize = mem::offset_of!(libc::signalfd_siginfo, ssi_pid);

/// A signal that was pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) number: i32,
    /// This process has sent it to itself.
    pub(crate) is_own: bool,
}

/// The blocked signals.
#[derive(Debug)]
pub(crate) struct StopSignals(File);

/// Returns whether this process ignores a signal, as `nohup` makes it ignore SIGHUP. A blocked signal
/// arrives although it is ignored.
pub(crate) fn is_ignored(number: i32) -> bool {
    // SAFETY: all-zero is a valid value to fill.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: `action` is a live local, and nothing is set.
    let done = unsafe { libc::sigaction(number, std::ptr::null(), &mut action) };
    done == 0 && action.sa_sigaction == libc::SIG_IGN
}

impl StopSignals {
    /// Blocks the signals in this thread and all that it starts later.
    pub(crate) fn block(numbers: &[i32]) -> io::Result<Self> {
        // SAFETY: all-zero is a valid value to initialize.
        let mut set: libc::sigset_t = unsafe { mem::zeroed() };
        // SAFETY: `set` is a live local, and the calls fail only for unknown signals.
        unsafe {
            libc::sigemptyset(&mut set);
            for &number in numbers {
                libc::sigaddset(&mut set, number);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        }
        // SAFETY: `set` is a live local.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the new descriptor has no other owner.
        Ok(StopSignals(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Waits until one of the signals is pending, and leaves it so.
    pub(crate) fn wait(&self) -> io::Result<()> {
        os::wait_readable([self.0.as_fd()]).map(drop)
    }

    /// Takes a pending signal; `None`: there is none.
    pub(crate) fn take(&self) -> io::Result<Option<Taken>> {
        let mut record = [0; RECORD_BYTES];
        match (&self.0).read(&mut record) {
            Ok(_) => {
                let number = record.first_chunk().expect("a record is longer");
                let sender = record[SENDER_AT..].first_chunk().expect("a record is longer");
                let is_own = u32::from_ne_bytes(*sender) == std::process::id();
                Ok(Some(Taken { number: i32::from_ne_bytes(*number), is_own }))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}
