// SPDX-License-Identifier: Apache-2.0
//! The use of in-flight regions: each serves one connection of this process at a time.
//!
//! A disk whose storage hangs may have lost its connection, and still have requests in flight: its region
//! stays in use until the storage answers. Another disk of this front-end would carry the same requests out
//! again meanwhile, and a late answer to the old ones would overwrite the result in guest memory.

use data_plane::InflightRegion;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Device and number of the file, and the offset of the region in it.
type Identity = (u64, u64, u64);

/// The regions in use.
static IN_USE: Mutex<Vec<Identity>> = Mutex::new(Vec::new());

/// A region that the connection uses.
pub(crate) struct UsedRegion {
    pub(crate) region: Arc<InflightRegion>,
    /// Shared with a later mapping of the region by the same connection.
    mark: Arc<Mark>,
}

/// Marks a region as used until the drop.
#[derive(Debug)]
struct Mark(Identity);

impl UsedRegion {
    /// Begins the use of `region` by a connection that uses `present`.
    ///
    /// # Errors
    /// Another disk has requests of it in flight, or the error of the system call.
    pub(crate) fn begin(
        region: Arc<InflightRegion>,
        present: Option<&UsedRegion>,
    ) -> io::Result<Self> {
        let (file, offset, _) = region.file();
        let found = file.metadata()?;
        let identity = (found.dev(), found.ino(), offset);
        if let Some(present) = present.filter(|present| present.mark.0 == identity) {
            return Ok(UsedRegion { region, mark: Arc::clone(&present.mark) });
        }
        let mut in_use = lock();
        if in_use.contains(&identity) {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the requests of this in-flight region are in flight at another disk, whose storage has not \
                 answered; wait for that, or end the guest",
            ));
        }
        in_use.push(identity);
        Ok(UsedRegion { region, mark: Arc::new(Mark(identity)) })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        lock().retain(|identity| *identity != self.0);
    }
}

fn lock() -> MutexGuard<'static, Vec<Identity>> {
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inflight_region;
    use vhost::vhost_user::message::VhostUserInflight;
    use virtqueue::Layout;

    #[test]
    fn a_region_serves_one_connection_at_a_time_which_may_map_it_again() {
        let wanted = VhostUserInflight::new(0, 0, 1, 128);
        let (told, file) = inflight_region::make(&wanted, Layout::Split, 128).unwrap();
        let map = || {
            let file = file.try_clone().unwrap();
            InflightRegion::map(file, 0, told.mmap_size, 1, 128).unwrap()
        };
        let first = UsedRegion::begin(map(), None).unwrap();
        let refused = UsedRegion::begin(map(), None).err().expect("it is in use");
        assert!(refused.to_string().contains("another disk"), "{refused}");
        let again = UsedRegion::begin(map(), Some(&first)).unwrap();
        drop(first);
        assert!(UsedRegion::begin(map(), None).is_err());
        drop(again);
        let (_, other) = inflight_region::make(&wanted, Layout::Split, 128).unwrap();
        let other = InflightRegion::map(other, 0, told.mmap_size, 1, 128).unwrap();
        let _both =
            (UsedRegion::begin(map(), None).unwrap(), UsedRegion::begin(other, None).unwrap());
    }
}
