// SPDX-License-Identifier: Apache-2.0
//! One ioctl on a vhost device.

// UNSAFETY: ioctl passes addresses to the kernel; no safe binding of the vhost ioctls exists that
// would be independent of the daemon's own.
#![expect(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use zerocopy::{FromBytes, IntoBytes};

/// The result of an ioctl: its value, or the error.
fn checked(value: libc::c_int) -> io::Result<u32> {
    u32::try_from(value).map_err(|_| io::Error::last_os_error())
}

/// An ioctl whose argument is `argument`, which it may change. `argument` must have the size that
/// the ioctl's code says.
pub(crate) fn ioctl<T>(fd: BorrowedFd<'_>, code: u32, argument: &mut T) -> io::Result<u32>
where
    T: IntoBytes + FromBytes + ?Sized,
{
    let bytes = argument.as_mut_bytes();
    let size = (code >> 16 & 0x3fff) as usize;
    assert!(size <= bytes.len(), "ioctl {code:#x} takes {size} bytes, not {}", bytes.len());
    // SAFETY: the kernel reads and writes at most `size` bytes there, or, for a table, as many as
    // its head says, which the caller made; what it writes is valid for any `FromBytes`.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), code.into(), bytes.as_mut_ptr()) })
}

/// An ioctl without argument.
pub(crate) fn ioctl_plain(fd: BorrowedFd<'_>, code: u32) -> io::Result<u32> {
    // SAFETY: the ioctl takes no address.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), code.into(), 0) })
}

/// Addresses without memory in any process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadAddress {
    /// 0.
    Null,
    /// In the half that belongs to the kernel.
    Kernel,
    /// Not an address at all.
    NonCanonical,
}

/// An ioctl whose argument points to no memory.
pub(crate) fn ioctl_bad(fd: BorrowedFd<'_>, code: u32, at: BadAddress) -> io::Result<u32> {
    let address: usize = match at {
        BadAddress::Null => 0,
        BadAddress::Kernel => 0xffff_8880_0000_0000,
        BadAddress::NonCanonical => 0x8000_dead_beef_0000,
    };
    // SAFETY: no memory of this process can be there, so none is changed.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), code.into(), address) })
}
