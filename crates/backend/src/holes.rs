// SPDX-License-Identifier: Apache-2.0
//! Holes of a file. Only [`Holes`] tells them: on some file systems data that has not reached the storage
//! lies in a hole, and a copy would have zeroes in its place.

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;

/// File systems whose `SEEK_DATA` names all data, also right after a write. On others a hole may be data
/// that has not reached the storage: OpenZFS, FUSE with a cache.
const EXACT: [u64; 4] = [
    0xef53,      // ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
];

/// The holes of a file, as far as they are known without doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holes {
    are_told: bool,
}

impl Holes {
    /// The holes of a file that is written at any time: only some file systems tell them. On others all of the
    /// file is data.
    pub fn exact(file: &File) -> Self {
        Holes { are_told: are_exact(file).unwrap_or(false) }
    }

    /// The holes of a file in ranges that no I/O writes from now on, or whose writes are noted. `sync` makes the
    /// file durable; it is called on the file systems whose holes are not exact. All of the file is data if it
    /// cannot be synced.
    ///
    /// # Errors
    /// The error of `sync`: the file may have lost data.
    pub fn synced(file: &File, sync: impl FnOnce() -> io::Result<()>) -> io::Result<Self> {
        Holes::after(are_exact(file).unwrap_or(false), sync)
    }

    fn after(are_exact: bool, sync: impl FnOnce() -> io::Result<()>) -> io::Result<Self> {
        if are_exact {
            return Ok(Holes { are_told: true });
        }
        match sync() {
            Ok(()) => Ok(Holes { are_told: true }),
            // As squashfs and ISO 9660.
            Err(why) if why.raw_os_error() == Some(libc::EINVAL) => Ok(Holes { are_told: false }),
            Err(why) => Err(why),
        }
    }

    /// Returns whether the file system tells holes.
    pub fn are_told(self) -> bool {
        self.are_told
    }

    /// The first data in a range of the file; empty at its end if there is none. All of the range if the
    /// storage knows no holes, as a block device.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn first_data(self, file: &File, range: Range<u64>) -> io::Result<Range<u64>> {
        if !self.are_told {
            return Ok(range);
        }
        let bounded = |at: u64| at.clamp(range.start, range.end);
        match rustix::fs::seek(file, SeekFrom::Data(range.start)) {
            Ok(start) if start < range.end => {
                let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
                Ok(bounded(start)..bounded(end))
            }
            Ok(_) | Err(Errno::NXIO) => Ok(range.end..range.end),
            Err(Errno::INVAL) => Ok(range),
            Err(why) => Err(why.into()),
        }
    }
}

fn are_exact(file: &File) -> io::Result<bool> {
    let kind = rustix::fs::fstatfs(file)?.f_type as u64 & 0xffff_ffff;
    Ok(EXACT.contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_hole_is_told_after_a_sync_only_where_data_may_lie_in_one() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(3 << 20).expect("a size");
        file.write_all_at(&[1; 4096], 1 << 20).expect("data");
        let (data, all) = (1 << 20..(1 << 20) + 4096, 0..3 << 20);
        let mut syncs = 0;
        let mut of = |are_exact, errno: Option<i32>| {
            Holes::after(are_exact, || {
                syncs += 1;
                errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
            })
        };
        let exact = of(true, Some(libc::EIO)).expect("no sync is needed");
        let synced = of(false, None).expect("the sync succeeds");
        let never = of(false, Some(libc::EINVAL)).expect("it cannot be synced");
        assert_eq!(
            of(false, Some(libc::EIO)).map_err(|why| why.raw_os_error()),
            Err(Some(libc::EIO))
        );
        assert_eq!(syncs, 3);
        for holes in [exact, synced] {
            assert_eq!(holes.first_data(&file, all.clone()).expect("data"), data);
        }
        assert_eq!(never.first_data(&file, all.clone()).expect("data"), all);
        assert!(!never.are_told());
    }
}
