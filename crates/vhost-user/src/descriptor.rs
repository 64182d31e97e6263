// SPDX-License-Identifier: Apache-2.0
//! Checks of descriptors from the front-end.

use crate::error::refusal;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, RecvFlags, Shutdown, SocketType, recv, shutdown};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Returns whether `fd` is an end of a pair of UNIX stream sockets, and leaves it for writing only. The front-end's
/// end of a connection to the daemon's socket is not: its peer has the name of that socket.
///
/// # Errors
/// The refusal of a socket whose data cannot be read.
pub(crate) fn take_socket_pair(fd: &File) -> io::Result<bool> {
    let is_stream =
        socket_domain(fd) == Ok(AddressFamily::UNIX) && socket_type(fd) == Ok(SocketType::STREAM);
    let peer = || UnixStream::from(OwnedFd::from(fd.try_clone()?)).peer_addr();
    if !is_stream || !peer().is_ok_and(|peer| peer.is_unnamed()) {
        return Ok(false);
    }
    end_receiving(fd)?;
    Ok(true)
}

/// Discards what a socket has received, and refuses to receive more. A descriptor that the front-end has sent to
/// this socket, its own end of the connection for example, would live as long as the socket.
fn end_receiving(socket: &File) -> io::Result<()> {
    // From now on the other end cannot send (EPIPE).
    shutdown(socket, Shutdown::Read)?;
    let mut bytes = [0; 4096];
    while recv(socket, &mut bytes, RecvFlags::DONTWAIT).is_ok_and(|(_, count)| count > 0) {}
    match rustix::io::ioctl_fionread(socket)? {
        0 => Ok(()),
        left => Err(refusal(format!("a socket with {left} bytes that cannot be read"))),
    }
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
    if !take_socket_pair(fd)? {
        check_eventfd(fd)?;
    }
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}
