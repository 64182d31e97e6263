// SPDX-License-Identifier: Apache-2.0
//! GET_INFLIGHT_FD: makes the shared memory of the in-flight region.

use data_plane::queue_region_bytes;
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use vhost::vhost_user::message::VhostUserInflight;
use virtqueue::Layout;

/// A sealed, zeroed memory file for the queues that `wanted` asks for, and its description.
pub(crate) fn make(
    wanted: &VhostUserInflight,
    layout: Layout,
) -> io::Result<(VhostUserInflight, File)> {
    let bytes = queue_region_bytes(layout, wanted.queue_size) * usize::from(wanted.num_queues);
    let file = memory_file(bytes as u64)?;
    let (num_queues, queue_size) = (wanted.num_queues, wanted.queue_size);
    Ok((VhostUserInflight::new(bytes as u64, 0, num_queues, queue_size), file))
}

// UNSAFETY: `memfd_create` and seals have no safe form in the libraries in use.
#[expect(unsafe_code)]
fn memory_file(bytes: u64) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"vhost-blk-inflight".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor just made, owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes)?;
    let seals = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: no memory is involved.
    match unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}
