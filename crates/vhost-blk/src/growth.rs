// SPDX-License-Identifier: Apache-2.0
//! Notices that the served block device has another size, and makes the disk take it up.
//!
//! The kernel announces a change of a block device's size to all listeners (a uevent with the action
//! `change`). A listener costs nothing while nothing changes.

use crate::failure::Failure;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use vhost_user::{Answer, Command, Control};

/// Group of the kernel's own messages.
const GROUP_KERNEL: u32 = 1;
/// Maximum size of a message; the kernel's own limit is smaller.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// Watches the block device at `path` until the process ends; does nothing for another file.
///
/// # Errors
/// [`Failure`] if no thread can be started.
pub fn watch(path: &Path, control: Control) -> Result<(), Failure> {
    let Some(device) = device_number(path) else { return Ok(()) };
    let socket = match listen() {
        Ok(socket) => socket,
        Err(error) => {
            tracing::info!(
                %error,
                "the kernel's messages about devices cannot be received: `vhost-blk ctl resize` \
                 adopts a new size of the device"
            );
            return Ok(());
        }
    };
    let spawned = std::thread::Builder::new().name("growth".into()).spawn(move || {
        if let Err(error) = follow(&socket, device, &control) {
            tracing::warn!(%error, "a new size of the device is not noticed any more");
        }
    });
    spawned.map(drop).map_err(|error| {
        Failure::run(
            "watch the size of the device",
            error,
            "raise the limit on threads (ulimit -u)",
        )
    })
}

/// Major and minor number of a block device.
fn device_number(path: &Path) -> Option<(u32, u32)> {
    let meta = fs::metadata(path).ok().filter(|meta| meta.file_type().is_block_device())?;
    Some((libc::major(meta.rdev()), libc::minor(meta.rdev())))
}

fn listen() -> io::Result<OwnedFd> {
    let kind = SocketType::DGRAM;
    let family = AddressFamily::NETLINK;
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, Some(KOBJECT_UEVENT))?;
    bind(&socket, &SocketAddrNetlink::new(0, GROUP_KERNEL))?;
    Ok(socket)
}

fn follow(socket: &OwnedFd, device: (u32, u32), control: &Control) -> io::Result<()> {
    use rustix::io::Errno;
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let is_change = match recvfrom(socket, &mut message, RecvFlags::empty()) {
            Ok((bytes, _, from)) => is_of_kernel(from) && is_change_of(&message[..bytes], device),
            // Messages were lost.
            Err(Errno::NOBUFS) => true,
            Err(Errno::INTR) => false,
            Err(error) => return Err(error.into()),
        };
        if is_change {
            match control.ask(Command::Resize(None)) {
                Some(Answer::Refused(why)) => tracing::warn!(why, "the device changed"),
                Some(_) => {}
                None => return Ok(()),
            }
        }
    }
}

/// Other processes may send messages, too.
fn is_of_kernel(from: Option<rustix::net::SocketAddrAny>) -> bool {
    let from = from.and_then(|address| SocketAddrNetlink::try_from(address).ok());
    from.is_some_and(|address| address.pid() == 0)
}

/// Returns whether a message (lines that end with a zero byte) tells of a change of the device.
fn is_change_of(message: &[u8], (major, minor): (u32, u32)) -> bool {
    let wanted = [
        "ACTION=change".to_owned(),
        "SUBSYSTEM=block".to_owned(),
        format!("MAJOR={major}"),
        format!("MINOR={minor}"),
    ];
    let has = |line: &String| message.split(|&byte| byte == 0).any(|part| part == line.as_bytes());
    wanted.iter().all(has)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_change_of_this_device_counts() {
        let message = |action: &str, minor: u32| {
            format!(
                "{action}@/devices/virtual/block/loop0\0ACTION={action}\0SUBSYSTEM=block\0\
                 MAJOR=7\0MINOR={minor}\0DEVNAME=loop0\0RESIZE=1\0SEQNUM=4\0"
            )
        };
        assert!(is_change_of(message("change", 0).as_bytes(), (7, 0)));
        for (text, device) in [
            (message("remove", 0), (7, 0)),
            (message("change", 10), (7, 1)),
            (message("change", 0), (70, 0)),
            (String::new(), (7, 0)),
        ] {
            assert!(!is_change_of(text.as_bytes(), device), "{text}");
        }
    }

    #[test]
    fn a_file_has_no_device_number() {
        assert_eq!(device_number(Path::new("/proc/self/exe")), None);
        assert_eq!(device_number(Path::new("/dev/null")), None);
    }
}
