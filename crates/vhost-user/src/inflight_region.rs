// SPDX-License-Identifier: Apache-2.0
//! GET_INFLIGHT_FD: creates the shared memory of the in-flight region.

use data_plane::queue_region_bytes;
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use vhost::vhost_user::message::VhostUserInflight;
use virtqueue::Layout;

/// Creates a sealed, zeroed memory file for the queues of `wanted`. Returns its description, too.
///
/// The file has room for queues of `queue_size_max` descriptors: a front-end may ask before the
/// driver has chosen a size. QEMU 10.0.13 asks for 128 although its queues have 1024.
pub(crate) fn make(
    wanted: &VhostUserInflight,
    layout: Layout,
    queue_size_max: u16,
) -> io::Result<(VhostUserInflight, File)> {
    let part_bytes = queue_region_bytes(layout, wanted.queue_size.max(queue_size_max));
    let bytes = part_bytes * usize::from(wanted.num_queues);
    let file = memory_file(bytes as u64)?;
    let (num_queues, queue_size) = (wanted.num_queues, wanted.queue_size);
    Ok((VhostUserInflight::new(bytes as u64, 0, num_queues, queue_size), file))
}

// UNSAFETY: the libraries in use have no safe `memfd_create` and no safe seals.
#[expect(unsafe_code)]
fn memory_file(bytes: u64) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"vhost-blk-inflight".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the new descriptor has no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes)?;
    let seals = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: no memory is involved.
    match unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}
