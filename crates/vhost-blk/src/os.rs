// SPDX-License-Identifier: Apache-2.0
//! Safe wrappers of system calls that `std` lacks.
// UNSAFETY: an inherited descriptor number, `poll` and `getgrnam_r` have no safe std form.
#![expect(unsafe_code)]

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::param::clock_ticks_per_second;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, SystemTime};

/// Takes ownership of an inherited descriptor. Children of this process do not inherit it.
///
/// # Errors
/// The error of the system call, if `fd` is not open.
pub fn inherited_fd(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: sets a flag of a descriptor; fails with EBADF if it is not open.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open and was passed to this process, which takes it once, at
    // start-up.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A file in memory with these bytes, at its start.
///
/// # Errors
/// The error of a system call.
pub fn memory_file(name: &str, bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

/// The start of this process, which an `exec` does not change; `None`: `/proc` does not tell it.
pub fn process_started() -> Option<SystemTime> {
    let ticks = start_ticks(&std::fs::read_to_string("/proc/self/stat").ok()?)?;
    let started =
        Duration::from_millis(ticks.checked_mul(1000)?.checked_div(clock_ticks_per_second())?);
    let now = clock_gettime(ClockId::Boottime);
    let now = Duration::new(now.tv_sec.try_into().ok()?, now.tv_nsec.try_into().ok()?);
    SystemTime::now().checked_sub(now.checked_sub(started)?)
}

/// The start of a process after that of the machine. The name before, in brackets, may contain anything.
fn start_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Waits until a descriptor is readable or at its end. Returns for each whether it is.
///
/// # Errors
/// The error of `poll`, except EINTR.
pub fn wait_readable<const N: usize>(fds: [BorrowedFd; N]) -> io::Result<[bool; N]> {
    let entry =
        |fd: BorrowedFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut fds = fds.map(entry);
    // SAFETY: `fds` is an array of that many entries.
    while unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(fds.map(|fd| fd.revents != 0))
}

/// The id of the group `name`; `None` if the group does not exist.
///
/// # Errors
/// The error of the group database.
pub fn group_id(name: &str) -> io::Result<Option<u32>> {
    const BUFFER_BYTES_MAX: usize = 1 << 20;
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut buffer = vec![0u8; 4096];
    loop {
        // SAFETY: all-zero is a valid `group` (null pointers).
        let mut group: libc::group = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: every pointer names a live local of the right type; `buffer` has that length.
        let errno = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                &mut group,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &mut found,
            )
        };
        match errno {
            0 => return Ok((!found.is_null()).then_some(group.gr_gid)),
            libc::ERANGE if buffer.len() < BUFFER_BYTES_MAX => buffer.resize(buffer.len() * 4, 0),
            // Answers of C libraries for an unknown name.
            libc::ENOENT | libc::ESRCH => return Ok(None),
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Raises the soft limit on open files to the hard limit.
///
/// # Errors
/// The error of the system call.
pub fn raise_open_files() -> io::Result<()> {
    let hard = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard })?)
}

/// Number of descriptors that this process may still open; `None`: there is no limit.
///
/// # Errors
/// The error of the system call.
pub fn open_files_left() -> io::Result<Option<u64>> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(None) };
    match std::fs::read_dir("/proc/self/fd") {
        Ok(open) => Ok(Some(limit.saturating_sub(open.count() as u64))),
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => Ok(Some(0)),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_on_open_files_becomes_the_hard_limit() {
        let before = getrlimit(Resource::Nofile);
        let low = Rlimit { current: before.current.map(|limit| limit.min(512)), ..before };
        setrlimit(Resource::Nofile, low).unwrap();
        raise_open_files().unwrap();
        let after = getrlimit(Resource::Nofile);
        assert_eq!((after.current, after.maximum), (before.maximum, before.maximum));
    }

    #[test]
    fn the_group_of_root_is_zero_and_an_invented_one_is_none() {
        assert_eq!(group_id("root").unwrap(), Some(0));
        assert_eq!(group_id("no-such-group-here").unwrap(), None);
        assert_eq!(group_id("nul\0inside").unwrap(), None);
    }

    #[test]
    fn the_start_of_this_process_is_in_the_past_also_with_an_odd_name() {
        let started = process_started().unwrap();
        let age = started.elapsed().unwrap();
        assert!(age < Duration::from_secs(24 * 3600), "{age:?}");
        let name = format!("7 (a) b (c) S {} 1234 5", ["0"; 18].join(" "));
        assert_eq!(start_ticks(&name), Some(1234));
        assert_eq!(start_ticks("7 (a) S 0"), None);
    }

    #[test]
    fn a_closed_descriptor_is_not_taken() {
        assert_eq!(inherited_fd(999_999).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
