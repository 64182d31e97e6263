// SPDX-License-Identifier: Apache-2.0
//! Stage *completion*: the status byte and the written length of a finished request.

use crate::request::{Kind, Refused};
use backend::IoError;
use virtio_spec::blk;
use virtqueue::chain::StatusByte;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// `S_OK`, `S_IOERR` or `S_UNSUPP`.
    pub code: u8,
    /// Bytes written into the chain before the status byte.
    pub data_bytes: u32,
}

impl Completion {
    /// The completion of a request of kind `kind` with the backend's `result`. `id_bytes` is the
    /// number of bytes copied for a GET_ID. A failed read has no data (section 5.2.6.2).
    #[inline]
    pub fn of(kind: Kind, result: Result<(), IoError>, id_bytes: u32) -> Self {
        match (result, kind) {
            (Ok(()), Kind::Read { bytes, .. }) => {
                Completion { code: blk::S_OK, data_bytes: u32::try_from(bytes).unwrap_or(u32::MAX) }
            }
            (Ok(()), Kind::GetId) => Completion { code: blk::S_OK, data_bytes: id_bytes },
            (Ok(()), _) => Completion { code: blk::S_OK, data_bytes: 0 },
            (Err(IoError::Unsupported), _) => Completion { code: blk::S_UNSUPP, data_bytes: 0 },
            (Err(_), _) => Completion { code: blk::S_IOERR, data_bytes: 0 },
        }
    }

    /// Writes the status byte. Returns the written length in bytes for the used ring.
    #[inline]
    pub fn write(self, status: StatusByte) -> u32 {
        status.write(self.code);
        self.data_bytes.saturating_add(1)
    }
}

impl Refused {
    /// Writes the status byte, if the chain has one. Returns the written length in bytes for the
    /// used ring.
    pub fn write(self) -> u32 {
        match self.status {
            Some(status) => Completion { code: self.code, data_bytes: 0 }.write(status),
            None => 0,
        }
    }
}
