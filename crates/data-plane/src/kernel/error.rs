// SPDX-License-Identifier: Apache-2.0
//! Why the kernel does not run a disk's queues, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// See the module's head. Displays as `WHY; WHAT TO DO` in one line.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The device node cannot be opened.
    #[error("{}: {source}; {remedy}", .path.display())]
    Open {
        /// The device node.
        path: PathBuf,
        /// Why.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// Something about the disk, the queue or the front-end that the kernel cannot do.
    #[error("{0}")]
    Unsuited(String),
    /// An ioctl failed.
    #[error("{call}: {source}; {remedy}")]
    Call {
        /// Its name.
        call: &'static str,
        /// Why.
        source: io::Error,
        /// What to do.
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
                "the block device is mounted or claimed: let go of it there, or use --data-plane uring"
            }
            ("VHOST_SET_MEM_TABLE", Some(libc::E2BIG)) => {
                "raise the parameter max_mem_regions of the kernel module vhost"
            }
            (_, Some(libc::ENOMEM)) => "free some memory, or raise the memlock limit",
            _ => "see the kernel log (dmesg)",
        };
        KernelError::Call { call, source, remedy }
    }

    /// The kernel does not know the ioctl, or not for this device.
    pub(crate) fn is_unknown_call(&self) -> bool {
        let unknown = [libc::ENOTTY, libc::EINVAL, libc::EFAULT, libc::ENOSYS];
        matches!(self, KernelError::Call { source, .. }
            if source.raw_os_error().is_some_and(|code| unknown.contains(&code)))
    }

    /// Somebody else has it.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, KernelError::Call { source, .. }
            if source.raw_os_error() == Some(libc::EBUSY))
    }
}

/// An error of the `vhost` crate, in the words of this one.
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
    }
}
