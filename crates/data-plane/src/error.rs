// SPDX-License-Identifier: Apache-2.0
//! Errors of the data planes. Their texts name the cause and the remedy.

use crate::worker::DISKS_MAX;
use std::io;
use std::path::{Path, PathBuf};
use virtqueue::QueueError;

/// Errors of the start of the io_uring data plane.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The kernel refuses an io_uring.
    #[error(
        "cannot set an io_uring up: {0}; allow it (sysctl kernel.io_uring_disabled=0, and no \
         seccomp filter or container profile against it)"
    )]
    Uring(io::Error),
    /// The disk cannot be opened for a thread.
    #[error("cannot open the disk for a data-plane thread: {0}; raise the limit on open files")]
    Lane(io::Error),
    /// io_uring refuses the disk's file.
    #[error("cannot register the disk's file with io_uring: {0}; raise the limit on open files")]
    Register(io::Error),
    /// The threads have as many disks as they can have.
    #[error("the data-plane threads have {DISKS_MAX} disks already; serve it by another daemon")]
    Full,
    /// No thread or eventfd is left.
    #[error("cannot start a data-plane thread: {0}; raise the limits on threads and open files")]
    Thread(io::Error),
    /// A thread cannot be pinned to this CPU.
    #[error("cannot pin a data-plane thread to CPU {0}: {1}; name CPUs this process may use")]
    Cpu(usize, io::Error),
}

/// Errors of the start of a queue.
#[derive(Debug, thiserror::Error)]
pub enum QueueStartError {
    /// The set-up by the front-end is wrong, for either plane.
    #[error("{0}")]
    Ring(#[from] QueueError),
    /// No file descriptor is left.
    #[error("no descriptor is left: {0}; raise the limit on open files")]
    Descriptor(#[from] io::Error),
    /// The kernel cannot run the queue; the io_uring plane can.
    #[error("the kernel data plane cannot run it: {0}")]
    Kernel(#[from] KernelError),
}

/// An error of the kernel data plane. Displays as `CAUSE; REMEDY` in one line.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The device node cannot be opened.
    #[error("{}: {source}; {remedy}", .path.display())]
    Open {
        /// The device node.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
        /// Remedy.
        remedy: &'static str,
    },
    /// The kernel does not support the disk, the queue or the front-end.
    #[error("{0}")]
    Unsuited(String),
    /// An ioctl failed.
    #[error("{call}: {source}; {remedy}")]
    Call {
        /// Name of the ioctl.
        call: &'static str,
        /// Error of the ioctl.
        source: io::Error,
        /// Remedy.
        remedy: &'static str,
    },
}

impl KernelError {
    pub(crate) fn open(path: &Path, source: io::Error) -> Self {
        let remedy = match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => {
                "load the kernel module (modprobe vhost_blk)"
            }
            Some(libc::EACCES | libc::EPERM) => {
                "give this user read and write access to it (group of the device node), or run as \
                 root"
            }
            _ => "see the kernel log (dmesg)",
        };
        KernelError::Open { path: path.into(), source, remedy }
    }

    pub(crate) fn call(call: &'static str, source: io::Error) -> Self {
        let remedy = match (call, source.raw_os_error()) {
            (_, Some(libc::ENOTTY)) => "load the kernel module that belongs to this program",
            ("VHOST_BLK_SET_BACKEND", Some(libc::EBUSY)) => {
                "the block device is mounted or claimed: release it there"
            }
            ("VHOST_BLK_SET_BACKEND", Some(libc::EOPNOTSUPP)) => {
                "the block device is zoned, and a guest would not know: use another one"
            }
            ("VHOST_SET_MEM_TABLE", Some(libc::E2BIG)) => {
                "raise the parameter max_mem_regions of the kernel module vhost"
            }
            (_, Some(libc::ENOMEM)) => "free some memory",
            _ => "see the kernel log (dmesg)",
        };
        KernelError::Call { call, source, remedy }
    }

    /// Returns whether the kernel does not support the ioctl for this device.
    pub(crate) fn is_unknown_call(&self) -> bool {
        let unknown = [libc::ENOTTY, libc::EINVAL, libc::EFAULT, libc::ENOSYS];
        matches!(self, KernelError::Call { source, .. }
            if source.raw_os_error().is_some_and(|code| unknown.contains(&code)))
    }

    /// The errno of the system call.
    pub(crate) fn errno(&self) -> Option<i32> {
        match self {
            KernelError::Call { source, .. } | KernelError::Open { source, .. } => {
                source.raw_os_error()
            }
            KernelError::Unsuited(_) => None,
        }
    }

    /// Returns whether the error is EBUSY.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, KernelError::Call { source, .. }
            if source.raw_os_error() == Some(libc::EBUSY))
    }
}

/// Converts an error of the `vhost` crate.
pub(crate) fn of_core(call: &'static str) -> impl Fn(vhost::Error) -> KernelError {
    move |error| match error {
        vhost::Error::IoctlError(source) => KernelError::call(call, source),
        other => KernelError::call(call, io::Error::other(other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_node_names_the_module_to_load() {
        let path = Path::new("/no/such/vhost-blk");
        let error = std::fs::File::open(path).unwrap_err();
        let text = KernelError::open(path, error).to_string();
        assert!(text.starts_with("/no/such/vhost-blk: "), "{text}");
        assert!(text.ends_with("; load the kernel module (modprobe vhost_blk)"), "{text}");
    }

    #[test]
    fn a_forbidden_device_node_names_the_permissions() {
        let text = KernelError::open(Path::new("/dev/x"), io::ErrorKind::PermissionDenied.into());
        assert!(!text.to_string().contains("access to it"), "no errno, no guess: {text}");
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        let text = KernelError::open(Path::new("/dev/x"), denied).to_string();
        assert!(text.contains("read and write access"), "{text}");
    }

    #[test]
    fn a_claimed_block_device_is_told_apart_from_other_failures() {
        let busy = || io::Error::from_raw_os_error(libc::EBUSY);
        let text = KernelError::call("VHOST_BLK_SET_BACKEND", busy()).to_string();
        assert!(text.contains("mounted or claimed"), "{text}");
        let text = KernelError::call("VHOST_SET_OWNER", busy()).to_string();
        assert!(text.contains("dmesg"), "{text}");
        let zoned = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        let text = KernelError::call("VHOST_BLK_SET_BACKEND", zoned).to_string();
        assert!(text.contains("is zoned"), "{text}");
    }
}
