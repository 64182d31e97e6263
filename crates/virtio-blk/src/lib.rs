// SPDX-License-Identifier: Apache-2.0
//! Block device requests in descriptor chains (virtio 1.3, section 5.2).
//!
//! [`Request::parse`] (stage *request*) is the only code that checks the driver's request: every
//! [`Request`] is in range and allowed. [`Completion`] (stage *completion*) is the answer.
//!
//! This crate does no I/O: it does not wait, and no function fails because of the storage.

#![forbid(unsafe_code)]

mod completion;
mod config;
mod request;

pub use completion::Completion;
pub use config::{
    DISCARDED_SECTORS_MAX, DeviceConfig, MAX_RANGES, SEGMENT_BYTES_MAX, ZEROED_SECTORS_MAX,
};
pub use request::{
    DISCARDED_PER_WRITTEN, DiskView, Kind, REQUEST_BYTES_MAX, Range, RangeList, Refused, Request,
    id_bytes,
};
