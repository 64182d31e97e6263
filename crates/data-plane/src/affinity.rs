// SPDX-License-Identifier: Apache-2.0
//! Pinning a thread to a CPU.
// UNSAFETY: the CPU set interface of libc.
#![expect(unsafe_code)]

use std::io;

/// Pins the calling thread to `cpu`.
pub(crate) fn pin_this_thread(cpu: usize) -> io::Result<()> {
    pin_thread(0, cpu)
}

/// Pins the thread `id` of this process (0: the calling one) to `cpu`.
pub(crate) fn pin_thread(id: libc::pid_t, cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` is below CPU_SETSIZE.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set is valid for the call; 0 is the calling thread.
    match unsafe { libc::sched_setaffinity(id, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
