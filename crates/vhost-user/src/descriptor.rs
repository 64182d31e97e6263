// SPDX-License-Identifier: Apache-2.0
//! Checks of descriptors that came from the front-end.

use crate::session::refusal;
use std::fs::File;
use std::io;

/// Refuses a regular file (memfd, hugetlbfs) that ends inside `len` bytes from `offset` on: it can
/// be mapped, but touching what lies behind its end would kill the daemon.
pub(crate) fn check_holds(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let metadata = file.metadata()?;
    let end = offset.checked_add(len);
    if metadata.is_file() && end.is_none_or(|end| end > metadata.len()) {
        let has = metadata.len();
        return Err(refusal(format!(
            "{len} bytes at {offset} of a shared memory file that has {has} bytes"
        )));
    }
    Ok(())
}

/// Refuses what is no eventfd: those have no file type. A socket might be the front-end's own end of
/// the connection, which would never end then; a file is always "signalled".
pub(crate) fn check_eventfd(fd: &File) -> io::Result<()> {
    match rustix::fs::fstat(fd)?.st_mode & libc::S_IFMT {
        0 => Ok(()),
        _ => Err(refusal("a kick, call or err descriptor that is not an eventfd")),
    }
}

/// [`check_eventfd`], and makes writes return at once: an eventfd that its owner has filled up
/// would stop the data-plane thread that calls.
pub(crate) fn check_signalled(fd: &File) -> io::Result<()> {
    check_eventfd(fd)?;
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}
