// SPDX-License-Identifier: Apache-2.0
//! The size of a file or block device, and its growth while it is served.

use super::piece::DirectAlign;
use super::{File, probe};
use crate::ResizeError;
use std::sync::PoisonError;

/// The part of the storage that the disk has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// Whole logical blocks.
    pub(super) capacity_bytes: u64,
    /// Start of the last block of O_DIRECT in bytes, if the storage ends inside it.
    pub(super) tail: u64,
}

impl Size {
    /// The size of a container, which bounds no position.
    pub(super) fn of_container() -> Self {
        let end = 1 << 62;
        Size { capacity_bytes: end, tail: end }
    }

    /// The size of a disk on storage of `bytes` bytes.
    pub(super) fn of(bytes: u64, logical_block_bytes: u32, direct: Option<DirectAlign>) -> Self {
        Size {
            capacity_bytes: bytes & !u64::from(logical_block_bytes - 1),
            tail: bytes & !u64::from(direct.map_or(1, |align| align.write) - 1),
        }
    }
}

impl File {
    pub(super) fn size(&self) -> Size {
        *self.size.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out [`crate::Disk::resize`].
    pub(super) fn set_size(&self, wanted: Option<u64>) -> Result<(), ResizeError> {
        // Held for all of it: of two calls at a time, each sees the other's size.
        let mut size = self.size.lock().unwrap_or_else(PoisonError::into_inner);
        let capacity = size.capacity_bytes;
        let file = &self.shared.file;
        let mut present = probe::size_bytes(file).map_err(ResizeError::Size)?;
        if present < capacity {
            return Err(ResizeError::Shrunk { present, capacity });
        }
        if let Some(wanted) = wanted {
            self.check_wanted(wanted, present, capacity)?;
            if wanted > present {
                file.set_len(wanted).map_err(|source| ResizeError::Grow { wanted, source })?;
                present = wanted;
            }
        }
        *size = Size::of(present, self.limits.logical_block_bytes, self.limits.direct);
        Ok(())
    }

    fn check_wanted(&self, wanted: u64, present: u64, capacity: u64) -> Result<(), ResizeError> {
        let block = self.limits.logical_block_bytes;
        if wanted < capacity || wanted < present && !self.is_device {
            return Err(ResizeError::Smaller { wanted, capacity: capacity.max(present) });
        }
        if self.is_device && wanted != present {
            return Err(ResizeError::Device { wanted, present });
        }
        if !wanted.is_multiple_of(block.into()) {
            return Err(ResizeError::PartOfBlock { wanted, block });
        }
        if wanted > present && self.limits.read_only {
            return Err(ResizeError::ReadOnly);
        }
        Ok(())
    }
}
