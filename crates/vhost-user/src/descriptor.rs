// SPDX-License-Identifier: Apache-2.0
//! Checks of descriptors from the front-end.

use crate::error::refusal;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Returns whether `fd` is an end of a pair of UNIX stream sockets. The front-end's end of the
/// connection is not: its peer has the name of the daemon's socket.
pub(crate) fn is_socket_pair(fd: &File) -> io::Result<bool> {
    let is_stream =
        socket_domain(fd) == Ok(AddressFamily::UNIX) && socket_type(fd) == Ok(SocketType::STREAM);
    let peer = || UnixStream::from(OwnedFd::from(fd.try_clone()?)).peer_addr();
    Ok(is_stream && peer().is_ok_and(|peer| peer.is_unnamed()))
}

/// Refuses all but eventfds. A socket may be the front-end's own end of the connection, which would then never
/// end. A regular file is always readable. A poll of an epoll descriptor waits for other files, and the
/// front-end may serve these itself (FUSE).
pub(crate) fn check_eventfd(fd: &File) -> io::Result<()> {
    // The kernel names it so; paths of files begin with `/`.
    match std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
        Ok(name) if name.as_os_str() == "anon_inode:[eventfd]" => Ok(()),
        Ok(_) => Err(refusal(
            "a kick, call or err descriptor of a kind that is not taken: give an eventfd",
        )),
        Err(error) => Err(refusal(format!(
            "the kind of a kick, call or err descriptor is not known: /proc/self/fd: {error}; mount /proc"
        ))),
    }
}

/// As [`check_eventfd`], but accepts an end of a socket pair: User Mode Linux uses it like an
/// eventfd and reads 8 bytes. Makes writes non-blocking: a full descriptor would block the
/// data-plane thread.
pub(crate) fn check_signalled(fd: &File) -> io::Result<()> {
    if !is_socket_pair(fd)? {
        check_eventfd(fd)?;
    }
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}
