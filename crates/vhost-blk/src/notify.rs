// SPDX-License-Identifier: Apache-2.0
//! Reports the state of the program to the service manager (`sd_notify(3)`).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Maximum wait for room in the queue of the service manager.
const SEND_MAX: Duration = Duration::from_secs(1);

/// Sends `state` (such as `READY=1`) to the service manager, if there is one. Logs a warning if the
/// manager cannot be reached. Returns whether it has the message, or there is none.
pub fn notify(state: &str) -> bool {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
        return true;
    };
    let sent = send(&name, state);
    if let Err(error) = &sent {
        tracing::warn!(%error, state, "cannot notify the service manager");
    }
    sent.is_ok()
}

/// The state of a reload that begins (`Type=notify-reload`).
pub fn reloading() -> String {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let microseconds = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
    format!("RELOADING=1\nMONOTONIC_USEC={microseconds}")
}

fn send(name: &OsStr, state: &str) -> io::Result<()> {
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
        _ => SocketAddr::from_pathname(name)?,
    };
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read must not keep a disk waiting for long.
    socket.set_write_timeout(Some(SEND_MAX))?;
    socket.send_to_addr(state.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_arrives_at_a_socket_with_an_abstract_name() {
        let name = format!("vhost-blk-notify-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        send(OsStr::new(&format!("@{name}")), "READY=1").unwrap();
        let mut text = [0; 16];
        let len = manager.recv(&mut text).unwrap();
        assert_eq!(&text[..len], b"READY=1");
    }
}
