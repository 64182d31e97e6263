// SPDX-License-Identifier: Apache-2.0
//! Pins threads to CPUs.
// UNSAFETY: calls the CPU set functions of libc.
#![expect(unsafe_code)]

use std::io;

/// Pins the calling thread to `cpu`.
pub(crate) fn pin_this_thread(cpu: usize) -> io::Result<()> {
    pin_thread(0, cpu)
}

/// Pins the thread `id` of this process (0: the calling thread) to `cpu`.
pub(crate) fn pin_thread(id: libc::pid_t, cpu: usize) -> io::Result<()> {
    let set = cpu_set(&[cpu])?;
    // SAFETY: the set is valid for the call; 0 is the calling thread.
    match unsafe { libc::sched_setaffinity(id, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The set of `cpus`.
pub(crate) fn cpu_set(cpus: &[usize]) -> io::Result<libc::cpu_set_t> {
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus {
        if cpu >= libc::CPU_SETSIZE as usize {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: `cpu` is below CPU_SETSIZE.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    Ok(set)
}
