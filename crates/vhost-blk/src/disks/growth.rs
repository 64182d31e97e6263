// SPDX-License-Identifier: Apache-2.0
//! Notices that a served block device has another size, and makes its disks take it up.
//!
//! The kernel announces a change of a block device's size to all listeners (a uevent with the action
//! `change`). A listener costs nothing while nothing changes.

use super::{Disks, Slot, lost};
use crate::failure::Failure;
use backend::File;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vhost_user::{Answer, Command};

/// Group of the kernel's own messages.
const GROUP_KERNEL: u32 = 1;
/// Maximum wait for the answers of the disks; a later refusal is not logged.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Maximum size of a message; the kernel's own limit is smaller.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// Watches the block devices of all disks until the process ends. Starts once.
///
/// # Errors
/// [`Failure`] if no thread can be started.
pub(super) fn watch(disks: &Arc<Disks>) -> Result<(), Failure> {
    if disks.watched.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    lost::follow_failures(disks).inspect_err(|_| disks.watched.store(false, Ordering::Relaxed))?;
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
    let of_thread = Arc::clone(disks);
    let spawned = std::thread::Builder::new().name("growth".into()).spawn(move || {
        if let Err(error) = follow(&socket, &of_thread) {
            tracing::warn!(%error, "a new size of a device is not noticed any more");
        }
    });
    spawned.map(drop).map_err(|error| {
        disks.watched.store(false, Ordering::Relaxed);
        let remedy = "raise the limit on threads (ulimit -u)";
        Failure::run("watch the size of the device", error, remedy)
    })
}

/// Major and minor number of the block device that a disk has open.
pub(super) fn device_number(opened: &File) -> Option<(u32, u32)> {
    let found = opened.found();
    let number = found.rdev();
    found.file_type().is_block_device().then(|| (libc::major(number), libc::minor(number)))
}

fn listen() -> io::Result<OwnedFd> {
    let kind = SocketType::DGRAM;
    let family = AddressFamily::NETLINK;
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, Some(KOBJECT_UEVENT))?;
    bind(&socket, &SocketAddrNetlink::new(0, GROUP_KERNEL))?;
    Ok(socket)
}

fn follow(socket: &OwnedFd, disks: &Arc<Disks>) -> io::Result<()> {
    use rustix::io::Errno;
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    loop {
        match recvfrom(socket, &mut message, RecvFlags::empty()) {
            Ok((bytes, _, from)) => {
                let message = &message[..bytes];
                if is_of_kernel(from) {
                    // A device that has lost its medium changes its size to zero.
                    disks.device_changed(|device| {
                        ["remove", "change"].iter().any(|it| is_message_of(it, message, device))
                    });
                    disks.adopt_sizes(|device| is_message_of("change", message, device));
                }
            }
            // Messages were lost.
            Err(Errno::NOBUFS) => {
                disks.device_changed(|_| true);
                disks.adopt_sizes(|_| true);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Disks {
    /// Makes a disk on a block device adopt its size.
    pub(super) fn adopt_size(&self, name: &str) {
        let device = self.lock().entry(name).ok().and_then(|entry| entry.device);
        if let Some(device) = device {
            self.adopt_sizes(|changed| changed == device);
        }
    }

    /// Makes the disks on the block devices that `changed` selects adopt their sizes.
    fn adopt_sizes(&self, changed: impl Fn((u32, u32)) -> bool) {
        let posted: Vec<_> = {
            let state = self.lock();
            let served = state.table.iter().filter_map(|(name, slot)| match slot {
                Slot::Served(entry) if entry.device.is_some_and(&changed) => Some((name, entry)),
                _ => None,
            });
            served
                .map(|(name, entry)| (name.clone(), entry.control.post(Command::Resize(None))))
                .collect()
        };
        let deadline = Instant::now() + ANSWER_MAX;
        for (disk, posted) in posted {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(Answer::Refused(why)) = posted.wait(Some(left)) {
                tracing::warn!(disk, why, "the device changed");
            }
        }
    }
}

/// Other processes may send messages, too.
fn is_of_kernel(from: Option<rustix::net::SocketAddrAny>) -> bool {
    let from = from.and_then(|address| SocketAddrNetlink::try_from(address).ok());
    from.is_some_and(|address| address.pid() == 0)
}

/// Returns whether a message (lines that end with a zero byte) reports this action on the device.
fn is_message_of(action: &str, message: &[u8], (major, minor): (u32, u32)) -> bool {
    let wanted = [
        format!("ACTION={action}"),
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
        assert!(is_message_of("change", message("change", 0).as_bytes(), (7, 0)));
        assert!(is_message_of("remove", message("remove", 0).as_bytes(), (7, 0)));
        for (text, device) in [
            (message("remove", 0), (7, 0)),
            (message("change", 10), (7, 1)),
            (message("change", 0), (70, 0)),
            (String::new(), (7, 0)),
        ] {
            assert!(!is_message_of("change", text.as_bytes(), device), "{text}");
        }
    }

    #[test]
    fn a_file_has_no_device_number() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(4096).unwrap();
        let opened = File::open(image.path(), backend::FileOptions::default()).unwrap();
        assert_eq!(device_number(&opened), None);
    }
}
